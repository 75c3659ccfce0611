// Attention with edge features, forward, from CSR on CUDA cores. There are H heads of D features, and A
// features per edge. The template parameter kEdge of the kernel selects the score: dot products (kEdge
// features of an edge per lane), GATv2 (kEdge = 0), or GATv2 with W in registers (kEdge = kKept).
//   - Dot products: with W_h the edges' linear map, <q_i, W_h a_ij> = <W_h^T q_i, a_ij> and sum_j w W_h a_ij
//     = W_h sum_j w a_ij. So the kernel reads A features per edge and multiplies A numbers per head, instead
//     of a row of H D features.
//   - GATv2: W a_ij is inside the leaky ReLU, so it is computed here and not stored. W is in registers if an
//     edge has up to 8 features, otherwise in the L1 cache.
//
// Floors, for E entries of width F = H D: 2 E F sizeof(T) bytes gathered (GATv2: half, because the key is
// also the value) and E A sizeof(T) bytes read. Without edge features (A = 0), the kernel computes the
// attention of attention_bsb.cu or of gatv2_attention.cu.

#include "fastsparse/additive_score.cuh"
#include "fastsparse/edge_attention.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace edge_attention_detail {

constexpr int kKept = -1;

// kPlain: neither bias nor dropout.
template <typename T, int kEdge, bool kPlain>
__global__ void __launch_bounds__(kHeadThreads,
                                  kEdge <= 0 ? 3 : kDotBlocks<T, kEdge> + (sizeof(T) == 4 && kEdge == 4))
    edge_attention_kernel(const __grid_constant__ EdgeAttentionArgs args, int head_lanes,
                          int heads_per_group) {
  constexpr bool kGatv2 = kEdge <= 0;
  constexpr int kInFlight = kEdgesInFlight<T, kEdge>;
  constexpr int kPart = kGatv2 ? 4 : kEdge;
  const EdgeAttentionInput& input = args.input;
  const EdgeLane lane(input, head_lanes, heads_per_group);
  const LaneWeights<T> weight_rows(lane, input);
  const auto k_rows = lane.gather<T>(input.k), v_rows = lane.gather<T>(input.v);
  const LaneEdges<T> edges(lane, input.edge);
  const std::conditional_t<kEdge == kKept, KeptWeight<T>, NoWeight> weight(lane, input);
  const RowSlice slice = load_slice(args.split, lane.group);
  const WarpLength length(slice.length);
  const std::int64_t row = row_of(args.split, slice), row_head = row * input.heads + lane.head;
  const float scale = static_cast<float>(input.scale);
  const SliceEntries of_slice(args.a, slice);
  Entries<kInFlight> next;
  next.read(of_slice, 0);

  float q[kLaneFeatures], att[kLaneFeatures], q_edge[kPart];
  lane.load<T>(q, input.q, row, kGatv2 ? 1.0f : scale);
  if constexpr (kGatv2) {
    lane.load_vector<T>(att, static_cast<const float*>(input.att));
  } else {
    float of_row[1][kPart], x[1][kLaneFeatures];
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) x[0][i] = q[i];
    to_edge_width<kPart, 1>(of_row, lane, weight_rows, x);
#pragma unroll
    for (int i = 0; i < kPart; ++i) q_edge[i] = of_row[0][i];
  }

  float max = -kInfinity, sum = 0;
  float acc[kLaneFeatures] = {}, acc_edge[kPart] = {};
  // Adds the entries from `base` on. `whole`: every group of the warp has all of these entries, so no entry
  // is masked.
  const auto add = [&](auto whole, const auto& entries, int base) {
    constexpr bool kWhole = decltype(whole)::value != 0;
    constexpr int kCount = sizeof(entries.col) / sizeof(entries.col[0]);
    bool has[kCount];
    LaneFeatures<T> k[kCount], v[kCount];
    [[maybe_unused]] EdgePart<T, kPart> edge[kCount];
    [[maybe_unused]] Words<T, 4> whole_edge[kCount][kKeptWeight / 4];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      has[u] = kWhole || base + u < slice.length;
      k[u] = k_rows.load(entries.col[u], has[u]);
      if constexpr (!kGatv2) {
        v[u] = v_rows.load(entries.col[u], has[u]);
        edge[u] = EdgePart<T, kPart>(lane, edges, entries.position[u], has[u]);
      } else if constexpr (kEdge == kKept) {
        load_edge<T>(whole_edge[u], lane, input.edge, entries.position[u], has[u]);
      }
    }
    next.read(of_slice, base + kCount);

    float score[kCount] = {};
    if constexpr (kGatv2) {
      float z[kCount][kLaneFeatures];
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) z[u][i] = q[i] + k[u][i];
        if constexpr (kEdge == kKept) weight.add_to(z[u], whole_edge[u]);
      }
      if constexpr (kEdge != kKept) add_projected<T>(z, lane, input, entries.position, has);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) {
          score[u] += att[i] * leaky_relu_up_to_1(z[u][i], scale);
        }
      }
    } else {
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) score[u] += q[i] * k[u][i];
#pragma unroll
        for (int i = 0; i < kPart; ++i) score[u] += q_edge[i] * edge[u][i];
      }
    }
    sum_over(score, lane.lanes);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      k[u].stay_packed();
      if constexpr (!kGatv2) {
        v[u].stay_packed();
        edge[u].stay_packed();
      }
    }
    float new_max = max;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (!kPlain && !kGatv2 && input.bias.data != nullptr && has[u]) {
        score[u] += load_value<T>(input.bias, input.bias.dtype == input.dtype,
                                  static_cast<std::int64_t>(entries.position[u]) * input.heads + lane.head);
      }
      if (!has[u]) score[u] = -kInfinity;
      new_max = fmaxf(new_max, score[u]);
    }
    const float reference = reference_score(new_max);
    const float rescale = exp_or_zero(max - reference);
    max = new_max;
    sum *= rescale;
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) acc[i] *= rescale;
    if constexpr (!kGatv2) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) acc_edge[i] *= rescale;
    }
    // The fma is explicit. Otherwise, the compiler would contract the two instances of this loop (for `whole`
    // or not) in two ways, and the rounding would depend on the other slices of the warp.
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      float w = exp_or_zero(score[u] - reference);
      sum += w;
      if (!kPlain && input.dropout.threshold != 0) {
        w *= dropout_factor(input.dropout, row, entries.col[u], lane.head);
      }
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) acc[i] = __fmaf_rn(w, kGatv2 ? k[u][i] : v[u][i], acc[i]);
      if constexpr (!kGatv2) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) acc_edge[i] = __fmaf_rn(w, edge[u][i], acc_edge[i]);
      }
    }
  };
  for_entries<kInFlight, kGatv2 ? kInFlight : 1>(length.longest, length.shortest, next, add);

  if constexpr (!kGatv2) add_from_edge_width<kPart>(acc, lane, weight_rows, acc_edge);
  if (lane.group >= args.split.num_slices || !lane.live) return;
  const std::int64_t width = input.heads * input.head_width;
  if (slice.target < 0) {
    const std::int64_t slot = ~slice.target;
    lane.store<T, float>(args.partial, slot, width, acc);
    if constexpr (!kGatv2) lane.store_edge<float>(args.partial_edge, slot, input.heads, acc_edge);
    if (lane.sub == 0) {
      reinterpret_cast<float2*>(args.partial_state)[slot * input.heads + lane.head] = make_float2(max, sum);
    }
    return;
  }
  const float normal = normaliser(sum);
  lane.store<T, T>(args.out, row, width, acc, normal);
  if constexpr (!kGatv2) lane.store_edge<T>(args.out_edge, row, input.heads, acc_edge, normal);
  if (lane.sub == 0) static_cast<float*>(args.lse)[row_head] = log_sum_exp(max, sum);
}

}  // namespace edge_attention_detail

