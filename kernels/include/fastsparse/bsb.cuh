// Reads binary sparse blocks. A quad is 16 bytes: the columns of its 4 vectors, 3 bytes each, then the masks
// of these vectors, one byte each. A warp processes a block of 16 vectors at a time, up to four quads of a
// window. Columns (three words) and masks (one word) are read separately, because different lanes need them.
#pragma once

#include <cstdint>

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

constexpr int kRows = 8;           // rows of a window
constexpr int kBlockVectors = 16;  // vectors of a block
constexpr int kOwned = 4;          // vectors of a quad
constexpr int kBlockQuads = kBlockVectors / kOwned;
constexpr int kQuadWords = 4;  // 32-bit words of a quad: three for columns, one for masks
constexpr int kMaskWord = 3;

// The columns of a quad in their stored form.
struct PackedColumns {
  std::uint32_t word[3];
};

// The address of the nth quad. Scaling an int index takes one instruction; a 64-bit index would take more.
__device__ __forceinline__ const std::uint32_t* quad_at(const std::uint32_t* quads, int nth) {
  return reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const uint4*>(quads) + nth);
}
__device__ __forceinline__ PackedColumns load_columns(const std::uint32_t* quads, int nth) {
  const std::uint32_t* at = quad_at(quads, nth);
  return {{__ldg(at), __ldg(at + 1), __ldg(at + 2)}};
}
__device__ __forceinline__ std::uint32_t load_masks(const std::uint32_t* quads, int nth) {
  return __ldg(quad_at(quads, nth) + kMaskWord);
}

__device__ __forceinline__ void unpack(const PackedColumns& packed, std::uint32_t (&column)[kOwned]) {
  column[0] = packed.word[0] & 0xffffffu;
  column[1] = __funnelshift_r(packed.word[0], packed.word[1], 24) & 0xffffffu;
  column[2] = __funnelshift_r(packed.word[1], packed.word[2], 16) & 0xffffffu;
  column[3] = packed.word[2] >> 8;
}

// Handles the last block of a window, which has only `left` quads. Each quarter of the warp has read words
// (columns or masks) of one quad. If the quad is beyond the window, they become 0. So that quarter gathers
// row 0 with masks of 0, and loads need no predicate.
template <int kWords>
__device__ __forceinline__ void cut_words(std::uint32_t (&word)[kWords], int left) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (static_cast<int>(threadIdx.x % kWarp / 8) >= left) word[i] = 0;
  }
}

// The column of one vector, for code whose speed does not matter.
__device__ __forceinline__ std::uint32_t column_of(const BsbView& a, std::int64_t vector) {
  const auto* byte =
      reinterpret_cast<const std::uint8_t*>(a.quad + vector / kOwned * kQuadWords) + vector % kOwned * 3;
  return byte[0] | byte[1] << 8 | byte[2] << 16;
}
// The quad's four masks, a byte each.
__device__ __forceinline__ std::uint32_t masks_of(const BsbView& a, std::int64_t quad) {
  return a.quad[quad * kQuadWords + kMaskWord];
}

// The rows of windows: 8 consecutive rows or, after row grouping, the rows of window_row.
struct WindowRow {
  const std::int32_t* window_row;
  std::int64_t num_rows;
  // The r-th row of a window; -1 if the window has fewer rows.
  __device__ __forceinline__ std::int64_t operator()(std::int64_t window, int r) const {
    const std::int64_t at = window * kRows + r;
    if (window_row != nullptr) return window_row[at];
    return at < num_rows ? at : -1;
  }
};

// Computes base + index * bytes in one instruction; the compiler would widen `bytes` and add two products.
__device__ __forceinline__ const char* row_address(const char* base, std::uint32_t index,
                                                   std::uint32_t bytes) {
  std::uint64_t address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(index), "r"(bytes), "l"(base));
  return reinterpret_cast<const char*>(address);
}

}  // namespace fastsparse::cuda
