// Scores of nodes for additive attention: arguments of cpu/head_scores.cpp and cuda/attention_layer_parts.cu.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse {

// score_k(i, h) = <vector_k(h), v(i, h)>, for one or two vectors per head.
struct HeadScoresArgs {
  DenseView v;             // (num_rows, heads * head_width)
  const void* vectors[2];  // (heads, head_width) in the accumulation type; the second may be null
  void* scores[2];  // (num_rows, heads) in the accumulation type; in the backward pass, their gradients
  std::int64_t num_rows;
  std::int64_t heads;
  std::int64_t head_width;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(HeadScoresArgs, FIELDS(heads, v), NUM_ROWS(num_rows), WIDTH(head_width),
                     PER(head_width, heads), DTYPE(dtype), AS(first_vector, vectors[0]),
                     AS(second_vector, vectors[1]), AS(first_scores, scores[0]),
                     AS(second_scores, scores[1]));

struct HeadScoresBackwardArgs {
  HeadScoresArgs forward;
  void* grad_v;           // (num_rows, heads * head_width) in dtype; null: not computed
  bool adds;              // whether the gradient is added to grad_v instead of overwriting grad_v
  void* grad_vectors[2];  // (heads, head_width) in the accumulation type; null: not computed
};
FASTSPARSE_ARGUMENTS(HeadScoresBackwardArgs, FIELDS(forward, grad_v, adds), AS(grad_first, grad_vectors[0]),
                     AS(grad_second, grad_vectors[1]));

}  // namespace fastsparse
