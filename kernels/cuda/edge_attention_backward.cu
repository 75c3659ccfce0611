// Attention with edge features, backward, from CSR on CUDA cores, for the scores of edge_attention.cu.
//
// With p = exp(s - lse_i), m the dropout factor, w = m p, q_edge_i = W_h^T q_i, dO_edge_i = W_h^T dO_i, dP =
// <dO_i, v_j> + <dO_edge_i, a_ij>, delta_i = <dO_i, out_i> (out includes the terms of edge features) and dS =
// p (m dP - delta_i), per head:
//   dot products: dq_edge_i = scale sum_j dS a_ij,  dq_i = scale sum_j dS k_j + W_h dq_edge_i,
//     dk_j = scale sum_i dS q_i,  dv_j = sum_i w dO_i,  da_ij = sum_h scale dS q_edge_i + w dO_edge_i
//   GATv2, z = x_i + x_j + W a_ij, dz = dS att leaky_relu'(z): dx_i = sum_j dz,  dx_j = sum_i dz + w dO_i,
//     datt = sum_ij dS leaky_relu(z),  dW = sum_ij dz a_ij^T,  da_ij = W^T dz
//   - The row pass gathers k_j and v_j (GATv2: x_j) and stores {w, dS} of every edge and head. For GATv2, it
//     also stores the signs of z, one bit per feature.
//   - The column pass computes two weighted sums of gathered rows, q_i and dO_i, without reductions over
//     lanes. For GATv2 it gathers only dO_i, because the signs determine leaky_relu'.
//   - For dot products, the transposed structure may be missing, because building it costs more than it saves
//     if a structure is used once. Then another pass over the rows replaces the column pass, and adds to the
//     columns' sums by float atomics: 8 E F bytes.
//   - GATv2's dW is computed in one pass over the edges, without a gather.
//
// Floors, for E entries of width F: 4 E F sizeof(T) bytes gathered (GATv2: 2), 16 E H bytes of pairs written
// and read. Slices of a row are combined in slot order, and the caller adds the sums of groups of lanes, so
// there are no other atomics.

#include "fastsparse/additive_score.cuh"
#include "fastsparse/atomic_add.cuh"
#include "fastsparse/combine_partials.cuh"
#include "fastsparse/edge_attention.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace edge_attention_backward_detail {

// The address of the pair {w, dS} of an edge and head.
__device__ __forceinline__ float2* pair_at(void* work, std::uint32_t position, std::int64_t heads,
                                           std::int64_t head) {
  return static_cast<float2*>(work) + head +
         static_cast<std::uint64_t>(position) * static_cast<std::uint32_t>(heads);
}

// Where this block writes the gradients of edge features: to one float32 part per block of heads, which the
// caller adds, or as T to the result if the block has all heads.
template <typename T>
struct FeatureGradients {
  char* from;
  std::uint32_t row_bytes;

  __device__ __forceinline__ explicit FeatureGradients(const EdgeAttentionBackwardArgs& args) {
    row_bytes =
        static_cast<std::uint32_t>(args.input.edge_width * (gridDim.y == 1 ? sizeof(T) : sizeof(float)));
    from =
        kept_in_register(static_cast<char*>(args.grad_features) + blockIdx.y * args.num_values * row_bytes);
  }

  // Writes consecutive features of one edge.
  template <int kCount>
  __device__ __forceinline__ void store(std::uint32_t position, int first, const float (&x)[kCount]) const {
    char* row = from + static_cast<std::uint64_t>(position) * row_bytes;
    if (gridDim.y == 1) {
      Pack<T, kCount> pack;
#pragma unroll
      for (int i = 0; i < kCount; ++i) pack.lane[i] = narrow<T>(x[i]);
      *reinterpret_cast<Pack<T, kCount>*>(reinterpret_cast<T*>(row) + first) = pack;
    } else {
      Pack<float, kCount> pack;
#pragma unroll
      for (int i = 0; i < kCount; ++i) pack.lane[i] = x[i];
      *reinterpret_cast<Pack<float, kCount>*>(reinterpret_cast<float*>(row) + first) = pack;
    }
  }
};

