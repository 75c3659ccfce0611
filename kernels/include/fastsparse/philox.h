// A counter-based random number generator (Philox4x32-10; Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). Attention's dropout uses it, so that every pass gets the same mask in any order of
// entries. Neighbour sampling uses it, so that both devices choose the same entries.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define FASTSPARSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTSPARSE_HOST_DEVICE inline
#endif

namespace fastsparse {

// Returns the first two of the four words of a block, the first word in the low half. The key has two words;
// the counter is (c0, c1, c2, 0).
FASTSPARSE_HOST_DEVICE std::uint64_t philox64(std::uint32_t key0, std::uint32_t key1, std::uint32_t c0,
                                              std::uint32_t c1, std::uint32_t c2) {
  std::uint32_t c3 = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<std::uint32_t>(product1);
    c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<std::uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return static_cast<std::uint64_t>(c1) << 32 | c0;
}

// Returns the first of the four words of a block.
FASTSPARSE_HOST_DEVICE std::uint32_t philox(std::uint32_t key0, std::uint32_t key1, std::uint32_t c0,
                                            std::uint32_t c1, std::uint32_t c2) {
  return static_cast<std::uint32_t>(philox64(key0, key1, c0, c1, c2));
}

// Drops an entry with probability p and multiplies the others by 1 / (1 - p). If threshold is 0, there is no
// dropout.
struct Dropout {
  std::uint32_t key0;
  std::uint32_t key1;
  std::uint32_t threshold;  // entries whose random word is below it are dropped
  float scale;
};

inline Dropout make_dropout(double p, std::int64_t seed) {
  const auto bits = static_cast<std::uint64_t>(seed);
  return {static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32),
          static_cast<std::uint32_t>(std::fmin(std::ceil(p * 0x1p32), 0x1p32 - 1)),
          static_cast<float>(1.0 / (1.0 - p))};
}

// The dropout factor of the weight of entry (row, column) and head. Row and column are numbered as in the
// caller's structure, also in passes over its transpose.
FASTSPARSE_HOST_DEVICE float dropout_factor(const Dropout& dropout, std::uint32_t row, std::uint32_t col,
                                            std::uint32_t head) {
  if (dropout.threshold == 0) return 1.0f;
  return philox(dropout.key0, dropout.key1, row, col, head) >= dropout.threshold ? dropout.scale : 0.0f;
}

}  // namespace fastsparse
