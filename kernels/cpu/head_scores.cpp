// Scores of nodes for additive attention on the CPU: blocks of rows, one head at a time, with the products
// and sums of attention_blocks.cpp. Time is bounded by reading the features once (num_rows * heads *
// head_width elements); the backward pass also writes that number of elements. Sums over rows are computed
// per task, and the sums of the tasks are added in order.
#include "fastsparse/head_scores.h"

#include <array>
#include <numeric>
#include <vector>

#include "fastsparse/cpu_attention.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kBlocksPerTask = 16;
constexpr std::int64_t kRows = kBlock * kBlocksPerTask;

std::array<std::int32_t, kBlock> all_rows() {
  std::array<std::int32_t, kBlock> rows;
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// The features of one head in the rows that begin at `row`, in the form in which attention gathers rows.
FASTSPARSE_INLINE Gather rows_from(const HeadScoresArgs& args, std::int64_t row, std::int64_t head,
                                   std::int64_t end, const std::int32_t* rows) {
  const std::int64_t count = std::min<std::int64_t>(kBlock, end - row);
  return {args.v, args.dtype, row * args.v.stride + head * args.head_width, rows, static_cast<int>(count), 0};
}

template <typename A>
void score_rows(const HeadScoresArgs& args, std::int64_t begin, std::int64_t end, const std::int32_t* rows) {
  A product[kBlock];
  for (std::int64_t row = begin; row < end; row += kBlock) {
    for (std::int64_t head = 0; head < args.heads; ++head) {
      const Gather block = rows_from(args, row, head, end, rows);
      for (int k = 0; k < 2 && args.vectors[k] != nullptr; ++k) {
        const A* vector = static_cast<const A*>(args.vectors[k]) + head * args.head_width;
        products({vector, nullptr, 0}, block, args.head_width, product);
        A* to = static_cast<A*>(args.scores[k]) + row * args.heads + head;
        for (int i = 0; i < block.count; ++i) to[i * args.heads] = product[i];
      }
    }
  }
}

// Sums a task's rows for the gradients of the two vectors; the sums are (2, heads * head_width).
template <typename A>
void differentiate_rows(const HeadScoresBackwardArgs& args, std::int64_t begin, std::int64_t end,
                        const std::int32_t* rows, A* sums) {
  const HeadScoresArgs& forward = args.forward;
  const std::int64_t heads = forward.heads, head_width = forward.head_width, width = heads * head_width;
  std::vector<A> compensation(2 * width), features(width);
  A weight[kBlock];
  for (int k = 0; k < 2; ++k) {
    if (args.grad_vectors[k] == nullptr) continue;
    for (std::int64_t row = begin; row < end; row += kBlock) {
      for (std::int64_t head = 0; head < heads; ++head) {
        const Gather block = rows_from(forward, row, head, end, rows);
        const A* grad = static_cast<const A*>(forward.scores[k]) + row * heads + head;
        for (int i = 0; i < block.count; ++i) weight[i] = grad[i * heads];
        const std::int64_t first = k * width + head * head_width;
        accumulate(Term::kFeatures, weight, {}, block, head_width,
                   {sums + first, compensation.data() + first});
      }
    }
  }
  if (args.grad_v == nullptr) return;
  for (std::int64_t row = begin; row < end; ++row) {
    if (args.adds) {
      widen_row({args.grad_v, width}, forward.dtype, row, width, features.data());
    } else {
      std::fill(features.begin(), features.end(), A{0});
    }
    for (int k = 0; k < 2 && forward.vectors[k] != nullptr; ++k) {
      const A* grad = static_cast<const A*>(forward.scores[k]) + row * heads;
      const A* vector = static_cast<const A*>(forward.vectors[k]);
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t f = head * head_width; f < (head + 1) * head_width; ++f) {
          features[f] += grad[head] * vector[f];
        }
      }
    }
    narrow_row(features.data(), A{1}, width, args.grad_v, forward.dtype, row * width);
  }
}

std::int64_t work(const HeadScoresArgs& args) { return args.num_rows * args.heads * args.head_width; }

}  // namespace

void head_scores(const HeadScoresArgs& args, int threads) {
  const auto rows = all_rows();
  with_sum_type(args.dtype, [&](auto type) {
#pragma omp parallel for num_threads(threads) if (work(args) > kSerialWork)
    for (std::int64_t row = 0; row < args.num_rows; row += kRows) {
      score_rows<decltype(type)>(args, row, std::min(row + kRows, args.num_rows), rows.data());
    }
  });
}

void head_scores_backward(const HeadScoresBackwardArgs& args, int threads) {
  const auto rows = all_rows();
  with_sum_type(args.forward.dtype, [&](auto type) {
    using A = decltype(type);
    const std::int64_t num_rows = args.forward.num_rows, width = args.forward.heads * args.forward.head_width;
    const std::int64_t tasks = (num_rows + kRows - 1) / kRows;
    std::vector<A> sums(tasks * 2 * width);
#pragma omp parallel for num_threads(threads) if (work(args.forward) > kSerialWork)
    for (std::int64_t task = 0; task < tasks; ++task) {
      const std::int64_t end = std::min((task + 1) * kRows, num_rows);
      differentiate_rows<A>(args, task * kRows, end, rows.data(), sums.data() + task * 2 * width);
    }
    for (int k = 0; k < 2; ++k) {
      if (args.grad_vectors[k] == nullptr) continue;
      for (std::int64_t f = k * width; f < (k + 1) * width; ++f) {
        double sum = 0;
        for (std::int64_t task = 0; task < tasks; ++task) sum += sums[task * 2 * width + f];
        static_cast<A*>(args.grad_vectors[k])[f - k * width] = static_cast<A>(sum);
      }
    }
  });
}

}  // namespace fastsparse::cpu
