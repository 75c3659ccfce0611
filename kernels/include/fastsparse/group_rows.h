// Row grouping: shared code of CPU and GPU. Min-wise hashing (Broder, 1997): the share of equal minima in two
// rows' signatures estimates the Jaccard similarity of their column sets. Every row is linked to the most
// similar row that it was compared with. All numbers are integers, so that all devices give equal results.
#pragma once

#include <cstdint>

#include "fastsparse/philox.h"  // FASTSPARSE_HOST_DEVICE

namespace fastsparse {

// Number of hashes in a signature.
constexpr int kHashes = 16;
// Largest number of bits of a hash.
constexpr int kHashBits = 24;
// Number of bits of the keys by which rows are sorted.
constexpr int kKeyBits = 28;
// Smallest number of equal hashes of similar rows (an estimated Jaccard similarity of 3/16).
constexpr int kAgreement = 3;
// Largest number of links that are followed from a row to its cluster's root; longer chains are rare.
constexpr int kMostLinks = 32;
// Two rows are near if their numbers differ by at most this number.
constexpr int kNearRows = 64;

// Random odd factors of every hash, passed to kernels by value because device code cannot read host
// constants.
struct HashFactors {
  std::uint32_t first[kHashes];
  std::uint32_t second[kHashes];
};
constexpr HashFactors kHashFactors = {
    {16264199, 8560495, 14813517, 9153173, 2776367, 6441055, 10674919, 10249665, 8890819, 15247111, 16019773,
     7185895, 10093123, 8104223, 11884679, 5762013},
    {10564393, 4433777, 6825607, 4441697, 14777443, 3688149, 12471663, 15508901, 6299951, 11032087, 13927979,
     15690341, 12195393, 4562755, 7300565, 3754125}};

// Permutations of the column numbers below 2^column_bits, by multiplications with odd numbers and shifts. If
// a number has more than 24 bits, only the upper 24 are kept.
struct ColumnHash {
  std::uint32_t mask;  // products may wrap: only their lower bits are kept
  int shift;
  int dropped;

  FASTSPARSE_HOST_DEVICE std::uint32_t operator()(std::int32_t column, std::uint32_t first,
                                                  std::uint32_t second) const {
    std::uint32_t value = (static_cast<std::uint32_t>(column) * first) & mask;
    value ^= value >> shift;
    value = (value * second) & mask;
    value ^= value >> shift;
    return value >> dropped;
  }

  // The largest hash, which is also the minimum of a row without columns.
  FASTSPARSE_HOST_DEVICE std::uint32_t most() const { return mask >> dropped; }
};

FASTSPARSE_HOST_DEVICE ColumnHash column_hash(int column_bits) {
  return {(1u << column_bits) - 1, (column_bits + 1) / 2,
          column_bits > kHashBits ? column_bits - kHashBits : 0};
}

// One hash followed by bits of the next.
FASTSPARSE_HOST_DEVICE std::int32_t sort_key(std::uint32_t hash, std::uint32_t next, int column_bits) {
  const int free = kKeyBits - (column_bits > kHashBits ? kHashBits : column_bits);
  return static_cast<std::int32_t>(hash << free | (next & ((1u << free) - 1)));
}

// Eight bits of each hash of a signature. Two different hashes have the same eight bits with probability
// 1/256.
struct alignas(16) Signature {
  std::uint64_t half[2];
};

// Number of bytes that are 0.
FASTSPARSE_HOST_DEVICE int zero_bytes(std::uint64_t word) {
  constexpr std::uint64_t kSeven = 0x7f7f7f7f7f7f7f7fu, kOnes = 0x0101010101010101u;
  // Adding 127 carries into the highest bit of a byte unless the byte's other bits are all 0.
  const std::uint64_t nonzero = ((((word & kSeven) + kSeven) | word) >> 7) & kOnes;
  // The product's highest byte is the sum of all bytes.
  return 8 - static_cast<int>(nonzero * kOnes >> 56);
}

// The similarity of a row to another row: the number of equal hashes in the upper 32 bits, and the other row
// in the lower 32 bits. So among equally similar rows, the row with the larger number is chosen.
FASTSPARSE_HOST_DEVICE std::int64_t similarity(const Signature& row, const Signature& other,
                                               std::int64_t other_row) {
  const int equal = zero_bytes(row.half[0] ^ other.half[0]) + zero_bytes(row.half[1] ^ other.half[1]);
  return static_cast<std::int64_t>(equal) << 32 | other_row;
}

// The link from every row to its most similar row, or to itself if no row is similar enough.
struct RowLinks {
  const std::int64_t* rowptr;
  const std::int64_t* best;  // similarity() to the most similar row; negative: none

  FASTSPARSE_HOST_DEVICE bool is_linked(std::int64_t row) const {
    return best[row] >= static_cast<std::int64_t>(kAgreement) << 32 && rowptr[row] != rowptr[row + 1];
  }

  FASTSPARSE_HOST_DEVICE std::int64_t next(std::int64_t row) const {
    return is_linked(row) ? best[row] & 0xffffffff : row;
  }

  FASTSPARSE_HOST_DEVICE bool is_near(std::int64_t row) const {
    const std::int64_t distance = next(row) - row;
    return is_linked(row) && distance <= kNearRows && -distance <= kNearRows;
  }

  // Along a chain of links, the similarity grows, or it stays equal and the row's number grows. So every
  // chain ends in two rows that are linked to each other; the row with the smaller number is the root.
  FASTSPARSE_HOST_DEVICE std::int64_t root(std::int64_t row) const {
    std::int64_t linked = next(row);
    for (int links = 0; links < kMostLinks; ++links) {
      const std::int64_t after = next(linked);
      if (after == row && row <= linked) return row;
      row = linked;
      linked = after;
    }
    return row;
  }
};

}  // namespace fastsparse
