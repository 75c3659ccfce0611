// Batch normalisation by the rows that a mask names, on CUDA: kernels/cuda/batch_norm.cu.
#pragma once

#include <cstdint>

#include "fastsparse/views.h"

namespace fastsparse {

// Features in rows one behind the other, which rows count, and what both passes need in addition.
struct MaskedRows {
  const void* x;  // (num_rows, width), not float64
  std::int64_t num_rows, width;
  Dtype dtype;
  const bool* mask;    // (num_rows,)
  const float* count;  // (1,): how many rows the mask names
  double* partial;     // scratch (num_parts, 2, width)
  std::int64_t num_parts;
};

struct BatchNormArgs {
  MaskedRows rows;
  const float* weight;  // (width,); null: 1
  const float* bias;    // null: 0
  float* running_mean;  // (width,), both or none
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
  const void* grad;  // as x
  const float* weight;
  const float* mean;
  const float* inverse;
  void* out;           // as x: zero where the mask names no row
  float* grad_weight;  // (width,)
  float* grad_bias;
};
FASTSPARSE_ARGUMENTS(BatchNormBackwardArgs, MATRIX_AS(x, rows.x), NUM_ROWS(rows.num_rows), WIDTH(rows.width),
                     DTYPE(rows.dtype), IN(rows, mask, count, partial, num_parts),
                     FIELDS(grad, weight, mean, inverse, out, grad_weight, grad_bias));

}  // namespace fastsparse
