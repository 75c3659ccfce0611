// Neighbour sampling on the GPU; sample_neighbors.h explains the steps. Every step takes three launches (five
// if a row has a slot for each neighbour). One call enqueues all steps of a batch, and nothing waits for the
// device.
//
// Uniformly without replacement, 4, 8, 16 or 32 lanes handle a row: each lane draws one number at a time by
// Floyd's method, shuffles resolve duplicates, and each lane fetches its entry. By weight without
// replacement, a warp handles a row and selects the smallest keys by counting digits in shared memory. In all
// other cases, every slot has a thread.
//
// Floors:
//   - Per edge, from memory: 32 bytes (a sector) for the entry's column, and 32 more for its position if the
//     caller's edges have another order.
//   - Per edge, in the L2 cache: a sector of the table each time its value is lowered, counted, written and
//     emitted, and one for its key if the table has keys.
//   - Per edge, sequentially: 56 bytes written and read once, and 28 written for the caller.
//   - Per new node 20 bytes; per row 24 bytes, and 28 written.
//   - The table is cleared once: 4 bytes per node of the graph, or 12 per place with 1.5 to 3 places per node
//     of the batch.
#include <algorithm>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/sample_neighbors.h"

namespace fastsparse::cuda {
namespace sample_neighbors_detail {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kMostBlocks = 132 * 16;
constexpr int kDigits = 256;

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>(
      std::min(std::max<std::int64_t>((threads + kThreads - 1) / kThreads, 1), kMostBlocks));
}

// A destination and the entries of its row.
struct Row {
  std::int64_t number;  // number of the row's node among the batch's nodes
  std::int64_t begin;   // first entry
  std::int64_t end;
  std::int32_t seed;
};

__device__ __forceinline__ Row load_row(const SampleStep& step, std::int64_t number) {
  const std::int64_t node = step.dst.node[number];
  // A node that is not in the graph gets no neighbours here; the host reports the error.
  const bool is_valid = node >= 0 && node < step.a.num_rows;
  return {number, is_valid ? step.a.rowptr[node] : 0, is_valid ? step.a.rowptr[node + 1] : 0,
          step.dst.seed == nullptr ? 0 : step.dst.seed[number]};
}

__device__ __forceinline__ std::int64_t num_rows(const SampleStep& step) {
  return *step.end_row - *step.first_row;
}

__device__ __forceinline__ std::int64_t num_slots(const SampleStep& step) {
  return step.slot_ptr == nullptr ? num_rows(step) * step.fanout : step.slot_ptr[num_rows(step)];
}

// The row of the step to which a slot belongs.
__device__ __forceinline__ std::int64_t row_of_slot(const SampleStep& step, std::int64_t slot) {
  if (step.slot_ptr == nullptr) return slot / step.fanout;
  std::int64_t low = 0, high = num_rows(step) - 1;  // finds the last row that begins at or before the slot
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (step.slot_ptr[middle] <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ void leave_empty(const SampleStep& step, std::int64_t slot) {
  step.slot_place[slot] = kNoPlace;
}

// Fills a slot with an entry of a row.
__device__ __forceinline__ void take(const SampleStep& step, const NodeTable& table, const Row& row,
                                     std::int64_t slot, std::int64_t entry) {
  const std::int64_t edge = edge_position(step.a, entry);
  const std::int32_t node = __ldg(step.a.col + entry);
  std::uint32_t place;
  if (step.induced) {
    place = find(table, step.src, node, row.seed);
  } else {
    place = find_or_insert(table, step.src, node, row.seed);
    lower_to(table.value + place, kIsSlot | static_cast<std::uint32_t>(slot));
  }
  step.slot_place[slot] = place;
  step.slot_edge[slot] = edge;
}

// ---------------------------------------------------------------- nodes that a batch begins with

__global__ void __launch_bounds__(kThreads)
    insert_kernel(const FirstNodes first, const NodeTable table, std::int64_t* error) {
  const NodeList& list = first.list;
  const std::int64_t nth = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (nth == 0) *first.count_out = first.count;
  if (nth >= first.count) return;
  const std::int64_t node = list.node[nth];
  if (node < 0 || node >= list.num_nodes) {
    *error = 1;
    return;
  }
  const std::uint32_t place = find_or_insert(table, list, node, list.seed == nullptr ? 0 : list.seed[nth]);
  lower_to(table.value + place, static_cast<std::uint32_t>(nth));
}

// ---------------------------------------------------------------- sample

// Chooses `fanout` entries of a row uniformly without replacement; kLanes lanes handle a row. Floyd's method
// (Bentley and Floyd, "A sample of brilliance", 1987) draws the j-th of k numbers from 0 to last, where
// last = n - k + j. If an earlier number is the same, `last` is chosen instead.
template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    sample_rows_kernel(const __grid_constant__ SampleStep step, const NodeTable table, std::uint64_t seed) {
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  constexpr int kGroups = kThreads / kLanes;
  const unsigned mask = static_cast<unsigned>((std::uint64_t{1} << kLanes) - 1)
                        << (threadIdx.x % kWarp / kLanes * kLanes);
  const std::int64_t first_row = *step.first_row, rows = num_rows(step);
  const auto fanout = static_cast<std::uint32_t>(step.fanout);
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kGroups + group; r < rows;
       r += static_cast<std::int64_t>(gridDim.x) * kGroups) {
    const Row row = load_row(step, first_row + r);
    const auto degree = static_cast<std::uint32_t>(row.end - row.begin);
    const std::int64_t slots = r * fanout;
    if (degree <= fanout) {
      for (std::uint32_t j = lane; j < fanout; j += kLanes) {
        if (j < degree) {
          take(step, table, row, slots + j, row.begin + j);
        } else {
          leave_empty(step, slots + j);
        }
      }
      continue;
    }
    for (std::uint32_t chunk = 0; chunk < fanout; chunk += kLanes) {
      const std::uint32_t j = chunk + lane, last = degree - fanout + j;
      const bool draws = j < fanout;
      const std::uint32_t number = draws ? below(draw_bits(seed, step, row.number, j), last + 1) : 0;
      bool taken = false;
      // The slots keep the numbers of earlier chunks until all chunks have drawn.
      for (std::uint32_t i = 0; i < chunk; ++i) taken |= step.slot_place[slots + i] == number;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const std::uint32_t other = __shfl_sync(mask, taken ? last : number, i, kLanes);
        taken |= lane > i && other == number;
      }
      const std::uint32_t drawn = taken ? last : number;
      if (fanout <= kLanes) {
        if (draws) take(step, table, row, slots + j, row.begin + drawn);
      } else {
        if (draws) step.slot_place[slots + j] = drawn;
        __syncwarp(mask);
      }
    }
    if (fanout <= kLanes) continue;
    for (std::uint32_t j = lane; j < fanout; j += kLanes) {
      take(step, table, row, slots + j, row.begin + step.slot_place[slots + j]);
    }
  }
}

// With replacement, or all neighbours: one thread per slot.
__global__ void __launch_bounds__(kThreads)
    sample_slots_kernel(const __grid_constant__ SampleStep step, const NodeTable table, std::uint64_t seed) {
  const std::int64_t first_row = *step.first_row, slots = num_slots(step);
  for (std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; slot < slots;
       slot += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const std::int64_t r = row_of_slot(step, slot);
    const Row row = load_row(step, first_row + r);
    if (step.slot_ptr != nullptr) {
      const std::int64_t entry = row.begin + (slot - step.slot_ptr[r]);
      if (step.weight != nullptr && !step.induced && !(step.weight[entry] > 0.0f)) {
        leave_empty(step, slot);
      } else {
        take(step, table, row, slot, entry);
      }
      continue;
    }
    const bool can_draw = step.weight_sum == nullptr ? row.begin < row.end
                                                     : step.weight_sum[row.begin] < step.weight_sum[row.end];
    if (!can_draw) {
      leave_empty(step, slot);
      continue;
    }
    const std::uint64_t bits = draw_bits(seed, step, row.number, slot - r * step.fanout);
    take(step, table, row, slot,
         step.weight_sum == nullptr ? row.begin + below(bits, static_cast<std::uint32_t>(row.end - row.begin))
                                    : entry_at(step.weight_sum, row.begin, row.end, unit(bits)));
  }
}

__device__ __forceinline__ int sum_of_warp(int value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}

// Chooses by weight without replacement: a warp handles a row. The k-th smallest key is found digit by digit,
// from the highest of four digits, by counting the entries whose keys begin with the digits found so far.
// Among equal keys, the first entries are chosen.
__global__ void __launch_bounds__(kThreads)
    sample_weighted_kernel(const __grid_constant__ SampleStep step, const NodeTable table,
                           std::uint64_t seed) {
  __shared__ int counts[kWarps][kDigits];
  const int lane = threadIdx.x % kWarp;
  int* count = counts[threadIdx.x / kWarp];
  const std::int64_t first_row = *step.first_row, rows = num_rows(step);
  const int fanout = static_cast<int>(step.fanout);
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp; r < rows;
       r += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const Row row = load_row(step, first_row + r);
    const int degree = static_cast<int>(row.end - row.begin);
    const auto is_drawable = [&](int i) { return i < degree && step.weight[row.begin + i] > 0.0f; };
    const auto key = [&](int i) {
      return weighted_key(draw_bits(seed, step, row.number, i), step.weight[row.begin + i]);
    };
    int drawable = 0;
    for (int i = lane; i < degree; i += kWarp) drawable += is_drawable(i);
    drawable = sum_of_warp(drawable);

    std::uint32_t found = 0,
                  known = 0;  // the digits of the k-th smallest key found so far, and a mask of their bits
    // Number of entries to choose among those whose key begins with the digits found so far.
    int left = fanout;
    if (drawable > fanout) {
      for (int shift = 24; shift >= 0; shift -= 8) {
        for (int digit = lane; digit < kDigits; digit += kWarp) count[digit] = 0;
        __syncwarp();
        for (int i = lane; i < degree; i += kWarp) {
          if (!is_drawable(i)) continue;
          const std::uint32_t word = key(i);
          if ((word & known) == found) atomicAdd(&count[word >> shift & (kDigits - 1)], 1);
        }
        __syncwarp();
        // Every lane has eight consecutive digits. The next digit belongs to the first lane whose counts,
        // added to those of the lanes before it, reach `left`.
        constexpr int kOfLane = kDigits / kWarp;
        int own = 0;
#pragma unroll
        for (int d = 0; d < kOfLane; ++d) own += count[lane * kOfLane + d];
        int upto = own;
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
          const int before = __shfl_up_sync(kFullWarp, upto, offset);
          if (lane >= offset) upto += before;
        }
        const int chosen = __ffs(__ballot_sync(kFullWarp, upto >= left)) - 1;
        int before = upto - own, digit = lane * kOfLane;
        if (lane == chosen) {
          while (before + count[digit] < left) before += count[digit++];
        }
        left -= __shfl_sync(kFullWarp, before, chosen);
        found |= static_cast<std::uint32_t>(__shfl_sync(kFullWarp, digit, chosen)) << shift;
        known |= static_cast<std::uint32_t>(kDigits - 1) << shift;
        __syncwarp();
      }
    }

