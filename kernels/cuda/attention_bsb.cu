// Fused dot-product attention on tensor cores from the binary sparse block format (Fused3S, sections 3.1-3.5
// and algorithm 1, at FlashSparse's 8x1 granularity). One pass computes scores, softmax and weighted sum, so
// no array has edge size.
//
// A warp computes one slice of a window (8 rows) for the heads of one tile. It gathers the rows of K and V of
// 16 vectors at a time into shared memory (attention_tiles.cuh), and loads the next block while it computes
// the current one. The running maximum of a row changes only if a score exceeds it by more than kSlack (in
// powers of two). Until then, weights may be up to 2^kSlack, which 16-bit formats and sums can represent. So
// one vote of the warp per block decides whether to reduce over lanes and to rescale the sums.
//
// Floors, for n vectors, and rows of K and V of D and Dv features: n (D + Dv) sizeof(T) bytes gathered, 4 n
// bytes of columns and masks; 16 n (D + Dv) flops on tensor cores. The gather is the bottleneck.

#include "fastsparse/attention_tiles.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace attention_bsb_detail {

using namespace attention;

constexpr float kSlack = 8.0f;  // weights stay below 256

// Layout of a warp's shared memory: stages of two tiles, then the quads of the stages' blocks. The last stage
// has the warp's own rows until they are in registers. The first stage has the results after the last block.
template <typename S>
struct Layout {
  static constexpr int kStageBytes = 2 * S::kTileBytes;
  static constexpr int kOwn = (kStages - 1) * kStageBytes;
  static constexpr int kBlocks = kStages * kStageBytes;
  static constexpr int kBytes = kBlocks + kStages * kBlockBytes;
  static constexpr int kWarps = warps_of_block(kBytes);
  static constexpr int kBlocksAtOnce = blocks_at_once(kBytes, S::kHeads > 1 ? 16 : 24);
};

// Computed in float64: in float32, the result would be off by 5e-4 for a maximum of 10,000.
__device__ __forceinline__ double log_sum(float maximum, float total) {
  return total == 0 ? -static_cast<double>(INFINITY) : static_cast<double>(maximum) + log2f(total);
}