// Sums the lanes' parts of the gradients of some edges' features over the heads of the group, and writes
// them.
template <typename T, int kCount, int kEdge>
__device__ __forceinline__ void store_features_of_heads(const FeatureGradients<T>& features,
                                                        const EdgeLane& lane, const Entries<kCount>& entries,
                                                        const bool (&has)[kCount],
                                                        float (&part)[kCount][kEdge]) {
  const int lane_of_group = threadIdx.x & (lane.group_lanes - 1);
  if (lane.group_lanes >= 4 * lane.lanes) {
    // Numbers are exchanged as in `scatter_sum`, but between the lanes of different heads: head h of the
    // group gets every fourth feature, from h % 4 on.
    const bool upper = (lane_of_group & 2 * lane.lanes) != 0, odd = (lane_of_group & lane.lanes) != 0;
    const int nth = 2 * upper + odd;
#pragma unroll
    for (int c = 0; c < kEdge / 4; ++c) {
      float number[kCount];
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const float* v = part[u] + c * 4;
        float low = upper ? v[2] : v[0], high = upper ? v[3] : v[1];
        low += __shfl_xor_sync(kFullWarp, upper ? v[0] : v[2], 2 * lane.lanes);
        high += __shfl_xor_sync(kFullWarp, upper ? v[1] : v[3], 2 * lane.lanes);
        number[u] = (odd ? high : low) + __shfl_xor_sync(kFullWarp, odd ? low : high, lane.lanes);
      }
      sum_over(number, lane.group_lanes, 4 * lane.lanes);
      if (lane_of_group >= 4 * lane.lanes || lane.edge_place(c) >= lane.edge_width) continue;
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const float one[1] = {number[u]};
        if (has[u]) features.store(entries.position[u], lane.edge_place(c) + nth, one);
      }
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) sum_over(part[u], lane.group_lanes, lane.lanes);
  if (lane_of_group >= lane.lanes) return;
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (!has[u]) continue;
#pragma unroll
    for (int c = 0; c < kEdge / 4; ++c) {
      if (lane.edge_place(c) >= lane.edge_width) continue;
      const float four[4] = {part[u][c * 4], part[u][c * 4 + 1], part[u][c * 4 + 2], part[u][c * 4 + 3]};
      features.store(entries.position[u], lane.edge_place(c), four);
    }
  }
}

