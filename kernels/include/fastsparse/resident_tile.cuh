// SpMM with a tile of x resident in shared memory: all rows of x, some of its features. For matrices of few
// columns, as pruned weights are, that many rows gather again and again: a block loads its tile once and sums
// many rows out of it, so that the L2 delivers tiles and entries and no gathers.
//
// Features are cut into tiles (the slow grid dimension), rows into groups of about equal work, one block
// each. Within a block every warp takes as many entries as any other, wherever rows begin and end: a row that
// several warps share is open at the end of the first, which after a barrier adds what the others carry, in
// order: the same bits every time, no atomics.
#pragma once

#include <cuda_pipeline.h>

#include <algorithm>

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/tca_tile.cuh"

namespace fastsparse::cuda {

// Entries that lanes of a warp read together, and those of them that are gathered before the first is summed.
constexpr int kResidentBatch = 32;
constexpr int kResidentHalf = 16;
// What the end of a row costs, in entries.
constexpr int kResidentRowCost = 16;
constexpr int kResidentThreads = 512;

// Sums on CUDA cores: lane = kPieces * group + piece, a group sums every kGroups-th entry, a lane 16 bytes.
template <typename T, int kRowPieces>
struct ResidentFma {
  static constexpr int kPieces = kRowPieces;
  using Element = T;
  static constexpr bool kTensorCores = false;
  static constexpr int kSwizzle = 0;
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr int kWidth = kVec * kPieces;
  static constexpr int kGroups = kWarp / kPieces;
  static constexpr int kResult =
      kVec > kGroups ? kVec / kGroups : 1;  // features that `finish` leaves in a lane

  int lane, piece;
  float sums[kVec];

  __device__ __forceinline__ ResidentFma() : lane(threadIdx.x % kWarp), piece(lane % kPieces) { clear(); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums[i] = 0;
  }

  // `row`, the place of its piece 0 in the tile, and `weight` are those of this lane's entry of a batch,
  // `left` is how many entries it has.
  __device__ __forceinline__ void add(const uint4* tile, int row, float weight, int left) {
#pragma unroll
    for (int half = 0; half < kResidentBatch; half += kResidentHalf) {
      if (half >= left) break;
      constexpr int kSteps = kResidentHalf / kGroups;
      Pack<T, kVec> gathered[kSteps];
      float weights[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int entry = half + s * kGroups + lane / kPieces;
        const uint4 raw = tile[__shfl_sync(kFullWarp, row, entry) ^ piece];
        memcpy(&gathered[s], &raw, sizeof raw);
        weights[s] = __shfl_sync(kFullWarp, weight, entry);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[i] += weights[s] * widen(gathered[s].lane[i]);
      }
    }
  }

  __device__ __forceinline__ int feature() const {
    int first = kVec * piece, count = kVec;
#pragma unroll
    for (int other = kWarp / 2; other >= kPieces; other /= 2) {
      count /= 2;
      if (lane & other) first += count;
    }
    return first;
  }

  // Where there are more groups than features of a lane, the last ones have copies.
  __device__ __forceinline__ bool has_result() const {
    return lane / kPieces % (kGroups * kResult / kVec) == 0;
  }

  // Adds the groups; a group keeps half of what it has at every step.
  __device__ __forceinline__ void finish(float (&result)[kResult]) {
    int count = kVec;
#pragma unroll
    for (int other = kWarp / 2; other >= kPieces; other /= 2) {
      if (count == 1) {
        sums[0] += __shfl_xor_sync(kFullWarp, sums[0], other);
        continue;
      }
      count /= 2;
      const bool upper = lane & other;
#pragma unroll
      for (int i = 0; i < kVec / 2; ++i) {
        if (i >= count) break;
        const float give = upper ? sums[i] : sums[i + count];
        const float keep = upper ? sums[i + count] : sums[i];
        sums[i] = keep + __shfl_xor_sync(kFullWarp, give, other);
      }
    }
#pragma unroll
    for (int i = 0; i < kResult; ++i) result[i] = sums[i];
  }
};

// Sums on tensor cores, as tca_tile.cuh says; a warp is one slot.
template <typename T, int kLanePieces, int kRowPieces, int kChunks>
struct ResidentTca {
  using Element = T;
  using Tile = TcaTile<T, kLanePieces, kRowPieces, kChunks>;
  static constexpr bool kTensorCores = true;
  // Eight lanes that read 64 bytes each of two rows: odd rows have their halves swapped.
  static constexpr int kSwizzle = Tile::kPieces == 8 ? 4 : 0;
  static_assert(Tile::kSlotLanes == kWarp);
  static constexpr int kPieces = Tile::kPieces;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr int kResult = Tile::kResult;
  static constexpr int kVec = 8;

