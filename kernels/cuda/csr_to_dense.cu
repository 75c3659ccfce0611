// A dense matrix from CSR and a value per edge, on CUDA cores: for structures so small and full that the
// dense product is the fastest one.
//
// A block of threads lays out one row in shared memory, a tile at a time, and writes it in 16-byte pieces, so
// that every byte of the result goes out once and coalesced: num_rows * num_cols * sizeof(T) bytes. Entries
// that occur twice add up there, in the accumulation type.

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = 2048;  // columns that are laid out at a time

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) csr_to_dense_kernel(const CsrToDenseArgs args) {
  __shared__ Acc<T> tile[kTile];
  const std::int64_t row = blockIdx.x;
  const std::int64_t first = args.a.rowptr[row], last = args.a.rowptr[row + 1];
  const T* value = static_cast<const T*>(args.value);
  T* out = static_cast<T*>(args.out) + row * args.a.num_cols;
  for (std::int64_t begin = 0; begin < args.a.num_cols; begin += kTile) {
    const int columns = static_cast<int>(min(static_cast<std::int64_t>(kTile), args.a.num_cols - begin));
    for (int c = threadIdx.x; c < columns; c += kThreads) tile[c] = 0;
    __syncthreads();
    for (std::int64_t entry = first + threadIdx.x; entry < last; entry += kThreads) {
      const std::int64_t column = args.a.col[entry] - begin;
      if (column < 0 || column >= columns) continue;
      atomicAdd(&tile[column], widen(value[edge_position(args.a, entry)]));
    }
    __syncthreads();
    for (int c = threadIdx.x * kVec; c < columns; c += kThreads * kVec) {
      Pack<T, kVec> pack;
#pragma unroll
      for (int i = 0; i < kVec; ++i) pack.lane[i] = narrow<T>(tile[c + i]);
      store_pack(pack, out + begin + c);
    }
    __syncthreads();
  }
}

}  // namespace

int csr_to_dense(const CsrToDenseArgs& args, void* stream) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kVec = 16 / sizeof(T);
    const unsigned grid = static_cast<unsigned>(args.a.num_rows);
    const auto queue = static_cast<cudaStream_t>(stream);
    if (vector_width<T>({args.a.num_cols}, {args.out}) == kVec) {
      csr_to_dense_kernel<T, kVec><<<grid, kThreads, 0, queue>>>(args);
    } else {
      csr_to_dense_kernel<T, 1><<<grid, kThreads, 0, queue>>>(args);
    }
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
