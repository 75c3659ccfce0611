// The score of an entry in additive attention (GAT, GATv2), for both passes.
#pragma once

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

__device__ __forceinline__ float leaky_relu(float x, float negative_slope) {
  return x > 0 ? x : negative_slope * x;
}

// Leaky ReLU in two instructions, for 0 <= negative_slope <= 1.
__device__ __forceinline__ float leaky_relu_up_to_1(float x, float negative_slope) {
  return fmaxf(x, negative_slope * x);
}

// The derivative of the leaky ReLU at x. At 0, it is negative_slope, as in PyTorch.
__device__ __forceinline__ float leaky_relu_slope(float x, float negative_slope) {
  return x > 0 ? 1.0f : negative_slope;
}

template <typename T>
__device__ __forceinline__ float edge_bias(const CsrView& a, const AdditiveAttentionInput& input,
                                           std::int64_t entry, std::int64_t head) {
  return load_value<T>(input.bias, input.bias.dtype == input.dtype,
                       edge_position(a, entry) * input.heads + head);
}

}  // namespace fastsparse::cuda