// kPlain: neither bias nor dropout.
template <typename T, int kEdge, bool kPlain>
__global__ void __launch_bounds__(kHeadThreads, kDotBlocks<T, kEdge>)
    dot_row_kernel(const __grid_constant__ EdgeAttentionBackwardArgs args, int head_lanes,
                   int heads_per_group) {
  constexpr int kInFlight = kEdgesInFlight<T, kEdge>;
  const EdgeAttentionInput& input = args.input;
  const EdgeLane lane(input, head_lanes, heads_per_group);
  const LaneWeights<T> weight_rows(lane, input);
  const auto k_rows = lane.gather<T>(input.k), v_rows = lane.gather<T>(input.v);
  const LaneEdges<T> edges(lane, input.edge);
  const FeatureGradients<T> features(args);
  const RowSlice slice = load_slice(args.split, lane.group);
  const WarpLength length(slice.length);
  const bool is_there = lane.group < args.split.num_slices && lane.live;
  const auto row = static_cast<std::uint32_t>(row_of(args.split, slice));
  const std::int64_t row_head = row * input.heads + lane.head;
  const float scale = static_cast<float>(input.scale);
  const SliceEntries of_slice(args.a, slice);
  Entries<kInFlight> next;
  next.read(of_slice, 0);

  // Features stay packed, because registers are scarce with 16-bit types. They are zeros for a row without
  // entries, because the row may contain NaN, and its lanes also loop up to the longest slice of their warp.
  LaneFeatures<T> q = {}, grad = {};
  if (slice.length > 0) {
    q = lane.load_packed<T>(input.q, row);
    grad = lane.load_packed<T>(args.grad, row);
  }
  float grad_q[kLaneFeatures] = {}, q_edge[kEdge], grad_edge[kEdge], grad_q_edge[kEdge] = {};
  {
    float of_row[2][kEdge], x[2][kLaneFeatures];
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) {
      x[0][i] = q[i];
      x[1][i] = grad[i];
    }
    to_edge_width<kEdge, 2>(of_row, lane, weight_rows, x);
#pragma unroll
    for (int i = 0; i < kEdge; ++i) {
      q_edge[i] = of_row[0][i];
      grad_edge[i] = of_row[1][i];
    }
  }
  float delta[1] = {};
  {
    float out[kLaneFeatures];
    lane.load<T>(out, args.out, row);
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) delta[0] += grad[i] * out[i];
  }
  sum_over(delta, lane.lanes);
  const float lse = finite_lse(static_cast<const float*>(args.lse)[row_head]);

  const auto add = [&](auto whole, const auto& entries, int base) {
    constexpr bool kWhole = decltype(whole)::value != 0;
    constexpr int kCount = sizeof(entries.col) / sizeof(entries.col[0]);
    bool has[kCount];
    LaneFeatures<T> k[kCount], v[kCount];
    EdgePart<T, kEdge> edge[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      has[u] = kWhole || base + u < slice.length;
      k[u] = k_rows.load(entries.col[u], has[u]);
      v[u] = v_rows.load(entries.col[u], has[u]);
      edge[u] = EdgePart<T, kEdge>(lane, edges, entries.position[u], has[u]);
    }
    next.read(of_slice, base + kCount);

    q.stay_packed();
    grad.stay_packed();
    float products[2 * kCount] = {};  // scores, then dP
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) {
        products[u] += q[i] * k[u][i];
        products[kCount + u] += grad[i] * v[u][i];
      }
#pragma unroll
      for (int i = 0; i < kEdge; ++i) {
        products[u] += q_edge[i] * edge[u][i];
        products[kCount + u] += grad_edge[i] * edge[u][i];
      }
    }
    sum_over(products, lane.lanes);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      k[u].stay_packed();
      edge[u].stay_packed();
    }
    float weight[kCount], grad_score[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      float reference = lse;
      if (!kPlain && input.bias.data != nullptr && has[u]) {
        reference -= load_value<T>(input.bias, input.bias.dtype == input.dtype,
                                   static_cast<std::int64_t>(entries.position[u]) * input.heads + lane.head);
      }
      const float p = has[u] && lane.live ? exp_or_zero(__fmaf_rn(scale, products[u], -reference)) : 0.0f;
      weight[u] = p;
      if (!kPlain && input.dropout.threshold != 0) {
        weight[u] *= dropout_factor(input.dropout, row, entries.col[u], lane.head);
      }
      // The fma is explicit, for the same reason as in the forward pass.
      grad_score[u] = __fmaf_rn(weight[u], products[kCount + u], -(p * delta[0]));
      if (has[u] && lane.live && lane.sub == 0) {
        *pair_at(args.work, entries.position[u], input.heads, lane.head) =
            make_float2(weight[u], grad_score[u]);
      }
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) grad_q[i] += grad_score[u] * k[u][i];
#pragma unroll
      for (int i = 0; i < kEdge; ++i) grad_q_edge[i] += grad_score[u] * edge[u][i];
    }
    if (args.grad_features == nullptr) return;
    float part[kCount][kEdge];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const float scaled = scale * grad_score[u];
#pragma unroll
      for (int i = 0; i < kEdge; ++i) part[u][i] = __fmaf_rn(scaled, q_edge[i], weight[u] * grad_edge[i]);
    }
    store_features_of_heads<T>(features, lane, entries, has, part);
  };
  for_entries<kInFlight, 1>(length.longest, length.shortest, next, add);

  add_from_edge_width<kEdge>(grad_q, lane, weight_rows, grad_q_edge);
  if (!is_there) return;
  const std::int64_t width = input.heads * input.head_width;
  if (slice.target < 0) {
    lane.store<T, float>(args.partial_q, ~slice.target, width, grad_q, scale);
    lane.store_edge<float>(args.partial_q_edge, ~slice.target, input.heads, grad_q_edge, scale);
  } else {
    lane.store<T, T>(args.grad_q, row, width, grad_q, scale);
    lane.store_edge<T>(args.grad_q_edge, row, input.heads, grad_q_edge, scale);
  }
}

