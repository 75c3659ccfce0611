// The attention of a layer in one call each way: scores of nodes, attention, what is added to its result; and
// the gradients of all that.
#include "fastsparse/attention_layer.h"

#include <vector>

#include "fastsparse/attention_gradients.h"
#include "fastsparse/cpu_attention.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kRows = 1024;  // of one task

template <typename A>
void add_to_rows(const AttentionLayerArgs& args, std::int64_t begin, std::int64_t end) {
  const AttentionCsrArgs& attention = args.attention;
  const std::int64_t width = attention.heads * attention.value_width;
  const DenseView out{attention.out, width}, bias{args.bias, 0};
  std::vector<A> row(width), term(width), shift(width);
  if (args.bias != nullptr) widen_row(bias, attention.dtype, 0, width, shift.data());
  for (std::int64_t i = begin; i < end; ++i) {
    widen_row(out, attention.dtype, i, width, row.data());
    if (args.skip.data != nullptr) {
      widen_row(args.skip, attention.dtype, i, width, term.data());
      for (std::int64_t f = 0; f < width; ++f) row[f] += term[f];
    }
    if (args.bias != nullptr) {
      for (std::int64_t f = 0; f < width; ++f) row[f] += shift[f];
    }
    narrow_row(row.data(), A{1}, width, attention.out, attention.dtype, i * width);
  }
}

// Sums of the columns of a matrix, those of tasks added up in order.
template <typename A>
void sum_columns(const DenseView& matrix, Dtype dtype, std::int64_t num_rows, std::int64_t width, void* to,
                 int threads) {
  if (to == nullptr) return;
  const std::int64_t tasks = (num_rows + kRows - 1) / kRows;
  std::vector<double> sums((tasks + 1) * width);
#pragma omp parallel for num_threads(threads) if (num_rows * width > kSerialWork)
  for (std::int64_t task = 0; task < tasks; ++task) {
    std::vector<A> row(width);
    double* sum = sums.data() + task * width;
    for (std::int64_t i = task * kRows; i < std::min((task + 1) * kRows, num_rows); ++i) {
      widen_row(matrix, dtype, i, width, row.data());
      for (std::int64_t f = 0; f < width; ++f) sum[f] += row[f];
    }
  }
  double* total = sums.data() + tasks * width;
  for (std::int64_t task = 0; task < tasks; ++task) {
    for (std::int64_t f = 0; f < width; ++f) total[f] += sums[task * width + f];
  }
  for (std::int64_t f = 0; f < width; ++f) static_cast<A*>(to)[f] = static_cast<A>(total[f]);
}

}  // namespace

void attention_layer(const AttentionLayerArgs& args, int threads) {
  const AttentionCsrArgs& attention = args.attention;
  if (attention.kind == AttentionScore::kAdditive) head_scores(args.scores, threads);
  attention_csr(attention, threads);
  if (args.skip.data == nullptr && args.bias == nullptr) return;
  const std::int64_t num_rows = attention.a.num_rows;
  with_sum_type(attention.dtype, [&](auto type) {
#pragma omp parallel for num_threads(threads) if (work(attention) > kSerialWork)
    for (std::int64_t row = 0; row < num_rows; row += kRows) {
      add_to_rows<decltype(type)>(args, row, std::min(row + kRows, num_rows));
    }
  });
}

void attention_layer_backward(const AttentionLayerBackwardArgs& args, int threads) {
  AttentionCsrBackwardArgs attention = args.attention;
  const AttentionCsrArgs& forward = attention.forward;
  const std::int64_t num_rows = forward.a.num_rows, width = forward.heads * forward.value_width;
  const std::int64_t stride = args.grad_joint.stride;
  with_sum_type(forward.dtype, [&](auto type) {
    using A = decltype(type);
    if (forward.kind == AttentionScore::kAdditive) {
      std::vector<A> grad_scores(2 * num_rows * forward.heads);
      HeadScoresBackwardArgs scores{
          args.scores, attention.grad_v, true, {args.grad_vectors[0], args.grad_vectors[1]}};
      attention.grad_src = scores.forward.scores[0] = grad_scores.data();
      attention.grad_dst = scores.forward.scores[1] = grad_scores.data() + num_rows * forward.heads;
      attention_csr_backward(attention, {forward.heads, forward.heads, stride}, threads);
      head_scores_backward(scores, threads);
    } else {
      attention_csr_backward(attention, {stride, stride, stride}, threads);
    }
    if (args.grad_skip != nullptr) {
      std::vector<A> row(width);
      for (std::int64_t i = 0; i < num_rows; ++i) {
        widen_row(attention.grad, forward.dtype, i, width, row.data());
        narrow_row(row.data(), A{1}, width, args.grad_skip, forward.dtype, i * stride);
      }
    }
    sum_columns<A>(attention.grad, forward.dtype, num_rows, width, args.grad_bias, threads);
    sum_columns<A>(args.grad_joint, forward.dtype, num_rows, args.joint_width, args.grad_map_bias, threads);
  });
}

}  // namespace fastsparse::cpu
