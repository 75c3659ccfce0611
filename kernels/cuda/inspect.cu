// Checks edges or compressed rows on the GPU and, if the edges are sorted, writes the arrays of a structure,
// in one launch. Some blocks pass over edges, the others over rows. The host reads the results once. Memory
// traffic: indices are read once; 4 bytes per edge and 28 bytes per row are written.
//
// Few edges are sorted in the same launch, by counting the entries of every row and comparing the entries
// within a row, because a radix sort takes a dozen launches.
#include <cooperative_groups.h>

#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/edge_checksum.h"
#include "fastsparse/launchers.h"
#include "fastsparse/sort_edges.h"
#include "fastsparse/sorted_search.cuh"

namespace fastsparse::cuda {
namespace inspect_detail {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 132 * 8;
using Word = unsigned long long;

template <typename Combine>
__device__ Word reduce_warp(Word value, Combine combine) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// Reduces over a block of threads; the result is valid in thread 0.
template <typename Combine>
__device__ Word reduce_block(Word value, Combine combine) {
  __shared__ Word of_warp[kThreads / kWarp];
  value = reduce_warp(value, combine);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / kWarp; ++warp) value = combine(value, of_warp[warp]);
  }
  __syncthreads();
  return value;
}

__device__ __forceinline__ void raise(std::int64_t* fact, Word value) {
  // Facts start at zero, so a value of zero needs no atomic operation.
  if (value != 0) atomicMax(reinterpret_cast<Word*>(fact), value);
}

__device__ __forceinline__ Word greater(Word a, Word b) { return a > b ? a : b; }

// An index as an unsigned number; a negative index becomes larger than all valid indices.
template <typename Index>
__device__ __forceinline__ Word as_unsigned(Index index) {
  return static_cast<Word>(static_cast<std::int64_t>(index));
}

template <typename Index>
__device__ void inspect_edges(const InspectArgs& args, std::int64_t block, std::int64_t blocks) {
  const auto* row = static_cast<const Index*>(args.row);
  const auto* col = static_cast<const Index*>(args.col);
  Word most_row = 0, most_col = 0, most_id = 0, checksum = 0, seen = 0;
#pragma unroll 4
  for (std::int64_t e = block * kThreads + threadIdx.x; e < args.num_edges; e += blocks * kThreads) {
    const Index c = col[e];
    most_col = greater(most_col, as_unsigned(c));
    if (args.col_out != nullptr) args.col_out[e] = static_cast<std::int32_t>(c);
    if (args.edge_id != nullptr) {
      most_id = greater(most_id, args.edge_id_is_64bit
                                     ? as_unsigned(static_cast<const std::int64_t*>(args.edge_id)[e])
                                     : as_unsigned(static_cast<const std::int32_t*>(args.edge_id)[e]));
    }
    if (row == nullptr) continue;
    const Index r = row[e];
    most_row = greater(most_row, as_unsigned(r));
    if (args.square) {
      checksum += edge_checksum(as_unsigned(r), as_unsigned(c));
      if (r == c) seen |= 4;
    }
    if (e > 0) {
      const Index previous = row[e - 1];
      if (r < previous) seen |= 1;
      if (r == previous && c < col[e - 1]) seen |= 2;
    }
  }
  most_col = reduce_block(most_col, greater);
  if (threadIdx.x == 0) raise(args.facts + kMostCol, most_col);
  if (args.edge_id != nullptr) {
    most_id = reduce_block(most_id, greater);
    if (threadIdx.x == 0) raise(args.facts + kMostEdgeId, most_id);
  }
  if (row == nullptr) return;
  most_row = reduce_block(most_row, greater);
  seen = reduce_block(seen, [](Word a, Word b) { return a | b; });
  if (threadIdx.x == 0) {
    raise(args.facts + kMostRow, most_row);
    raise(args.facts + kRowsDescend, seen & 1);
    raise(args.facts + kColsDescend, seen & 2);
    raise(args.facts + kLoops, seen & 4);
  }
  if (!args.square) return;
  checksum = reduce_block(checksum, [](Word a, Word b) { return a + b; });
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<Word*>(args.facts + kChecksum), checksum);
}

