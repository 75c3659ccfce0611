// Sums of the rows of several matrices at once, on CUDA: kernels/cuda/sum_of_rows.cu.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse::cuda {

constexpr int kMostSums = 3;

// Of up to kMostSums matrices of float32 and one other dtype, none of it float64.
int sums_of_rows(const SumOfRowsArgs* each, int count, void* stream);

}  // namespace fastsparse::cuda
