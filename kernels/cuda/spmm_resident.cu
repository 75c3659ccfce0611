// SpMM with a tile of x resident in shared memory: 256 bytes of every row of x. This kernel is for matrices
// with few columns, such as pruned weights, because many rows gather the same row of x. A block loads its
// tile once and sums many rows from it, so the L2 cache delivers only tiles and entries. Floor per call, for
// E entries of width F: E * F * sizeof(T) bytes read from shared memory, at 128 bytes per clock and
// multiprocessor.
//
// Features are cut into tiles (the slow grid dimension), and rows into groups of about equal work, one block
// per group. The warps of a block divide its work evenly, so they may begin within a row. If several warps
// share a row, the first of them stores it: after a barrier, it adds the partial sums of the other warps in
// order. So there are no atomics, and every run gives the same bits. policy.spmm_resident decides if a tile
// fits.
//
// On small matrices, the setup takes longer than the products. So 64-bit divisions are done on the host, and
// every warp reads entries ahead into shared memory, 128 at a time.

#include <cuda_pipeline.h>

#include <algorithm>

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/tca_tile.cuh"

namespace fastsparse::cuda {
namespace spmm_resident_detail {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPieces = 16;  // number of 16-byte pieces of a row of the tile
constexpr int kBatch = 32;   // most entries that one call of `add` adds
constexpr int kHalf = 16;    // number of entries whose pieces are gathered before the first is summed
constexpr int kStage = 128;  // number of entries per warp in shared memory
// Costs, in units of the time that an entry takes:
constexpr int kRowCost = 16;    // the end of a row
constexpr int kSourceCost = 4;  // loading a row of the tile

// An entry in shared memory: the index of its source's piece 0 in the tile, in pieces, and its weight.
struct alignas(8) Entry {
  int row;
  float weight;
};

// Sums on CUDA cores: one half of a warp handles even entries, the other half odd ones; lane = 16 half +
// piece.
template <typename T>
struct CudaCores {
  using Element = T;
  static constexpr bool kTensorCores = false;
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr int kWidth = kVec * kPieces;
  static constexpr int kResult = kVec / 2;  // number of features that `finish` leaves in a lane
  // `sums` has the terms of up to 2 batches, which are 32 terms per lane. `totals` has up to 32 such sums,
  // and `total` the sum of these. So rounding errors grow much more slowly with the length of a row than
  // those of a single sum. This matters if a row repeats a source, for instance 100,000 times, because all
  // errors then have the same sign.
  static constexpr int kBatchesPerSum = 2;
  static constexpr int kBatchesPerTotal = 32 * kBatchesPerSum;

  int piece, half, batches;
  float sums[kVec], totals[kVec], total[kVec];

  __device__ __forceinline__ CudaCores() : piece(threadIdx.x % kPieces), half(threadIdx.x / kPieces % 2) {
    clear();
  }

  __device__ __forceinline__ void clear() {
    batches = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums[i] = totals[i] = total[i] = 0;
  }

  __device__ __forceinline__ void flush(float (&from)[kVec], float (&to)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      to[i] += from[i];
      from[i] = 0;
    }
  }

  // Adds up to kBatch entries; `none` is an entry with a row of zeros.
  __device__ __forceinline__ void add(const uint4* tile, const Entry* entries, int count, Entry none) {
#pragma unroll
    for (int first = 0; first < kBatch; first += kHalf) {
      if (first + kHalf <= count) {
        add_half<true>(tile, entries + first, kHalf, none);
      } else if (first < count) {
        add_half<false>(tile, entries + first, count - first, none);
      }
    }
    if (++batches % kBatchesPerSum == 0) flush(sums, totals);
    if (batches % kBatchesPerTotal == 0) flush(totals, total);
  }

  template <bool kFull>
  __device__ __forceinline__ void add_half(const uint4* tile, const Entry* entries, int count, Entry none) {
    constexpr int kSteps = kHalf / 2;
    Pack<T, kVec> gathered[kSteps];
    float weights[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = 2 * s + half;
      const Entry entry = kFull || at < count ? entries[at] : none;
      const uint4 raw = tile[entry.row + piece];
      memcpy(&gathered[s], &raw, sizeof raw);
      weights[s] = entry.weight;
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[i] += weights[s] * widen(gathered[s].lane[i]);
    }
  }