template <typename Index>
__device__ void inspect_rows(const InspectArgs& args, std::int64_t block) {
  // The range of the entries of this block's rows. The threads of the block search within it, in the cache.
  __shared__ std::int64_t ends[2];
  const auto* row = static_cast<const Index*>(args.row);
  const int warp = threadIdx.x / kWarp;
  if (row != nullptr && warp < 2) {
    const std::int64_t at = std::min((block + warp) * kThreads, args.num_rows);
    const std::int64_t end = search_warp(row, 0, args.num_edges, at);
    if (threadIdx.x % kWarp == 0) ends[warp] = end;
  }
  __syncthreads();
  const auto begin_of = [&](std::int64_t r) {
    return row == nullptr ? args.rowptr[r] : search(row, ends[0], ends[1], r);
  };
  const std::int64_t r = block * kThreads + threadIdx.x;
  const std::int64_t begin = r <= args.num_rows ? begin_of(r) : 0;
  std::int64_t end = __shfl_down_sync(kFullWarp, begin, 1);
  std::int64_t degree = 0;
  if (r <= args.num_rows) {
    if (row != nullptr) args.rowptr[r] = begin;
    if (r == 0) args.facts[kFirstEntry] = begin;
    if (r == args.num_rows) args.facts[kLastEntry] = begin;
  }
  if (r < args.num_rows) {
    if (threadIdx.x % kWarp == kWarp - 1) end = begin_of(r + 1);
    degree = end - begin;
    if (degree < 0) raise(args.facts + kRowsDescend, 1);
    if (degree == 0) args.facts[kEmptyRows] = 1;
    args.inv_degree[r] = degree > 0 ? 1.0f / static_cast<float>(degree) : 0.0f;
    args.slices[r] = {begin, static_cast<std::int32_t>(degree), static_cast<std::int32_t>(r)};
  }
  const Word longest = reduce_block(degree > 0 ? degree : 0, greater);
  if (threadIdx.x == 0) raise(args.facts + kMostEntries, longest);
}

template <typename Index>
__device__ void inspect_block(const InspectArgs& args, std::int64_t row_blocks) {
  const std::int64_t block = blockIdx.x;
  block < row_blocks ? inspect_rows<Index>(args, block)
                     : inspect_edges<Index>(args, block - row_blocks, gridDim.x - row_blocks);
}

// The first blocks search for rows. While they wait for memory, the other blocks pass over edges.
__global__ void inspect_kernel(const __grid_constant__ InspectArgs args, std::int64_t row_blocks) {
  args.index_is_64bit ? inspect_block<std::int64_t>(args, row_blocks)
                      : inspect_block<std::int32_t>(args, row_blocks);
}

// ---------------------------------------------------------------- few edges

__device__ __forceinline__ Word sum_of(Word a, Word b) { return a + b; }

// The numbers of entries, slices, slots and split rows in one word, so that one scan sums all of them. No sum
// overflows into the next field, because there are at most kFewEdges edges and rows, and slices have at least
// 32 entries.
struct Counts {
  Word word;

  __device__ static Counts of_row(std::int64_t degree, std::int64_t longest) {
    const Word slices = degree > longest ? (degree + longest - 1) / longest : 1;
    return {static_cast<Word>(degree) << 45 | slices << 27 | (slices > 1 ? slices << 13 | 1 : 0)};
  }
  __device__ std::int64_t entries() const { return static_cast<std::int64_t>(word >> 45); }
  __device__ std::int32_t slices() const { return static_cast<std::int32_t>(word >> 27 & 0x3ffff); }
  __device__ std::int32_t slots() const { return static_cast<std::int32_t>(word >> 13 & 0x3fff); }
  __device__ std::int32_t cut_rows() const { return static_cast<std::int32_t>(word & 0x1fff); }
};

