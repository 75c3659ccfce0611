// Backward pass of the fused dot-product attention (attention_bsb.cu). Scores are recomputed, and the saved
// log-sum-exp normalises them, as in FlashAttention-2, so no intermediate array has one element per edge.
// There are no atomics.
//
// With P = softmax(S), M the dropout factors, delta_i = <dO_i, O_i>, dP = dO V^T and, element by element, dS
// = P (M dP - delta):
//   - A pass over the structure gathers K and V and computes dQ = scale dS K, and the gradient dS of the
//     bias.
//   - A pass over the transposed structure gathers Q and dO and computes dK = scale dS^T Q and dV = (M P)^T
//     dO.
//
// Both passes use one kernel. With own rows A, B and gathered rows X, Y, the scores are A X^T, and the
// products with gradients are B Y^T. The kernel sums dS X and, in the second pass, also (M P) Y. Each row is
// gathered once for both of its products.

#include "fastsparse/attention_tiles.cuh"
#include "fastsparse/combine_partials.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace attention_bsb_backward_detail {

using namespace attention;

// What the passes read for a row and head: x is the log-sum-exp, and y is delta. In float32, z is the
// rounding error of x, which is 5e-4 for scores of 10,000.
template <typename T>
using RowState = std::conditional_t<std::is_same_v<T, float>, float4, float2>;

// The arguments of one pass. In the transposed pass, own rows are sources, and gathered rows are
// destinations.
struct Pass {
  BsbView a;
  AttentionBsbInput input;
  DenseView own_a, own_b;  // Q, dO; transposed: K, V
  DenseView x, y;          // K, V; transposed: Q, dO
  const void* row_state;
  void* grad_bias;
  void* grad_a;      // gradient of the matrix in own_a
  void* grad_b;      // transposed: gradient of V; otherwise unused
  float* partial_a;  // partial results of grad_a, for windows with several slices
  float* partial_b;
};

// Layout of a warp's shared memory: stages of two tiles, the states of the gathered rows, and the quads of
// the stages' blocks. The last stage has the own rows until they are loaded, if they fit the registers. The
// first stage has the results after the last block.
template <typename S, bool kTransposed>
struct Layout {
  static constexpr bool kKeepOwn = 2 * S::kPieces + (kTransposed ? 8 : 4) * S::kTiles <= 128;
  static constexpr int kStageBytes = 2 * S::kTileBytes;
  static constexpr int kStateBytes =
      kTransposed ? kBlockVectors * S::kHeads * static_cast<int>(sizeof(RowState<typename S::T>)) : 0;
  static constexpr int kOwnA = (kKeepOwn ? kStages - 1 : kStages) * kStageBytes;
  static constexpr int kOwnB = kOwnA + S::kOwnBytes;
  static constexpr int kState = kStages * kStageBytes + (kKeepOwn ? 0 : 2 * S::kOwnBytes);
  static constexpr int kBlocks = kState + kStages * kStateBytes;
  static constexpr int kBytes = kBlocks + kStages * kBlockBytes;
  static constexpr int kWarps = warps_of_block(kBytes);
  static constexpr int kBlocksAtOnce = blocks_at_once(kBytes, S::kHeads > 1 ? 16 : 20);
};

// Copies the states of the 16 gathered rows, in the order of the block's vectors.
template <typename S>
__device__ __forceinline__ void copy_state(std::uint32_t to, const RowState<typename S::T>* state,
                                           const std::uint32_t (&column)[kOwned], std::int64_t first_head,
                                           std::int64_t heads, int lane) {
  const std::int64_t row = lane / 2 % 2 ? lane % 2 ? column[3] : column[2] : lane % 2 ? column[1] : column[0];
  const int vector = lane / 8 * 4 + lane % 4;
#pragma unroll
  for (int h = 0; h < S::kHeads; h += 2) {
    const int head = h + lane / 4 % 2;
    const bool present = first_head + head < heads;
    if (head < S::kHeads) {
      constexpr int kBytes = static_cast<int>(sizeof *state);
      copy_async<kBytes>(to + (vector * S::kHeads + head) * kBytes,
                         state + row * heads + (present ? first_head + head : 0), present ? kBytes : 0);
    }
  }
}

