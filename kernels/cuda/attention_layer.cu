// The attention of a layer on CUDA, with one call per pass. The forward call computes scores of nodes,
// attention, and the skip connection and bias that are added. The backward call computes all gradients. Both
// launch the kernels of the operators (additive_attention.cu, gatv2_attention.cu, edge_attention.cu without
// edge features or attention_bsb.cu, and their backward passes) and the kernels of attention_layer_parts.cu.
// Several sums over nodes share one launch.

#include <algorithm>

#include "fastsparse/attention_layer.cuh"
#include "fastsparse/attention_layer.h"
#include "fastsparse/launchers.h"
#include "fastsparse/sum_of_rows.h"

namespace fastsparse::cuda {
namespace attention_layer_detail {

constexpr int kRowsPerPart = 32;
constexpr int kBlockRows = 8;  // rows per window of binary sparse blocks

std::int64_t ceil_div(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }

// Workspace, divided into arrays that start at multiples of 16 bytes.
struct Workspace {
  float* base;
  std::int64_t used = 0;

  float* take(std::int64_t numbers) {
    float* found = base + used;
    used += (numbers + 3) / 4 * 4;
    return found;
  }
};

struct Layer {
  const CudaAttentionLayerArgs& args;
  cudaStream_t stream;
  const std::int64_t width = args.heads * args.head_width, joint_width = args.num_linears * width;
  const std::int64_t items = args.num_nodes * args.heads, features = args.num_nodes * width;
  const std::int64_t bytes = args.dtype == Dtype::kFloat32 ? 4 : 2;

  bool is(AttentionScore kind) const { return args.kind == kind; }

  DenseView column(const void* joint, std::int64_t map) const {
    return {static_cast<const char*>(joint) + map * width * bytes, joint_width};
  }

  float* state(int array) const { return static_cast<float*>(args.state) + array * items; }

  HeadScoresArgs scores(void* first, void* second) const {
    return {column(args.joint, 0),
            {args.vectors[0], args.vectors[1]},
            {first, second},
            args.num_nodes,
            args.heads,
            args.head_width,
            args.dtype};
  }

  AdditiveAttentionInput additive() const {
    return {state(1),
            state(0),
            column(args.joint, 0),
            {nullptr, args.dtype, args.heads},
            args.scale,
            args.dropout,
            args.heads,
            args.head_width,
            args.dtype};
  }

  Gatv2AttentionInput gatv2() const {
    return {column(args.joint, args.num_linears - 1),
            column(args.joint, 0),
            args.vectors[0],
            args.scale,
            args.dropout,
            args.heads,
            args.head_width,
            args.dtype};
  }

  EdgeAttentionInput from_rows() const {
    return {false,
            column(args.joint, 2),
            column(args.joint, 0),
            column(args.joint, 1),
            nullptr,
            nullptr,
            nullptr,
            {nullptr, args.dtype, args.heads},
            args.scale,
            args.dropout,
            args.heads,
            args.head_width,
            0,
            args.dtype};
  }

  AttentionBsbInput from_blocks() const {
    return {column(args.joint, 2),
            column(args.joint, 0),
            column(args.joint, 1),
            {nullptr, args.dtype, args.heads},
            args.scale,
            args.dropout,
            args.heads,
            args.head_width,
            args.head_width,
            args.tf32,
            args.dtype};
  }

  // Size of `state` as a number of float32, rounded up to a multiple of 16 bytes.
  std::int64_t state_numbers() const {
    const int arrays = is(AttentionScore::kAdditive) ? 3 : args.on_blocks ? 2 : 1;
    return ceil_div(arrays * items, 4) * 4;
  }

  struct Forward {
    float *partial, *partial_state;
    std::int64_t numbers;
  };

  Forward forward_workspace() const {
    const std::int64_t rows = args.num_slots * (args.on_blocks ? kBlockRows : 1);
    Workspace workspace{args.scratch};
    Forward found{workspace.take(rows * width), workspace.take(rows * args.heads * 2), 0};
    found.numbers = workspace.used;
    return found;
  }

  int forward() const {
    const Forward workspace = forward_workspace();
    int code = cudaSuccess;
    if (is(AttentionScore::kAdditive)) {
      launch_scores(scores(state(0), state(1)), 4 * args.num_parts, stream);
      code = cuda::additive_attention(
          {args.a, args.split, additive(), args.out, state(2), workspace.partial, workspace.partial_state},
          stream);
    } else if (is(AttentionScore::kGatv2)) {
      code = cuda::gatv2_attention(
          {args.a, args.split, gatv2(), args.out, state(0), workspace.partial, workspace.partial_state},
          stream);
    } else if (args.on_blocks) {
      code = cuda::attention_bsb({args.blocks, from_blocks(), args.out, static_cast<double*>(args.state),
                                  workspace.partial, workspace.partial_state},
                                 stream);
    } else {
      code = cuda::edge_attention({args.a, args.split, from_rows(), args.out, nullptr, state(0),
                                   workspace.partial, nullptr, workspace.partial_state},
                                  stream);
    }
    if (code != cudaSuccess) return code;
    const DenseView skip = args.num_linears == 4 ? column(args.joint, 3) : DenseView{nullptr, 0};
    launch_add(args.dtype,
               {args.out, skip, args.bias, args.bias_is_float, args.result, args.num_nodes, width}, stream);
    return cudaGetLastError();
  }

