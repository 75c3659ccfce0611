// Reading binary sparse blocks. A quad is 16 bytes: the columns of its 4 vectors, 3 bytes each, then their
// masks, a byte each. A warp takes up to four quads of a window at a time, a block of 16 vectors.
#pragma once

#include <cstdint>

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

constexpr int kRows = 8;           // rows of a window
constexpr int kBlockVectors = 16;  // vectors of a block
constexpr int kOwned = 4;          // vectors of a quad
constexpr int kBlockQuads = kBlockVectors / kOwned;
constexpr int kQuadWords = 4;  // 32-bit words of a quad: three of columns, one of masks

// x, y, z: columns; w: masks.
__device__ __forceinline__ uint4 load_quad(const std::uint32_t* quads, int nth) {
  return __ldg(reinterpret_cast<const uint4*>(quads) + nth);
}

__device__ __forceinline__ void unpack(const uint4& quad, std::uint32_t (&column)[kOwned]) {
  column[0] = quad.x & 0xffffffu;
  column[1] = __funnelshift_r(quad.x, quad.y, 24) & 0xffffffu;
  column[2] = __funnelshift_r(quad.y, quad.z, 16) & 0xffffffu;
  column[3] = quad.z >> 8;
}

// What the last block of a window lacks, `left` quads being there: lanes that read a quad behind the window
// get the first one's columns, which are gathered anyway, so that they need no predicate; its masks they are
// to ignore. Every quarter warp has read one quad.
__device__ __forceinline__ void cut_columns(uint4& quad, int left) {
  if (left >= kBlockQuads) return;  // the same in all lanes
  const bool behind = static_cast<int>(threadIdx.x % kWarp / 8) >= left;
  const std::uint32_t x = __shfl_sync(kFullWarp, quad.x, 0), y = __shfl_sync(kFullWarp, quad.y, 0),
                      z = __shfl_sync(kFullWarp, quad.z, 0);
  if (behind) quad = make_uint4(x, y, z, quad.w);
}

// One vector at a time, for paths where time does not matter.
__device__ __forceinline__ std::uint32_t column_of(const BsbView& a, std::int64_t vector) {
  const auto* byte =
      reinterpret_cast<const std::uint8_t*>(a.quad + vector / kOwned * kQuadWords) + vector % kOwned * 3;
  return byte[0] | byte[1] << 8 | byte[2] << 16;
}
// Bits of the quad's four masks, a byte each.
__device__ __forceinline__ std::uint32_t masks_of(const BsbView& a, std::int64_t quad) {
  return a.quad[quad * kQuadWords + kQuadWords - 1];
}

// The rows of windows. A window has 8 consecutive rows, or those that row grouping gave it.
struct WindowRow {
  const std::int32_t* window_row;
  std::int64_t num_rows;
  // The r-th row of a window, -1: none.
  __device__ __forceinline__ std::int64_t operator()(std::int64_t window, int r) const {
    const std::int64_t at = window * kRows + r;
    if (window_row != nullptr) return window_row[at];
    return at < num_rows ? at : -1;
  }
};

// base + index * bytes in one instruction: left to itself the compiler adds the halves of a widened `bytes`.
__device__ __forceinline__ const char* row_address(const char* base, std::uint32_t index,
                                                   std::uint32_t bytes) {
  std::uint64_t address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(index), "r"(bytes), "l"(base));
  return reinterpret_cast<const char*>(address);
}

}  // namespace fastsparse::cuda