  // The first of the tile's features that `finish` leaves in this lane.
  __device__ __forceinline__ int feature() const { return kVec * piece + kResult * half; }
  __device__ __forceinline__ bool has_result() const { return true; }

  // Adds the halves of the warp, each of which keeps half of the features.
  __device__ __forceinline__ void finish(float (&result)[kResult]) {
    flush(sums, totals);
    flush(totals, total);
#pragma unroll
    for (int i = 0; i < kResult; ++i) {
      const float give = half ? total[i] : total[i + kResult];
      const float keep = half ? total[i + kResult] : total[i];
      result[i] = keep + __shfl_xor_sync(kFullWarp, give, kPieces);
    }
  }
};

// Sums on tensor cores (tca_tile.cuh). A whole warp is one slot.
template <typename T>
struct TensorCores {
  using Element = T;
  using Tile = TcaTile<T, 4, 4, 2>;
  static constexpr bool kTensorCores = true;
  static_assert(Tile::kSlotLanes == kWarp && Tile::kPieces == kPieces);
  static constexpr int kWidth = Tile::kWidth;
  static constexpr int kResult = Tile::kResult;
  static constexpr int kVec = 8;

  Tile tile;
  int batches;
  float sums[4][4], total[4][4];

  __device__ __forceinline__ TensorCores() { clear(); }

  __device__ __forceinline__ void clear() {
    batches = 0;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[pair][i] = total[pair][i] = 0;
    }
  }

  __device__ __forceinline__ void add(const uint4* x, const Entry* entries, int count, Entry none) {
    const Entry own = tile.lane < count ? entries[tile.lane] : none;
    const int row = own.row;
    const std::uint32_t mine = bits_of<T>(own.weight);
    const std::uint32_t pair = mine | __shfl_down_sync(kFullWarp, mine, 1) << 16;  // used in even lanes only
#pragma unroll
    for (int first = 0; first < kBatch; first += kHalf) {
      if (first >= count) break;
      constexpr int kSteps = kHalf / Tile::kStep;
      uint4 gathered[2 * kSteps];
      std::uint32_t weights[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int entry = first + s * Tile::kStep + tile.chunk * Tile::kChunk + 2 * tile.nth;
        gathered[2 * s] = x[__shfl_sync(kFullWarp, row, entry) + tile.piece];
        gathered[2 * s + 1] = x[__shfl_sync(kFullWarp, row, entry + 1) + tile.piece];
        weights[s] = __shfl_sync(kFullWarp, pair, entry);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        Tile::multiply(gathered[2 * s], gathered[2 * s + 1], tile.in_column ? weights[s] : 0, sums);
      }
    }
    if (++batches % Tile::kBatchesPerSum == 0) Tile::flush(sums, total);
  }

  __device__ __forceinline__ int feature() const { return tile.feature(); }
  __device__ __forceinline__ bool has_result() const { return tile.has_result(); }

  __device__ __forceinline__ void finish(float (&result)[kResult]) {
    Tile::flush(sums, total);
    tile.trace(total, result);
  }
};

// A position between two entries: `entry` is the entry after it, and belongs to `row`.
struct Cut {
  int row, entry;
};

// How rows and entries are divided among warps. It is computed on the host, so that no thread divides 64-bit
// numbers.
struct Partition {
  int work, more;     // work per warp, in entries; the first `more` warps have one more
  int rows, entries;  // approximate number of rows and of entries per block
  int sample_step;    // distance between sampled rows
  int last_sample;

  // Work, in entries, of all warps before `warp`.
  __device__ __forceinline__ int before(int warp) const { return warp * work + min(warp, more); }
};

// Finds the last row whose preceding entries and row ends cost at most `target`. Each group of eight
// neighbouring lanes searches for one target. `sample` has the costs before every sample_step-th row.
__device__ __forceinline__ int find_row(const CsrView& a, const Partition& partition, const int* sample,
                                        int target) {
  constexpr int kLanes = 8;
  const int lane = threadIdx.x % kWarp, which = lane / kLanes, probe = lane % kLanes + 1;
  const auto how_many = [&](bool fits) {
    return __popc(__ballot_sync(kFullWarp, fits) >> (which * kLanes) & ((1u << kLanes) - 1));
  };
  int at = 0;
#pragma unroll
  for (int step = kThreads / kLanes; step > 0; step /= kLanes) {
    const int place = at + probe * step;
    at += how_many(place <= partition.last_sample && sample[place] <= target) * step;
  }
  int row = at * partition.sample_step;
  for (int size = partition.sample_step - 1; size > 0;) {
    const int step = (size + kLanes - 1) / kLanes;
    const std::int64_t place = row + static_cast<std::int64_t>(probe) * step;
    row += how_many(place <= a.num_rows && __ldg(a.rowptr + place) + place * kRowCost <= target) * step;
    size = step - 1;
  }
  return row;
}

