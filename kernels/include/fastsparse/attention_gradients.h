// Attention's backward pass on the CPU with gradients that are in the columns of a wider matrix.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse::cpu {

// Elements from one row to the next of the gradients of dst, src and v.
struct GradientStrides {
  std::int64_t dst, src, v;
};

void attention_csr_backward(const AttentionCsrBackwardArgs& args, const GradientStrides& strides,
                            int threads);

}  // namespace fastsparse::cpu