  struct Backward {
    float* row_state;  // for dot products that read rows: {w, dS} of every edge and head
    float *partial_row, *partial_column, *partial_other;
    float *first, *second, *third;  // gradients before a kernel copies them or adds them to the results
    float* sums;
    double* parts[kMostSums];  // partial sums of the gradients of the vector, the bias and the maps' biases
    std::int64_t numbers;
  };

  // Largest number of blocks of the kernel for the scores' gradients. Each block writes its own partial sums.
  std::int64_t score_blocks() const { return args.num_parts; }

  Backward backward_workspace() const {
    Workspace workspace{args.scratch};
    Backward found{};
    const std::int64_t matrix = (features * bytes + 3) / 4;
    if (is(AttentionScore::kAdditive)) {
      found.row_state = workspace.take(items * 4);
      found.partial_row = workspace.take(args.num_slots * args.heads * 4);
      found.partial_column = workspace.take(args.num_slots_t * width);
      found.partial_other = workspace.take(args.num_slots_t * args.heads);
      found.first = workspace.take(items);
      found.second = workspace.take(items);
      found.sums = workspace.take(std::min<std::int64_t>(score_blocks(), args.num_nodes) * 3 * width);
    } else if (is(AttentionScore::kGatv2)) {
      found.row_state = workspace.take(items * 2);
      found.partial_row = workspace.take(args.num_slots * width);
      found.partial_column = workspace.take(args.num_slots_t * width);
      found.sums = workspace.take(args.att_rows * width);
      found.first = workspace.take(matrix);
      if (args.num_linears == 2) found.second = workspace.take(matrix);
    } else {
      const std::int64_t rows = args.on_blocks ? kBlockRows : 1;
      found.row_state = workspace.take(args.on_blocks ? items * 4 : args.num_values * args.heads * 2);
      found.partial_row = workspace.take(args.num_slots * rows * width);
      found.partial_column = workspace.take(args.num_slots_t * rows * width);
      found.partial_other = workspace.take(args.num_slots_t * rows * width);
      found.first = workspace.take(matrix);
      found.second = workspace.take(matrix);
      found.third = workspace.take(matrix);
    }
    const std::int64_t rows[] = {args.att_rows, args.num_nodes, args.num_nodes};
    const std::int64_t columns[] = {width, width, joint_width};
    for (int i = 0; i < kMostSums; ++i) {
      found.parts[i] = reinterpret_cast<double*>(workspace.take(num_parts(rows[i]) * columns[i] * 2));
    }
    found.numbers = workspace.used;
    return found;
  }

  std::int64_t num_parts(std::int64_t rows) const {
    return std::min(std::max<std::int64_t>(ceil_div(rows, kRowsPerPart), 1), args.num_parts);
  }

  int backward() const {
    const Backward workspace = backward_workspace();
    const int code = is(AttentionScore::kAdditive) ? additive_backward(workspace)
                     : is(AttentionScore::kGatv2)  ? gatv2_backward(workspace)
                     : args.on_blocks              ? blocks_backward(workspace)
                                                   : rows_backward(workspace);
    return code != cudaSuccess ? code : sum(workspace);
  }

  // Sums the gradients that are sums over nodes or, for GATv2, over lane groups.
  int sum(const Backward& workspace) const {
    SumOfRowsArgs sums[kMostSums];
    int count = 0;
    const auto add = [&](int which, const void* rows, std::int64_t num_rows, std::int64_t columns,
                         std::int64_t stride, Dtype dtype, void* to, Dtype to_dtype) {
      if (to == nullptr) return;
      sums[count++] = {rows, num_rows, columns, stride, workspace.parts[which], num_parts(num_rows),
                       to,   dtype,    to_dtype};
    };
    if (is(AttentionScore::kGatv2)) {
      add(0, workspace.sums, args.att_rows, width, width, Dtype::kFloat32, args.grad_vectors[0],
          Dtype::kFloat32);
    }
    // For additive attention, `additive_backward` computes grad_bias together with the vectors' gradients.
    if (!is(AttentionScore::kAdditive)) {
      add(1, args.grad.data, args.num_nodes, width, args.grad.stride, args.dtype, args.grad_bias,
          args.grad_bias_dtype);
    }
    add(2, args.grad_joint, args.num_nodes, joint_width, joint_width, args.dtype, args.grad_map_bias,
        args.grad_map_bias_dtype);
    return cuda::sums_of_rows(sums, count, stream);
  }

