// Adds the gradients of aggregate_linear's parameters over slabs of rows:
// kernels/cuda/aggregate_linear_backward.cu.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse {

struct SlabSumsArgs {
  const float* weights;  // (num_slabs, 2, of_weight): gradients of W, then of W_r
  const float* bias;     // (num_slabs, of_bias): gradients of the bias
  float* grad_weight;    // out (of_weight)
  float* grad_root;      // out (of_weight)
  float* grad_bias;      // out (of_bias)
  std::int64_t num_slabs;
  std::int64_t of_weight;  // number of elements of W
  std::int64_t of_bias;    // number of elements of the bias; 0: not computed
};

}  // namespace fastsparse