    int taken = 0, equal = 0;
    const unsigned below_lane = (1u << lane) - 1;
    for (int from = 0; from < degree; from += kWarp) {
      const int i = from + lane;
      bool takes = is_drawable(i);
      if (drawable > fanout) {
        const std::uint32_t word = takes ? key(i) : ~0u;
        const unsigned ties = __ballot_sync(kFullWarp, takes && word == found);
        takes = takes && (word < found || (word == found && equal + __popc(ties & below_lane) < left));
        equal += __popc(ties);
      }
      const unsigned takers = __ballot_sync(kFullWarp, takes);
      if (takes) take(step, table, row, r * fanout + taken + __popc(takers & below_lane), row.begin + i);
      taken += __popc(takers);
    }
    for (int j = taken + lane; j < fanout; j += kWarp) leave_empty(step, r * fanout + j);
  }
}

// ---------------------------------------------------------------- count and write

// The range of items that a block handles.
struct Tile {
  std::int64_t begin;
  std::int64_t end;
};

__device__ __forceinline__ Tile tile_of_block(std::int64_t items) {
  std::int64_t length = (items + gridDim.x - 1) / gridDim.x;
  length = (length + kThreads - 1) / kThreads * kThreads;
  const std::int64_t begin = min(length * blockIdx.x, items);
  return {begin, min(begin + length, items)};
}

