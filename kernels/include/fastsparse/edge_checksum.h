// A checksum that detects structures that differ from their transpose, without comparing the two.
#pragma once

#include <cstdint>

#include "fastsparse/philox.h"  // FASTSPARSE_HOST_DEVICE

namespace fastsparse {

// The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every bit of the argument affects every bit of
// the result.
FASTSPARSE_HOST_DEVICE std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

// The term of an edge. The sum over all edges, in any order and modulo 2^64, is 0 if every edge has its
// reverse.
FASTSPARSE_HOST_DEVICE std::uint64_t edge_checksum(std::uint64_t row, std::uint64_t col) {
  return mixed(row << 32 | (col & 0xffffffffu)) - mixed(col << 32 | (row & 0xffffffffu));
}

}  // namespace fastsparse