// kExtras: the call has a bias, dropout or both.
template <typename S, int kTerms, bool kExtras>
__global__ void __launch_bounds__(kWarp* Layout<S>::kWarps, Layout<S>::kBlocksAtOnce)
    attention_kernel(const __grid_constant__ AttentionBsbArgs args) {
  using L = Layout<S>;
  constexpr int kRowsOwned = Owned<S>::kRowsOwned;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionBsbInput& input = args.input;
  const int lane = threadIdx.x % kWarp;
  const int warp_of_block = threadIdx.x / kWarp;
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * L::kWarps + warp_of_block;
  if (warp >= args.a.split.num_slices) return;
  const RowSlice slice = load_slice(args.a.split, warp);
  const std::int64_t window = row_of(args.a.split, slice);
  const WindowRow window_row{args.a.window_row, args.a.num_rows};
  const std::int64_t first_head = static_cast<std::int64_t>(blockIdx.y) * S::kHeads;
  const auto memory =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)) + warp_of_block * L::kBytes;

  const Table<S> k(input.k, first_head, input.heads, input.head_width, lane);
  const Table<S> v(input.v, first_head, input.heads, input.value_width, lane);
  const std::uint32_t* quads = args.a.quad + slice.begin * kQuadWords;
  const int num_blocks = (slice.length + kBlockQuads - 1) / kBlockQuads;
  PackedColumns next = load_columns(quads, lane / 8);
  // Starts the copies of the block whose columns are in `next`, and reads the columns of the block after it.
  // The array is padded, so this read may go past the slice.
  const auto start = [&](int index) {
    const std::uint32_t stage = memory + index % kStages * L::kStageBytes;
    if (index < num_blocks) {
      const int left = slice.length - index * kBlockQuads;
      cut_words(next.word, left);
      std::uint32_t column[kOwned];
      unpack(next, column);
      copy_tile<S>(stage, k, column, lane);
      copy_tile<S>(stage + S::kTileBytes, v, column, lane);
      copy_block(memory + L::kBlocks + index % kStages * kBlockBytes,
                 quads + index * (kBlockQuads * kQuadWords), left, lane);
    }
    commit_copies();
    next = load_columns(quads, (index + 1) * kBlockQuads + lane / 8);
  };
  const float scale = input.scale * kLog2E;
  float sum[S::kTiles][4], maximum[S::kHeads][kRowsOwned], total[S::kHeads][kRowsOwned];
  // If a sum is infinite or NaN, the loop runs again, entry by entry.
  for (bool by_entry = false;; by_entry = true) {
    if (slice.length > 0) {
      const Table<S> own(input.q, first_head, input.heads, input.head_width, lane);
      copy_own<S>(memory + L::kOwn, own, window_row, window, lane);
    }
#pragma unroll
    for (int index = 0; index + 1 < kStages; ++index) start(index);

    std::uint32_t q[S::kPieces];
#pragma unroll
    for (int f = 0; f < S::kTiles; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[f][i] = 0;
    }
#pragma unroll
    for (int h = 0; h < S::kHeads; ++h) {
#pragma unroll
      for (int r = 0; r < kRowsOwned; ++r) {
        maximum[h][r] = kNoMaximum;
        total[h][r] = 0;
      }
    }
    for (int index = 0; index < num_blocks; ++index) {
      wait_for_copies<kStages - 2>();
      if (index == 0) {
        load_own<S>(q, memory + L::kOwn, lane);
        __syncwarp();
      }
      start(index + kStages - 1);  // all lanes are here, so the previous tile is not in use
      const std::uint32_t stage = memory + index % kStages * L::kStageBytes;
      const std::uint32_t block = memory + L::kBlocks + index % kStages * kBlockBytes;
      const Entries<S> entries(block, lane);
      const bool drops = kExtras && input.dropout.threshold != 0;
      const std::uint32_t drawn =
          drops ? entries.template draw<false>(input.dropout, window_row, window, first_head) : 0;
      std::int64_t position[kOwned];
      if constexpr (kExtras) {
        if (input.bias.data != nullptr) {
          entries.positions(position, args.a, slice.begin + index * kBlockQuads);
        }
      }

      float score[S::kHeads][kOwned], highest[S::kHeads][kRowsOwned];
      bool exceeds = false;
#pragma unroll
      for (int h = 0; h < S::kHeads; ++h) {
        multiply_rows<S, kTerms>(score[h], q, stage, h, lane);
#pragma unroll
        for (int r = 0; r < kRowsOwned; ++r) highest[h][r] = -INFINITY;
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
          score[h][i] = entries.present(i) ? score[h][i] * scale : -INFINITY;
          if constexpr (kExtras) score[h][i] += entries.bias(input, i, position[i], first_head + h);
          highest[h][i % kRowsOwned] = fmaxf(highest[h][i % kRowsOwned], score[h][i]);
        }
#pragma unroll
        for (int r = 0; r < kRowsOwned; ++r) exceeds |= highest[h][r] > maximum[h][r] + kSlack;
      }
      if (__any_sync(kFullWarp, exceeds)) {
#pragma unroll
        for (int h = 0; h < S::kHeads; ++h) {
          float shrink[kRowsOwned];
#pragma unroll
          for (int r = 0; r < kRowsOwned; ++r) {
            const float of_row =
                Owned<S>::reduce(highest[h][r], [](float a, float b) { return fmaxf(a, b); });
            const float raised = fmaxf(maximum[h][r], of_row);
            shrink[r] = exp2_approx(maximum[h][r] - raised);
            maximum[h][r] = raised;
            total[h][r] *= shrink[r];
          }
          scale_rows<S>(sum, shrink, h, lane);
        }
      }
#pragma unroll
      for (int h = 0; h < S::kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
          score[h][i] = exp2_approx(score[h][i] - maximum[h][i % kRowsOwned]);
          total[h][i % kRowsOwned] += score[h][i];
          if (drops && entries.present(i)) {
            score[h][i] *=
                entries.template factor<false>(input.dropout, drawn, i, h, window_row, window, first_head);
          }
        }
        if (by_entry) {
          add_entries<S>(sum, stage + S::kTileBytes, block, score[h], h, lane);
        } else {
          add_columns<S, kTerms>(sum, stage + S::kTileBytes, score[h], h, lane);
        }
      }
    }

    if (by_entry || finite<S>(sum)) break;
    next = load_columns(quads, lane / 8);
    __syncwarp();
  }
#pragma unroll
  for (int h = 0; h < S::kHeads; ++h) {
    const bool stores = Owned<S>::stores(lane) && first_head + h < input.heads;
    float inverse[kRowsOwned];
#pragma unroll
    for (int r = 0; r < kRowsOwned; ++r) {
      total[h][r] = Owned<S>::reduce(total[h][r], [](float a, float b) { return a + b; });
      inverse[r] = total[h][r] == 0 ? 0.0f : 1.0f / total[h][r];
      const int place = Owned<S>::row(r, lane);
      if (slice.target < 0) {
        const std::int64_t at = (static_cast<std::int64_t>(~slice.target) * kRows + place) * input.heads;
        if (stores) {
          reinterpret_cast<float2*>(args.partial_state)[at + first_head + h] =
              make_float2(maximum[h][r], total[h][r]);
        }
      } else {
        const std::int64_t row = window_row(window, place);
        if (stores && row >= 0) {
          args.lse[row * input.heads + first_head + h] = log_sum(maximum[h][r], total[h][r]);
        }
      }
    }
    if (slice.target >= 0) scale_rows<S>(sum, inverse, h, lane);
  }
  if (slice.target < 0) {
    store_partial<S>({args.partial, input.heads, input.value_width}, sum, ~slice.target, first_head, lane);
  } else {
    __syncwarp();
    store_rows<S>({args.out, input.heads, input.value_width}, sum, memory, window_row, window, first_head,
                  lane);
  }
}

