// Reading binary sparse blocks. A block is 64 bytes: the columns of its 16 vectors, 3 bytes each, then their
// masks, a byte each. Four vectors' columns are three words and their masks one, which takes the L1 four
// passes for a warp; columns of four bytes would take it five.
#pragma once

#include <cstdint>

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

constexpr int kRows = 8;           // rows of a window
constexpr int kBlockVectors = 16;  // vectors of a block
constexpr int kBlockWords = 16;    // 32-bit words of a block
constexpr int kOwned = 4;          // neighbouring vectors of a block that are read together
constexpr int kMaskWord = 12;      // the first word of masks

// Columns of kOwned vectors as they are stored.
struct PackedColumns {
  std::uint32_t word[3];
};

// part: 0 .. 3, which vectors of the block.
__device__ __forceinline__ PackedColumns load_columns(const std::uint32_t* block, int part) {
  const std::uint32_t* at = block + 3 * part;
  return {{__ldg(at), __ldg(at + 1), __ldg(at + 2)}};
}
__device__ __forceinline__ std::uint32_t load_masks(const std::uint32_t* block, int part) {
  return __ldg(block + kMaskWord + part);
}

__device__ __forceinline__ void unpack(const PackedColumns& packed, std::uint32_t (&column)[kOwned]) {
  column[0] = packed.word[0] & 0xffffffu;
  column[1] = __funnelshift_r(packed.word[0], packed.word[1], 24) & 0xffffffu;
  column[2] = __funnelshift_r(packed.word[1], packed.word[2], 16) & 0xffffffu;
  column[3] = packed.word[2] >> 8;
}

// One vector at a time, for paths where time does not matter.
__device__ __forceinline__ std::uint32_t column_of(const BsbView& a, std::int64_t vector) {
  const auto* byte = reinterpret_cast<const std::uint8_t*>(a.block + vector / kBlockVectors * kBlockWords) +
                     vector % kBlockVectors * 3;
  return byte[0] | byte[1] << 8 | byte[2] << 16;
}
__device__ __forceinline__ std::uint32_t mask_of(const BsbView& a, std::int64_t vector) {
  return reinterpret_cast<const std::uint8_t*>(a.block + vector / kBlockVectors * kBlockWords +
                                               kMaskWord)[vector % kBlockVectors];
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
