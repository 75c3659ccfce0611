// Additive (GAT) attention, backward, from CSR on CUDA cores. Scores are recomputed, so no intermediate array
// has one element per edge.
//
// With z the logit, p = exp(leaky_relu(z) - lse), k the dropout factor and dP_ij = <dO_i, v_j>:
//   delta_i = sum_j p k dP,   dS_ij = p (k dP - delta_i) leaky_relu'(z),
//   dscore_dst_i = sum_j dS_ij,   dscore_src_j = sum_i dS_ij,   dv_j = sum_i p k dO_i,   dbias_ij = dS_ij.
// All results except dbias are sums of dot products, so a lane adds its parts of the dot products over a
// whole slice. The lanes are reduced once at the end of the slice, not per entry.
//   - The row pass over A gathers v_j. leaky_relu' takes two values, and sum_j p (k dP - delta) = 0, so with
//     N = sum p k dP and P = sum p over the entries with z > 0 (+) and the others (-): dscore_dst = (1 -
//     slope) (N+ P- - N- P+),   delta = N+ + N-.
//   - The column pass over A^T gathers dO_i once for dv, dscore_src and dbias.
//
// Floors, for E entries of width F: 2 E F sizeof(T) bytes gathered, E heads (4 + 16) bytes of scores and row
// states. Slices of a row are combined in slot order.

#include "fastsparse/additive_score.cuh"
#include "fastsparse/combine_partials.cuh"
#include "fastsparse/head_lanes.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace additive_attention_backward_detail {

// What the column pass reads for a row and head: score_dst, lse, delta, and a factor of p. The factor makes
// the weights sum to 1 although a large lse has a rounding error.
using RowState = float4;

// N and P (see the top of the file): sums over a row's entries with positive logits (plus) and over the
// others (minus).
struct RowSums {
  float n_plus, n_minus, p_plus, p_minus;
};

__device__ __forceinline__ void finish_row(const AdditiveAttentionBackwardArgs& args, std::int64_t at,
                                           RowSums sums) {
  const float scale = normaliser(sums.p_plus + sums.p_minus);
  const float grad = sums.n_plus * sums.p_minus - sums.n_minus * sums.p_plus;
  args.grad_score_dst[at] = (1.0f - args.input.negative_slope) * grad * scale * scale;
  reinterpret_cast<RowState*>(args.row_state)[at] = make_float4(
      args.input.score_dst[at], finite_lse(args.lse[at]), (sums.n_plus + sums.n_minus) * scale, scale);
}

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads, resident_blocks<T, kVec>(8))
    additive_row_kernel(const __grid_constant__ AdditiveAttentionBackwardArgs args, int heads_per_group) {
  constexpr int kInFlight = kEntriesInFlight<kVec>;
  const AdditiveAttentionInput& input = args.input;
  const HeadLane<T, kVec, kHeadLanes> lane(input.heads, input.head_width, heads_per_group);
  const RowSlice slice = load_slice(args.split, lane.group);
  const WarpLength length(slice.length);
  const std::int64_t row = row_of(args.split, slice), row_head = lane.at(row);
  const float score_dst = input.score_dst[row_head], lse = finite_lse(args.lse[row_head]);
  float grad[kLaneFeatures];
  lane.load(grad, args.grad, row);
  const auto rows = lane.gather(input.v);

  const auto column = [&](int entry) {
    return entry < slice.length ? __ldg(args.a.col + slice.begin + entry) : 0;
  };
  const auto score_src = [&](int entry, int col) {
    return entry < slice.length ? __ldg(input.score_src + lane.at(col)) : 0.0f;
  };
  int next_col = column(lane.sub), far_col = column(kHeadLanes + lane.sub);
  float next_score = score_src(lane.sub, next_col);

  float n_plus = 0, n_minus = 0, p_plus = 0, p_minus = 0;
  for (int base = 0; base < length.longest; base += kHeadLanes) {
    const int mine = base + lane.sub, col = next_col;
    // The sign of this number says whether z > 0.
    float weight = 0;
    if (mine < slice.length) {
      float logit = score_dst + next_score;
      if (input.bias.data != nullptr) logit += edge_bias<T>(args.a, input, slice.begin + mine, lane.head);
      const float p = __expf(leaky_relu(logit, input.negative_slope) - lse);
      weight = p * dropout_factor(input.dropout, row, col, lane.head);
      if (logit > 0) {
        p_plus += p;
      } else {
        p_minus += p;
        weight = -weight;
      }
    }
    next_col = far_col;
    next_score = score_src(mine + kHeadLanes, next_col);
    far_col = column(mine + 2 * kHeadLanes);

    for_steps<kHeadLanes, kInFlight>(base, length, [&](auto whole, int step) {
      const auto has = [&](int u) { return decltype(whole)::value || base + step + u < slice.length; };
      Features<T, kVec> v[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int source = __shfl_sync(kFullWarp, col, step + u, kHeadLanes);
        v[u] = rows.load(source, has(u));
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const float entry_weight = __shfl_sync(kFullWarp, weight, step + u, kHeadLanes);
        float dot = 0;
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) dot += grad[i] * v[u][i];
        n_plus += fmaxf(entry_weight, 0.0f) * dot;
        n_minus -= fminf(entry_weight, 0.0f) * dot;
      }
    });
  }
  n_plus = sum_lanes<kHeadLanes>(n_plus);
  n_minus = sum_lanes<kHeadLanes>(n_minus);
  p_plus = sum_lanes<kHeadLanes>(p_plus);
  p_minus = sum_lanes<kHeadLanes>(p_minus);

  if (lane.group >= args.split.num_slices || !lane.live || lane.sub != 0) return;
  if (slice.target < 0) {
    reinterpret_cast<float4*>(args.partial_row)[lane.at(~slice.target)] =
        make_float4(n_plus, n_minus, p_plus, p_minus);
  } else {
    // Zeros for a row without entries, because its gradient may contain NaN, and its lanes also loop up to
    // the longest slice of their warp.
    finish_row(args, row_head, slice.length > 0 ? RowSums{n_plus, n_minus, p_plus, p_minus} : RowSums{});
  }
}

