// SpMM from CSR on tensor cores and CUDA cores, after HR-SpMM (section 4). A warp sums a long item, which is
// a multiple of 64 entries of a row, at most 256, by matricised dot products (tca_tile.cuh). Sub-warps with
// one lane per 16 bytes of features sum a short item, which is the rest of a row, fewer than 64 entries, in
// float32. hybrid_rows.cu makes the list of items.
//
// Floors are the same as in spmm_tca.cu. Long items fill whole products and short items need no padding, so
// no row length leaves lanes idle. Rows with several items store partial sums, which a second kernel adds in
// order. The paper's atomics would send the same number of bytes to the same cache lines, and for 16-bit
// results they would also need a buffer of floats.

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/tca_tile.cuh"

namespace fastsparse::cuda {
namespace spmm_hr_detail {

constexpr int kThreads = 128;
constexpr int kAtOnce = 8;  // number of entries of a short item that a lane loads at once

// Stores sums of kVec features from `feature` on, in the result's row or as a partial result.
template <typename T, int kVec>
__device__ __forceinline__ void store_sums(const SpmmArgs& args, const RowSlice& slice, std::int64_t feature,
                                           const float (&sum)[kVec]) {
  if (slice.target < 0) {
    constexpr int kStore = kVec < 4 ? kVec : 4;
    float* partial = static_cast<float*>(args.partial) + ~slice.target * args.width + feature;
#pragma unroll
    for (int i = 0; i < kVec; i += kStore) {
      Pack<float, kStore> pack;
#pragma unroll
      for (int k = 0; k < kStore; ++k) pack.lane[k] = sum[i + k];
      store_pack(pack, partial + i);
    }
  } else {
    const Epilogue epilogue = epilogue_of(args);
    store_pack(epilogue.finish<T>(sum, slice.target, feature),
               static_cast<T*>(args.out) + slice.target * args.width + feature);
  }
}

// Sums eight features of a short item; `x` points to the first of them in row 0.
template <typename T>
__device__ __forceinline__ void sum_short(const TileArgs& args, const T* x, const RowSlice& slice,
                                          float (&sum)[8]) {
  const bool weighted = args.value.data != nullptr || args.scale_src != nullptr;
  for (int first = 0; first < slice.length; first += kAtOnce) {
    int col[kAtOnce];
    Pack<T, 8> pack[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      col[u] = first + u < slice.length ? __ldg(args.a.col + slice.begin + first + u) : -1;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      pack[u] = Pack<T, 8>{};
      if (col[u] >= 0) pack[u] = load_pack<T, 8>(x + col[u] * args.x.stride);
    }
    if (weighted) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        weight[u] = col[u] >= 0 ? entry_weight<T>(args, slice.begin + first + u, col[u]) : 0.0f;
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float feature = widen(pack[u].lane[i]);
        sum[i] += weighted ? weight[u] * feature : feature;
      }
    }
  }
}

template <typename T, int kLanePieces, int kRowPieces>
__global__ void __launch_bounds__(kThreads, 4)
    spmm_hr_kernel(const SpmmArgs args, std::int64_t num_long, unsigned long_blocks) {
  using Tile = TcaTile<T, kLanePieces, kRowPieces, 8 / kRowPieces>;
  constexpr int kPieces = Tile::kPieces;
  const TileArgs tile_args{args.a, args.value, static_cast<const float*>(args.scale_src), args.x,
                           args.value.dtype == args.dtype};
  const std::int64_t feature0 = static_cast<std::int64_t>(blockIdx.y) * Tile::kWidth;
  if (blockIdx.x < long_blocks) {
    const std::int64_t item =
        static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
    if (item >= num_long) return;
    const Tile tile;
    const RowSlice slice = load_slice(args.split, item);
    float sum[Tile::kResult];
    tile.sum(tile_args, feature0, args.width, slice.begin, 0, slice.length, Tile::kBatch, sum);
    const std::int64_t feature = feature0 + tile.feature();
    if (tile.has_result() && feature < args.width) store_sums<T>(args, slice, feature, sum);
  } else {
    const std::int64_t row =
        static_cast<std::int64_t>(blockIdx.x - long_blocks) * (kThreads / kPieces) + threadIdx.x / kPieces;
    const std::int64_t feature = feature0 + threadIdx.x % kPieces * 8;
    if (row >= args.a.num_rows || feature >= args.width) return;
    const RowSlice slice = load_slice(args.split, args.split.num_slices - args.a.num_rows + row);
    if (slice.length < 0) return;  // long items cover this row
    float sum[8] = {};
    sum_short<T>(tile_args, static_cast<const T*>(args.x.data) + feature, slice, sum);
    store_sums<T>(args, slice, feature, sum);
  }
}

template <typename T, int kLanePieces, int kRowPieces>
void launch_shape(const SpmmArgs& args, std::int64_t num_long, cudaStream_t stream) {
  constexpr int kPieces = kLanePieces * kRowPieces;
  const unsigned long_blocks = ceil_div(num_long, kThreads / kWarp);
  const unsigned short_blocks = ceil_div(args.a.num_rows, kThreads / kPieces);
  const dim3 grid(long_blocks + short_blocks, ceil_div(args.width, 8 * kPieces));
  spmm_hr_kernel<T, kLanePieces, kRowPieces><<<grid, kThreads, 0, stream>>>(args, num_long, long_blocks);
}

template <typename T>
void launch(const SpmmArgs& args, std::int64_t num_long, cudaStream_t stream) {
  if (args.width > 64) {
    launch_shape<T, 4, 4>(args, num_long, stream);
  } else if (args.width > 32) {
    launch_shape<T, 2, 4>(args, num_long, stream);
  } else if (args.width > 16) {
    launch_shape<T, 2, 2>(args, num_long, stream);
  } else if (args.width > 8) {
    launch_shape<T, 1, 2>(args, num_long, stream);
  } else {
    launch_shape<T, 1, 1>(args, num_long, stream);
  }
  const Epilogue epilogue = epilogue_of(args);
  combine_partials<T, 1>(args.split, args.partial, epilogue, SameRow{}, stream);
}

}  // namespace spmm_hr_detail

int spmm_hr(const SpmmArgs& args, std::int64_t num_long, void* stream) {
  using namespace spmm_hr_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  args.dtype == Dtype::kFloat16 ? launch<__half>(args, num_long, queue)
                                : launch<__nv_bfloat16>(args, num_long, queue);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