// Finds the positions where this warp's work begins and ends, and the first entry of its first row. A block
// begins at the start of a row. A warp begins at the start of a row, or at a multiple of a batch within a
// row. Lanes 8 i to 8 i + 7 find cut i of {this warp, the next warp, the block's first warp, the next block's
// first warp}.
__device__ __forceinline__ void find_cuts(const CsrView& a, const Partition& partition, const int* sample,
                                          Cut& begin, Cut& end, int& row_begin) {
  constexpr int kLanes = 8;
  const int which = threadIdx.x % kWarp / kLanes, warp = threadIdx.x / kWarp;
  const int part = which < 2 ? warp + which : (which - 2) * kWarps;  // counted from the block's first warp
  const int target = partition.before(blockIdx.x * kWarps + part);
  const int row = find_row(a, partition, sample, target);
  const int first = static_cast<int>(__ldg(a.rowptr + row));
  const int last = row < a.num_rows ? static_cast<int>(__ldg(a.rowptr + row + 1)) : first;
  Cut cut{row, first};
  if (part % kWarps != 0) {
    const int offset = (target - first - row * kRowCost) / kBatch * kBatch;
    cut = first + offset < last ? Cut{row, first + offset} : Cut{row + 1, last};
  }
  const auto of = [&](int i) {
    return Cut{__shfl_sync(kFullWarp, cut.row, i * kLanes), __shfl_sync(kFullWarp, cut.entry, i * kLanes)};
  };
  const Cut low = of(2), high = of(3);
  const auto within = [&](Cut c) {
    return Cut{min(max(c.row, low.row), high.row), min(max(c.entry, low.entry), high.entry)};
  };
  begin = within(of(0));
  end = within(of(1));
  row_begin = begin.row < a.num_rows ? static_cast<int>(__ldg(a.rowptr + begin.row)) : begin.entry;
}

// Loads the stored value of an entry. Another function computes the entry's weight from this value, so that
// the kernel need not wait for the load at once.
template <typename T>
__device__ __forceinline__ std::uint32_t value_bits(const TileArgs& args, std::int64_t entry) {
  if (args.value.data == nullptr) return 0;
  const std::int64_t position = edge_position(args.a, entry);
  if (sizeof(T) == 2 && args.value_in_feature_dtype) {
    return __ldg(static_cast<const unsigned short*>(args.value.data) + position);
  }
  return __ldg(static_cast<const unsigned*>(args.value.data) + position);
}

template <typename T>
__device__ __forceinline__ float weight_from(const TileArgs& args, std::uint32_t value, int col) {
  float weight = 1;
  if (args.value.data != nullptr) {
    weight = __uint_as_float(value);
    if constexpr (sizeof(T) == 2) {
      const auto low = static_cast<std::uint16_t>(value);
      T narrow_value;
      memcpy(&narrow_value, &low, sizeof low);
      if (args.value_in_feature_dtype) weight = widen(narrow_value);
    }
  }
  if (args.scale_src != nullptr) weight *= __ldg(args.scale_src + col);
  return weight;
}

// Prefetches approximately this block's part of an array to the L2 cache while the block searches for its
// rows. Each thread prefetches one cache line.
__device__ __forceinline__ void prefetch_part(const void* data, std::int64_t size, int of_block,
                                              int element_bytes) {
  constexpr int kLine = 128;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * of_block;
  const std::int64_t at = begin * element_bytes + threadIdx.x * kLine;
  if (at < min(begin + of_block, size) * element_bytes) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(data) + at));
  }
}