// Runs one warp per split row and head.
__global__ void __launch_bounds__(kWarp)
    combine_row_kernel(const __grid_constant__ AdditiveAttentionBackwardArgs args) {
  const std::int64_t head = blockIdx.y, end = args.split.split_ptr[blockIdx.x + 1];
  float4 sum = {};
  for (std::int64_t slot = args.split.split_ptr[blockIdx.x] + threadIdx.x; slot < end; slot += kWarp) {
    const float4 part =
        __ldg(reinterpret_cast<const float4*>(args.partial_row) + slot * args.input.heads + head);
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
  }
  sum.x = sum_lanes<kWarp>(sum.x);
  sum.y = sum_lanes<kWarp>(sum.y);
  sum.z = sum_lanes<kWarp>(sum.z);
  sum.w = sum_lanes<kWarp>(sum.w);
  const std::int64_t row = args.split.split_row[blockIdx.x];
  if (threadIdx.x == 0) finish_row(args, row * args.input.heads + head, {sum.x, sum.y, sum.z, sum.w});
}

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads, resident_blocks<T, kVec>(8))
    additive_column_kernel(const __grid_constant__ AdditiveAttentionBackwardArgs args, int heads_per_group) {
  constexpr int kInFlight = kEntriesInFlight<kVec>;
  const AdditiveAttentionInput& input = args.input;
  const HeadLane<T, kVec, kHeadLanes> lane(input.heads, input.head_width, heads_per_group);
  const RowSlice slice = load_slice(args.split_t, lane.group);
  const WarpLength length(slice.length);
  const std::int64_t source = row_of(args.split_t, slice), source_head = lane.at(source);
  const float score_src = input.score_src[source_head];
  float v[kLaneFeatures];
  lane.load(v, input.v, source);
  const auto rows = lane.gather(args.grad);

  const auto column = [&](int entry) {
    return entry < slice.length ? __ldg(args.a_t.col + slice.begin + entry) : 0;
  };
  const auto row_state = [&](int entry, int row) {
    return entry < slice.length ? __ldg(reinterpret_cast<const RowState*>(args.row_state) + lane.at(row))
                                : RowState{};
  };
  int next_row = column(lane.sub), far_row = column(kHeadLanes + lane.sub);
  RowState next_state = row_state(lane.sub, next_row);

  float grad_v[kLaneFeatures] = {};
  float grad_score = 0;
  for (int base = 0; base < length.longest; base += kHeadLanes) {
    const int mine = base + lane.sub, row = next_row;
    // The sign of this number says whether z > 0.
    float weight = 0, constant = 0;
    if (mine < slice.length) {
      float logit = next_state.x + score_src;
      if (input.bias.data != nullptr) logit += edge_bias<T>(args.a_t, input, slice.begin + mine, lane.head);
      const float p = __expf(leaky_relu(logit, input.negative_slope) - next_state.y) * next_state.w;
      weight = p * dropout_factor(input.dropout, row, source, lane.head);
      constant = p * next_state.z * leaky_relu_slope(logit, input.negative_slope);
      grad_score -= constant;
      if (logit <= 0) weight = -weight;
    }
    next_row = far_row;
    next_state = row_state(mine + kHeadLanes, next_row);
    far_row = column(mine + 2 * kHeadLanes);

    for_steps<kHeadLanes, kInFlight>(base, length, [&](auto whole, int step) {
      const auto has = [&](int u) { return decltype(whole)::value || base + step + u < slice.length; };
      Features<T, kVec> grad[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int entry_row = __shfl_sync(kFullWarp, row, step + u, kHeadLanes);
        grad[u] = rows.load(entry_row, has(u));
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const float entry_weight = __shfl_sync(kFullWarp, weight, step + u, kHeadLanes);
        const float factor = fabsf(entry_weight);
        float dot = 0;
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) {
          const float g = grad[u][i];
          dot += g * v[i];
          grad_v[i] += factor * g;
        }
        const float score_part = (entry_weight > 0 ? factor : input.negative_slope * factor) * dot;
        grad_score += score_part;
        if (args.grad_bias != nullptr) {
          const float whole = sum_lanes<kHeadLanes>(score_part);
          if (lane.sub == step + u && mine < slice.length && lane.live) {
            const std::int64_t at = edge_position(args.a_t, slice.begin + mine) * input.heads + lane.head;
            if (input.bias.dtype == input.dtype) {
              static_cast<T*>(args.grad_bias)[at] = narrow<T>(whole - constant);
            } else {
              static_cast<float*>(args.grad_bias)[at] = whole - constant;
            }
          }
        }
      }
    });
  }
  grad_score = sum_lanes<kHeadLanes>(grad_score);

  if (lane.group >= args.split_t.num_slices || !lane.live) return;
  const std::int64_t width = input.heads * input.head_width;
  if (slice.target < 0) {
    lane.template store<float>(args.partial_v, ~slice.target, width, grad_v);
    if (lane.sub == 0) args.partial_score[lane.at(~slice.target)] = grad_score;
  } else {
    lane.template store<T>(args.grad_v, source, width, grad_v);
    // Zero for a source without entries, because the source may contain NaN, as in the row pass.
    if (lane.sub == 0) args.grad_score_src[source_head] = slice.length > 0 ? grad_score : 0.0f;
  }
}