// The steps of the sort. All blocks finish a step before the next step begins.
struct EdgeSort {
  const SortEdgesArgs& args;
  const InspectArgs& found;
  std::int32_t* count;               // (num_rows): number of entries of every row
  std::int32_t* edge;                // (num_edges): edges, grouped by row, in any order within a row
  std::int64_t first_row, last_row;  // rows of this block: first_row .. last_row - 1

  __device__ explicit EdgeSort(const SortEdgesArgs& given) : args(given), found(given.found) {
    count = args.scratch;
    edge = count + found.num_rows;
    const std::int64_t rows = (found.num_rows + gridDim.x - 1) / gridDim.x;
    first_row = std::min(blockIdx.x * rows, found.num_rows);
    last_row = std::min(first_row + rows, found.num_rows);
  }

  // Calls `what(e, row)` for those of this thread's edges that have a valid row.
  template <typename Index, typename What>
  __device__ void each_edge(What what) const {
    const auto* row = static_cast<const Index*>(found.row);
    for (std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < found.num_edges;
         e += static_cast<std::int64_t>(gridDim.x) * kThreads) {
      const Index r = row[e];
      if (as_unsigned(r) < static_cast<Word>(found.num_rows)) what(e, static_cast<std::int64_t>(r));
    }
  }

  __device__ void clear() const {
    for (std::int64_t r = first_row + threadIdx.x; r < last_row; r += kThreads) count[r] = 0;
    if (blockIdx.x == 0 && threadIdx.x < kNumSortFacts) found.facts[threadIdx.x] = 0;
  }

  // The number that atomicAdd returns for an edge is its temporary place among the row's entries.
  template <typename Index>
  __device__ void count_rows() const {
    inspect_edges<Index>(found, blockIdx.x, gridDim.x);
    each_edge<Index>([&](std::int64_t e, std::int64_t r) { args.order[e] = atomicAdd(count + r, 1); });
  }

  __device__ void add_up() const {
    Word sum = 0;
    for (std::int64_t r = first_row + threadIdx.x; r < last_row; r += kThreads) {
      sum += Counts::of_row(count[r], args.longest).word;
    }
    sum = reduce_block(sum, sum_of);
    if (threadIdx.x == 0) args.sums[blockIdx.x] = sum;
  }

  __device__ void begin_rows() const {
    using Scan = cub::BlockScan<Word, kThreads>;
    __shared__ typename Scan::TempStorage storage;
    __shared__ Word shared_begin;
    Word before = 0;
    for (unsigned block = threadIdx.x; block < blockIdx.x; block += kThreads) before += args.sums[block];
    before = reduce_block(before, sum_of);
    if (threadIdx.x == 0) shared_begin = before;
    __syncthreads();
    Counts begin{shared_begin};
    Word most = 0;
    for (std::int64_t base = first_row; base < last_row; base += kThreads) {
      const std::int64_t r = base + threadIdx.x;
      const std::int64_t degree = r < last_row ? count[r] : 0;
      Word at, total;
      Scan(storage).ExclusiveSum(r < last_row ? Counts::of_row(degree, args.longest).word : 0, at, total);
      __syncthreads();  // the next scan reuses the storage
      if (r < last_row) begin_row(r, degree, {begin.word + at});
      most = greater(most, static_cast<Word>(degree));
      begin.word += total;
    }
    most = reduce_block(most, greater);
    if (threadIdx.x == 0) {
      raise(found.facts + kMostEntries, most);
      if (first_row < last_row && last_row == found.num_rows) end_rows(begin);
    }
  }

