// GATv2 attention, backward, from CSR on CUDA cores. Scores are recomputed, so no array has one element per
// edge.
//
// With z = x_dst_i + x_src_j, s = <att, leaky_relu(z)>, p = exp(s - lse_i), k the dropout factor, dP = <dO_i,
// x_src_j>, delta_i = <dO_i, out_i> and dS = p (k dP - delta_i), per head and feature f:
//   dx_dst_i = sum_j dS att leaky_relu'(z),   dx_src_j = sum_i p k dO_i + dS att leaky_relu'(z),
//   datt = sum_ij dS leaky_relu(z).
// leaky_relu' is slope + (1 - slope) [z > 0], so the only sum per feature is that of dS [z > 0]: sum_j dS is
// 0, and sum_i dS is one number per head.
//   - The row pass over A gathers x_src_j. A group of lanes handles many slices and keeps its part of datt in
//     registers; the caller adds the groups' parts.
//   - The column pass over A^T gathers x_dst_i and dO_i.
//
// Floors, for E entries of width F: 3 E F sizeof(T) bytes gathered; about 10 instructions per feature, entry
// and pass. Slices of a row are combined in slot order, without atomics.

#include <algorithm>

#include "fastsparse/additive_score.cuh"
#include "fastsparse/combine_partials.cuh"
#include "fastsparse/head_lanes.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace gatv2_attention_backward_detail {

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads, resident_blocks<T, kVec>(4))
    gatv2_row_kernel(const __grid_constant__ Gatv2AttentionBackwardArgs args, int heads_per_group) {
  constexpr int kInFlight = kEntriesInFlight<kVec>;
  const Gatv2AttentionInput& input = args.input;
  const HeadLane<T, kVec, kHeadLanes> lane(input.heads, input.head_width, heads_per_group);
  const std::int64_t width = input.heads * input.head_width;
  float att[kLaneFeatures], grad_att[kLaneFeatures] = {};
  lane.load_vector(att, input.att);
  const auto rows = lane.gather(input.x_src);

  for (std::int64_t first = 0; first < args.split.num_slices; first += args.att_rows) {
    const std::int64_t index = first + lane.group;
    const RowSlice slice = load_slice(args.split, index);
    const WarpLength length(slice.length);
    const std::int64_t row = row_of(args.split, slice), row_head = lane.at(row);
    float x_dst[kLaneFeatures], grad[kLaneFeatures], out[kLaneFeatures], grad_x[kLaneFeatures] = {};
    // Zeros for a row without entries, because the row may contain NaN, and its lanes also loop up to the
    // longest slice of their warp.
    lane.load(x_dst, input.x_dst, row, slice.length > 0);
    lane.load(grad, args.grad, row, slice.length > 0);
    lane.load(out, args.out, row);
    const float lse = finite_lse(args.lse[row_head]);
    float delta = 0;
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) delta += grad[i] * out[i];
    delta = sum_lanes<kHeadLanes>(delta);

    float score_sum = 0;
    const auto column = [&](int entry) {
      return entry < slice.length ? __ldg(args.a.col + slice.begin + entry) : 0;
    };
    int next_col = column(lane.sub);
    for (int base = 0; base < length.longest; base += kHeadLanes) {
      const int col = next_col;
      const float factor = dropout_factor(input.dropout, row, col, lane.head);
      next_col = column(base + kHeadLanes + lane.sub);
      for_steps<kHeadLanes, kInFlight>(base, length, [&](auto whole, int step) {
        const auto has = [&](int u) { return decltype(whole)::value || base + step + u < slice.length; };
        Features<T, kVec> x_src[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const int source = __shfl_sync(kFullWarp, col, step + u, kHeadLanes);
          x_src[u] = rows.load(source, has(u));
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          float activated[kLaneFeatures];
          float score = 0, dot = 0;
#pragma unroll
          for (int i = 0; i < kLaneFeatures; ++i) {
            const float x = x_src[u][i];
            activated[i] = leaky_relu_up_to_1(x_dst[i] + x, input.negative_slope);
            score += att[i] * activated[i];
            dot += grad[i] * x;
          }
          score = sum_lanes<kHeadLanes>(score);
          dot = sum_lanes<kHeadLanes>(dot);
          const float p = has(u) ? __expf(score - lse) : 0.0f;
          const float grad_score = p * (__shfl_sync(kFullWarp, factor, step + u, kHeadLanes) * dot - delta);
          score_sum += grad_score;
#pragma unroll
          for (int i = 0; i < kLaneFeatures; ++i) {
            grad_att[i] += grad_score * activated[i];
            if (activated[i] > 0) grad_x[i] += grad_score;
          }
        }
      });
    }

    if (index >= args.split.num_slices || !lane.live) continue;
    // The part of dx_dst with the factor `slope` sums to 0 and is left out. If a score is NaN, dx_dst must be
    // NaN, too.
    const float zero_or_nan = 0.0f * score_sum;
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) {
      grad_x[i] = (1.0f - input.negative_slope) * att[i] * grad_x[i] + zero_or_nan;
    }
    if (slice.target < 0) {
      lane.template store<float>(args.partial_dst, ~slice.target, width, grad_x);
    } else {
      lane.template store<T>(args.grad_x_dst, row, width, grad_x);
    }
    if (lane.sub == 0 && slice.begin == args.a.rowptr[row]) {  // the first slice of the row
      reinterpret_cast<float2*>(args.row_state)[row_head] = make_float2(lse, delta);
    }
  }
  if (lane.live) lane.template store<float>(args.grad_att, lane.group, width, grad_att);
}

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads, resident_blocks<T, kVec>(5))
    gatv2_column_kernel(const __grid_constant__ Gatv2AttentionBackwardArgs args, int heads_per_group) {
  constexpr int kInFlight = kEntriesInFlight<kVec>;
  const Gatv2AttentionInput& input = args.input;
  const HeadLane<T, kVec, kHeadLanes> lane(input.heads, input.head_width, heads_per_group);
  const RowSlice slice = load_slice(args.split_t, lane.group);
  const WarpLength length(slice.length);
  const std::int64_t source = row_of(args.split_t, slice);
  float att[kLaneFeatures], x_src[kLaneFeatures];
  lane.load_vector(att, input.att);
  lane.load(x_src, input.x_src, source, slice.length > 0);
  const auto x_dst_rows = lane.gather(input.x_dst), grad_rows = lane.gather(args.grad);

  const auto column = [&](int entry) {
    return entry < slice.length ? __ldg(args.a_t.col + slice.begin + entry) : 0;
  };
  const auto row_state = [&](int entry, int row) {
    return entry < slice.length ? __ldg(reinterpret_cast<const float2*>(args.row_state) + lane.at(row))
                                : make_float2(0, 0);
  };
  int next_row = column(lane.sub), far_row = column(kHeadLanes + lane.sub);
  float2 next_state = row_state(lane.sub, next_row);

  float value_part[kLaneFeatures] = {}, positive_part[kLaneFeatures] = {};
  float score_sum = 0;
  for (int base = 0; base < length.longest; base += kHeadLanes) {
    const int row = next_row;
    const float2 state = next_state;
    const float factor = dropout_factor(input.dropout, row, source, lane.head);
    next_row = far_row;
    next_state = row_state(base + kHeadLanes + lane.sub, next_row);
    far_row = column(base + 2 * kHeadLanes + lane.sub);
    for_steps<kHeadLanes, kInFlight>(base, length, [&](auto whole, int step) {
      const auto has = [&](int u) { return decltype(whole)::value || base + step + u < slice.length; };
      Features<T, kVec> x_dst[kInFlight], grad[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int entry_row = __shfl_sync(kFullWarp, row, step + u, kHeadLanes);
        x_dst[u] = x_dst_rows.load(entry_row, has(u));
        grad[u] = grad_rows.load(entry_row, has(u));
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        float activated[kLaneFeatures];
        float score = 0, dot = 0;
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) {
          activated[i] = leaky_relu_up_to_1(x_dst[u][i] + x_src[i], input.negative_slope);
          score += att[i] * activated[i];
          dot += grad[u][i] * x_src[i];
        }
        score = sum_lanes<kHeadLanes>(score);
        dot = sum_lanes<kHeadLanes>(dot);
        const float lse = __shfl_sync(kFullWarp, state.x, step + u, kHeadLanes);
        const float delta = __shfl_sync(kFullWarp, state.y, step + u, kHeadLanes);
        const float p = has(u) ? __expf(score - lse) : 0.0f;
        const float weight = p * __shfl_sync(kFullWarp, factor, step + u, kHeadLanes);
        const float grad_score = weight * dot - p * delta;
        score_sum += grad_score;
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) {
          value_part[i] += weight * grad[u][i];
          if (activated[i] > 0) positive_part[i] += grad_score;
        }
      }
    });
  }

  if (lane.group >= args.split_t.num_slices || !lane.live) return;
  const float slope = input.negative_slope;
