// Sums of rows on the CPU: kernels/cpu/sum_of_rows.cpp.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse::cpu {

// By one thread; `partial` is not used.
void sum_of_rows(const SumOfRowsArgs& args, int threads);

}  // namespace fastsparse::cpu
