// Softmax over the entries of every row of edge values on the CPU, and its gradient.
#include <vector>

#include "fastsparse/cpu_attention.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kFewHeads =
    4;  // if there are fewer heads, they are processed one by one, with vectors of entries

// Processes all heads of an entry together.
template <typename T>
FASTSPARSE_INLINE void normalise_heads(const EdgeSoftmaxArgs& args, std::int64_t row_begin,
                                       std::int64_t row_end) {
  using A = Acc<T>;
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const auto* input = static_cast<const T*>(args.input);
  auto* out = static_cast<T*>(args.out);
  const std::int64_t heads = args.heads;
  std::vector<A> workspace(2 * heads), weights;
  std::vector<double> sums(heads);
  A *highest = workspace.data(), *inverse = highest + heads;
  double* sum = sums.data();
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t begin = args.a.rowptr[row], count = args.a.rowptr[row + 1] - begin;
    weights.resize(count * heads);
    std::fill(highest, highest + heads, -kInfinity);
    std::fill(sum, sum + heads, 0.0);
    for (std::int64_t i = 0; i < count; ++i) {
      const T* scores = input + edge_position(args.a, begin + i) * heads;
      for (std::int64_t h = 0; h < heads; ++h) {
        const A score = widen(scores[h]), so_far = highest[h];
        highest[h] = ((score > so_far) | (score != score)) ? score : so_far;  // a NaN remains
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const T* scores = input + edge_position(args.a, begin + i) * heads;
      A* weight = weights.data() + i * heads;
      for (std::int64_t h = 0; h < heads; ++h) {
        const A term = exponential(widen(scores[h]) - highest[h]);
        weight[h] = highest[h] == -kInfinity ? A{0} : term;
      }
      for (std::int64_t h = 0; h < heads; ++h) sum[h] += weight[h];
    }
    for (std::int64_t h = 0; h < heads; ++h) inverse[h] = sum[h] == 0 ? A{0} : static_cast<A>(1 / sum[h]);
    for (std::int64_t i = 0; i < count; ++i) {
      const A* weight = weights.data() + i * heads;
      T* result = out + edge_position(args.a, begin + i) * heads;
      for (std::int64_t h = 0; h < heads; ++h) narrow(weight[h] * inverse[h], result + h);
    }
  }
}

template <typename T>
FASTSPARSE_INLINE void normalise_rows(const EdgeSoftmaxArgs& args, std::int64_t row_begin,
                                      std::int64_t row_end) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const auto* input = static_cast<const T*>(args.input);
  auto* out = static_cast<T*>(args.out);
  std::vector<A> weight;  // weights of one row and head, padded to whole vectors
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t begin = args.a.rowptr[row], count = args.a.rowptr[row + 1] - begin;
    weight.resize((count + kWidth - 1) / kWidth * kWidth);
    for (std::int64_t head = 0; head < args.heads; ++head) {
      A highest = -kInfinity;
      for (std::int64_t i = 0; i < count; ++i) {
        weight[i] = widen(input[edge_position(args.a, begin + i) * args.heads + head]);
        highest = weight[i] > highest || weight[i] != weight[i] ? weight[i] : highest;  // a NaN remains
      }
      std::fill(weight.begin() + count, weight.end(), -kInfinity);
      double sum = 0;
      if (highest == -kInfinity) {
        std::fill(weight.begin(), weight.end(), A{0});
      } else {
        for (A& term : weight) term = exponential(term - highest);
        for (std::size_t i = 0; i < weight.size(); i += kWidth) sum += sum_of(weight.data() + i, kWidth);
      }
      const A inverse = sum == 0 ? A{0} : static_cast<A>(1 / sum);
      for (std::int64_t i = 0; i < count; ++i) {
        narrow(weight[i] * inverse, out + edge_position(args.a, begin + i) * args.heads + head);
      }
    }
  }
}

template <typename T>
FASTSPARSE_INLINE void differentiate_rows(const EdgeSoftmaxArgs& args, std::int64_t row_begin,
                                          std::int64_t row_end) {
  using A = Acc<T>;
  const auto* weight = static_cast<const T*>(args.input);
  const auto* grad = static_cast<const T*>(args.grad);
  auto* out = static_cast<T*>(args.out);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
    for (std::int64_t head = 0; head < args.heads; ++head) {
      double sum = 0;
      for (std::int64_t entry = begin; entry < end; ++entry) {
        const std::int64_t at = edge_position(args.a, entry) * args.heads + head;
        sum += static_cast<double>(widen(weight[at])) * widen(grad[at]);
      }
      for (std::int64_t entry = begin; entry < end; ++entry) {
        const std::int64_t at = edge_position(args.a, entry) * args.heads + head;
        narrow(widen(weight[at]) * static_cast<A>(widen(grad[at]) - sum), out + at);
      }
    }
  }
}

template <typename T>
FASTSPARSE_INLINE void process_rows(const EdgeSoftmaxArgs& args, std::int64_t begin, std::int64_t end) {
  if (args.grad != nullptr) {
    differentiate_rows<T>(args, begin, end);
  } else if (args.heads < kFewHeads) {
    normalise_rows<T>(args, begin, end);
  } else {
    normalise_heads<T>(args, begin, end);
  }
}

}  // namespace

void edge_softmax(const EdgeSoftmaxArgs& args, int threads) {
  with_type(args.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) \
    num_threads(threads) if (args.a.num_edges * args.heads > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        process_rows<decltype(type)>(args, row, std::min(row + kRowsPerTask, args.a.num_rows));
      });
    }
  });
}

}  // namespace fastsparse::cpu