template <typename Sum>
__global__ void __launch_bounds__(kThreads, 1)
    spmm_resident_kernel(const SpmmArgs args, const Partition partition) {
  using T = typename Sum::Element;
  extern __shared__ uint4 tile[];  // (num_cols + 1, kPieces); the last row is zero
  __shared__ float carry[kWarps][Sum::kWidth];
  __shared__ Cut begins[kWarps];
  __shared__ Entry stages[kWarps][kStage];
  __shared__ int sample[kThreads];

  const CsrView& a = args.a;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t feature0 = static_cast<std::int64_t>(blockIdx.y) * Sum::kWidth;
  const int sampled_row = static_cast<int>(threadIdx.x) * partition.sample_step;
  int cost = 0;
  if (threadIdx.x <= partition.last_sample) cost = static_cast<int>(__ldg(a.rowptr + sampled_row));
  prefetch_part(a.rowptr, a.num_rows + 1, partition.rows, sizeof *a.rowptr);
  prefetch_part(a.col, a.num_edges, partition.entries, sizeof *a.col);
  if (args.value.data != nullptr && a.edge_id == nullptr) {
    const int bytes = args.value.dtype == args.dtype ? sizeof(T) : sizeof(float);
    prefetch_part(args.value.data, a.num_edges, partition.entries, bytes);
  }

  const int num_cols = static_cast<int>(a.num_cols), piece = threadIdx.x % kPieces;
  const std::int64_t piece_feature = feature0 + piece * Sum::kVec;
  const std::size_t unread = piece_feature < args.width ? 0 : sizeof(uint4);
  const T* x = static_cast<const T*>(args.x.data) + (unread ? 0 : piece_feature);
#pragma unroll 4
  for (int col = static_cast<int>(threadIdx.x) / kPieces; col < num_cols; col += kThreads / kPieces) {
    __pipeline_memcpy_async(tile + col * kPieces + piece, x + col * args.x.stride, sizeof(uint4), unread);
  }
  __pipeline_commit();
  sample[threadIdx.x] = cost + sampled_row * kRowCost;
  __syncthreads();

  Cut begin, end;
  int row_begin;
  find_cuts(a, partition, sample, begin, end, row_begin);
  const int count = end.entry - begin.entry, rows = end.row - begin.row;
  // The warp begins within a row whose first entries belong to an earlier warp.
  const bool within = begin.entry > row_begin;

  const TileArgs tile_args{a, args.value, static_cast<const float*>(args.scale_src), args.x,
                           args.value.dtype == args.dtype};
  constexpr int kOwn = kStage / kWarp;
  const Entry none{num_cols * kPieces, 0.0f};
  int next_col[kOwn] = {};
  std::uint32_t next_value[kOwn] = {};
  Entry* stage = stages[warp];
  // This function only loads, so that nothing waits for the loads before `put`.
  const auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int entry = first + i * kWarp + lane;
      if (entry < count) {
        next_col[i] = __ldg(a.col + begin.entry + entry);
        next_value[i] = value_bits<T>(tile_args, begin.entry + entry);
      }
    }
  };
  const auto put = [&] {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float weight = weight_from<T>(tile_args, next_value[i], next_col[i]);
      stage[i * kWarp + lane] = {next_col[i] * kPieces, weight};
    }
    __syncwarp();
  };
  const auto row_ends_from = [&](int first) {
    const std::int64_t row = min(static_cast<std::int64_t>(begin.row + first + lane + 1), a.num_rows);
    return static_cast<int>(__ldg(a.rowptr + row)) - begin.entry;
  };
  fetch(0);
  if (threadIdx.x < kPieces) tile[none.row + threadIdx.x] = uint4{};
  int row_ends = row_ends_from(0);
  if (lane == 0) begins[warp] = begin;
  for (int i = lane; i < Sum::kWidth; i += kWarp) carry[warp][i] = 0;
  put();
  fetch(kStage);

  Sum sum;
  __pipeline_wait_prior(0);
  __syncthreads();

  const Epilogue epilogue = epilogue_of(args);
  const std::int64_t feature = feature0 + sum.feature();
  float result[Sum::kResult];
  const auto store = [&](std::int64_t row) {
    if (sum.has_result() && feature < args.width) {
      store_pack(epilogue.finish<T>(result, row, feature),
                 static_cast<T*>(args.out) + row * args.width + feature);
    }
  };
  int staged = 0;  // the first entry in shared memory
  bool open = false;
  for (int r = 0, from = 0; r < rows || (r == rows && from < count); ++r) {
    if (r > 0 && r % kWarp == 0) row_ends = row_ends_from(r);
    const int to = min(__shfl_sync(kFullWarp, row_ends, r % kWarp), count);
    const int row_from = from;
    sum.clear();
    while (from < to) {
      if (from == staged + kStage) {
        staged = from;
        __syncwarp();
        put();
        fetch(staged + kStage);
      }
      const int together = min(min(to, staged + kStage) - from, kBatch);
      sum.add(tile, stage + (from - staged), together, none);
      from += together;
    }
    sum.finish(result);
    // The tensor cores also multiply other pieces by zero, which gives NaN if they are infinite. So sums that
    // are not finite are computed again on CUDA cores.
    if constexpr (Sum::kTensorCores) {
      bool finite = true;
#pragma unroll
      for (int i = 0; i < Sum::kResult; ++i) finite = finite && isfinite(result[i]);
      if (!finite) {
#pragma unroll
        for (int i = 0; i < Sum::kResult; ++i) result[i] = 0;
#pragma unroll 1
        for (std::int64_t e = begin.entry + row_from; e < begin.entry + to; ++e) {
          const int col = a.col[e];
          const float weight = widen(narrow<T>(entry_weight<T>(tile_args, e, col)));
          const T* x = reinterpret_cast<const T*>(tile + col * kPieces) + sum.feature();
#pragma unroll
          for (int i = 0; i < Sum::kResult; ++i) result[i] += weight * widen(x[i]);
        }
      }
    }
    if (r == 0 && within) {
      if (sum.has_result()) {
#pragma unroll
        for (int i = 0; i < Sum::kResult; ++i) carry[warp][sum.feature() + i] = result[i];
      }
    } else if (r < rows) {
      store(begin.row + r);
    } else {
      open = true;
    }
  }
  __syncthreads();
  if (open && sum.has_result()) {
    for (int other = warp + 1; other < kWarps && begins[other].row == end.row; ++other) {
#pragma unroll
      for (int i = 0; i < Sum::kResult; ++i) result[i] += carry[other][sum.feature() + i];
    }
  }
  if (open) store(end.row);
}