// Sums a value over a block. All threads get the sum.
__device__ std::uint64_t sum_of_block(std::uint64_t value) {
  __shared__ std::uint64_t of_warp[kWarps];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  std::uint64_t sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp];
  return sum;
}

// Returns the sum of `value` over the threads before this one. `total` becomes the sum over all threads.
__device__ std::uint64_t sum_before_thread(std::uint64_t value, std::uint64_t& total) {
  __shared__ std::uint64_t of_warp[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  std::uint64_t upto = value;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const std::uint64_t before = __shfl_up_sync(kFullWarp, upto, offset);
    if (lane >= offset) upto += before;
  }
  __syncthreads();
  if (lane == kWarp - 1) of_warp[warp] = upto;
  __syncthreads();
  std::uint64_t before = upto - value;
  total = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    if (other < warp) before += of_warp[other];
    total += of_warp[other];
  }
  return before;
}

__device__ std::uint64_t sum_of_tiles_before(const std::uint64_t* tile_counts) {
  std::uint64_t sum = 0;
  for (unsigned tile = threadIdx.x; tile < blockIdx.x; tile += kThreads) sum += tile_counts[tile];
  return sum_of_block(sum);
}

// The number of edges in the low half, and the number of new nodes in the high half; both are less than 2^31.
__device__ __forceinline__ std::uint64_t pair_of_slot(const SampleStep& step, const NodeTable& table,
                                                      std::int64_t slot) {
  const std::uint32_t place = step.slot_place[slot];
  if (place == kNoPlace) return 0;
  const bool is_new = read_shared(table.value + place) == (kIsSlot | static_cast<std::uint32_t>(slot));
  return 1 | static_cast<std::uint64_t>(is_new) << 32;
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ SampleStep step, const NodeTable table) {
  const Tile tile = tile_of_block(num_slots(step));
  std::uint64_t pair = 0;
  for (std::int64_t slot = tile.begin + threadIdx.x; slot < tile.end; slot += kThreads) {
    pair += pair_of_slot(step, table, slot);
  }
  pair = sum_of_block(pair);
  if (threadIdx.x == 0) step.tile_counts[blockIdx.x] = pair;
}