#pragma unroll
  for (int i = 0; i < kLaneFeatures; ++i) {
    value_part[i] += att[i] * (slope * score_sum + (1.0f - slope) * positive_part[i]);
  }
  const std::int64_t width = input.heads * input.head_width;
  if (slice.target < 0) {
    lane.template store<float>(args.partial_src, ~slice.target, width, value_part);
  } else {
    lane.template store<T>(args.grad_x_src, source, width, value_part);
  }
}

template <typename T, int kVec, int kHeadLanes>
void launch(const Gatv2AttentionBackwardArgs& args, cudaStream_t stream) {
  const Gatv2AttentionInput& input = args.input;
  const int per_group = heads_per_group(input.heads, kHeadLanes);
  const std::int64_t width = input.heads * input.head_width;
  // Groups without a slice also write zeros for datt.
  gatv2_row_kernel<T, kVec, kHeadLanes>
      <<<head_grid(args.att_rows, input.heads, kHeadLanes), kHeadThreads, 0, stream>>>(args, per_group);
  combine_partials<T, 1>(args.split, args.partial_dst, Epilogue::only(args.grad_x_dst, width), SameRow{},
                         stream);
  if (args.split_t.num_slices == 0) return;
  gatv2_column_kernel<T, kVec, kHeadLanes>
      <<<head_grid(args.split_t.num_slices, input.heads, kHeadLanes), kHeadThreads, 0, stream>>>(args,
                                                                                                 per_group);
  combine_partials<T, 1>(args.split_t, args.partial_src, Epilogue::only(args.grad_x_src, width), SameRow{},
                         stream);
}

}  // namespace gatv2_attention_backward_detail

int gatv2_attention_backward(const Gatv2AttentionBackwardArgs& args, void* stream_address) {
  using namespace gatv2_attention_backward_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  const Gatv2AttentionInput& input = args.input;
  with_head_lanes(input.dtype, input.head_width,
                  {input.x_dst.stride, input.x_src.stride, args.out.stride, args.grad.stride},
                  {input.x_dst.data, input.x_src.data, args.out.data, args.grad.data, args.grad_x_dst,
                   args.grad_x_src, args.grad_att, args.partial_dst, args.partial_src},
                  [&](auto type, auto vec, auto head_lanes) {
                    launch<decltype(type), decltype(vec)::value, decltype(head_lanes)::value>(args, stream);
                  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