// Number of blocks per tile of features. It minimises the time, if a wave of blocks takes as long as one
// block, which handles its share of the rows and loads its tile.
std::int64_t row_groups(const CsrView& a, std::int64_t tiles) {
  int device = 0, num_sms = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  constexpr int kMostWaves = 8;
  const std::int64_t work = a.num_edges + a.num_rows * kRowCost, load = a.num_cols * kSourceCost;
  std::int64_t best = 1, least = 0;
  for (int waves = 1; waves <= kMostWaves; ++waves) {
    const std::int64_t groups = waves * num_sms / tiles;
    if (groups == 0) continue;
    const std::int64_t cost = waves * (work / groups + load);
    if (least == 0 || cost < least) best = groups, least = cost;
  }
  return best;
}

Partition share_out(const CsrView& a, std::int64_t blocks) {
  const std::int64_t warps = blocks * kWarps, work = a.num_edges + a.num_rows * kRowCost;
  const int sample_step = std::max(static_cast<int>(ceil_div(a.num_rows, kThreads - 1)), 1);
  return {static_cast<int>(work / warps),
          static_cast<int>(work % warps),
          static_cast<int>(ceil_div(a.num_rows, blocks)),
          static_cast<int>(ceil_div(a.num_edges, blocks)),
          sample_step,
          static_cast<int>(a.num_rows / sample_step)};
}

template <typename Sum>
int launch(const SpmmArgs& args, cudaStream_t stream) {
  const auto kernel = spmm_resident_kernel<Sum>;
  const auto bytes = static_cast<int>((args.a.num_cols + 1) * kPieces * sizeof(uint4));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const unsigned tiles = ceil_div(args.width, Sum::kWidth);
  const std::int64_t blocks = row_groups(args.a, tiles);
  const dim3 grid(static_cast<unsigned>(blocks), tiles);
  kernel<<<grid, kThreads, bytes, stream>>>(args, share_out(args.a, blocks));
  return cudaGetLastError();
}

}  // namespace spmm_resident_detail

int spmm_resident(const SpmmArgs& args, bool tensor_cores, void* stream) {
  using namespace spmm_resident_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  if (args.dtype == Dtype::kFloat32) return launch<CudaCores<float>>(args, queue);
  if (args.dtype == Dtype::kFloat16) {
    return tensor_cores ? launch<TensorCores<__half>>(args, queue) : launch<CudaCores<__half>>(args, queue);
  }
  return tensor_cores ? launch<TensorCores<__nv_bfloat16>>(args, queue)
                      : launch<CudaCores<__nv_bfloat16>>(args, queue);
}

}  // namespace fastsparse::cuda
