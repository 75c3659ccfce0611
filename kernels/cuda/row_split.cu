// Cuts rows into slices on the GPU, in three launches and without a sort. First, every block counts the
// slices of its rows by length. Then one block sums the counts, and finally every block writes its slices.
// The order of slices: full slices, then the last slices of all rows by descending power of two of their
// length, and each kind in row order. So the same rows always give the same list.
#include <algorithm>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/sort_segments.h"
#include "fastsparse/sorted_search.cuh"

namespace fastsparse::cuda {
namespace row_split_detail {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Number of kinds of last slices: a slice of kind k has 2^(k-1) to 2^k - 1 entries, a slice of kind 0 has
// none. The highest kind also has all longer slices.
constexpr int kLengths = 16;
// Counters of a block of rows: last slices by kind, then kFull, kSplitRows and kSlots. The scratch has the
// counts of all blocks, counter by counter, and then the positions where the slices of each kind start.
constexpr int kFull = kLengths, kSplitRows = kLengths + 1, kSlots = kLengths + 2, kCounters = kLengths + 3;
constexpr int kRunsAtATime = 4;  // runs of 32 blocks whose counts are read before any is added

std::int64_t num_blocks(std::int64_t num_rows) { return ceil_div(num_rows, kThreads); }

struct Row {
  std::int64_t begin, length, pieces;
  int kind;  // kind of the last slice
};

__device__ Row row_between(std::int64_t begin, std::int64_t end, std::int64_t longest) {
  Row row{begin, end - begin, 0, 0};
  // If the rows are not sorted, the caller does not use the counts.
  if (row.length < 0) row.length = 0;
  row.pieces = row.length > longest ? (row.length + longest - 1) / longest : 1;
  const std::int64_t last = row.length - (row.pieces - 1) * longest;
  row.kind = 64 - __clzll(last);
  if (row.kind >= kLengths) row.kind = kLengths - 1;
  return row;
}

__device__ Row row_at(const RowSplitArgs& args, std::int64_t r) {
  if (r >= args.num_rows) return {0, 0, 0, 0};
  return row_between(args.rowptr[r], args.rowptr[r + 1], args.longest);
}

// Returns the sum of `value` over the threads before this one. `total` becomes the sum over all threads, in
// every thread.
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

// Returns the rank of this thread among the threads of its block that have the same kind. `kinds` gets the
// number of threads of each kind. Threads without a row pass kind -1.
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

__device__ void count_block(const RowSplitArgs& args, const Row& row, bool live) {
  __shared__ int kinds[kLengths];
  const bool split = row.pieces > 1;
  rank_in_kind(live ? row.kind : -1, kinds);
  std::int64_t full, split_rows, slots;
  sum_before(split ? row.pieces - 1 : 0, full);
  sum_before(split ? 1 : 0, split_rows);
  sum_before(split ? row.pieces : 0, slots);
  std::int64_t* counts = args.counts + blockIdx.x;
  const std::int64_t blocks = gridDim.x;
  if (threadIdx.x < kLengths) counts[threadIdx.x * blocks] = kinds[threadIdx.x];
  if (threadIdx.x == 0) {
    counts[kFull * blocks] = full;
    counts[kSplitRows * blocks] = split_rows;
    counts[kSlots * blocks] = slots;
  }
}

__global__ void count_kernel(const RowSplitArgs args) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  count_block(args, row_at(args, r), r < args.num_rows);
}

// Finds the row pointers of sorted keys, then counts slices.
__global__ void find_and_count_kernel(const RowSplitArgs args, const SortedKeys keys) {
  // The range of the entries of this block's rows. The threads of the block search within it, in the cache.
  __shared__ std::int64_t ends[2];
  __shared__ std::int64_t begins[kThreads + 1];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads;
  const int warp = threadIdx.x / kWarp;
  if (warp < 2) {
    const std::int64_t at = std::min(first + warp * kThreads, args.num_rows);
    const std::int64_t end = search_warp(keys.key, 0, keys.num_keys, at);
    if (threadIdx.x % kWarp == 0) ends[warp] = end;
  }
  __syncthreads();
  const std::int64_t r = first + threadIdx.x;
  begins[threadIdx.x] = search(keys.key, ends[0], ends[1], std::min(r, args.num_rows));
  if (threadIdx.x == 0) begins[kThreads] = ends[1];
  __syncthreads();
  const bool live = r < args.num_rows;
  Row row{0, 0, 0, 0};
  if (live) {
    const std::int64_t end = begins[threadIdx.x + 1];
    row = row_between(begins[threadIdx.x], end, args.longest);
    keys.rowptr[r] = row.begin;
    if (r == args.num_rows - 1) keys.rowptr[args.num_rows] = end;
  }
  count_block(args, row, live);
}

// Converts the counts to positions: of each block's first slice of a kind, first split row and first slot.
// One warp handles one counter. If `host_facts` is not null, `totals` has facts about segments, and the host
// gets a copy.
__global__ void place_kernel(const RowSplitArgs args, std::int64_t blocks, std::int64_t* host_facts) {
  __shared__ std::int64_t totals[kCounters];
  const int lane = threadIdx.x % kWarp, counter = threadIdx.x / kWarp;
  std::int64_t descends = 0, entries = 0;  // loaded now, while the loads of the counts are in flight
  if (host_facts != nullptr && threadIdx.x == 0) {
    descends = args.totals[kIndexDescends];
    entries = args.rowptr[args.num_rows];
  }
  std::int64_t* counts = args.counts + counter * blocks;
  std::int64_t running = 0;
  for (std::int64_t base = lane; base < blocks + lane; base += kWarp * kRunsAtATime) {
    std::int64_t value[kRunsAtATime], upto[kRunsAtATime];
#pragma unroll
    for (int i = 0; i < kRunsAtATime; ++i) {
      const std::int64_t block = base + i * kWarp;
      value[i] = upto[i] = block < blocks ? counts[block] : 0;
    }
    for (int offset = 1; offset < kWarp; offset *= 2) {
#pragma unroll
      for (int i = 0; i < kRunsAtATime; ++i) {
        const std::int64_t other = __shfl_up_sync(kFullWarp, upto[i], offset);
        if (lane >= offset) upto[i] += other;
      }
    }
#pragma unroll
    for (int i = 0; i < kRunsAtATime; ++i) {
      const std::int64_t block = base + i * kWarp;
      if (block < blocks) counts[block] = running + upto[i] - value[i];
      running += __shfl_sync(kFullWarp, upto[i], kWarp - 1);
    }
  }
  if (lane == 0) totals[counter] = running;
  __syncthreads();
  if (threadIdx.x != 0) return;
  std::int64_t* starts = args.counts + kCounters * blocks;
  std::int64_t start = totals[kFull];
  starts[kFull] = starts[kSplitRows] = starts[kSlots] = 0;
  for (int kind = kLengths - 1; kind >= 0; --kind) {
    starts[kind] = start;
    start += totals[kind];
  }
  args.totals[0] = totals[kSplitRows];
  args.totals[1] = totals[kSlots];
  if (host_facts == nullptr) return;
  host_facts[kCutSegments] = totals[kSplitRows];
  host_facts[kSegmentSlots] = totals[kSlots];
  host_facts[kIndexDescends] = descends;
  host_facts[kEntriesInRange] = entries;
}

// Writes the slices. If `capacity` is not 0, the list has memory for this number of slices, and those after
// the last one are marked as unused.
__global__ void fill_kernel(const RowSplitArgs args, std::int64_t capacity) {
  __shared__ int kinds[kLengths];
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (capacity > 0) {
    const std::int64_t num_slices = args.num_rows - args.totals[0] + args.totals[1];
    for (std::int64_t i = num_slices + r; i < capacity;
         i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
      args.slices[i] = {0, 0, kNoTarget};
    }
  }
  const Row row = row_at(args, r);
  const bool live = r < args.num_rows, split = row.pieces > 1;
  const auto place_of = [&](int counter) {
    const std::int64_t blocks = gridDim.x;
    return args.counts[counter * blocks + blockIdx.x] + args.counts[kCounters * blocks + counter];
  };
  const int rank = rank_in_kind(live ? row.kind : -1, kinds);
  std::int64_t total, block_split_rows, block_slots;
  const std::int64_t full_at = place_of(kFull) + sum_before(split ? row.pieces - 1 : 0, total);
  const std::int64_t split_at = place_of(kSplitRows) + sum_before(split ? 1 : 0, block_split_rows);
  const std::int64_t slot_at = place_of(kSlots) + sum_before(split ? row.pieces : 0, block_slots);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    args.split_ptr[place_of(kSplitRows) + block_split_rows] = place_of(kSlots) + block_slots;
  }
  if (!live) return;
  const std::int64_t before_last = (row.pieces - 1) * args.longest;
  args.slices[place_of(row.kind) + rank] = {
      row.begin + before_last, static_cast<std::int32_t>(row.length - before_last),
      static_cast<std::int32_t>(split ? ~(slot_at + row.pieces - 1) : r)};
  if (!split) return;
  args.split_row[split_at] = static_cast<std::int32_t>(r);
  args.split_ptr[split_at] = slot_at;
  for (std::int64_t nth = 0; nth < row.pieces - 1; ++nth) {
    args.slices[full_at + nth] = {row.begin + nth * args.longest, static_cast<std::int32_t>(args.longest),
                                  static_cast<std::int32_t>(~(slot_at + nth))};
  }
}

}  // namespace row_split_detail