template <typename T>
__global__ void __launch_bounds__(kHeadThreads, sizeof(T) == 2 ? 8 : 5)
    dot_column_kernel(const __grid_constant__ EdgeAttentionBackwardArgs args, int head_lanes,
                      int heads_per_group) {
  constexpr int kInFlight = kEdgesInFlight<T, 4>;
  const EdgeAttentionInput& input = args.input;
  const EdgeLane lane(input, head_lanes, heads_per_group);
  const auto q_rows = lane.gather<T>(input.q), grad_rows = lane.gather<T>(args.grad);
  const RowSlice slice = load_slice(args.split_t, lane.group);
  if (lane.group >= args.split_t.num_slices) return;
  // Each group loops over its own length, because no lane waits for another one.
  const SliceEntries of_slice(args.a_t, slice);
  Entries<kInFlight> next;
  next.read(of_slice, 0);

  float grad_k[kLaneFeatures] = {}, grad_v[kLaneFeatures] = {};
  const auto add = [&](auto, const auto& entries, int base) {
    constexpr int kCount = sizeof(entries.col) / sizeof(entries.col[0]);
    LaneFeatures<T> q[kCount], grad[kCount];
    float2 pair[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      q[u] = q_rows.load(entries.col[u]);
      grad[u] = grad_rows.load(entries.col[u]);
      pair[u] = __ldg(pair_at(args.work, entries.position[u], input.heads, lane.head));
    }
    next.read(of_slice, base + kCount);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) {
        grad_k[i] += pair[u].y * q[u][i];
        grad_v[i] += pair[u].x * grad[u][i];
      }
    }
  };
  for_entries<kInFlight, 1>(slice.length, slice.length, next, add);

  if (!lane.live) return;
  const std::int64_t width = input.heads * input.head_width;
  const float scale = static_cast<float>(input.scale);
  if (slice.target < 0) {
    lane.store<T, float>(args.partial_k, ~slice.target, width, grad_k, scale);
    lane.store<T, float>(args.partial_v, ~slice.target, width, grad_v);
  } else {
    lane.store<T, T>(args.grad_k, slice.target, width, grad_k, scale);
    lane.store<T, T>(args.grad_v, slice.target, width, grad_v);
  }
}

template <typename T>
__global__ void __launch_bounds__(kHeadThreads, sizeof(T) == 2 ? 8 : 5)
    dot_scatter_kernel(const __grid_constant__ EdgeAttentionBackwardArgs args, int head_lanes,
                       int heads_per_group) {
  constexpr int kVec = kEdgeVec<T>;
  const EdgeAttentionInput& input = args.input;
  const EdgeLane lane(input, head_lanes, heads_per_group);
  const RowSlice slice = load_slice(args.split, lane.group);
  if (lane.group >= args.split.num_slices || !lane.live) return;
  const std::int64_t row = row_of(args.split, slice), width = input.heads * input.head_width;
  float q[kLaneFeatures], grad[kLaneFeatures];
  lane.load<T>(q, input.q, row, static_cast<float>(input.scale));
  lane.load<T>(grad, args.grad, row);
  const SliceEntries of_slice(args.a, slice);
  Entries<1> next;
  next.read(of_slice, 0);
  for (int nth = 0; nth < slice.length; ++nth) {
    const Entries<1> entry = next;
    next.read(of_slice, nth + 1);
    const float2 pair = __ldg(pair_at(args.work, entry.position[0], input.heads, lane.head));
    const std::int64_t first = static_cast<std::int64_t>(entry.col[0]) * width + lane.first;
#pragma unroll
    for (int i = 0; i < kLaneFeatures; i += 4) {
      const int at = lane.place<kVec>(i / kVec) + i % kVec;
      if (at >= lane.head_width) continue;
      float of_k[4], of_v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of_k[j] = pair.y * q[i + j];
        of_v[j] = pair.x * grad[i + j];
      }
      atomic_add(static_cast<float*>(args.sum_k) + first + at, of_k);
      atomic_add(static_cast<float*>(args.sum_v) + first + at, of_v);
    }
  }
}