__global__ void __launch_bounds__(kThreads)
    write_kernel(const __grid_constant__ SampleStep step, const NodeTable table) {
  const Tile tile = tile_of_block(num_slots(step));
  const std::int64_t edges_before = *step.edges_before, nodes_before = *step.nodes_before;
  const std::int64_t first_row = *step.first_row;
  std::uint64_t before = sum_of_tiles_before(step.tile_counts);
  for (std::int64_t from = tile.begin; from < tile.end; from += kThreads) {
    const std::int64_t slot = from + threadIdx.x;
    const std::uint64_t pair = slot < tile.end ? pair_of_slot(step, table, slot) : 0;
    std::uint64_t total;
    const std::uint64_t own = before + sum_before_thread(pair, total);
    before += total;
    if (pair == 0) continue;
    const std::uint32_t place = step.slot_place[slot];
    const std::int64_t edge = edges_before + static_cast<std::uint32_t>(own);
    step.place[edge] = place;
    step.row[edge] = static_cast<std::int32_t>(first_row + row_of_slot(step, slot));
    step.edge_id[edge] = step.slot_edge[slot];
    if (pair >> 32 == 0) continue;
    const std::int64_t number = nodes_before + static_cast<std::int64_t>(own >> 32);
    step.src.node[number] = node_at(table, step.src, place);
    if (step.src.seed != nullptr) step.src.seed[number] = seed_at(table, place);
    // Other threads may read this value to check whether their slot is the first one. They see another slot
    // or this number, and neither is their slot.
    *static_cast<volatile std::uint32_t*>(table.value + place) = static_cast<std::uint32_t>(number);
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    *step.edges_after = edges_before + static_cast<std::uint32_t>(before);
    *step.nodes_after = nodes_before + static_cast<std::int64_t>(before >> 32);
  }
}

// ---------------------------------------------------------------- slots of all neighbours

__device__ __forceinline__ std::uint64_t degree_of(const SampleStep& step, std::int64_t r) {
  const Row row = load_row(step, *step.first_row + r);
  return static_cast<std::uint64_t>(row.end - row.begin);
}

