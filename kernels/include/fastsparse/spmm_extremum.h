// Gradients of extrema over neighbours: arguments of kernels/c*/spmm_extremum_backward.c*.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse {

// SpmmExtremumArgs::arg has the position of the chosen edge in the caller's order (its low 32 bits, if
// positions are larger), or this number if a row has no edges.
constexpr std::int32_t kNoEdge = -1;

struct SpmmExtremumBackwardArgs {
  CsrView a;  // CUDA: the transposed structure, to which split_t belongs; CPU: the structure itself
  RowSplitView split_t;
  EdgeValueView value;         // null data if values were added; grad_value is then computed as for x = 1
  DenseView grad;              // (num_rows, width)
  DenseView x;                 // (num_cols, width); read for grad_value; null: values were added
  const std::int32_t* arg;     // (num_rows, width), result of the forward pass
  const std::int32_t* source;  // (num_values): source of every edge; required on the CPU, and for grad_value
  void* grad_x;                // (num_cols, width); on the CPU in the accumulation type
  void* grad_value;            // (num_values, heads), zeros in the accumulation type; null: not computed
  void* partial;               // (num_slots, width) in the accumulation type; CUDA only
  std::int64_t num_rows;
  std::int64_t width;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SpmmExtremumBackwardArgs, AS(transposed, a), ALSO(split_t), FIELDS(grad),
                     NUM_ROWS(num_rows), WIDTH(width), DTYPE(dtype), FIELDS(x, value), AS(heads, value.heads),
                     FIELDS(arg, source, grad_x, grad_value, partial));

}  // namespace fastsparse
