// Sums of rows on the CPU (kernels/cpu/sum_of_rows.cpp), and several at once on CUDA.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse::cpu {

// By one thread; `partial` is not used.
void sum_of_rows(const SumOfRowsArgs& args, int threads);

}  // namespace fastsparse::cpu

namespace fastsparse::cuda {

constexpr int kMostSums = 3;

// Of up to kMostSums matrices of float32 and one other dtype, none of it float64.
int sums_of_rows(const SumOfRowsArgs* each, int count, void* stream);

}  // namespace fastsparse::cuda