__global__ void __launch_bounds__(kThreads) count_degrees_kernel(const __grid_constant__ SampleStep step) {
  const Tile tile = tile_of_block(num_rows(step));
  std::uint64_t sum = 0;
  for (std::int64_t r = tile.begin + threadIdx.x; r < tile.end; r += kThreads) sum += degree_of(step, r);
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) step.tile_counts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) write_slot_ptr_kernel(const __grid_constant__ SampleStep step) {
  const std::int64_t rows = num_rows(step);
  const Tile tile = tile_of_block(rows);
  std::uint64_t before = sum_of_tiles_before(step.tile_counts);
  for (std::int64_t from = tile.begin; from < tile.end; from += kThreads) {
    const std::int64_t r = from + threadIdx.x;
    std::uint64_t total;
    const std::uint64_t own = before + sum_before_thread(r < tile.end ? degree_of(step, r) : 0, total);
    before += total;
    if (r < tile.end) step.slot_ptr[r] = static_cast<std::int64_t>(own);
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    step.slot_ptr[rows] = static_cast<std::int64_t>(before);
  }
}

unsigned tiles_for(std::int64_t items) {
  return static_cast<unsigned>(
      std::min<std::int64_t>(std::max<std::int64_t>((items + kThreads - 1) / kThreads, 1), kMostTiles));
}

template <int kLanes>
void launch_rows(const SampleStep& step, const SampleArgs& args, cudaStream_t stream) {
  sample_rows_kernel<kLanes>
      <<<blocks_for(step.most_rows * kLanes), kThreads, 0, stream>>>(step, args.table, args.seed);
}

void launch_sample(const SampleStep& step, const SampleArgs& args, cudaStream_t stream) {
  if (step.slot_ptr != nullptr || step.replace) {
    sample_slots_kernel<<<blocks_for(step.most_slots), kThreads, 0, stream>>>(step, args.table, args.seed);
  } else if (step.weight != nullptr) {
    sample_weighted_kernel<<<blocks_for(step.most_rows * kWarp), kThreads, 0, stream>>>(step, args.table,
                                                                                        args.seed);
  } else if (step.fanout <= 4) {
    launch_rows<4>(step, args, stream);
  } else if (step.fanout <= 8) {
    launch_rows<8>(step, args, stream);
  } else if (step.fanout <= 16) {
    launch_rows<16>(step, args, stream);
  } else {
    launch_rows<32>(step, args, stream);
  }
}

// ---------------------------------------------------------------- what the caller gets

__global__ void __launch_bounds__(kThreads) emit_edges_kernel(const EmitEdgesArgs args) {
  const std::int64_t edge = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (edge >= args.num_edges) return;
  const std::uint32_t source = args.table.value[args.place[edge]];
  args.edge_index[edge] = source;
  args.edge_index[args.num_edges + edge] = args.row[edge];
  args.col[edge] = static_cast<std::int32_t>(source);
  args.edge_id_out[edge] = args.edge_id[edge];
}

__global__ void __launch_bounds__(kThreads) emit_rows_kernel(const EmitRowsArgs args) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (r > args.num_rows) return;
  const auto first_of = [&](std::int64_t row, std::int64_t low) {
    std::int64_t high = args.num_edges;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (args.row[middle] < row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const std::int64_t begin = first_of(r, 0);
  args.rowptr[r] = begin;
  if (r == args.num_rows) return;
  const std::int64_t degree = first_of(r + 1, begin) - begin;
  args.inv_degree[r] = degree > 0 ? 1.0f / static_cast<float>(degree) : 0.0f;
  args.slices[r] = {begin, static_cast<std::int32_t>(degree), static_cast<std::int32_t>(r)};
}

// The address of a row of a table.
template <typename Word>
__device__ const Word* row_of_table(const GatherRowsArgs& args, std::int64_t row, std::int64_t words) {
  if (args.parts == nullptr) return static_cast<const Word*>(args.table) + row * words;
  if (args.kept != nullptr) {
    const int place = __ldg(args.place + row);
    if (place >= 0) return static_cast<const Word*>(args.kept) + place * words;
  }
  // Divisions of 32-bit numbers are several times as fast as divisions of 64-bit numbers.
  const auto number = static_cast<std::uint32_t>(row), parts = static_cast<std::uint32_t>(args.num_parts);
  const std::uint32_t nth = number / parts;
  return reinterpret_cast<const Word*>(__ldg(args.parts + (number - nth * parts))) + nth * words;
}

// Gathers rows of a table, one word per thread. `Number` must be able to represent the number of words.
template <typename Word, typename Number>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const GatherRowsArgs args, Number words, Number out_words) {
  auto* out = static_cast<Word*>(args.out);
  const Number all = static_cast<Number>(args.num_rows) * out_words;
#pragma unroll 4
  for (Number word = static_cast<Number>(blockIdx.x) * kThreads + threadIdx.x; word < all;
       word += static_cast<Number>(gridDim.x) * kThreads) {
    const Number row = word / out_words, nth = word - row * out_words;
    Word value{};
    if (nth < words) value = __ldg(row_of_table<Word>(args, __ldg(args.index + row), words) + nth);
    out[word] = value;
  }
}

}  // namespace sample_neighbors_detail

