// Searches among sorted numbers.
#pragma once

#include <algorithm>

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

// Returns the first of the positions low .. high whose number is at least `least`. If the numbers do not
// ascend, the result is any of these positions. A warp reads 32 positions at a time, so among a million
// numbers, it waits for memory four times instead of twenty times.
template <typename Number>
__device__ std::int64_t search_warp(const Number* sorted, std::int64_t low, std::int64_t high,
                                    std::int64_t least) {
  const int lane = threadIdx.x % kWarp;
  while (low < high) {
    const std::int64_t step = (high - low + kWarp - 1) / kWarp, at = low + lane * step;
    const bool below = at < high && static_cast<std::int64_t>(sorted[at]) < least;
    const int num_below = __popc(__ballot_sync(kFullWarp, below));
    if (num_below == 0) return low;
    high = std::min(high, low + num_below * step);
    low += (num_below - 1) * step + 1;
  }
  return low;
}

// Does the same as search_warp, with one thread.
template <typename Number>
__device__ std::int64_t search(const Number* sorted, std::int64_t low, std::int64_t high,
                               std::int64_t least) {
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (static_cast<std::int64_t>(sorted[middle]) < least) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace fastsparse::cuda
