// MaxK of 16-bit numbers (maxk_16_bits.cu), called by maxk.cu.
#pragma once

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

constexpr std::int64_t kMost16BitColumns = 1024;  // largest supported width

template <typename T>
void maxk_16_bits(const MaxkArgs& args, cudaStream_t stream);

}  // namespace fastsparse::cuda
