// The attention of a layer, with one call per pass. The forward call computes the scores of nodes, attention,
// and the terms that are added to its result. The backward call computes all gradients.
#include "fastsparse/attention_layer.h"

#include <vector>

#include "fastsparse/attention_gradients.h"
#include "fastsparse/cpu_attention.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

struct AttentionLayerArgs {
  AttentionCsrArgs attention;
  HeadScoresArgs scores;  // additive attention only: gives dst and src
  DenseView skip;         // (num_rows, width), added to the result; null data: no skip connection
  const void* bias;       // (width) in dtype; null: 0
};

struct AttentionLayerBackwardArgs {
  AttentionCsrBackwardArgs attention;  // additive: without grad_dst and grad_src
  HeadScoresArgs scores;
  void* grad_vectors[2];  // additive: (heads, head_width) in the accumulation type
  DenseView grad_joint;  // gradient of the linear maps' results; the gradients in `attention` point into this
                         // matrix
  std::int64_t joint_width;  // number of columns of grad_joint
  void* grad_skip;           // points into grad_joint; null: no skip connection
  void* grad_bias;           // (width) in the accumulation type; null: not computed
  void* grad_map_bias;       // (joint_width) in the accumulation type: sums of grad_joint; null: not computed
};

// Addresses of the results of a layer's linear maps, and of tensors that the forward call saves for the
// backward call.
struct Places {
  const AttentionLayer& layer;
  const AttentionLayerCall& call;

  std::int64_t width() const { return layer.heads * layer.head_width; }
  std::int64_t joint_width() const { return layer.num_linears * width(); }

  void* column(void* joint, std::int64_t linear) const {
    const Dtype dtype = layer.dtype;
    const std::int64_t bytes = dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
    return static_cast<char*>(joint) + linear * width() * bytes;
  }
  DenseView features(std::int64_t linear) const { return {column(call.joint, linear), joint_width()}; }

  void* state(std::int64_t array) const {
    const std::int64_t bytes = layer.dtype == Dtype::kFloat64 ? 8 : 4;
    return static_cast<char*>(call.state) + array * layer.a.num_rows * layer.heads * bytes;
  }

  AttentionCsrArgs attention() const {
    AttentionCsrArgs args{};
    args.a = layer.a;
    args.kind = layer.kind;
    args.scale = layer.scale;
    args.dropout = call.dropout;
    args.keep_scale = call.keep_scale;
    args.edge = call.edge;
    args.weight = call.edge_weight;
    args.edge_width = call.edge_width;
    args.heads = layer.heads;
    args.head_width = layer.kind == AttentionScore::kAdditive ? 0 : layer.head_width;
    args.value_width = layer.head_width;
    args.dtype = layer.dtype;
    args.bias.heads = layer.heads;
    args.lse = state(layer.kind == AttentionScore::kAdditive ? 2 : 0);
    if (layer.kind == AttentionScore::kAdditive) {
      args.bias.data = call.edge_scores;
      args.bias.dtype = layer.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
      args.v = features(0);
      args.src = {state(0), layer.heads};
      args.dst = {state(1), layer.heads};
    } else if (layer.kind == AttentionScore::kGatv2) {
      args.src = args.v = features(0);
      args.dst = features(1);
      args.att = call.first_vector;
    } else {
      args.src = features(0);
      args.v = features(1);
      args.dst = features(2);
    }
    return args;
  }

  HeadScoresArgs scores() const {
    return {features(0),          {call.first_vector, call.second_vector},
            {state(0), state(1)}, layer.a.num_rows,
            layer.heads,          layer.head_width,
            layer.dtype};
  }
};

AttentionLayerArgs arguments_of(const AttentionLayerForward& given) {
  const Places places{given.layer, given.call};
  AttentionLayerArgs args{places.attention(), places.scores(), {}, given.bias};
  args.attention.out = given.out;
  if (given.layer.num_linears == 4) args.skip = places.features(3);
  return args;
}

AttentionLayerBackwardArgs arguments_of(const AttentionLayerBackward& given) {
  const Places places{given.layer, given.call};
  void* joint = given.grad_joint;
  AttentionLayerBackwardArgs args{};
  args.attention.forward = places.attention();
  args.attention.a_t = given.a_t;
  args.attention.grad = given.grad;
  args.attention.work = given.work;
  args.attention.grad_edge = given.grad_edge;
  args.attention.grad_weight = given.grad_edge_weight;
  args.joint_width = places.joint_width();
  args.grad_joint = {joint, args.joint_width};
  if (given.layer.kind == AttentionScore::kAdditive) {
    args.scores = places.scores();
    args.grad_vectors[0] = given.grad_first;
    args.grad_vectors[1] = given.grad_second;
    args.attention.grad_v = joint;
  } else if (given.layer.kind == AttentionScore::kGatv2) {
    args.attention.grad_att = given.grad_first;
    args.attention.grad_src = joint;
    args.attention.grad_dst = places.column(joint, 1);
  } else {
    args.attention.grad_src = joint;
    args.attention.grad_v = places.column(joint, 1);
    args.attention.grad_dst = places.column(joint, 2);
    if (given.layer.num_linears == 4) args.grad_skip = places.column(joint, 3);
  }
  args.grad_bias = given.grad_bias;
  args.grad_map_bias = given.grad_map_bias;
  return args;
}

constexpr std::int64_t kRows = 1024;  // rows per task

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

// Sums the columns of a matrix. Each task sums its rows, and the sums of the tasks are added in order.
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

void attention_layer(const AttentionLayerForward& given, int threads) {
  const AttentionLayerArgs args = arguments_of(given);
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

void attention_layer_backward(const AttentionLayerBackward& given, int threads) {
  const AttentionLayerBackwardArgs args = arguments_of(given);
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
