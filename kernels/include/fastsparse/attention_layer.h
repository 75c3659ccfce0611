// The attention of a layer on the CPU in one call each way: what its linear maps give lies side by side in
// one matrix, (num_nodes, maps * heads * head_width), and so do their gradients.
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

namespace cpu {
void attention_layer(const AttentionLayerArgs& args, int threads);
void attention_layer_backward(const AttentionLayerBackwardArgs& args, int threads);
}  // namespace cpu

}  // namespace fastsparse
