// SpMM on tensor cores directly from CSR, after TCA-SpMM (section 4). It reads only row pointers and columns,
// builds no other format and has one launch. tca_tile.cuh computes the product.
//
// Floors per call, for E entries of width F: 2 E F bytes gathered and 4 E ceil(F / tile) bytes of columns,
// for tiles of `tile` features. The tensor cores compute 16 E F flops, and an eighth of these are useful.
// That is a few per cent of what they can compute during the gather. So loads decide the time: runs of 128
// bytes (F >= 64), eight in flight per lane. Tiles of features are the slow grid dimension, because a tile of
// x is more likely to stay in the caches than all of x.
//
// A block has several slots (tca_tile.cuh). If there are few rows, `parts` slots share a row. Rows that are
// much longer than the mean are shared by all slots of their block, one row after another. The sums of slots
// are added in shared memory, in order. So there are no atomics and no second kernel, and every run gives the
// same bits.
//
// If x has few rows, policy.spmm_resident chooses spmm_resident.cu instead.

#include <algorithm>

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/tca_tile.cuh"

namespace fastsparse::cuda {
namespace spmm_tca_detail {

constexpr int kThreads = 128;
constexpr int kLongRow = 512;             // entries per slot above which a whole block handles the row
constexpr int kResidentWarps = 132 * 16;  // about the number of warps that an H200 runs at once
// Up to this mean number of entries per row, slots have as few lanes as possible, so that a warp may handle
// several rows.
constexpr std::int64_t kPackedEntries = 8;

template <typename T, int kLanePieces, int kRowPieces, int kChunks>
__global__ void __launch_bounds__(kThreads, 4) spmm_tca_kernel(const SpmmArgs args, int parts) {
  using Tile = TcaTile<T, kLanePieces, kRowPieces, kChunks>;
  constexpr int kSlots = kThreads / Tile::kSlotLanes;
  __shared__ float shared[kSlots][Tile::kWidth];

  const Tile tile;
  const TileArgs tile_args{args.a, args.value, static_cast<const float*>(args.scale_src), args.x,
                           args.value.dtype == args.dtype};
  const Epilogue epilogue = epilogue_of(args);
  const int slot = threadIdx.x / Tile::kSlotLanes;
  const int rows = kSlots / parts;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * rows;
  const std::int64_t feature0 = static_cast<std::int64_t>(blockIdx.y) * Tile::kWidth;
  const std::int64_t feature = feature0 + tile.feature();

  const auto length_of = [&](std::int64_t row) {
    return row < args.a.num_rows ? static_cast<int>(args.a.rowptr[row + 1] - args.a.rowptr[row]) : -1;
  };
  const int most = parts == kSlots ? 0x7fffffff : kLongRow * parts;
  const bool any_long = __syncthreads_or(length_of(row0 + slot / parts) > most);

  // Turn 0 handles all rows that are not long, with `parts` slots each; the other turns handle the long rows,
  // with all slots.
  for (int turn = 0; turn <= (any_long ? rows : 0); ++turn) {
    const int sharing = turn == 0 ? parts : kSlots;
    const std::int64_t row = turn == 0 ? row0 + slot / parts : row0 + turn - 1;
    const int part = slot % sharing;
    const int length = length_of(row);
    const bool live = length >= 0 && (length > most) == (turn > 0);
    if (turn > 0 && !live) continue;

    float sum[Tile::kResult];
    tile.sum(tile_args, feature0, args.width, live ? args.a.rowptr[row] : 0, part * Tile::kBatch,
             live ? length : 0, sharing * Tile::kBatch, sum);
    if (sharing > 1) {
      if (tile.has_result()) {
#pragma unroll
        for (int i = 0; i < Tile::kResult; ++i) shared[slot][tile.feature() + i] = sum[i];
      }
      __syncthreads();
      if (part == 0 && tile.has_result()) {
#pragma unroll 1
        for (int other = 1; other < sharing; ++other) {
#pragma unroll
          for (int i = 0; i < Tile::kResult; ++i) sum[i] += shared[slot + other][tile.feature() + i];
        }
      }
      __syncthreads();
    }
    if (live && part == 0 && tile.has_result() && feature < args.width) {
      store_pack(epilogue.finish<T>(sum, row, feature),
                 static_cast<T*>(args.out) + row * args.width + feature);
    }
  }
}

template <typename T, int kLanePieces, int kRowPieces, int kChunks>
void launch_shape(const SpmmArgs& args, cudaStream_t stream) {
  using Tile = TcaTile<T, kLanePieces, kRowPieces, kChunks>;
  constexpr int kSlots = kThreads / Tile::kSlotLanes;
  const std::int64_t tiles = ceil_div(args.width, Tile::kWidth);
  const std::int64_t slots_wanted = static_cast<std::int64_t>(kResidentWarps) * kWarp / Tile::kSlotLanes;
  int parts = 1;
  while (parts < kSlots && args.a.num_rows * tiles * parts < slots_wanted &&
         args.a.num_edges > args.a.num_rows * parts * Tile::kBatch) {
    parts *= 2;
  }
  const dim3 grid(ceil_div(args.a.num_rows, kSlots / parts), static_cast<unsigned>(tiles));
  spmm_tca_kernel<T, kLanePieces, kRowPieces, kChunks><<<grid, kThreads, 0, stream>>>(args, parts);
}

template <typename T, int kLanePieces, int kRowPieces>
void launch_pieces(const SpmmArgs& args, cudaStream_t stream) {
  if (args.a.num_edges <= kPackedEntries * args.a.num_rows) {
    launch_shape<T, kLanePieces, kRowPieces, 1>(args, stream);
  } else {
    launch_shape<T, kLanePieces, kRowPieces, 8 / kRowPieces>(args, stream);
  }
}

template <typename T>
void launch(const SpmmArgs& args, cudaStream_t stream) {
  if (args.width > 64) {
    launch_pieces<T, 4, 4>(args, stream);
  } else if (args.width > 32) {
    launch_pieces<T, 2, 4>(args, stream);
  } else if (args.width > 16) {
    launch_pieces<T, 2, 2>(args, stream);
  } else if (args.width > 8) {
    launch_pieces<T, 1, 2>(args, stream);
  } else {
    launch_pieces<T, 1, 1>(args, stream);
  }
}

}  // namespace spmm_tca_detail

int spmm_tca(const SpmmArgs& args, void* stream) {
  using namespace spmm_tca_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  args.dtype == Dtype::kFloat16 ? launch<__half>(args, queue) : launch<__nv_bfloat16>(args, queue);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
