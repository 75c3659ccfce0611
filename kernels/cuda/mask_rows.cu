// Dense rows in which the entries whose bits are not set become 0: the gradient of MaxK with dense results.
//
// A thread handles 16 bytes of each of kRows rows, and reads the word that has their bits, which neighbouring
// threads read, too. The floor is the memory traffic, num_rows * width * (2 * sizeof(T) + 1 / 8) bytes.

#include <type_traits>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace mask_rows_detail {

constexpr int kThreads = 128;
constexpr int kRows = 4;  // rows that a thread reads at once

// Replaces the elements whose bits are 0 by 0.
template <typename T, int kVec>
__device__ __forceinline__ void mask(Pack<T, kVec>& pack, unsigned bits) {
  if constexpr (sizeof(T) == 2 && kVec % 2 == 0) {
    unsigned pairs[kVec / 2];
    memcpy(pairs, &pack, sizeof pack);
#pragma unroll
    for (int j = 0; j < kVec / 2; ++j) {
      pairs[j] &= (bits >> (2 * j) & 1u) * 0xffffu | (bits >> (2 * j + 1) & 1u) * 0xffff0000u;
    }
    memcpy(&pack, pairs, sizeof pack);
  } else {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if ((bits >> j & 1u) == 0) pack.lane[j] = T(0.0f);
    }
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) mask_kernel(const MaskRowsArgs args, int log_lanes) {
  const int rows = kThreads >> log_lanes;  // rows that the block handles at once
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * rows * kRows + (static_cast<int>(threadIdx.x) >> log_lanes);
  const int width = static_cast<int>(args.width), num_words = (width + 31) / 32;
  const int lanes = 1 << log_lanes;
  for (int column = (static_cast<int>(threadIdx.x) & (lanes - 1)) * kVec; column < width;
       column += lanes * kVec) {
    Pack<T, kVec> packs[kRows];
    unsigned words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * rows;
      if (row >= args.num_rows) break;
      packs[r] =
          load_pack<T, kVec>(static_cast<const T*>(args.dense.data) + row * args.dense.stride + column);
      words[r] = __ldg(args.kept + row * num_words + column / 32);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * rows;
      if (row >= args.num_rows) break;
      mask(packs[r], words[r] >> column % 32);
      store_pack(packs[r], static_cast<T*>(args.out) + row * width + column);
    }
  }
}

template <typename T, int kVec>
void launch(const MaskRowsArgs& args, cudaStream_t stream) {
  int log_lanes = 0;
  while (log_lanes < 5 && (kVec << log_lanes) < args.width) ++log_lanes;
  const unsigned grid = ceil_div(args.num_rows, (kThreads >> log_lanes) * kRows);
  mask_kernel<T, kVec><<<grid, kThreads, 0, stream>>>(args, log_lanes);
}

}  // namespace mask_rows_detail

int mask_rows(const MaskRowsArgs& args, void* stream) {
  using namespace mask_rows_detail;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kVec = 16 / sizeof(T);
    const auto queue = static_cast<cudaStream_t>(stream);
    if (vector_width<T>({args.width, args.dense.stride}, {args.dense.data, args.out}) == kVec) {
      launch<T, kVec>(args, queue);
    } else {
      launch<T, 1>(args, queue);
    }
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