template <typename T, int kVec, int kHeadLanes>
void launch(const AdditiveAttentionBackwardArgs& args, cudaStream_t stream) {
  const AdditiveAttentionInput& input = args.input;
  const int per_group = heads_per_group(input.heads, kHeadLanes);
  if (args.split.num_slices > 0) {
    additive_row_kernel<T, kVec, kHeadLanes>
        <<<head_grid(args.split.num_slices, input.heads, kHeadLanes), kHeadThreads, 0, stream>>>(args,
                                                                                                 per_group);
  }
  if (args.split.num_split_rows > 0) {
    const dim3 grid(static_cast<unsigned>(args.split.num_split_rows), static_cast<unsigned>(input.heads));
    combine_row_kernel<<<grid, kWarp, 0, stream>>>(args);
  }
  if (args.split_t.num_slices == 0) return;
  additive_column_kernel<T, kVec, kHeadLanes>
      <<<head_grid(args.split_t.num_slices, input.heads, kHeadLanes), kHeadThreads, 0, stream>>>(args,
                                                                                                 per_group);
  combine_partials<T, 1>(args.split_t, args.partial_v,
                         Epilogue::only(args.grad_v, input.heads * input.head_width), SameRow{}, stream);
  combine_partials<float, 1>(args.split_t, args.partial_score,
                             Epilogue::only(args.grad_score_src, input.heads), SameRow{}, stream);
}

}  // namespace additive_attention_backward_detail

int additive_attention_backward(const AdditiveAttentionBackwardArgs& args, void* stream_address) {
  using namespace additive_attention_backward_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  const AdditiveAttentionInput& input = args.input;
  with_head_lanes(input.dtype, input.head_width, {input.v.stride, args.grad.stride},
                  {input.v.data, args.grad.data, args.grad_v, args.partial_v},
                  [&](auto type, auto vec, auto head_lanes) {
                    launch<decltype(type), decltype(vec)::value, decltype(head_lanes)::value>(args, stream);
                  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