std::int64_t num_row_split_counts(std::int64_t num_rows) {
  using namespace row_split_detail;
  return (num_blocks(num_rows) + 1) * kCounters;
}

int row_split_count(const RowSplitArgs& args, void* stream) {
  using namespace row_split_detail;
  auto* queue = static_cast<cudaStream_t>(stream);
  const std::int64_t blocks = num_blocks(args.num_rows);
  if (blocks > 0) count_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, queue>>>(args);
  place_kernel<<<1, kCounters * kWarp, 0, queue>>>(args, blocks, nullptr);
  return cudaGetLastError();
}

int row_split_fill(const RowSplitArgs& args, void* stream) {
  using namespace row_split_detail;
  const std::int64_t blocks = num_blocks(args.num_rows);
  if (blocks == 0) return cudaSuccess;
  fill_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, 0);
  return cudaGetLastError();
}

int row_split_of_keys(const RowSplitArgs& args, const SortedKeys& keys, std::int64_t* host_facts,
                      void* stream) {
  using namespace row_split_detail;
  auto* queue = static_cast<cudaStream_t>(stream);
  const std::int64_t blocks = num_blocks(args.num_rows);
  find_and_count_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, queue>>>(args, keys);
  place_kernel<<<1, kCounters * kWarp, 0, queue>>>(args, blocks, host_facts);
  const std::int64_t capacity = args.num_rows + keys.num_keys / args.longest;
  fill_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, queue>>>(args, capacity);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