// Writes da = W^T dz of the edges in flight (GATv2), summed over the heads of the group. W is in registers.
template <typename T, int kCount>
__device__ __forceinline__ void store_edge_gradient(const EdgeAttentionBackwardArgs& args,
                                                    const EdgeLane& lane, const KeptWeight<T>& weight,
                                                    const float (&dz)[kCount][kLaneFeatures],
                                                    const Entries<kCount>& entries,
                                                    const bool (&has)[kCount]) {
  float part[kKeptWeight * kCount] = {};
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
#pragma unroll
    for (int a = 0; a < kKeptWeight; ++a) {
#pragma unroll
      for (int f = 0; f < kLaneFeatures; ++f) part[u * kKeptWeight + a] += weight.of[a][f] * dz[u][f];
    }
  }
  const int lane_of_group = threadIdx.x & (lane.group_lanes - 1);
  if (lane.group_lanes >= kKeptWeight * kCount) {
    const float number = scatter_sum(part, lane.group_lanes);
    const int mine = lane_of_group / kKeptWeight, a = lane_of_group % kKeptWeight;
    std::uint32_t position = entries.position[0];
    bool wanted = has[0] && mine == 0;
#pragma unroll
    for (int u = 1; u < kCount; ++u) {
      if (mine == u) {
        position = entries.position[u];
        wanted = has[u];
      }
    }
    const float one[1] = {number};
    if (wanted && a < lane.edge_width) FeatureGradients<T>(args).store(position, a, one);
  } else {
    sum_over(part, lane.group_lanes);
    if (lane_of_group != 0) return;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (!has[u]) continue;
#pragma unroll
      for (int a = 0; a < kKeptWeight; a += 4) {
        if (a >= lane.edge_width) break;
        const float* of = part + u * kKeptWeight + a;
        const float four[4] = {of[0], of[1], of[2], of[3]};
        FeatureGradients<T>(args).store(entries.position[u], a, four);
      }
    }
  }
}

// Writes da = W^T dz of the edges in flight, for edges with more features. W is in the L1 cache.
template <typename T, int kCount>
__device__ __forceinline__ void store_edge_gradient(const EdgeAttentionBackwardArgs& args,
                                                    const EdgeLane& lane,
                                                    const float (&dz)[kCount][kLaneFeatures],
                                                    const Entries<kCount>& entries,
                                                    const bool (&has)[kCount]) {
  const float* weight = static_cast<const float*>(args.input.weight);
  const std::int64_t width = args.input.heads * args.input.head_width;
  const int lane_of_group = threadIdx.x & (lane.group_lanes - 1);
#pragma unroll 1
  for (int a = 0; a < lane.edge_width; a += 4) {
    float part[4 * kCount] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float w[kLaneFeatures];
      lane.load_vector<T>(w, weight + (a + i) * width);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int f = 0; f < kLaneFeatures; ++f) part[u * 4 + i] += w[f] * dz[u][f];
      }
    }
    sum_over(part, lane.group_lanes);
    if (lane_of_group != 0) continue;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (!has[u]) continue;
      const float four[4] = {part[u * 4], part[u * 4 + 1], part[u * 4 + 2], part[u * 4 + 3]};
      FeatureGradients<T>(args).store(entries.position[u], a, four);
    }
  }
}

