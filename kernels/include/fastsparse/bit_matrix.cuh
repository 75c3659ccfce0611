// Transposes matrices of bits, within the registers of a lane and between lanes.
#pragma once

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

// Takes the bits of `a` where the mask is set, and the bits of `b` elsewhere, in one instruction; the
// compiler would emit two.
__device__ __forceinline__ unsigned merge(unsigned a, unsigned b, unsigned mask) {
  unsigned merged;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(merged) : "r"(a), "r"(b), "r"(mask));
  return merged;
}

// Copies bits 15 and 31 to all bits of their halves. __byte_perm would ignore the selector's sign flag.
__device__ __forceinline__ unsigned signs_of_halves(unsigned word) {
  unsigned signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(word));
  return signs;
}

// Divides both words into pairs of fields of kShift bits. `a` gets the lower fields and `b` the upper fields
// of both words. In every new pair, the field of the old `a` is the lower one.
template <int kShift>
__device__ __forceinline__ void exchange(unsigned& a, unsigned& b) {
  const unsigned x = a, y = b;
  if constexpr (kShift == 16) {
    a = __byte_perm(x, y, 0x5410), b = __byte_perm(x, y, 0x7632);
  } else if constexpr (kShift == 8) {
    a = __byte_perm(x, y, 0x6240), b = __byte_perm(x, y, 0x7351);
  } else {
    constexpr unsigned kLower = ~0u / ((1u << kShift) + 1);
    a = merge(x, y << kShift, kLower), b = merge(x >> kShift, y, kLower);
  }
}

// Does the same as exchange, between the word of lane l and the word of lane l + `distance`, for every l in
// which this bit is 0. `distance` is a power of two.
template <int kShift>
__device__ __forceinline__ unsigned exchange_lanes(unsigned word, int distance) {
  const unsigned other = __shfl_xor_sync(kFullWarp, word, distance);
  const bool upper = (threadIdx.x & static_cast<unsigned>(distance)) != 0;
  if constexpr (kShift == 16) {
    return __byte_perm(word, other, upper ? 0x3276 : 0x5410);
  } else if constexpr (kShift == 8) {
    return __byte_perm(word, other, upper ? 0x3715 : 0x6240);
  } else {
    constexpr unsigned kLower = ~0u / ((1u << kShift) + 1);
    return upper ? merge(other >> kShift, word, kLower) : merge(word, other << kShift, kLower);
  }
}

// Transposes bytes among every 4 lanes: byte i of lane j becomes byte j of lane i.
__device__ __forceinline__ unsigned transposed_bytes(unsigned word) {
  return exchange_lanes<16>(exchange_lanes<8>(word, 1), 2);
}

// Transposes groups of four bits among every 8 lanes: group i of lane j becomes group j of lane i.
__device__ __forceinline__ unsigned transposed_nibbles(unsigned word) {
  return exchange_lanes<4>(exchange_lanes<8>(exchange_lanes<16>(word, 4), 2), 1);
}

// Index of the word in which bit_planes stores a bit.
constexpr int plane_of(int bit) { return bit % 2 * 8 + bit / 2; }

// Converts 32 numbers of 16 bits (words[i] has numbers 2 i and 2 i + 1) to one word per bit: bit e of
// words[plane_of(b)] is bit b of number e. Every step exchanges one binary digit of the register's index with
// one digit of the position in the word.
__device__ __forceinline__ void bit_planes(unsigned (&words)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) exchange<16>(words[i], words[i + 8]);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i % 8 < 4) exchange<8>(words[i], words[i + 4]);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i % 4 < 2) exchange<4>(words[i], words[i + 2]);
  }
#pragma unroll
  for (int i = 0; i < 16; i += 2) exchange<2>(words[i], words[i + 1]);
#pragma unroll
  for (int i = 0; i < 8; ++i) exchange<1>(words[i], words[i + 8]);
}

// Moves bits 0, 2, 4 and so on to the lower half, and bits 1, 3, 5 and so on to the upper half.
__device__ __forceinline__ unsigned evens_first(unsigned word) {
  const auto swap = [&](int shift, unsigned where) {
    const unsigned changed = (word ^ word >> shift) & where;
    word ^= changed ^ changed << shift;
  };
  swap(1, 0x22222222u);
  swap(2, 0x0c0c0c0cu);
  swap(4, 0x00f000f0u);
  swap(8, 0x0000ff00u);
  return word;
}

// A word with the first `count` bits set.
__device__ __forceinline__ unsigned first_bits(int count) {
  return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1u;
}

}  // namespace fastsparse::cuda
