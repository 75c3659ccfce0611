// GATv2 attention, forward, from CSR on CUDA cores.
//
// The score <att, leaky_relu(x_dst_i + x_src_j)> is not a matrix product, so tensor cores are not used. The
// gathered row x_src_j is also the value, so there is one gather. Per entry and feature, there are a
// conversion, a sum, leaky_relu (slope product, maximum) and two multiply-adds. Floors, for E entries of
// width F: E F sizeof(T) bytes gathered and 6 E F lane instructions. The instructions take longer than the
// gather if 16-bit features are in the L2 cache. The online softmax rescales once for all entries in flight.

#include "fastsparse/additive_score.cuh"
#include "fastsparse/head_lanes.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace gatv2_attention_detail {

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads, resident_blocks<T, kVec>(6))
    gatv2_kernel(const __grid_constant__ Gatv2AttentionArgs args, int heads_per_group) {
  constexpr int kInFlight = kEntriesInFlight<kVec>;
  const Gatv2AttentionInput& input = args.input;
  const HeadLane<T, kVec, kHeadLanes> lane(input.heads, input.head_width, heads_per_group);
  const RowSlice slice = load_slice(args.split, lane.group);
  const WarpLength length(slice.length);
  const std::int64_t row = row_of(args.split, slice);
  float x_dst[kLaneFeatures], att[kLaneFeatures];
  lane.load(x_dst, input.x_dst, row);
  lane.load_vector(att, input.att);
  const auto rows = lane.gather(input.x_src);

  const auto column = [&](int entry) {
    return entry < slice.length ? __ldg(args.a.col + slice.begin + entry) : 0;
  };
  int next_col = column(lane.sub);

  float max = -kInfinity, sum = 0;
  float acc[kLaneFeatures] = {};
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
      float score[kInFlight];
      float new_max = max;
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        float part = 0;
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) {
          part += att[i] * leaky_relu_up_to_1(x_dst[i] + x_src[u][i], input.negative_slope);
        }
        part = sum_lanes<kHeadLanes>(part);
        score[u] = has(u) ? part : -kInfinity;
        new_max = fmaxf(new_max, score[u]);
      }
      const float reference = reference_score(new_max);
      if (__any_sync(kFullWarp, new_max > max)) {
        const float rescale = __expf(max - reference);
        sum *= rescale;
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) acc[i] *= rescale;
      }
      max = new_max;
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        float weight = __expf(score[u] - reference);
        sum += weight;
        weight *= __shfl_sync(kFullWarp, factor, step + u, kHeadLanes);
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) acc[i] += weight * x_src[u][i];
      }
    });
  }

  if (lane.group >= args.split.num_slices || !lane.live) return;
  const std::int64_t width = input.heads * input.head_width;
  if (slice.target < 0) {
    const std::int64_t slot = ~slice.target;
    lane.template store<float>(args.partial, slot, width, acc);
    if (lane.sub == 0) {
      reinterpret_cast<float2*>(args.partial_state)[lane.at(slot)] = make_float2(max, sum);
    }
    return;
  }
  const float scale = normaliser(sum);
#pragma unroll
  for (int i = 0; i < kLaneFeatures; ++i) acc[i] *= scale;
  lane.template store<T>(args.out, row, width, acc);
  if (lane.sub == 0) args.lse[lane.at(row)] = log_sum_exp(max, sum);
}

}  // namespace gatv2_attention_detail

int gatv2_attention(const Gatv2AttentionArgs& args, void* stream_address) {
  using namespace gatv2_attention_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  const Gatv2AttentionInput& input = args.input;
  with_head_lanes(
      input.dtype, input.head_width, {input.x_dst.stride, input.x_src.stride},
      {input.x_dst.data, input.x_src.data, args.out, args.partial},
      [&](auto type, auto vec, auto head_lanes) {
        using T = decltype(type);
        constexpr int kVec = decltype(vec)::value, kHeadLanes = decltype(head_lanes)::value;
        gatv2_kernel<T, kVec, kHeadLanes>
            <<<head_grid(args.split.num_slices, input.heads, kHeadLanes), kHeadThreads, 0, stream>>>(
                args, heads_per_group(input.heads, kHeadLanes));
        combine_softmax<T>(args.split, args.partial, args.partial_state, input.heads, input.head_width,
                           args.out, args.lse, stream);
      });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