// Adds the partial results of windows with several slices, in slot order. A block handles 128 features of one
// window, each of its warps one row.
template <typename T>
__global__ void __launch_bounds__(kWarp* kRows)
    combine_kernel(const __grid_constant__ AttentionBsbArgs args) {
  constexpr int kFeatures = 4;  // per lane: independent sums, so that loads overlap
  const RowSplitView& split = args.a.split;
  const std::int64_t heads = args.input.heads, width = heads * args.input.value_width;
  const int r = threadIdx.y;
  const std::int64_t row = WindowRow{args.a.window_row, args.a.num_rows}(split.split_row[blockIdx.x], r);
  if (row < 0) return;
  const std::int64_t begin = split.split_ptr[blockIdx.x], end = split.split_ptr[blockIdx.x + 1];
  const auto* state = reinterpret_cast<const float2*>(args.partial_state);
  std::int64_t feature[kFeatures], head[kFeatures];
  float maximum[kFeatures], total[kFeatures] = {}, sum[kFeatures] = {};
#pragma unroll
  for (int i = 0; i < kFeatures; ++i) {
    feature[i] = (static_cast<std::int64_t>(blockIdx.y) * kFeatures + i) * kWarp + threadIdx.x;
    head[i] = min(feature[i] / args.input.value_width, heads - 1);
    maximum[i] = kNoMaximum;
  }
  for (std::int64_t slot = begin; slot < end; ++slot) {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) {
      maximum[i] = fmaxf(maximum[i], __ldg(&state[(slot * kRows + r) * heads + head[i]].x));
    }
  }
  for (std::int64_t slot = begin; slot < end; ++slot) {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) {
      const float2 of_slot = __ldg(&state[(slot * kRows + r) * heads + head[i]]);
      const float weight = exp2_approx(of_slot.x - maximum[i]);
      total[i] += weight * of_slot.y;
      if (feature[i] < width)
        sum[i] += weight * __ldg(args.partial + (slot * kRows + r) * width + feature[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kFeatures; ++i) {
    if (feature[i] >= width) continue;
    static_cast<T*>(args.out)[row * width + feature[i]] = narrow<T>(total[i] == 0 ? 0.0f : sum[i] / total[i]);
    if (feature[i] % args.input.value_width == 0) {
      args.lse[row * heads + head[i]] = log_sum(maximum[i], total[i]);
    }
  }
}

struct Launch {
  const AttentionBsbArgs& args;
  cudaStream_t stream;
  cudaError_t error = cudaSuccess;

  template <typename S, int kTerms>
  void run() {
    if constexpr (kAlwaysExtras<S>) {
      run<S, kTerms, true>();
    } else {
      has_extras(args.input) ? run<S, kTerms, true>() : run<S, kTerms, false>();
    }
  }

  template <typename S, int kTerms, bool kExtras>
  void run() {
    using L = Layout<S>;
    const auto kernel = attention_kernel<S, kTerms, kExtras>;
    error = prepare_kernel(kernel, L::kWarps * L::kBytes);
    if (error != cudaSuccess) return;
    if (args.a.split.num_slices == 0) return;
    const dim3 grid(ceil_div(args.a.split.num_slices, L::kWarps), ceil_div(args.input.heads, S::kHeads));
    kernel<<<grid, kWarp * L::kWarps, L::kWarps * L::kBytes, stream>>>(args);
    if (args.a.split.num_split_rows == 0) return;
    const std::int64_t width = args.input.heads * args.input.value_width;
    combine_kernel<typename S::T>
        <<<dim3(static_cast<unsigned>(args.a.split.num_split_rows), ceil_div(width, 4 * kWarp)),
           dim3(kWarp, kRows), 0, stream>>>(args);
  }
};

}  // namespace attention_bsb_detail

int attention_bsb(const AttentionBsbArgs& args, void* stream) {
  using namespace attention_bsb_detail;
  Launch launch{args, static_cast<cudaStream_t>(stream)};
  if (!with_shape(args.input, launch)) return cudaErrorInvalidValue;
  return launch.error != cudaSuccess ? launch.error : cudaGetLastError();
}

}  // namespace fastsparse::cuda
