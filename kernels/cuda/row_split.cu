// Rows cut into slices on the GPU, in three launches and without a sort: every block of rows counts its
// slices by length, one block of threads sums the counts up, and every block writes its slices where they
// belong. Order: full slices first, then the last slices of all rows by falling power of two of their
// length, each kind in row order, so that the same rows always give the same list.
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace in_row_split {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLengths = 16;  // kinds of last slices: kind k has 2^(k-1) to 2^k - 1 entries, kind 0 none
// Counters of a block of rows: last slices by kind, then these.
constexpr int kFull = kLengths, kSplitRows = kLengths + 1, kSlots = kLengths + 2, kCounters = kLengths + 3;

std::int64_t num_blocks(std::int64_t num_rows) { return ceil_div(num_rows, kThreads); }

struct Row {
  std::int64_t begin, length, pieces;
  int kind;  // of the last piece
};

__device__ Row row_at(const RowSplitArgs& args, std::int64_t r) {
  Row row{0, 0, 0, 0};
  if (r >= args.num_rows) return row;
  row.begin = args.rowptr[r];
  row.length = args.rowptr[r + 1] - row.begin;
  // Of rows that turn out not to be sorted; the counts are then not used.
  if (row.length < 0) row.length = 0;
  row.pieces = row.length > args.longest ? (row.length + args.longest - 1) / args.longest : 1;
  const std::int64_t last = row.length - (row.pieces - 1) * args.longest;
  row.kind = 64 - __clzll(last);
  if (row.kind >= kLengths) row.kind = kLengths - 1;
  return row;
}

// Sum of `value` over the threads before this one; `total` gets that of all, in every thread.
__device__ std::int64_t sum_before(std::int64_t value, std::int64_t& total) {
  __shared__ std::int64_t of_warp[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  std::int64_t upto = value;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const std::int64_t other = __shfl_up_sync(kFullWarp, upto, offset);
    if (lane >= offset) upto += other;
  }
  if (lane == kWarp - 1) of_warp[warp] = upto;
  __syncthreads();
  std::int64_t before = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  __syncthreads();
  return before + upto - value;
}

// Rank of this thread among those of its block with the same kind; `kinds` gets the numbers of each kind.
// Threads that have no row take part with kind -1.
__device__ int rank_in_kind(int kind, int* kinds) {
  __shared__ int of_warp[kWarps][kLengths];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane < kLengths) of_warp[warp][lane] = 0;
  __syncwarp();
  const unsigned same = __match_any_sync(kFullWarp, kind);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (rank == 0 && kind >= 0) of_warp[warp][kind] = __popc(same);
  __syncthreads();
  if (threadIdx.x < kLengths) {
    int total = 0;
    for (int w = 0; w < kWarps; ++w) total += of_warp[w][threadIdx.x];
    kinds[threadIdx.x] = total;
  }
  int before = 0;
  for (int w = 0; w < warp; ++w) before += kind >= 0 ? of_warp[w][kind] : 0;
  __syncthreads();
  return before + rank;
}

// counts[block * kCounters + counter]
__global__ void count_kernel(const RowSplitArgs args) {
  __shared__ int kinds[kLengths];
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const Row row = row_at(args, r);
  const bool split = row.pieces > 1;
  rank_in_kind(r < args.num_rows ? row.kind : -1, kinds);
  std::int64_t full, split_rows, slots;
  sum_before(split ? row.pieces - 1 : 0, full);
  sum_before(split ? 1 : 0, split_rows);
  sum_before(split ? row.pieces : 0, slots);
  std::int64_t* counts = args.counts + blockIdx.x * kCounters;
  if (threadIdx.x < kLengths) counts[threadIdx.x] = kinds[threadIdx.x];
  if (threadIdx.x == 0) {
    counts[kFull] = full;
    counts[kSplitRows] = split_rows;
    counts[kSlots] = slots;
  }
}