template <typename S, int kTerms, bool kExtras, bool kTransposed>
__global__ void __launch_bounds__(kWarp* Layout<S, kTransposed>::kWarps,
                                  Layout<S, kTransposed>::kBlocksAtOnce)
    attention_backward_kernel(const __grid_constant__ Pass args) {
  using L = Layout<S, kTransposed>;
  using State = RowState<typename S::T>;
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

  const Table<S> x(args.x, first_head, input.heads, input.head_width, lane);
  const Table<S> y(args.y, first_head, input.heads, input.value_width, lane);
  const std::uint32_t* quads = args.a.quad + slice.begin * kQuadWords;
  const int num_blocks = (slice.length + kBlockQuads - 1) / kBlockQuads;
  PackedColumns next = load_columns(quads, lane / 8);
  // Starts the copies of the block whose columns are in `next`, and reads the columns of the block after it.
  // The array is padded, so this read may go past the slice.
  const auto start = [&](int index) {
    const int nth = index % kStages;
    if (index < num_blocks) {
      const int left = slice.length - index * kBlockQuads;
      cut_words(next.word, left);
      std::uint32_t column[kOwned];
      unpack(next, column);
      copy_tile<S>(memory + nth * L::kStageBytes, x, column, lane);
      copy_tile<S>(memory + nth * L::kStageBytes + S::kTileBytes, y, column, lane);
      copy_block(memory + L::kBlocks + nth * kBlockBytes, quads + index * (kBlockQuads * kQuadWords), left,
                 lane);
      if constexpr (kTransposed) {
        copy_state<S>(memory + L::kState + nth * L::kStateBytes, static_cast<const State*>(args.row_state),
                      column, first_head, input.heads, lane);
      }
    }
    commit_copies();
    next = load_columns(quads, (index + 1) * kBlockQuads + lane / 8);
  };
  const float scale = input.scale * kLog2E;
  State own_state[S::kHeads][kRowsOwned] = {};
  if constexpr (!kTransposed) {
#pragma unroll
    for (int r = 0; r < kRowsOwned; ++r) {
      const std::int64_t row = window_row(window, Owned<S>::row(r, lane));
#pragma unroll
      for (int h = 0; h < S::kHeads; ++h) {
        if (row >= 0 && first_head + h < input.heads) {
          own_state[h][r] =
              __ldg(static_cast<const State*>(args.row_state) + row * input.heads + first_head + h);
        }
      }
    }
  }

  float sum_a[S::kTiles][4], sum_b[S::kTiles][4];
  // If a sum is infinite or NaN, the loop runs again, entry by entry.
  for (bool by_entry = false;; by_entry = true) {
    if (slice.length > 0) {
      const Table<S> a(args.own_a, first_head, input.heads, input.head_width, lane);
      copy_own<S>(memory + L::kOwnA, a, window_row, window, lane);
      const Table<S> b(args.own_b, first_head, input.heads, input.value_width, lane);
      copy_own<S>(memory + L::kOwnB, b, window_row, window, lane);
    }
#pragma unroll
    for (int index = 0; index + 1 < kStages; ++index) start(index);
    std::uint32_t own_a[S::kPieces], own_b[S::kPieces];
#pragma unroll
    for (int f = 0; f < S::kTiles; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum_a[f][i] = sum_b[f][i] = 0;
    }
    for (int index = 0; index < num_blocks; ++index) {
      wait_for_copies<kStages - 2>();
      if (index == 0 && L::kKeepOwn) {
        load_own<S>(own_a, memory + L::kOwnA, lane);
        load_own<S>(own_b, memory + L::kOwnB, lane);
        __syncwarp();
      }
      start(index + kStages - 1);  // all lanes are here, so the previous tile is not in use
      const int nth = index % kStages;
      const std::uint32_t tile_x = memory + nth * L::kStageBytes, tile_y = tile_x + S::kTileBytes;
      const std::uint32_t block = memory + L::kBlocks + nth * kBlockBytes;
      const Entries<S> entries(block, lane);
      const bool drops = kExtras && input.dropout.threshold != 0;
      const std::uint32_t drawn =
          drops ? entries.template draw<kTransposed>(input.dropout, window_row, window, first_head) : 0;
      std::int64_t position[kOwned];
      if constexpr (kExtras) {
        if (input.bias.data != nullptr) {
          entries.positions(position, args.a, slice.begin + index * kBlockQuads);
        }
      }
#pragma unroll
      for (int h = 0; h < S::kHeads; ++h) {
        float score[kOwned], product[kOwned];
        if constexpr (!L::kKeepOwn) load_own<S>(own_a, memory + L::kOwnA, lane);
        multiply_rows<S, kTerms>(score, own_a, tile_x, h, lane);
        if constexpr (!L::kKeepOwn) load_own<S>(own_b, memory + L::kOwnB, lane);
        multiply_rows<S, kTerms>(product, own_b, tile_y, h, lane);
        State gathered_state[Owned<S>::kVectors];
        if constexpr (kTransposed) {
#pragma unroll
          for (int n = 0; n < Owned<S>::kVectors; ++n) {
            const int at = (Owned<S>::vector(n, lane) * S::kHeads + h) * static_cast<int>(sizeof(State));
            load_shared(gathered_state[n], memory + L::kState + nth * L::kStateBytes + at);
          }
        }
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
          const State state = kTransposed ? gathered_state[i / kRowsOwned] : own_state[h][i % kRowsOwned];
          // Rounded in the same way as in the forward pass, so that the only score of a row has exactly the
          // weight 1.
          float power = __fmul_rn(score[i], scale), factor = 1;
          if constexpr (kExtras) {
            power += entries.bias(input, i, position[i], first_head + h);
          }
          if (drops && entries.present(i)) {
            factor = entries.template factor<kTransposed>(input.dropout, drawn, i, h, window_row, window,
                                                          first_head);
          }
          power -= state.x;
          if constexpr (S::kFloat) power -= state.z;
          const float p = entries.present(i) ? exp2_approx(power) : 0.0f;
          score[i] = entries.present(i) ? p * (factor * product[i] - state.y) : 0.0f;
          product[i] = p * factor;
          if constexpr (kExtras && !kTransposed) {
            if (args.grad_bias != nullptr && entries.present(i) && first_head + h < input.heads) {
              const std::int64_t at = position[i] * input.heads + first_head + h;
              if (input.bias.dtype == input.dtype) {
                static_cast<typename S::T*>(args.grad_bias)[at] = narrow<typename S::T>(score[i]);
              } else {
                static_cast<float*>(args.grad_bias)[at] = score[i];
              }
            }
          }
        }
        if (by_entry) {
          add_entries<S>(sum_a, tile_x, block, score, h, lane);
          if constexpr (kTransposed) add_entries<S>(sum_b, tile_y, block, product, h, lane);
        } else {
          add_columns<S, kTerms>(sum_a, tile_x, score, h, lane);
          if constexpr (kTransposed) add_columns<S, kTerms>(sum_b, tile_y, product, h, lane);
        }
      }
    }

    if (by_entry || (finite<S>(sum_a) && (!kTransposed || finite<S>(sum_b)))) break;
    next = load_columns(quads, lane / 8);
    __syncwarp();
  }
