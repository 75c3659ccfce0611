// The attention of a layer, with one call per pass. The results of the layer's linear maps are stored next to
// each other in one matrix, (num_nodes, num_linears * heads * head_width), and so are their gradients.
#pragma once

#include "fastsparse/head_scores.h"
#include "fastsparse/views.h"

namespace fastsparse {

// The attention of a layer on the CPU: arguments that all calls on a structure share.
struct AttentionLayer {
  CsrView a;
  AttentionScore kind;
  Dtype dtype;
  std::int64_t heads;
  std::int64_t head_width;
  std::int64_t num_linears;  // additive: 1; GATv2: 2; dot products: 3, or 4 with the skip connection
  double scale;              // dot products: factor of the scores; otherwise: slope of the leaky ReLU
};
FASTSPARSE_ARGUMENTS(AttentionLayer, AS(structure, a),
                     FIELDS(kind, dtype, heads, head_width, num_linears, scale));

// Arguments of both passes.
struct AttentionLayerCall {
  void* joint;               // (num_nodes, num_linears * heads * head_width)
  const void* first_vector;  // additive: vector of the sources, (heads, head_width) in the accumulation type;
                             // GATv2: att
  const void* second_vector;
  DenseView edge;
  DenseView edge_weight;
  std::int64_t edge_width;
  const void* edge_scores;  // additive: (num_values, heads) in the accumulation type; null: 0
  void* state;  // (num_nodes, heads) arrays in the accumulation type. Additive: scores of sources, scores of
                // destinations, log-sum-exp; otherwise: only log-sum-exp
  Dropout dropout;
  double keep_scale;
};

struct AttentionLayerForward {
  AttentionLayer layer;
  AttentionLayerCall call;
  const void* bias;  // (width) in dtype; null: 0
  void* out;
};
FASTSPARSE_ARGUMENTS(AttentionLayerForward, IN(call, joint, first_vector, second_vector, edge),
                     WIDTH(call.edge_width), IN(call, edge_weight, edge_scores), FIELDS(bias, out),
                     IN(call, state), DROPOUT(call.dropout), KEEP_SCALE(call.keep_scale));

struct AttentionLayerBackward {
  AttentionLayer layer;
  CsrView a_t;
  AttentionLayerCall call;
  DenseView grad;
  void* grad_joint;  // has the shape of joint
  void* grad_first;  // gradients of the vectors, in the accumulation type; null for these and all following
                     // fields: not computed
  void* grad_second;
  void* work;  // (num_values, heads, 2), see AttentionCsrBackwardArgs
  void* grad_edge;
  void* grad_edge_weight;
  void* grad_bias;      // (width) in the accumulation type
  void* grad_map_bias;  // (num_linears * width) in the accumulation type: sums of grad_joint
};
FASTSPARSE_ARGUMENTS(AttentionLayerBackward, AS(transposed, a_t),
                     IN(call, joint, first_vector, second_vector, edge), WIDTH(call.edge_width),
                     IN(call, edge_weight, edge_scores, state),
                     FIELDS(grad, grad_joint, grad_first, grad_second, work, grad_edge, grad_edge_weight,
                            grad_bias, grad_map_bias),
                     DROPOUT(call.dropout), KEEP_SCALE(call.keep_scale));

// On CUDA, for both passes: dtype is not float64, the structure is square.
struct CudaAttentionLayerArgs {
  AttentionScore kind;
  Dtype dtype;
  std::int64_t num_nodes;
  std::int64_t heads;
  std::int64_t head_width;
  std::int64_t num_linears;  // additive: 1; GATv2: sources and destinations, or 1 for both; dot products:
                             // keys, values, queries and, optionally, a term added to the result
  float scale;               // dot products: factor of the scores; otherwise: slope of the leaky ReLU
  CsrView a, a_t;            // a_t, split_t, blocks_t and num_slots_t: backward pass only
  RowSplitView split, split_t;
  bool on_blocks;  // dot products: whether attention reads blocks instead of rows
  BsbView blocks, blocks_t;
  std::int64_t num_slots, num_slots_t;
  std::int64_t num_values;  // only for dot products that read rows
  std::int64_t att_rows;    // GATv2, backward: see Gatv2AttentionBackwardArgs
  std::int64_t num_parts;   // largest number of parts of a sum over nodes
  Dropout dropout;
  bool tf32;

  const void* joint;        // (num_nodes, num_linears * width)
  const float* vectors[2];  // (heads, head_width); null: there is none
  const void* bias;         // forward: (width); null: 0
  bool bias_is_float;       // whether the bias is float32 instead of dtype
  void* out;                // (num_nodes, width): result of attention alone
  void* result;             // forward: `out` plus bias and skip term; may be the same memory as `out`
  void* state;  // additive: float32 (3, num_nodes, heads): scores of sources, of destinations, log-sum-exp;
                // otherwise (num_nodes, heads): log-sum-exp, in float64 on blocks and else in float32
  float* scratch;

  DenseView grad;  // (num_nodes, width); this and all following fields: backward pass only
  void* grad_joint;
  float* grad_vectors[2];
  void* grad_bias;  // (width); null: not computed
  Dtype grad_bias_dtype;
  void* grad_map_bias;  // (num_linears * width): sums of grad_joint; null: not computed
  Dtype grad_map_bias_dtype;
};
struct CudaAttentionLayerForward;
FASTSPARSE_ARGUMENTS_AS(CudaAttentionLayerForward, CudaAttentionLayerArgs, FIELDS(joint),
                        AS(first_vector, vectors[0]), AS(second_vector, vectors[1]),
                        FIELDS(bias, bias_is_float, out, result, state, scratch), DROPOUT(dropout),
                        FIELDS(tf32));
struct CudaAttentionLayerBackward;
FASTSPARSE_ARGUMENTS_AS(CudaAttentionLayerBackward, CudaAttentionLayerArgs, FIELDS(joint),
                        AS(first_vector, vectors[0]), AS(second_vector, vectors[1]),
                        FIELDS(out, state, scratch, grad, grad_joint), AS(grad_first, grad_vectors[0]),
                        AS(grad_second, grad_vectors[1]),
                        FIELDS(grad_bias, grad_bias_dtype, grad_map_bias, grad_map_bias_dtype),
                        DROPOUT(dropout), FIELDS(tf32));

constexpr int kMostLinears = 4;

// Stacks the weights and the biases of a layer's linear maps, and converts them to `to_dtype`. Weights and
// biases have that dtype or float32.
struct StackedMapsArgs {
  const void* weights[kMostLinears];  // weight_size elements each
  const void* biases[kMostLinears];   // bias_size elements each; bias_size is 0 without biases
  std::int64_t num_linears;
  std::int64_t weight_size;
  std::int64_t bias_size;
  void* weight;  // (num_linears, weight_size)
  void* bias;    // (num_linears, bias_size)
  Dtype dtype;
  Dtype to_dtype;
};

namespace cuda {
// Size of `state` as a number of floats; a multiple of 16 bytes.
std::int64_t attention_layer_state(const CudaAttentionLayerArgs& args);
// Size of `scratch` as a number of floats, for either pass.
std::int64_t attention_layer_scratch(const CudaAttentionLayerArgs& args, bool backward);
}  // namespace cuda

}  // namespace fastsparse
