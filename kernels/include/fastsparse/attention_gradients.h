// Attention's backward pass on the CPU, if gradients are columns of a wider matrix.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse::cpu {

// Row strides, in elements, of the gradients of dst, src and v.
struct GradientStrides {
  std::int64_t dst, src, v;
};

void attention_csr_backward(const AttentionCsrBackwardArgs& args, const GradientStrides& strides,
                            int threads);

}  // namespace fastsparse::cpu