#pragma unroll
  for (int f = 0; f < S::kTiles; ++f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum_a[f][i] *= input.scale;
  }
  if (slice.target < 0) {
    const std::int64_t slot = ~slice.target;
    store_partial<S>({args.partial_a, input.heads, input.head_width}, sum_a, slot, first_head, lane);
    if constexpr (kTransposed) {
      store_partial<S>({args.partial_b, input.heads, input.value_width}, sum_b, slot, first_head, lane);
    }
    return;
  }
  __syncwarp();
  store_rows<S>({args.grad_a, input.heads, input.head_width}, sum_a, memory, window_row, window, first_head,
                lane);
  if constexpr (kTransposed) {
    store_rows<S>({args.grad_b, input.heads, input.value_width}, sum_b, memory, window_row, window,
                  first_head, lane);
  }
}

// RowState of every row and head, computed by 8 lanes each. A log-sum-exp of minus infinity becomes 0, so
// that the scores of such a row, if any, keep the weight 0.
template <typename T>
__global__ void __launch_bounds__(128)
    row_state_kernel(const __grid_constant__ AttentionBsbBackwardArgs args) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  const std::int64_t heads = args.input.heads, width = args.input.value_width;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * (128 / 8) + threadIdx.x / 8;
  const bool inside = item < args.a.num_rows * heads;
  const std::int64_t row = inside ? item / heads : 0, head = inside ? item % heads : 0;
  const T* out = static_cast<const T*>(args.out) + row * heads * width + head * width;
  const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride + head * width;
  float delta = 0;
  for (std::int64_t feature = threadIdx.x % 8 * kPack; inside && feature < width; feature += 8 * kPack) {
    const auto o = load_pack<T, kPack>(out + feature), d = load_pack<T, kPack>(grad + feature);
#pragma unroll
    for (int i = 0; i < kPack; ++i) delta += widen(o.lane[i]) * widen(d.lane[i]);
  }
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) delta += __shfl_xor_sync(kFullWarp, delta, distance);
  if (!inside || threadIdx.x % 8 != 0) return;
  const double lse = args.lse[item] == -INFINITY ? 0.0 : args.lse[item];
  RowState<T> state{static_cast<float>(lse), delta};
  if constexpr (std::is_same_v<T, float>) state.z = static_cast<float>(lse - state.x);
  reinterpret_cast<RowState<T>*>(args.row_state)[item] = state;
}