int edge_attention(const EdgeAttentionArgs& args, void* stream_address) {
  using namespace edge_attention_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  const EdgeAttentionInput& input = args.input;
  if (args.split.num_slices == 0) return cudaSuccess;
  const int lanes = edge_head_lanes(input);
  const int per_group = heads_per_group(input.heads, lanes);
  const dim3 grid = head_grid(args.split.num_slices, input.heads, lanes);
  with_edge_type(input.dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = [&](auto kernel) { kernel<<<grid, kHeadThreads, 0, stream>>>(args, lanes, per_group); };
    if (input.gatv2) {
      run(input.edge_width <= kKeptWeight ? edge_attention_kernel<T, kKept, false>
                                          : edge_attention_kernel<T, 0, false>);
    } else if (input.edge_width <= 4 * lanes) {
      run(is_plain(input) ? edge_attention_kernel<T, 4, true> : edge_attention_kernel<T, 4, false>);
    } else {
      run(edge_attention_kernel<T, kMostEdge, false>);
    }
    auto* lse = static_cast<float*>(args.lse);
    combine_softmax<T>(args.split, args.partial, args.partial_state, input.heads, input.head_width, args.out,
                       lse, stream);
    if (!input.gatv2 && input.edge_width > 0) {
      combine_softmax<T>(args.split, args.partial_edge, args.partial_state, input.heads, input.edge_width,
                         args.out_edge, lse, stream);
    }
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
