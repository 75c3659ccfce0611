// Additive (GAT) attention, forward, from CSR on CUDA cores.
//
// A score is one number per entry and head, so each lane computes the softmax weight of one entry of a batch
// (head_lanes.cuh) and passes it to the head's other lanes by shuffles. As in spmm_csr.cu, the gather of v is
// the bottleneck. Floors per call, for E entries of width F: E F sizeof(T) bytes gathered, and E heads 4
// bytes of scores. The softmax is online: sums are relative to the largest score so far, and are rescaled
// when a larger score comes. If a row has several slices, each of them stores (maximum, sum, output), and a
// second kernel combines them in slot order.

#include "fastsparse/additive_score.cuh"
#include "fastsparse/head_lanes.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace additive_attention_detail {

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads, resident_blocks<T, kVec>(8))
    additive_kernel(const __grid_constant__ AdditiveAttentionArgs args, int heads_per_group) {
  constexpr int kInFlight = kEntriesInFlight<kVec>;
  const AdditiveAttentionInput& input = args.input;
  const HeadLane<T, kVec, kHeadLanes> lane(input.heads, input.head_width, heads_per_group);
  const RowSlice slice = load_slice(args.split, lane.group);
  const WarpLength length(slice.length);
  const std::int64_t row = row_of(args.split, slice);
  const float score_dst = slice.length > 0 ? input.score_dst[lane.at(row)] : 0.0f;

  const auto rows = lane.gather(input.v);

  // Columns are read two batches ahead, and the scores of their sources one batch ahead.
  const auto column = [&](int entry) {
    return entry < slice.length ? __ldg(args.a.col + slice.begin + entry) : 0;
  };
  const auto score_src = [&](int entry, int col) {
    return entry < slice.length ? __ldg(input.score_src + lane.at(col)) : 0.0f;
  };
  int next_col = column(lane.sub), far_col = column(kHeadLanes + lane.sub);
  float next_score = score_src(lane.sub, next_col);

  float max = -kInfinity, sum = 0;
  float acc[kLaneFeatures] = {};
  for (int base = 0; base < length.longest; base += kHeadLanes) {
    const int mine = base + lane.sub, col = next_col;
    float score = -kInfinity;
    if (mine < slice.length) {
      float logit = score_dst + next_score;
      if (input.bias.data != nullptr) logit += edge_bias<T>(args.a, input, slice.begin + mine, lane.head);
      score = leaky_relu(logit, input.negative_slope);
    }
    next_col = far_col;
    next_score = score_src(mine + kHeadLanes, next_col);
    far_col = column(mine + 2 * kHeadLanes);

    const float new_max = fmaxf(max, max_lanes<kHeadLanes>(score));
    const float reference = reference_score(new_max);
    if (__any_sync(kFullWarp, new_max > max)) {
      const float rescale = __expf(max - reference);
      sum *= rescale;
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) acc[i] *= rescale;
    }
    max = new_max;
    float weight = __expf(score - reference);
    sum += weight;
    weight *= dropout_factor(input.dropout, row, col, lane.head);

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
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) acc[i] += entry_weight * v[u][i];
      }
    });
  }
  sum = sum_lanes<kHeadLanes>(sum);

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

}  // namespace additive_attention_detail

int additive_attention(const AdditiveAttentionArgs& args, void* stream_address) {
  using namespace additive_attention_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  const AdditiveAttentionInput& input = args.input;
  with_head_lanes(
      input.dtype, input.head_width, {input.v.stride}, {input.v.data, args.out, args.partial},
      [&](auto type, auto vec, auto head_lanes) {
        using T = decltype(type);
        constexpr int kVec = decltype(vec)::value, kHeadLanes = decltype(head_lanes)::value;
        additive_kernel<T, kVec, kHeadLanes>
            <<<head_grid(args.split.num_slices, input.heads, kHeadLanes), kHeadThreads, 0, stream>>>(
                args, heads_per_group(input.heads, kHeadLanes));
        combine_softmax<T>(args.split, args.partial, args.partial_state, input.heads, input.head_width,
                           args.out, args.lse, stream);
      });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