// Turns the counts into the place of each block's first slice of a kind, split row and slot. One warp per
// counter.
__global__ void place_kernel(const RowSplitArgs args, std::int64_t blocks) {
  __shared__ std::int64_t totals[kCounters];
  __shared__ std::int64_t starts[kCounters];
  const int lane = threadIdx.x % kWarp, counter = threadIdx.x / kWarp;
  std::int64_t running = 0;
  for (std::int64_t base = 0; base < blocks; base += kWarp) {
    const std::int64_t block = base + lane;
    const std::int64_t value = block < blocks ? args.counts[block * kCounters + counter] : 0;
    std::int64_t upto = value;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::int64_t other = __shfl_up_sync(kFullWarp, upto, offset);
      if (lane >= offset) upto += other;
    }
    if (block < blocks) args.counts[block * kCounters + counter] = running + upto - value;
    running += __shfl_sync(kFullWarp, upto, kWarp - 1);
  }
  if (lane == 0) totals[counter] = running;
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int64_t start = totals[kFull];
    starts[kFull] = starts[kSplitRows] = starts[kSlots] = 0;
    for (int kind = kLengths - 1; kind >= 0; --kind) {
      starts[kind] = start;
      start += totals[kind];
    }
    args.totals[0] = totals[kSplitRows];
    args.totals[1] = totals[kSlots];
  }
  __syncthreads();
  for (std::int64_t block = lane; block < blocks; block += kWarp) {
    args.counts[block * kCounters + counter] += starts[counter];
  }
}

__global__ void fill_kernel(const RowSplitArgs args) {
  __shared__ int kinds[kLengths];
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const Row row = row_at(args, r);
  const bool live = r < args.num_rows, split = row.pieces > 1;
  const std::int64_t* places = args.counts + blockIdx.x * kCounters;
  const int rank = rank_in_kind(live ? row.kind : -1, kinds);
  std::int64_t total, block_split_rows, block_slots;
  const std::int64_t full_at = places[kFull] + sum_before(split ? row.pieces - 1 : 0, total);
  const std::int64_t split_at = places[kSplitRows] + sum_before(split ? 1 : 0, block_split_rows);
  const std::int64_t slot_at = places[kSlots] + sum_before(split ? row.pieces : 0, block_slots);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    args.split_ptr[places[kSplitRows] + block_split_rows] = places[kSlots] + block_slots;
  }
  if (!live) return;
  const std::int64_t before_last = (row.pieces - 1) * args.longest;
  args.slices[places[row.kind] + rank] = {row.begin + before_last,
                                          static_cast<std::int32_t>(row.length - before_last),
                                          static_cast<std::int32_t>(split ? ~(slot_at + row.pieces - 1) : r)};
  if (!split) return;
  args.split_row[split_at] = static_cast<std::int32_t>(r);
  args.split_ptr[split_at] = slot_at;
  for (std::int64_t nth = 0; nth < row.pieces - 1; ++nth) {
    args.slices[full_at + nth] = {row.begin + nth * args.longest, static_cast<std::int32_t>(args.longest),
                                  static_cast<std::int32_t>(~(slot_at + nth))};
  }
}

}  // namespace in_row_split

std::int64_t num_row_split_counts(std::int64_t num_rows) {
  using namespace in_row_split;
  return num_blocks(num_rows) * kCounters;
}

int row_split_count(const RowSplitArgs& args, void* stream) {
  using namespace in_row_split;
  auto* queue = static_cast<cudaStream_t>(stream);
  const std::int64_t blocks = num_blocks(args.num_rows);
  if (blocks > 0) count_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, queue>>>(args);
  place_kernel<<<1, kCounters * kWarp, 0, queue>>>(args, blocks);
  return cudaGetLastError();
}

int row_split_fill(const RowSplitArgs& args, void* stream) {
  using namespace in_row_split;
  const std::int64_t blocks = num_blocks(args.num_rows);
  if (blocks == 0) return cudaSuccess;
  fill_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