template <typename T, bool kKept>
__global__ void __launch_bounds__(kHeadThreads, 3)
    gatv2_row_kernel(const __grid_constant__ EdgeAttentionBackwardArgs args, int head_lanes,
                     int heads_per_group) {
  constexpr int kInFlight = kKept ? 2 : kEdgesInFlight<T>;
  const EdgeAttentionInput& input = args.input;
  const EdgeLane lane(input, head_lanes, heads_per_group);
  // Only whole warps return: a warp has up to 32 groups, and att_rows is a multiple of 32.
  if (lane.group >= args.att_rows) return;
  const std::int64_t width = input.heads * input.head_width;
  const float slope = static_cast<float>(input.scale);
  float att[kLaneFeatures], grad_att[kLaneFeatures] = {};
  lane.load_vector<T>(att, static_cast<const float*>(input.att));
  const auto rows = lane.gather<T>(input.k);
  const std::conditional_t<kKept, KeptWeight<T>, NoWeight> kept(lane, input);

  for (std::int64_t first = 0; first < args.split.num_slices; first += args.att_rows) {
    const std::int64_t index = first + lane.group;
    const RowSlice slice = load_slice(args.split, index);
    const int longest = __reduce_max_sync(kFullWarp, slice.length);
    const std::int64_t row = row_of(args.split, slice), row_head = row * input.heads + lane.head;
    Entries<kInFlight> next;
    next.read(args.a, slice, 0);
    float x_dst[kLaneFeatures] = {}, grad[kLaneFeatures] = {}, grad_x[kLaneFeatures] = {};
    if (slice.length > 0) {  // a row without entries has zeros, because it may contain NaN
      lane.load<T>(x_dst, input.q, row);
      lane.load<T>(grad, args.grad, row);
    }
    float delta[1] = {};
    {
      float out[kLaneFeatures];
      lane.load<T>(out, args.out, row);
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) delta[0] += grad[i] * out[i];
    }
    sum_over(delta, lane.lanes);
    const float lse = finite_lse(static_cast<const float*>(args.lse)[row_head]);

    for (int base = 0; base < longest; base += kInFlight) {
      const Entries<kInFlight> entries = next;
      bool has[kInFlight];
      LaneFeatures<T> x_src[kInFlight];
      Words<T, 4> edge[kInFlight][kKeptWeight / 4];
      float z[kInFlight][kLaneFeatures];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        has[u] = base + u < slice.length;
        x_src[u] = rows.load(entries.col[u], has[u]);
        if constexpr (kKept) load_edge<T>(edge[u], lane, input.edge, entries.position[u], has[u]);
      }
      next.read(args.a, slice, base + kInFlight);
      float products[2 * kInFlight] = {};  // scores, then dP
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) {
          z[u][i] = x_dst[i] + x_src[u][i];
          products[kInFlight + u] += grad[i] * x_src[u][i];
        }
        if constexpr (kKept) kept.add_to(z[u], edge[u]);
      }
      if constexpr (!kKept) add_projected<T>(z, lane, input, entries.position, has);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) {
          products[u] += att[i] * leaky_relu_up_to_1(z[u][i], slope);
        }
      }
      sum_over(products, lane.lanes);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const float p = has[u] ? exp_or_zero(products[u] - lse) : 0.0f;
        float weight = p;
        if (input.dropout.threshold != 0) {
          weight *= dropout_factor(input.dropout, row, entries.col[u], lane.head);
        }
        float grad_score = weight * products[kInFlight + u] - p * delta[0];
        if (!lane.live) grad_score = 0;
        unsigned positive = 0;
#pragma unroll
        for (int i = 0; i < kLaneFeatures; ++i) {
          grad_att[i] += grad_score * leaky_relu_up_to_1(z[u][i], slope);
          positive |= z[u][i] > 0 ? 1u << i : 0u;
          z[u][i] =
              grad_score * att[i] * leaky_relu_slope(z[u][i], slope);  // from here on, the gradient of z
          grad_x[i] += z[u][i];
        }
        if (has[u] && lane.live) {
          const std::int64_t of_head =
              static_cast<std::int64_t>(entries.position[u]) * input.heads + lane.head;
          args.positive[of_head * lane.lanes + lane.sub] = static_cast<std::uint8_t>(positive);
          if (lane.sub == 0) static_cast<float2*>(args.work)[of_head] = make_float2(weight, grad_score);
        }
      }
      if (args.grad_features != nullptr) {
        if constexpr (kKept) {
          store_edge_gradient<T>(args, lane, kept, z, entries, has);
        } else {
          store_edge_gradient<T>(args, lane, z, entries, has);
        }
      }
    }

    if (index >= args.split.num_slices || !lane.live) continue;
    if (slice.target < 0) {
      lane.store<T, float>(args.partial_q, ~slice.target, width, grad_x);
    } else {
      lane.store<T, T>(args.grad_q, row, width, grad_x);
    }
  }
  if (lane.live) lane.store<T, float>(args.grad_att, lane.group, width, grad_att);
}

