// float32 numbers as sums of bfloat16 numbers, for products on tensor cores with the accuracy of float32.
#pragma once

#include <cstdint>

namespace fastsparse::cuda {

// Two float32 numbers as bfloat16 terms: each term is the upper half of what remains after the previous ones.
template <int kTerms>
__device__ __forceinline__ void split_pair(float x, float y, std::uint32_t (&term)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    const std::uint32_t x_bits = __float_as_uint(x), y_bits = __float_as_uint(y);
    term[i] = __byte_perm(x_bits, y_bits, 0x7632);
    x -= __uint_as_float(x_bits & 0xffff0000u);
    y -= __uint_as_float(y_bits & 0xffff0000u);
  }
}

}  // namespace fastsparse::cuda
