// Batch normalisation over the rows that a mask selects, on CUDA: kernels/cuda/batch_norm.cu.
#pragma once

#include <cstdint>

#include "fastsparse/views.h"

namespace fastsparse {

// Arguments of both passes: features in contiguous rows, and the mask that selects rows.
struct MaskedRows {
  const void* x;  // (num_rows, width) in any dtype except float64
  std::int64_t num_rows, width;
  Dtype dtype;
  const bool* mask;    // (num_rows,)
  const float* count;  // (1,): number of rows that the mask selects
  double* partial;     // scratch (num_parts, 2, width)
  std::int64_t num_parts;
};

struct BatchNormArgs {
  MaskedRows rows;
  const float* weight;  // (width,); null: 1
  const float* bias;    // null: 0
  float* running_mean;  // (width,); null, together with running_var: not updated
  float* running_var;
  float momentum, eps;
  void* out;
  float* mean;     // (width,)
  float* inverse;  // (width,): 1 / sqrt(variance + eps)
};
FASTSPARSE_ARGUMENTS(BatchNormArgs, MATRIX_AS(x, rows.x), NUM_ROWS(rows.num_rows), WIDTH(rows.width),
                     DTYPE(rows.dtype), IN(rows, mask, count, partial, num_parts),
                     FIELDS(weight, bias, running_mean, running_var, momentum, eps, out, mean, inverse));

struct BatchNormBackwardArgs {
  MaskedRows rows;
  const void* grad;  // gradient of the result, (num_rows, width) in the dtype of x
  const float* weight;
  const float* mean;
  const float* inverse;
  void* out;           // (num_rows, width) in the dtype of x; rows that the mask does not select are 0
  float* grad_weight;  // (width,)
  float* grad_bias;
};
FASTSPARSE_ARGUMENTS(BatchNormBackwardArgs, MATRIX_AS(x, rows.x), NUM_ROWS(rows.num_rows), WIDTH(rows.width),
                     DTYPE(rows.dtype), IN(rows, mask, count, partial, num_parts),
                     FIELDS(grad, weight, mean, inverse, out, grad_weight, grad_bias));

}  // namespace fastsparse