  __device__ void begin_row(std::int64_t r, std::int64_t degree, Counts at) const {
    const std::int64_t begin = at.entries();
    found.rowptr[r] = begin;
    found.inv_degree[r] = degree > 0 ? 1.0f / static_cast<float>(degree) : 0.0f;
    args.inv_sqrt_degree[r] = rsqrtf(static_cast<float>(degree + 1));
    if (degree == 0) found.facts[kEmptyRows] = 1;
    RowSlice* slices = found.slices + at.slices();
    if (degree <= args.longest) {
      *slices = {begin, static_cast<std::int32_t>(degree), static_cast<std::int32_t>(r)};
      return;
    }
    args.split_row[at.cut_rows()] = static_cast<std::int32_t>(r);
    args.split_ptr[at.cut_rows()] = at.slots();
    std::int32_t slot = at.slots();
    for (std::int64_t done = 0; done < degree; done += args.longest) {
      const auto length = static_cast<std::int32_t>(std::min(args.longest, degree - done));
      *slices++ = {begin + done, length, ~slot++};
    }
  }

  __device__ void end_rows(Counts total) const {
    found.rowptr[found.num_rows] = total.entries();
    args.split_ptr[total.cut_rows()] = total.slots();
    found.facts[kNumSlices] = total.slices();
    found.facts[kNumSlots] = total.slots();
    found.facts[kNumSplitRows] = total.cut_rows();
  }

  template <typename Index>
  __device__ void group() const {
    each_edge<Index>([&](std::int64_t e, std::int64_t r) {
      edge[found.rowptr[r] + args.order[e]] = static_cast<std::int32_t>(e);
    });
  }

  // The final place of an edge is the number of the row's entries that precede it in the sorted order.
  template <typename Index>
  __device__ void rank() const {
    const auto* col = static_cast<const Index*>(found.col);
    each_edge<Index>([&](std::int64_t e, std::int64_t r) {
      const std::int64_t begin = found.rowptr[r], end = found.rowptr[r + 1];
      const Index c = col[e];
      std::int64_t place = begin;
      for (std::int64_t entry = begin; entry < end; ++entry) {
        const std::int32_t other = edge[entry];
        const Index of_other = col[other];
        if (of_other < c || (of_other == c && other < e)) ++place;
      }
      found.col_out[place] = static_cast<std::int32_t>(c);
      args.order[place] = static_cast<std::int32_t>(e);
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) found.facts[kIsSorted] = 1;
  }
};

template <typename Index>
__global__ void __launch_bounds__(kThreads) sort_edges_kernel(const __grid_constant__ SortEdgesArgs args) {
  const auto grid = cooperative_groups::this_grid();
  const EdgeSort sort(args);
  sort.clear();
  grid.sync();
  sort.count_rows<Index>();
  grid.sync();
  sort.add_up();
  grid.sync();
  sort.begin_rows();
  grid.sync();
  // All blocks take the same branch.
  if (stay_in_order(args.found) || args.found.facts[kMostEntries] > kMostCompared) return;
  sort.group<Index>();
  grid.sync();
  sort.rank<Index>();
}

}  // namespace inspect_detail

int sort_edges(const SortEdgesArgs& args, void* stream) {
  using namespace inspect_detail;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  // All blocks must be resident, because they wait for each other. One block per multiprocessor always fits.
  const auto work = ceil_div(std::max(args.found.num_edges, args.found.num_rows), kThreads);
  const unsigned blocks =
      std::min(std::max(work, 1u), static_cast<unsigned>(std::min(processors, kMostSortBlocks)));
  auto* kernel =
      args.found.index_is_64bit ? sort_edges_kernel<std::int64_t> : sort_edges_kernel<std::int32_t>;
  SortEdgesArgs given = args;
  void* pointers[] = {&given};
  return cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(kThreads), pointers, 0,
                                     static_cast<cudaStream_t>(stream));
}

int inspect(const InspectArgs& args, void* stream) {
  using namespace inspect_detail;
  auto* queue = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaMemsetAsync(args.facts, 0, kNumEdgeFacts * sizeof *args.facts, queue);
  if (error != cudaSuccess) return error;
  const std::int64_t row_blocks = ceil_div(args.num_rows + 1, kThreads);
  const std::int64_t edge_blocks =
      std::min(static_cast<std::int64_t>(ceil_div(args.num_edges, kThreads)), kMostBlocks);
  inspect_kernel<<<static_cast<unsigned>(row_blocks + edge_blocks), kThreads, 0, queue>>>(args, row_blocks);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