int sample_neighbors(const SampleArgs& args, void* stream) {
  using namespace sample_neighbors_detail;
  auto* queue = static_cast<cudaStream_t>(stream);
  const std::size_t places = args.table.num_places;
  cudaError_t error = cudaSuccess;
  if (args.table.key != nullptr) {
    error = cudaMemsetAsync(args.table.key, 0xff, places * sizeof *args.table.key, queue);
    if (error != cudaSuccess) return error;
  }
  error = cudaMemsetAsync(args.table.value, 0xff, places * sizeof *args.table.value, queue);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(args.sizes, 0, args.num_sizes * sizeof *args.sizes, queue);
  if (error != cudaSuccess) return error;
  for (int k = 0; k < args.num_lists; ++k) {
    const FirstNodes& first = args.first_nodes[k];
    insert_kernel<<<std::max(ceil_div(first.count, kThreads), 1u), kThreads, 0, queue>>>(first, args.table,
                                                                                         args.sizes);
  }
  for (int k = 0; k < args.num_steps; ++k) {
    const SampleStep& step = args.steps[k];
    if (step.slot_ptr != nullptr) {
      const unsigned tiles = tiles_for(step.most_rows);
      count_degrees_kernel<<<tiles, kThreads, 0, queue>>>(step);
      write_slot_ptr_kernel<<<tiles, kThreads, 0, queue>>>(step);
    }
    launch_sample(step, args, queue);
    const unsigned tiles = tiles_for(step.most_slots);
    count_kernel<<<tiles, kThreads, 0, queue>>>(step, args.table);
    write_kernel<<<tiles, kThreads, 0, queue>>>(step, args.table);
  }
  return cudaGetLastError();
}

int emit_edges(const EmitEdgesArgs& args, void* stream) {
  using namespace sample_neighbors_detail;
  if (args.num_edges == 0) return cudaSuccess;
  emit_edges_kernel<<<ceil_div(args.num_edges, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      args);
  return cudaGetLastError();
}

int emit_rows(const EmitRowsArgs& args, void* stream) {
  using namespace sample_neighbors_detail;
  emit_rows_kernel<<<ceil_div(args.num_rows + 1, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      args);
  return cudaGetLastError();
}

int gather_rows(const GatherRowsArgs& args, void* stream) {
  using namespace sample_neighbors_detail;
  if (args.num_rows == 0 || args.row_bytes == 0) return cudaSuccess;
  auto* queue = static_cast<cudaStream_t>(stream);
  const auto address = reinterpret_cast<std::uintptr_t>(args.table) |
                       reinterpret_cast<std::uintptr_t>(args.out) |
                       static_cast<std::uintptr_t>(args.row_bytes | args.out_row_bytes);
  const auto launch = [&](auto word) {
    using Word = decltype(word);
    const auto size = static_cast<std::int64_t>(sizeof(Word));
    const std::int64_t words = args.row_bytes / size, out_words = args.out_row_bytes / size;
    const std::int64_t all = args.num_rows * out_words;
    // Divisions of 32-bit numbers are several times as fast as divisions of 64-bit numbers.
    if (all < std::int64_t{1} << 31) {
      gather_rows_kernel<Word, std::uint32_t><<<blocks_for(all / 4), kThreads, 0, queue>>>(
          args, static_cast<std::uint32_t>(words), static_cast<std::uint32_t>(out_words));
    } else {
      gather_rows_kernel<Word, std::int64_t>
          <<<blocks_for(all / 4), kThreads, 0, queue>>>(args, words, out_words);
    }
  };
  if (address % 16 == 0) {
    launch(uint4{});
  } else if (address % 8 == 0) {
    launch(uint2{});
  } else if (address % 4 == 0) {
    launch(std::uint32_t{});
  } else if (address % 2 == 0) {
    launch(std::uint16_t{});
  } else {
    launch(std::uint8_t{});
  }
  return cudaGetLastError();
}

int send(void* to, const void* from, std::int64_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice,
                         static_cast<cudaStream_t>(stream));
}

}  // namespace fastsparse::cuda