  int additive_backward(const Backward& workspace) const {
    const int code = cuda::additive_attention_backward(
        {args.a, args.split, args.a_t, args.split_t, additive(), args.grad, state(2), workspace.second,
         workspace.first, args.grad_joint, nullptr, workspace.row_state, workspace.partial_row,
         workspace.partial_column, workspace.partial_other},
        stream);
    if (code != cudaSuccess) return code;
    const HeadScoresArgs of = scores(workspace.first, workspace.second);
    const DenseView grad = args.grad_bias == nullptr ? DenseView{nullptr, 0} : args.grad;
    const ScoreSums sums{{args.grad_vectors[0], args.grad_vectors[1], args.grad_bias},
                         {Dtype::kFloat32, Dtype::kFloat32, args.grad_bias_dtype}};
    launch_score_gradients({of, grad, args.grad_joint, workspace.sums}, sums, score_blocks(), stream);
    return cudaGetLastError();
  }

  int gatv2_backward(const Backward& workspace) const {
    const bool shared = args.num_linears == 1;
    void* grad_src = shared ? args.grad_joint : workspace.first;
    void* grad_dst = shared ? workspace.first : workspace.second;
    const int code = cuda::gatv2_attention_backward({args.a,
                                                     args.split,
                                                     args.a_t,
                                                     args.split_t,
                                                     gatv2(),
                                                     {args.out, width},
                                                     args.grad,
                                                     state(0),
                                                     grad_dst,
                                                     grad_src,
                                                     workspace.sums,
                                                     args.att_rows,
                                                     workspace.row_state,
                                                     workspace.partial_row,
                                                     workspace.partial_column},
                                                    stream);
    if (code != cudaSuccess) return code;
    if (shared) {
      launch_add(args.dtype,
                 {grad_src, {grad_dst, width}, nullptr, false, args.grad_joint, args.num_nodes, width},
                 stream);
    } else {
      launch_join(args.dtype,
                  {{{grad_src, width}, {grad_dst, width}}, 2, args.grad_joint, args.num_nodes, width},
                  stream);
    }
    return cudaGetLastError();
  }

  int blocks_backward(const Backward& workspace) const {
    const int code = cuda::attention_bsb_backward(
        {args.blocks, args.blocks_t, from_blocks(), args.out, static_cast<const double*>(args.state),
         args.grad, workspace.third, workspace.first, workspace.second, nullptr, workspace.row_state,
         workspace.partial_row, workspace.partial_column, workspace.partial_other},
        stream);
    return code != cudaSuccess ? code : join_dot_product(workspace);
  }

  int rows_backward(const Backward& workspace) const {
    EdgeAttentionBackwardArgs of{};
    of.a = args.a, of.split = args.split;
    of.a_t = args.a_t, of.split_t = args.split_t;
    of.input = from_rows();
    of.out = {args.out, width};
    of.grad = args.grad;
    of.lse = state(0);
    of.work = workspace.row_state;
    of.num_values = args.num_values;
    of.grad_q = workspace.third, of.grad_k = workspace.first, of.grad_v = workspace.second;
    of.partial_q = workspace.partial_row, of.partial_k = workspace.partial_column,
    of.partial_v = workspace.partial_other;
    const int code = cuda::edge_attention_backward(of, stream);
    return code != cudaSuccess ? code : join_dot_product(workspace);
  }

  int join_dot_product(const Backward& workspace) const {
    launch_join(args.dtype,
                {{{workspace.first, width}, {workspace.second, width}, {workspace.third, width}, args.grad},
                 args.num_linears,
                 args.grad_joint,
                 args.num_nodes,
                 width},
                stream);
    return cudaGetLastError();
  }
};

}  // namespace attention_layer_detail

int attention_layer(const CudaAttentionLayerArgs& args, void* stream) {
  using namespace attention_layer_detail;
  return Layer{args, static_cast<cudaStream_t>(stream)}.forward();
}

int attention_layer_backward(const CudaAttentionLayerArgs& args, void* stream) {
  using namespace attention_layer_detail;
  return Layer{args, static_cast<cudaStream_t>(stream)}.backward();
}

std::int64_t attention_layer_scratch(const CudaAttentionLayerArgs& args, bool backward) {
  using namespace attention_layer_detail;
  const Layer layer{args, nullptr};
  return backward ? layer.backward_workspace().numbers : layer.forward_workspace().numbers;
}

std::int64_t attention_layer_state(const CudaAttentionLayerArgs& args) {
  using namespace attention_layer_detail;
  return Layer{args, nullptr}.state_numbers();
}

}  // namespace fastsparse::cuda
