// SpMM with a tile of x resident in shared memory: all rows of x, 256 bytes of each. For matrices of few
// columns, as pruned weights are, that many rows gather again and again: a block loads its tile once and sums
// many rows out of it, so that the L2 delivers tiles and entries and no gathers. Floor per call, E entries of
// width F: E * F * sizeof(T) bytes out of shared memory, 128 bytes per clock and multiprocessor.
//
// Features are cut into tiles (the slow grid dimension), rows into groups of about equal work, one block
// each. Within a block every warp takes as many entries as any other, wherever rows begin and end: a row that
// several warps share is open at the end of the first, which after a barrier adds what the others carry, in
// order: the same bits every time, no atomics. choose.spmm_resident says where a tile fits.

#include <cuda_pipeline.h>

#include <algorithm>

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/tca_tile.cuh"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPieces = 16;  // of 16 bytes of a row of x
// Entries that lanes of a warp read together, and those of them that are gathered before the first is summed.
constexpr int kBatch = 32;
constexpr int kHalf = 16;
// In entries, what the end of a row costs, and loading a row of the tile.
constexpr int kRowCost = 16;
constexpr int kSourceCost = 4;

// Sums on CUDA cores: one half of a warp takes even entries, the other odd ones; lane = 16 half + piece.
template <typename T>
struct CudaCores {
  using Element = T;
  static constexpr bool kTensorCores = false;
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr int kWidth = kVec * kPieces;
  static constexpr int kResult = kVec / 2;  // features that `finish` leaves in a lane
  // Then sums move to totals of up to 32 sums, and those to totals of totals: rounding errors grow with 32
  // terms at a time, not with the row, which may repeat a source 100,000 times, so that errors have one sign.
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

  // `row`, the place of its piece 0 in the tile, and `weight` are those of this lane's entry of a batch,
  // `left` is how many entries it has.
  __device__ __forceinline__ void add(const uint4* tile, int row, float weight, int left) {
#pragma unroll
    for (int first = 0; first < kBatch; first += kHalf) {
      if (first >= left) break;
      constexpr int kSteps = kHalf / 2;
      Pack<T, kVec> gathered[kSteps];
      float weights[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int entry = first + 2 * s + half;
        const uint4 raw = tile[__shfl_sync(kFullWarp, row, entry) + piece];
        memcpy(&gathered[s], &raw, sizeof raw);
        weights[s] = __shfl_sync(kFullWarp, weight, entry);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[i] += weights[s] * widen(gathered[s].lane[i]);
      }
    }
    if (++batches % kBatchesPerSum == 0) flush(sums, totals);
    if (batches % kBatchesPerTotal == 0) flush(totals, total);
  }

  // First of the features, of the tile, that `finish` leaves in this lane.
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

// Sums on tensor cores, as tca_tile.cuh says; a warp is one slot.
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

  __device__ __forceinline__ void add(const uint4* x, int row, float weight, int left) {
    const std::uint32_t mine = bits_of<T>(weight);
    const std::uint32_t pair = mine | __shfl_down_sync(kFullWarp, mine, 1) << 16;  // of use in even lanes
#pragma unroll
    for (int first = 0; first < kBatch; first += kHalf) {
      if (first >= left) break;
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
  const std::int64_t target = (a.num_edges + a.num_rows * kRowCost) * mine / parts;
  // The last row of which entries and ends before it cost at most `target`.
  std::int64_t row = 0;
  for (std::int64_t size = a.num_rows; size > 0;) {
    const std::int64_t step = (size + kProbes * kLanes - 1) / (kProbes * kLanes);
    int below = 0;
#pragma unroll
    for (int p = 0; p < kProbes; ++p) {
      const std::int64_t probe = row + (p * kLanes + lane % kLanes + 1) * step;
      const bool fits = probe <= a.num_rows && __ldg(a.rowptr + probe) + probe * kRowCost <= target;
      below += __popc(__ballot_sync(kFullWarp, fits) >> (which * kLanes) & 0xff);
    }
    row += below * step;
    size = step - 1;
  }
  const std::int64_t first = __ldg(a.rowptr + row);
  const std::int64_t last = row < a.num_rows ? __ldg(a.rowptr + row + 1) : first;
  Cut cut{row, first};
  if (mine % block_parts != 0) {
    const std::int64_t offset = (target - first - row * kRowCost) / kBatch * kBatch;
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
__global__ void __launch_bounds__(kThreads, 1) spmm_resident_kernel(const SpmmArgs args) {
  using T = typename Sum::Element;
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
    __pipeline_memcpy_async(tile + i, x, 16, there ? 0 : 16);
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
      const float weight = of_row ? next_weight : 0;
      const int left = to - from;
      from = min(from + kBatch, to);
      load(from);
      sum.add(tile, col * kPieces, weight, left);
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

// Blocks for each tile of features: what takes least where a wave of blocks takes as long as one of them, its
// share of the rows and its tile.
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

template <typename Sum>
int launch(const SpmmArgs& args, cudaStream_t stream) {
  const auto kernel = spmm_resident_kernel<Sum>;
  const auto bytes = static_cast<int>((args.a.num_cols + 1) * kPieces * sizeof(uint4));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const unsigned tiles = ceil_div(args.width, Sum::kWidth);
  const dim3 grid(static_cast<unsigned>(row_groups(args.a, tiles)), tiles);
  kernel<<<grid, kThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

int spmm_resident(const SpmmArgs& args, bool tensor_cores, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (args.dtype == Dtype::kFloat32) return launch<CudaCores<float>>(args, queue);
  if (args.dtype == Dtype::kFloat16) {
    return tensor_cores ? launch<TensorCores<__half>>(args, queue) : launch<CudaCores<__half>>(args, queue);
  }
  return tensor_cores ? launch<TensorCores<__nv_bfloat16>>(args, queue)
                      : launch<CudaCores<__nv_bfloat16>>(args, queue);
}

}  // namespace fastsparse::cuda
