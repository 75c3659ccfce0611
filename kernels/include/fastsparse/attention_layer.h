// The attention of a layer in one call each way: what its linear maps give lies side by side in one matrix,
// (num_nodes, num_linears * heads * head_width), and so do their gradients.
#pragma once

#include "fastsparse/head_scores.h"
#include "fastsparse/views.h"

namespace fastsparse {

struct AttentionLayerArgs {
  AttentionCsrArgs attention;
  HeadScoresArgs scores;  // additive attention only: gives dst and src
  DenseView skip;         // (num_rows, width), added to the result; null data: nothing is
  const void* bias;       // (width) in dtype; null: 0
};

struct AttentionLayerBackwardArgs {
  AttentionCsrBackwardArgs attention;  // additive: without grad_dst and grad_src
  HeadScoresArgs scores;
  void* grad_vectors[2];     // additive: (heads, head_width) in the accumulation type
  DenseView grad_joint;      // of the maps' results: what the pointers in `attention` point into
  std::int64_t joint_width;  // its columns
  void* grad_skip;           // in grad_joint; null: there is none
  void* grad_bias;           // (width) in the accumulation type; null: not wanted
  void* grad_map_bias;       // (joint_width) in the accumulation type: sums of grad_joint; null: not wanted
};

// On CUDA, for both passes: dtype is not float64, the structure is square.
struct CudaAttentionLayerArgs {
  AttentionScore kind;
  Dtype dtype;
  std::int64_t num_nodes;
  std::int64_t heads;
  std::int64_t head_width;
  std::int64_t num_linears;  // additive: 1; GATv2: sources and destinations, or 1 for both; dot products:
                             // keys, values, queries and perhaps what is added to the result
  float scale;               // of dot products; else the slope of the leaky ReLU
  CsrView a, a_t;            // a_t, split_t, blocks_t and num_slots_t: of the backward pass
  RowSplitView split, split_t;
  bool on_blocks;  // dot products: whether they read these, not the rows
  BsbView blocks, blocks_t;
  std::int64_t num_slots, num_slots_t;
  std::int64_t num_values;  // dot products of rows
  std::int64_t att_rows;    // GATv2, backward: see Gatv2AttentionBackwardArgs
  std::int64_t num_parts;   // most parts of a sum over nodes
  Dropout dropout;
  bool tf32;

  const void* joint;        // (num_nodes, num_linears * width)
  const float* vectors[2];  // (heads, head_width); null: there is none
  const void* bias;         // forward: (width); null: 0
  bool bias_is_float;       // whether it is float32, not of dtype
  void* out;                // (num_nodes, width): of attention alone
  void* result;             // forward: with what is added to it; may be `out`
  void* state;  // float32 (3 or 1, num_nodes, heads): scores of sources and destinations of additive
                // attention, log-sum-exp; of blocks: float64
  float* scratch;

  DenseView grad;  // backward, as all that follows: (num_nodes, width)
  void* grad_joint;
  float* grad_vectors[2];
  void* grad_bias;  // (width); null: not wanted
  Dtype grad_bias_dtype;
  void* grad_map_bias;  // (num_linears * width): sums of grad_joint; null: not wanted
  Dtype grad_map_bias_dtype;
};

constexpr int kMostLinears = 4;

// Weights of a layer's linear maps below each other, and their biases, in the dtype that is multiplied. That
// is theirs, or they are float32.
struct StackedMapsArgs {
  const void* weights[kMostLinears];  // weight_size numbers each
  const void* biases[kMostLinears];   // bias_size numbers each, 0: there are none
  std::int64_t num_linears;
  std::int64_t weight_size;
  std::int64_t bias_size;
  void* weight;  // (num_linears, weight_size)
  void* bias;    // (num_linears, bias_size)
  Dtype dtype;
  Dtype to_dtype;
};

namespace cuda {
// Numbers of float32 that `state` takes, a multiple of 16 bytes.
std::int64_t attention_layer_state(const CudaAttentionLayerArgs& args);
// Numbers of float32 that `scratch` has for either pass.
std::int64_t attention_layer_scratch(const CudaAttentionLayerArgs& args, bool backward);
}  // namespace cuda

}  // namespace fastsparse