struct Launch {
  const AttentionBsbBackwardArgs& args;
  cudaStream_t stream;
  cudaError_t error = cudaSuccess;

  template <typename S, int kTerms>
  void run() {
    using T = typename S::T;
    const AttentionBsbInput& input = args.input;
    const void* state = args.row_state;
    const std::int64_t items = args.a.num_rows * input.heads;
    if (items > 0) row_state_kernel<T><<<ceil_div(items, 128 / 8), 128, 0, stream>>>(args);
    run_pass<S, kTerms, false>({args.a, input, input.q, args.grad, input.k, input.v, state, args.grad_bias,
                                args.grad_q, nullptr, args.partial_q, nullptr});
    run_pass<S, kTerms, true>({args.a_t, input, input.k, input.v, input.q, args.grad, state, nullptr,
                               args.grad_k, args.grad_v, args.partial_k, args.partial_v});
  }

  template <typename S, int kTerms, bool kTransposed>
  void run_pass(const Pass& pass) {
    if constexpr (kAlwaysExtras<S>) {
      run_kernel<S, kTerms, true, kTransposed>(pass);
    } else {
      has_extras(pass.input) ? run_kernel<S, kTerms, true, kTransposed>(pass)
                             : run_kernel<S, kTerms, false, kTransposed>(pass);
    }
  }

  template <typename S, int kTerms, bool kExtras, bool kTransposed>
  void run_kernel(const Pass& pass) {
    using T = typename S::T;
    using L = Layout<S, kTransposed>;
    if (error != cudaSuccess || pass.a.split.num_slices == 0) return;
    const auto kernel = attention_backward_kernel<S, kTerms, kExtras, kTransposed>;
    error = prepare_kernel(kernel, L::kWarps * L::kBytes);
    if (error != cudaSuccess) return;
    const std::int64_t heads = pass.input.heads;
    const dim3 grid(ceil_div(pass.a.split.num_slices, L::kWarps), ceil_div(heads, S::kHeads));
    kernel<<<grid, kWarp * L::kWarps, L::kWarps * L::kBytes, stream>>>(pass);
    const WindowRow window_row{pass.a.window_row, pass.a.num_rows};
    const Epilogue a = Epilogue::only(pass.grad_a, heads * pass.input.head_width);
    combine_partials<T, kRows>(pass.a.split, pass.partial_a, a, window_row, stream);
    if constexpr (kTransposed) {
      const Epilogue b = Epilogue::only(pass.grad_b, heads * pass.input.value_width);
      combine_partials<T, kRows>(pass.a.split, pass.partial_b, b, window_row, stream);
    }
  }
};

}  // namespace attention_bsb_backward_detail

int attention_bsb_backward(const AttentionBsbBackwardArgs& args, void* stream) {
  using namespace attention_bsb_backward_detail;
  Launch launch{args, static_cast<cudaStream_t>(stream)};
  if (!with_shape(args.input, launch)) return cudaErrorInvalidValue;
  return launch.error != cudaSuccess ? launch.error : cudaGetLastError();
}

}  // namespace fastsparse::cuda