template <typename T>
__global__ void __launch_bounds__(kHeadThreads, 5)
    gatv2_column_kernel(const __grid_constant__ EdgeAttentionBackwardArgs args, int head_lanes,
                        int heads_per_group) {
  constexpr int kInFlight = kEdgesInFlight<T>;
  const EdgeAttentionInput& input = args.input;
  const EdgeLane lane(input, head_lanes, heads_per_group);
  const RowSlice slice = load_slice(args.split_t, lane.group);
  if (lane.group >= args.split_t.num_slices) return;
  const auto grad_rows = lane.gather<T>(args.grad);
  const SliceEntries of_slice(args.a_t, slice);
  Entries<kInFlight> next;
  next.read(of_slice, 0);

  float value_part[kLaneFeatures] = {}, positive_part[kLaneFeatures] = {}, score_sum = 0;
  for (int base = 0; base < slice.length; base += kInFlight) {
    const Entries<kInFlight> entries = next;
    LaneFeatures<T> grad[kInFlight];
    float2 pair[kInFlight];
    unsigned positive[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const bool has = base + u < slice.length;
      grad[u] = grad_rows.load(entries.col[u], has);
      pair[u] = make_float2(0, 0);
      positive[u] = 0;
      if (has) {
        const std::int64_t of_head = static_cast<std::int64_t>(entries.position[u]) * input.heads + lane.head;
        pair[u] = __ldg(static_cast<const float2*>(args.work) + of_head);
        positive[u] = __ldg(args.positive + of_head * lane.lanes + lane.sub);
      }
    }
    next.read(of_slice, base + kInFlight);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      score_sum += pair[u].y;
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) {
        value_part[i] += pair[u].x * grad[u][i];
        if (positive[u] >> i & 1u) positive_part[i] += pair[u].y;
      }
    }
  }

  if (!lane.live) return;
  float att[kLaneFeatures];
  lane.load_vector<T>(att, static_cast<const float*>(input.att));
  const float slope = static_cast<float>(input.scale);
#pragma unroll
  for (int i = 0; i < kLaneFeatures; ++i) {
    value_part[i] += att[i] * (slope * score_sum + (1.0f - slope) * positive_part[i]);
  }
  const std::int64_t width = input.heads * input.head_width;
  if (slice.target < 0) {
    lane.store<T, float>(args.partial_k, ~slice.target, width, value_part);
  } else {
    lane.store<T, T>(args.grad_k, slice.target, width, value_part);
  }
}

// Number of edge features per block: a lane keeps their part of dW in registers.
constexpr int kWeightFeatures = 8;