  Tile tile;
  int batches;
  float sums[4][4], total[4][4];

  __device__ __forceinline__ ResidentTca() { clear(); }

  __device__ __forceinline__ void clear() {
    batches = 0;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[pair][i] = total[pair][i] = 0;
    }
  }

  __device__ __forceinline__ void add(const uint4* x, int row, float weight, int left) {
    const std::uint32_t mine = bits_of<T>(weight);
    const std::uint32_t pair = mine | __shfl_down_sync(kFullWarp, mine, 1) << 16;  // of use in even lanes
#pragma unroll
    for (int half = 0; half < kResidentBatch; half += kResidentHalf) {
      if (half >= left) break;
      constexpr int kSteps = kResidentHalf / Tile::kStep;
      uint4 gathered[2 * kSteps];
      std::uint32_t weights[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int entry = half + s * Tile::kStep + tile.chunk * Tile::kChunk + 2 * tile.nth;
        gathered[2 * s] = x[__shfl_sync(kFullWarp, row, entry) ^ tile.piece];
        gathered[2 * s + 1] = x[__shfl_sync(kFullWarp, row, entry + 1) ^ tile.piece];
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

// A place between two entries: `entry` is in `row`, or is its first.
struct Cut {
  std::int64_t row, entry;
};

// Places that cut rows and entries into `parts` of about equal work, for this warp's part and its block's:
// lanes 8 i to 8 i + 7 find cut i of {part, part + 1, block's first part, next block's}. Blocks begin with a
// row, warps with a row or a multiple of a batch within it. 64 probes at a time: two steps for 4096 rows.
__device__ __forceinline__ void find_cuts(const CsrView& a, std::int64_t part, std::int64_t block_parts,
                                          std::int64_t parts, Cut& begin, Cut& end, std::int64_t& row_begin) {
  constexpr int kProbes = 8, kLanes = 8;
  const int lane = threadIdx.x % kWarp, which = lane / kLanes;
  const std::int64_t block_first = part / block_parts * block_parts;
  const std::int64_t mine = which < 2 ? part + which : block_first + (which - 2) * block_parts;
  const std::int64_t target = (a.num_edges + a.num_rows * kResidentRowCost) * mine / parts;
  // The last row of which entries and ends before it cost at most `target`.
  std::int64_t row = 0;
  for (std::int64_t size = a.num_rows; size > 0;) {
    const std::int64_t step = (size + kProbes * kLanes - 1) / (kProbes * kLanes);
    int below = 0;
#pragma unroll
    for (int p = 0; p < kProbes; ++p) {
      const std::int64_t probe = row + (p * kLanes + lane % kLanes + 1) * step;
      const bool fits = probe <= a.num_rows && __ldg(a.rowptr + probe) + probe * kResidentRowCost <= target;
      below += __popc(__ballot_sync(kFullWarp, fits) >> (which * kLanes) & 0xff);
    }
    row += below * step;
    size = step - 1;
  }
  const std::int64_t first = __ldg(a.rowptr + row);
  const std::int64_t last = row < a.num_rows ? __ldg(a.rowptr + row + 1) : first;
  Cut cut{row, first};
  if (mine % block_parts != 0) {
    const std::int64_t offset = (target - first - row * kResidentRowCost) / kResidentBatch * kResidentBatch;
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
  row_begin = begin.row < a.num_rows ? __ldg(a.rowptr + begin.row) : begin.entry;
}

// Brings this block's part of an array, about, towards the L2 while it still looks for its rows: a line per
// thread.
__device__ __forceinline__ void prefetch_part(const void* data, std::int64_t size, int element_bytes) {
  constexpr int kLine = 128;
  const std::int64_t at = size * blockIdx.x / gridDim.x * element_bytes + threadIdx.x * kLine;
  if (at < size * (blockIdx.x + 1) / gridDim.x * element_bytes) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(data) + at));
  }
}

template <typename Sum>
__global__ void __launch_bounds__(kResidentThreads, 1) spmm_resident_kernel(const SpmmArgs args) {
  using T = typename Sum::Element;
  constexpr int kThreads = kResidentThreads;
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kPieces = Sum::kPieces;
  extern __shared__ uint4 tile[];  // (num_cols + 1, kPieces); the last row is zero
  __shared__ float carry[kWarps][Sum::kWidth];
  __shared__ Cut begins[kWarps];

  const CsrView& a = args.a;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t feature0 = static_cast<std::int64_t>(blockIdx.y) * Sum::kWidth;
  prefetch_part(a.rowptr, a.num_rows + 1, sizeof *a.rowptr);
  prefetch_part(a.col, a.num_edges, sizeof *a.col);
  if (args.value.data != nullptr && a.edge_id == nullptr) {
    const int bytes = args.value.dtype == args.dtype ? sizeof(T) : sizeof(float);
    prefetch_part(args.value.data, a.num_edges, bytes);
  }
  const int num_pieces = static_cast<int>(a.num_cols) * kPieces;
  for (int i = threadIdx.x; i < num_pieces + kPieces; i += kThreads) {
    const std::int64_t feature = feature0 + i % kPieces * Sum::kVec;
    const bool there = i < num_pieces && feature < args.width;
    const T* x = static_cast<const T*>(args.x.data) + (there ? i / kPieces * args.x.stride + feature : 0);
    __pipeline_memcpy_async(tile + (i ^ (i / kPieces % 2 * Sum::kSwizzle)), x, 16, there ? 0 : 16);
  }
  __pipeline_commit();

  Cut begin, end;
  std::int64_t row_begin;
  find_cuts(a, static_cast<std::int64_t>(blockIdx.x) * kWarps + warp, kWarps,
            static_cast<std::int64_t>(gridDim.x) * kWarps, begin, end, row_begin);
  const int count = static_cast<int>(end.entry - begin.entry);
  const int rows = static_cast<int>(end.row - begin.row);
  // The warp begins within a row of which an earlier warp has the first entries.
  const bool within = begin.entry > row_begin;

  const TileArgs tile_args{a, args.value, static_cast<const float*>(args.scale_src), args.x,
                           args.value.dtype == args.dtype};
  int next_col = 0;
  float next_weight = 0;
  const auto load = [&](int first) {
    if (first + lane < count) {
      next_col = __ldg(a.col + begin.entry + first + lane);
      next_weight = entry_weight<T>(tile_args, begin.entry + first + lane, next_col);
    }
  };
  load(0);

  Sum sum;
  if (lane == 0) begins[warp] = begin;
  for (int i = lane; i < Sum::kWidth; i += kWarp) carry[warp][i] = 0;
  __pipeline_wait_prior(0);
  __syncthreads();

  const Epilogue epilogue{args.scale_dst, args.bias, args.relu, args.out, args.width};
  const std::int64_t feature = feature0 + sum.feature();
  float result[Sum::kResult];
  const auto store = [&](std::int64_t row) {
    if (sum.has_result() && feature < args.width) {
      store_pack(epilogue.finish<T>(result, row, feature),
                 static_cast<T*>(args.out) + row * args.width + feature);
    }
  };
  int row_ends = 0;
  bool open = false;
  for (int r = 0, from = 0; r < rows || (r == rows && from < count); ++r) {
    if (r % kWarp == 0) {
      row_ends = static_cast<int>(__ldg(a.rowptr + min(begin.row + r + lane + 1, a.num_rows)) - begin.entry);
    }
    const int to = min(__shfl_sync(kFullWarp, row_ends, r % kWarp), count);
    const int row_from = from;
    sum.clear();
    while (from < to) {
      const bool of_row = from + lane < to;
      const int col = of_row ? next_col : static_cast<int>(a.num_cols);
      const int row = col * kPieces + col % 2 * Sum::kSwizzle;
      const float weight = of_row ? next_weight : 0;
      const int left = to - from;
      from = min(from + kResidentBatch, to);
      load(from);
      sum.add(tile, row, weight, left);
    }
    sum.finish(result);
    // Zero in B of the tensor cores, times an infinity of another piece, is not zero.
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
          const int piece = (col * kPieces + col % 2 * Sum::kSwizzle) ^ (sum.feature() / Sum::kVec);
          const T* x = reinterpret_cast<const T*>(tile + piece) + sum.feature() % Sum::kVec;
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

// Launches the kernel where a tile fits into shared memory, every block has a row and there are more entries
// to gather than rows of x to load; says whether.
template <typename Sum>
bool launch_resident(const SpmmArgs& args, cudaStream_t stream) {
  int device = 0, num_sms = 0, shared_bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  constexpr std::int64_t kFixedBytes = kResidentThreads / kWarp * (Sum::kWidth * sizeof(float) + sizeof(Cut));
  const std::int64_t bytes = (args.a.num_cols + 1) * Sum::kPieces * sizeof(uint4);
  const auto tiles = static_cast<std::int64_t>(ceil_div(args.width, Sum::kWidth));
  const std::int64_t groups = std::max<std::int64_t>(1, num_sms / tiles);
  if (bytes + kFixedBytes > shared_bytes || args.a.num_rows < groups) return false;
  if (args.a.num_edges < groups * args.a.num_cols) return false;
  const auto kernel = spmm_resident_kernel<Sum>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(tiles));
  kernel<<<grid, kResidentThreads, bytes, stream>>>(args);
  return true;
}

}  // namespace fastsparse::cuda
