// Builds the work list of spmm_hr (HR-SpMM, section 4.1, algorithm 1) in two launches, without a wait for the
// GPU. In the first launch, each block counts the items of its rows. In the second, each block sums the
// counts of the blocks before it, and writes the items of its rows. The number of blocks is limited, so that
// these sums stay small and time is proportional to rows and items. A thread handles one row and writes its
// items.

#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/dependent_launch.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace hybrid_rows_detail {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1024;  // about the number of blocks that an H100 or H200 runs at once

// Rows per block: a multiple of kThreads that keeps the number of blocks low.
std::int64_t rows_of_block(std::int64_t num_rows) {
  return kThreads * std::max<std::int64_t>(1, ceil_div(num_rows, kThreads * kMostBlocks));
}

unsigned num_blocks(std::int64_t num_rows) { return ceil_div(num_rows, rows_of_block(num_rows)); }

__device__ __forceinline__ HybridRowsCounts operator+(const HybridRowsCounts& a, const HybridRowsCounts& b) {
  return {a.long_items + b.long_items, a.split_rows + b.split_rows, a.slots + b.slots};
}

// How a row is cut into items (HybridRows in formats/hybrid_rows.py).
struct RowCut {
  std::int64_t begin;
  int rest;   // number of entries in the short item
  int whole;  // number of entries in long items
  int num_long;
  bool has_short;

  __device__ __forceinline__ int items() const { return num_long + has_short; }
  __device__ __forceinline__ bool split() const { return items() > 1; }
  __device__ __forceinline__ HybridRowsCounts counts() const {
    return {num_long, split(), split() ? items() : 0};
  }
};

__device__ __forceinline__ RowCut cut_row(const HybridRowsArgs& args, std::int64_t row) {
  RowCut cut;
  cut.begin = args.rowptr[row];
  const int length = static_cast<int>(args.rowptr[row + 1] - cut.begin);
  cut.rest = length % args.multiple;
  cut.whole = length - cut.rest;
  cut.num_long = (cut.whole + args.longest - 1) / args.longest;
  cut.has_short = cut.rest > 0 || length == 0;
  return cut;
}

// Returns the sum of `value` over the threads before this one. `total` becomes the sum over all threads, in
// every thread.
__device__ HybridRowsCounts sum_before(const HybridRowsCounts& value, HybridRowsCounts& total) {
  using Scan = cub::BlockScan<HybridRowsCounts, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage storage;
  HybridRowsCounts before;
  const auto add = [](const HybridRowsCounts& a, const HybridRowsCounts& b) { return a + b; };
  Scan(storage).ExclusiveScan(value, before, HybridRowsCounts{}, add, total);
  __syncthreads();  // the next call reuses the shared memory
  return before;
}

__global__ void __launch_bounds__(kThreads) count_kernel(const HybridRowsArgs args, std::int64_t block_rows) {
  launch_dependents();
  const std::int64_t first = blockIdx.x * block_rows, end = min(first + block_rows, args.num_rows);
  HybridRowsCounts counts{}, total;
  for (std::int64_t row = first + threadIdx.x; row < end; row += kThreads) {
    counts = counts + cut_row(args, row).counts();
  }
  sum_before(counts, total);
  if (threadIdx.x == 0) args.counts[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads) fill_kernel(const HybridRowsArgs args, std::int64_t block_rows) {
  wait_for_kernel_before();
  const std::int64_t first = blockIdx.x * block_rows, end = min(first + block_rows, args.num_rows);
  HybridRowsCounts counts{}, so_far;
  for (unsigned block = threadIdx.x; block < blockIdx.x; block += kThreads) {
    counts = counts + args.counts[block];
  }
  sum_before(counts, so_far);
  for (std::int64_t tile = first; tile < end; tile += kThreads) {
    const std::int64_t row = tile + threadIdx.x;
    const RowCut cut = row < end ? cut_row(args, row) : RowCut{};
    HybridRowsCounts of_tile;
    const HybridRowsCounts at = so_far + sum_before(cut.counts(), of_tile);
    so_far = so_far + of_tile;
    if (row >= end) continue;
    const auto target = [&](int nth) {
      return static_cast<std::int32_t>(cut.split() ? ~(at.slots + nth) : row);
    };
    for (int nth = 0; nth < cut.num_long; ++nth) {
      const int before = nth * args.longest;
      args.slices[at.long_items + nth] = {cut.begin + before, min(args.longest, cut.whole - before),
                                          target(nth)};
    }
    args.slices[args.most_long + row] = {cut.begin + cut.whole, cut.has_short ? cut.rest : -1,
                                         target(cut.num_long)};
    if (cut.split()) {
      args.split_row[at.split_rows] = static_cast<std::int32_t>(row);
      args.split_ptr[at.split_rows] = at.slots;
    }
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    args.split_ptr[so_far.split_rows] = so_far.slots;
    args.counts[gridDim.x] = so_far;
  }
}

}  // namespace hybrid_rows_detail

std::int64_t num_hybrid_rows_counts(std::int64_t num_rows) {
  using namespace hybrid_rows_detail;
  return num_blocks(num_rows) + 1;
}

int hybrid_rows(const HybridRowsArgs& args, void* stream) {
  using namespace hybrid_rows_detail;
  auto* queue = static_cast<cudaStream_t>(stream);
  const std::int64_t block_rows = rows_of_block(args.num_rows);
  const unsigned blocks = num_blocks(args.num_rows);
  count_kernel<<<blocks, kThreads, 0, queue>>>(args, block_rows);
  launch_dependent(fill_kernel, true, dim3(blocks), dim3(kThreads), 0, queue, args, block_rows);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
