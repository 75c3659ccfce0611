// The operators as seen by the binding: one name per operator, once for the CPU and once for CUDA.
// CPU launchers run on `threads` OpenMP threads. CUDA launchers enqueue on `stream` (a cudaStream_t) of the
// current device and return a cudaError_t as int; they never allocate and never synchronise.
#pragma once

#include <cstddef>

#include "fastsparse/views.h"

namespace fastsparse::cpu {

void compress(const CompressArgs& args);
void spmm_csr(const SpmmArgs& args, int threads);
void spmm_extremum(const SpmmExtremumArgs& args, int threads);
void sddmm_csr(const SddmmArgs& args, int threads);

}  // namespace fastsparse::cpu

namespace fastsparse::cuda {

std::size_t compress_scratch_bytes(const CompressArgs& args);
int compress(const CompressArgs& args, void* scratch, std::size_t scratch_bytes, void* stream);
int spmm_csr(const SpmmArgs& args, void* stream);
int spmm_bsb(const SpmmBsbArgs& args, void* stream);
int spmm_extremum(const SpmmExtremumArgs& args, void* stream);
int sddmm_csr(const SddmmArgs& args, void* stream);
int sddmm_bsb(const SddmmBsbArgs& args, void* stream);

}  // namespace fastsparse::cuda
