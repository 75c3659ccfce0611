// Sums of the columns of several matrices at once, on CUDA: kernels/cuda/sum_of_rows.cu.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse::cuda {

constexpr int kMostSums = 3;

// Sums up to kMostSums matrices. Their dtypes are float32 and at most one other dtype, which is not float64.
int sums_of_rows(const SumOfRowsArgs* each, int count, void* stream);

}  // namespace fastsparse::cuda