// Computes dW. Group g sums every weight_rows-th edge from g on, and writes row g of grad_weight.
template <typename T>
__global__ void __launch_bounds__(kHeadThreads, 4)
    gatv2_weight_kernel(const __grid_constant__ EdgeAttentionBackwardArgs args, int head_lanes,
                        int heads_per_group) {
  const EdgeAttentionInput& input = args.input;
  const EdgeLane lane(input, head_lanes, heads_per_group);
  const int first = static_cast<int>(blockIdx.z) * kWeightFeatures;
  const bool second = first + 4 < lane.edge_width;
  const float slope = static_cast<float>(input.scale);
  float acc[kWeightFeatures][kLaneFeatures] = {};
#pragma unroll 2
  for (std::int64_t edge = lane.group; edge < args.num_values; edge += args.weight_rows) {
    const std::int64_t of_head = edge * input.heads + lane.head;
    const float grad_score = __ldg(static_cast<const float2*>(args.work) + of_head).y;
    const unsigned positive = __ldg(args.positive + of_head * lane.lanes + lane.sub);
    const T* from = static_cast<const T*>(input.edge) + edge * lane.edge_width + first;
    Words<T, 4> features[2];
    features[0].load(from, true);
    features[1].load(from + 4, second);
    const float negative = slope * grad_score;
#pragma unroll
    for (int f = 0; f < kLaneFeatures; ++f) {
      const float term = positive >> f & 1u ? grad_score : negative;
#pragma unroll
      for (int a = 0; a < kWeightFeatures; ++a) acc[a][f] += term * features[a / 4][a % 4];
    }
  }
  if (!lane.live) return;
  float att[kLaneFeatures];
  lane.load_vector<T>(att, static_cast<const float*>(input.att));
  const std::int64_t width = input.heads * input.head_width;
#pragma unroll
  for (int a = 0; a < kWeightFeatures; ++a) {
    if (first + a >= lane.edge_width) break;
#pragma unroll
    for (int f = 0; f < kLaneFeatures; ++f) acc[a][f] *= att[f];
    lane.store<T, float>(args.grad_weight, lane.group * lane.edge_width + first + a, width, acc[a]);
  }
}

template <typename T>
void launch(const EdgeAttentionBackwardArgs& args, cudaStream_t stream) {
  const EdgeAttentionInput& input = args.input;
  const int lanes = edge_head_lanes(input);
  const int per_group = heads_per_group(input.heads, lanes);
  const std::int64_t width = input.heads * input.head_width, edge_width = input.heads * input.edge_width;
  const auto run = [&](auto kernel, std::int64_t groups, unsigned z = 1) {
    dim3 grid = head_grid(groups, input.heads, lanes);
    grid.z = z;
    kernel<<<grid, kHeadThreads, 0, stream>>>(args, lanes, per_group);
  };
  const auto combine = [&](const RowSplitView& split, const float* partial, void* to, std::int64_t columns) {
    combine_partials<T, 1>(split, partial, Epilogue::only(to, columns), SameRow{}, stream);
  };
  if (input.gatv2) {
    run(input.edge_width <= kKeptWeight ? gatv2_row_kernel<T, true> : gatv2_row_kernel<T, false>,
        args.att_rows);  // groups without a slice also write zeros for datt
  } else if (args.split.num_slices != 0) {
    if (input.edge_width > 4 * lanes) {
      run(dot_row_kernel<T, kMostEdge, false>, args.split.num_slices);
    } else {
      run(is_plain(input) ? dot_row_kernel<T, 4, true> : dot_row_kernel<T, 4, false>, args.split.num_slices);
    }
    if (edge_width > 0) combine(args.split, args.partial_q_edge, args.grad_q_edge, edge_width);
  }
  combine(args.split, args.partial_q, args.grad_q, width);
  if (args.sum_k != nullptr) {
    if (args.split.num_slices != 0) run(dot_scatter_kernel<T>, args.split.num_slices);
  } else if (args.split_t.num_slices != 0) {
    run(input.gatv2 ? gatv2_column_kernel<T> : dot_column_kernel<T>, args.split_t.num_slices);
    combine(args.split_t, args.partial_k, args.grad_k, width);
    if (!input.gatv2) combine(args.split_t, args.partial_v, args.grad_v, width);
  }
  if (input.gatv2 && args.grad_weight != nullptr) {
    run(gatv2_weight_kernel<T>, args.weight_rows, ceil_div(input.edge_width, kWeightFeatures));
  }
}

}  // namespace edge_attention_backward_detail

int edge_attention_backward(const EdgeAttentionBackwardArgs& args, void* stream_address) {
  using namespace edge_attention_backward_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  with_edge_type(args.input.dtype, [&](auto type) { launch<decltype(type)>(args, stream); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
