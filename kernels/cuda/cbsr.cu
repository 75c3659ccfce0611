// The way between CBSR and dense rows, on CUDA cores.
//
// To dense: a warp lays out one row in shared memory, a tile at a time, and writes it in 16-byte pieces, so
// that every byte of the result goes out once and coalesced: num_rows * (k * (sizeof(T) + id) + width *
// sizeof(T)) bytes in all. Gather: one thread per kept entry; a row's entries lie close to each other.

#include <type_traits>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace in_cbsr {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTile = 512;  // columns that a warp lays out at a time
constexpr int kGatherThreads = 256;
constexpr int kGatherRows = 32;  // rows of a block

// Calls f with a value of the type of the column ids of rows of this width.
template <typename F>
void with_id_type(std::int64_t width, F&& f) {
  width <= 256 ? f(std::uint8_t{}) : f(std::uint16_t{});
}

template <typename T, typename Id, int kVec>
__global__ void __launch_bounds__(kThreads) to_dense_kernel(const CbsrToDenseArgs args) {
  __shared__ alignas(16) T tiles[kWarps][kTile];
  const int lane = threadIdx.x % kWarp;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= args.num_rows) return;
  T* tile = tiles[threadIdx.x / kWarp];
  const T* values = static_cast<const T*>(args.values) + row * args.k;
  const Id* ids = static_cast<const Id*>(args.ids) + row * args.k;
  const int k = static_cast<int>(args.k), width = static_cast<int>(args.width);
  T* out = static_cast<T*>(args.out) + row * args.width;
  for (int begin = 0; begin < width; begin += kTile) {
    const int columns = min(kTile, width - begin);
    Pack<T, kVec> zeros;
    memset(&zeros, 0, sizeof zeros);
    for (int c = lane * kVec; c < columns; c += kWarp * kVec) store_pack(zeros, tile + c);
    __syncwarp();
    for (int i = lane; i < k; i += kWarp) {
      const int column = static_cast<int>(ids[i]) - begin;
      if (column >= 0 && column < columns) tile[column] = values[i];
    }
    __syncwarp();
    for (int c = lane * kVec; c < columns; c += kWarp * kVec) {
      store_pack(*reinterpret_cast<const Pack<T, kVec>*>(tile + c), out + begin + c);
    }
    __syncwarp();
  }
}

template <typename T, typename Id>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const CbsrGatherArgs args) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kGatherRows;
  const auto k = static_cast<unsigned>(args.k);
  const auto entries =
      static_cast<unsigned>(min(static_cast<std::int64_t>(kGatherRows), args.num_rows - first)) * k;
  const T* dense = static_cast<const T*>(args.dense.data) + first * args.dense.stride;
  const Id* ids = static_cast<const Id*>(args.ids) + first * args.k;
  T* out = static_cast<T*>(args.out) + first * args.k;
  for (unsigned i = threadIdx.x; i < entries; i += kGatherThreads) {
    const Id id = ids[i];
    out[i] = id < args.width ? dense[i / k * args.dense.stride + id] : T(0.0f);
  }
}

}  // namespace in_cbsr

int cbsr_to_dense(const CbsrToDenseArgs& args, void* stream) {
  using namespace in_cbsr;
  with_type(args.dtype, [&](auto type) {
    with_id_type(args.width, [&](auto id) {
      using T = decltype(type);
      using Id = decltype(id);
      constexpr int kVec = 16 / sizeof(T);
      const unsigned grid = ceil_div(args.num_rows, kWarps);
      const auto queue = static_cast<cudaStream_t>(stream);
      if (vector_width<T>({args.width}, {args.out}) == kVec) {
        to_dense_kernel<T, Id, kVec><<<grid, kThreads, 0, queue>>>(args);
      } else {
        to_dense_kernel<T, Id, 1><<<grid, kThreads, 0, queue>>>(args);
      }
    });
  });
  return cudaGetLastError();
}

int cbsr_gather(const CbsrGatherArgs& args, void* stream) {
  using namespace in_cbsr;
  with_type(args.dtype, [&](auto type) {
    with_id_type(args.width, [&](auto id) {
      gather_kernel<decltype(type), decltype(id)>
          <<<ceil_div(args.num_rows, kGatherRows), kGatherThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              args);
    });
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
