// Gradients of edge_messages.cu, from CSR on CUDA cores.
//
// With dO the gradient of out, z, v_ij, e = W a, u = U a as in edge_messages.h, s = sigmoid(z):
//   relu:  dz_ij = [z > 0] dO_i            gates: dz_ij = s (1 - s) v_ij dO_i, dv_ij = s dO_i
//   with state: dz_ij = s (1 - s) (v_j dO_i + dside_i) + dstate_ij
//   dq_j = sum_i dz_ij, dv_j = sum_i dv_ij, de_ij = dz_ij, dW = sum_ij dz_ij a_ij^T, dU = sum_ij dv_ij
//   a_ij^T, da_ij = W^T dz_ij + U^T dv_ij; dk_i is dO_i times a sum of the forward pass (with state: the sum
//   of de over the row).
//   - The column pass goes over the transpose, and also writes de or da. For relu, it gathers dO_i and reads
//     signs (E F T + E F / 8 bytes, with T bytes per number). For gates without state, it gathers dO_i and
//     k_i (2 E F T bytes). With state, it gathers dO_i and dside_i, and reads z and dstate of every edge.
//   - The weight pass goes over the rows once more for dW and dU. For relu it reads only signs and raw
//     features; for gates it gathers again. A group of lanes sums every `groups`-th slice in registers.
//   - Two small kernels add the groups' sums, in float64, and the tiles of da.

#include "fastsparse/edge_messages.cuh"

namespace fastsparse::cuda {
namespace edge_messages_backward_detail {

// Sums over the lanes of a group. All lanes get the same bits.
template <int kCount, typename A>
__device__ __forceinline__ void sum_over_lanes(A (&v)[kCount], int lanes) {
  for (int offset = 1; offset < lanes; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] += __shfl_xor_sync(kFullWarp, v[i], offset);
  }
}

// Adds <weight_a, x_u> over the lane's features to the part of raw feature first + i of edge u.
template <typename T, int kCount>
__device__ __forceinline__ void add_to_features(Acc<T> (&part)[4 * kCount], const MessageLane<T>& lane,
                                                const void* weight, std::int64_t first,
                                                const Acc<T> (&x)[kCount][kTileFeatures]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Acc<T> w[kTileFeatures];
    lane.load_weights(w, static_cast<const Acc<T>*>(weight) + (first + i) * lane.width);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int f = 0; f < kTileFeatures; ++f) part[u * 4 + i] += w[f] * x[u][f];
    }
  }
}

// Sums each of kCount numbers over 8 lanes, in three steps: with kLanes = 8, 4 and 2. Lane i gets the i-th
// eighth of the sums. In each step, the lanes exchange half of their numbers. That takes 7/8 kCount shuffles
// instead of 3 kCount for sums in all lanes.
template <int kLanes, typename A, int kCount>
__device__ __forceinline__ void scatter_over_lanes(A (&v)[kCount]) {
  constexpr int kHalf = kCount * kLanes / 16;
  const bool upper = (threadIdx.x & (kLanes / 2)) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const A given = upper ? v[i] : v[i + kHalf], kept = upper ? v[i + kHalf] : v[i];
    v[i] = kept + __shfl_xor_sync(kFullWarp, given, kLanes / 2);
  }
  if constexpr (kLanes > 2) scatter_over_lanes<kLanes / 2>(v);
}

// Sums the lanes' parts of the gradients of four raw features, for kCount edges, and writes the sums.
template <typename T, int kCount>
__device__ __forceinline__ void store_features(const EdgeMessageBackwardArgs& args,
                                               const MessageLane<T>& lane, std::int64_t first,
                                               Acc<T> (&part)[4 * kCount], const NextEntries<kCount>& entries,
                                               const bool (&has)[kCount]) {
  using A = Acc<T>;
  const auto row_of_features = [&](std::uint32_t position) {
    const std::int64_t row = blockIdx.y * args.num_values + position;
    return static_cast<A*>(args.grad_features) + row * args.input.edge_width + first;
  };
  if (lane.lanes == 8 && kCount > 1) {
    constexpr int kMine = kCount > 1 ? kCount / 2 : 1, kOwners = 4 / kMine;  // lanes per edge
    scatter_over_lanes<8>(part);
    std::uint32_t position = entries.position[0];
    bool wanted = has[0];
#pragma unroll
    for (int u = 1; u < kCount; ++u) {
      const bool mine = lane.sub >= u * kOwners;
      position = mine ? entries.position[u] : position;
      wanted = mine ? has[u] : wanted;
    }
    if (!wanted) return;
    Pack<A, kMine> pack;
#pragma unroll
    for (int i = 0; i < kMine; ++i) pack.lane[i] = part[i];
    store_pack(pack, row_of_features(position) + lane.sub % kOwners * kMine);
    return;
  }
  sum_over_lanes(part, lane.lanes);
  if (lane.sub != 0) return;
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (!has[u]) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) row_of_features(entries.position[u])[i] = part[u * 4 + i];
  }
}

template <typename T, EdgeMessage kMessage, bool kRaw>
__global__ void __launch_bounds__(kMessageThreads, kMessageBlocks<T>)
    edge_messages_column_kernel(const __grid_constant__ EdgeMessageBackwardArgs args, int lanes) {
  using A = Acc<T>;
  constexpr bool kGated = kMessage != EdgeMessage::kRelu, kState = kMessage == EdgeMessage::kGateAndState;
  constexpr int kInFlight = kMessagesInFlight < T, 1 + kGated + 2 * kState, kRaw && kGated ? 2 : 4 > ;
  const EdgeMessageInput& input = args.input;
  const MessageLane<T> lane(input.width, lanes);
  const RowSlice slice = load_slice(args.split_t, lane.group);
  int longest = slice.length;
  if constexpr (kRaw)
    longest = __reduce_max_sync(kFullWarp, slice.length);  // sums over lanes need whole warps
  if (!kRaw && lane.group >= args.split_t.num_slices) return;
  NextEntries<kInFlight> next;
  next.read(args.a_t, slice, 0);

  A q[kTileFeatures] = {}, v[kTileFeatures] = {};
  if constexpr (kGated) {
    const std::int64_t source = row_of(args.split_t, slice);
    if constexpr (!kState) lane.load(q, input.q, source);
    lane.load(v, input.v, source);
  }
  A grad_q[kTileFeatures] = {}, grad_v[kTileFeatures] = {};
  for (int base = 0; base < longest; base += kInFlight) {
    const NextEntries<kInFlight> entries = next;
    bool has[kInFlight];
    TileRow<T> grad[kInFlight], other[kInFlight], state[kInFlight], grad_state[kInFlight];
    unsigned positive[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      has[u] = base + u < slice.length;
      grad[u] = lane.load(args.grad, entries.col[u], has[u]);
      if constexpr (kState) {
        other[u] = lane.load(args.grad_side, entries.col[u], has[u]);
        state[u] = lane.load(args.state, entries.position[u], has[u]);
        grad_state[u] =
            lane.load(args.grad_state, entries.position[u], has[u] && args.grad_state.data != nullptr);
      } else if constexpr (kGated) {
        other[u] = lane.load(input.k, entries.col[u], has[u]);
      } else {
        positive[u] = has[u] ? __ldg(lane.signs(args.positive, entries.position[u], args.sign_bytes)) : 0;
      }
    }
    next.read(args.a_t, slice, base + kInFlight);

    A z[kInFlight][kTileFeatures], value[kInFlight][kTileFeatures];  // later, the gradients of z and v_ij
    if constexpr (kGated) {
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
        for (int i = 0; i < kTileFeatures; ++i) {
          z[u][i] = kState ? state[u][i] : q[i] + other[u][i];
          value[u][i] = v[i];
        }
      }
      if constexpr (kRaw) {
        add_projected(z, lane, input, input.weight, entries.position, has);
        add_projected(value, lane, input, input.of_value, entries.position, has);
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
      for (int i = 0; i < kTileFeatures; ++i) {
        const A of_out = grad[u][i];
        if constexpr (kGated) {
          const A gate = sigmoid(z[u][i]), slope = gate * (A{1} - gate);
          if constexpr (kState) {
            z[u][i] = slope * (value[u][i] * of_out + other[u][i]) + grad_state[u][i];
          } else {
            z[u][i] = slope * value[u][i] * of_out;
          }
          value[u][i] = gate * of_out;
          if (has[u]) {  // entries beyond the slice may give NaN
            grad_q[i] += z[u][i];
            grad_v[i] += value[u][i];
          }
        } else {
          z[u][i] = positive[u] >> i & 1u ? of_out : A{0};
          grad_q[i] += z[u][i];
        }
      }
      if constexpr (!kRaw && kMessage != EdgeMessage::kGate) {
        if (has[u] && args.grad_edge != nullptr) {
          lane.template store<T>(args.grad_edge, entries.position[u], z[u]);
        }
      }
    }
    if constexpr (kRaw) {
      if (args.grad_features == nullptr) continue;
#pragma unroll 1
      for (std::int64_t first = 0; first < input.edge_width; first += 4) {
        A part[4 * kInFlight] = {};
        add_to_features<T>(part, lane, input.weight, first, z);
        if constexpr (kGated) add_to_features<T>(part, lane, input.of_value, first, value);
        store_features(args, lane, first, part, entries, has);
      }
    }
  }
  if (lane.group >= args.split_t.num_slices) return;
  if (!kGated && args.scale != nullptr) {
    const A scale = widen(*static_cast<const T*>(args.scale));
    lane.add_root(grad_q, args.grad, scale, args.a_t, args.split_t, slice);
  }
  lane.store_sum(slice, args.grad_q, args.partial_q, grad_q);
  if constexpr (kGated) lane.store_sum(slice, args.grad_v, args.partial_v, grad_v);
}

// Number of rows of a group's partial sums: the rows of dW and, for relu, one row for dbias.
__host__ __device__ inline std::int64_t rows_of_group(const EdgeMessageInput& input) {
  return input.edge_width + (input.message == EdgeMessage::kRelu ? 1 : 0);
}

// Number of raw features per block: a lane keeps their part of dW in registers.
template <typename T>
constexpr int kWeightFeatures = sizeof(Acc<T>) == 4 ? 8 : 4;

// Blocks per multiprocessor. For relu, all groups of a width of 128 run at once.
template <typename T, bool kGated>
constexpr int kWeightBlocks = sizeof(Acc<T>) == 8 ? 1
                              : kGated            ? 3
                                                  : 4;

// A group of lanes sums dW over every args.groups-th slice. For gates, blocks with odd blockIdx.z sum dU
// instead. The next slice and its entries are loaded ahead, because slice, entry and edge are dependent
// loads.
template <typename T, bool kGated>
__global__ void __launch_bounds__(kMessageThreads, kWeightBlocks<T, kGated>)
    edge_messages_weight_kernel(const __grid_constant__ EdgeMessageBackwardArgs args, int lanes) {
  using A = Acc<T>;
  constexpr int kFeatures = kWeightFeatures<T>, kParts = kFeatures / 4;
  constexpr int kInFlight = kGated ? 1 : 2;
  const EdgeMessageInput& input = args.input;
  const MessageLane<T> lane(input.width, lanes);
  if (lane.group >= args.groups) return;
  const bool of_value = kGated && blockIdx.z % 2 != 0;
  const std::int64_t first = static_cast<std::int64_t>(kGated ? blockIdx.z / 2 : blockIdx.z) * kFeatures;
  A acc[kFeatures][kTileFeatures] = {}, of_bias[kTileFeatures] = {};
  RowSlice slice = load_slice(args.split, lane.group);
  NextEntries<kInFlight> next;
  next.read(args.a, slice, 0);
  for (std::int64_t index = lane.group; index < args.split.num_slices; index += args.groups) {
    const RowSlice following = load_slice(args.split, index + args.groups);
    const std::int64_t row = row_of(args.split, slice);
    A grad[kTileFeatures], k[kTileFeatures];
    lane.load(grad, args.grad, row);
    if constexpr (kGated) lane.load(k, input.k, row);
    int base = 0;
    do {  // also once for an empty slice, because the entries of the next slice are read here
      const NextEntries<kInFlight> entries = next;
      bool has[kInFlight];
      FourFeatures<T> features[kInFlight][kParts];
      TileRow<T> q[kInFlight], v[kInFlight];
      unsigned positive[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        has[u] = base + u < slice.length;
        const T* from = row_from<T>(input.edge, entries.position[u]) + first;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          features[u][part].load(from + part * 4, has[u] && first + part * 4 < input.edge_width);
        }
        if constexpr (kGated) {
          q[u] = lane.load(input.q, entries.col[u], has[u]);
          v[u] = lane.load(input.v, entries.col[u], has[u] && !of_value);
        } else {
          positive[u] = has[u] ? __ldg(lane.signs(args.positive, entries.position[u], args.sign_bytes)) : 0;
        }
      }
      const bool is_last = base + kInFlight >= slice.length;
      const RowSlice upcoming{is_last ? following.begin : slice.begin + base + kInFlight,
                              is_last ? following.length : slice.length - base - kInFlight, 0};
      next.read(args.a, upcoming, 0);

      A factor[kInFlight][kTileFeatures];
      if constexpr (kGated) {
        A value[kInFlight][kTileFeatures];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
          for (int i = 0; i < kTileFeatures; ++i) {
            factor[u][i] = k[i] + q[u][i];
            value[u][i] = v[u][i];
          }
        }
        add_projected(factor, lane, input, input.weight, entries.position, has);
        if (!of_value) add_projected(value, lane, input, input.of_value, entries.position, has);
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
          for (int i = 0; i < kTileFeatures; ++i) {
            const A gate = sigmoid(factor[u][i]);
            factor[u][i] = gate * (of_value ? A{1} : (A{1} - gate) * value[u][i]) * grad[i];
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (!has[u]) continue;
        if constexpr (!kGated) {
#pragma unroll
          for (int i = 0; i < kTileFeatures; ++i) {
            factor[u][i] = positive[u] >> i & 1u ? grad[i] : A{0};
            of_bias[i] += factor[u][i];
          }
        }
#pragma unroll
        for (int a = 0; a < kFeatures; ++a) {
#pragma unroll
          for (int i = 0; i < kTileFeatures; ++i) acc[a][i] += factor[u][i] * features[u][a / 4][a % 4];
        }
      }
      base += kInFlight;
    } while (base < slice.length);
    slice = following;
  }
  void* to = of_value ? args.grad_of_value : args.grad_weight;
  const std::int64_t row = lane.group * rows_of_group(input);
#pragma unroll
  for (int a = 0; a < kFeatures; ++a) {
    if (first + a < input.edge_width) lane.template store<A>(to, row + first + a, acc[a]);
  }
  if constexpr (!kGated) {
    if (first == 0) lane.template store<A>(to, row + input.edge_width, of_bias);
  }
}

// Adds the groups' parts of dW and dbias or, in the second row of the grid, the groups' parts of dU. Each
// lane handles one column, and each of the 32 warps every 32nd group.
template <typename T, typename A>
__global__ void __launch_bounds__(kWarp* kWarp)
    sum_groups_kernel(const __grid_constant__ EdgeMessageBackwardArgs args) {
  __shared__ double sums[kWarp][kWarp];
  const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
  const std::int64_t width = args.input.width, size = rows_of_group(args.input) * width;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + lane;
  const bool of_value = blockIdx.y != 0;
  double total = 0;
  if (column < size) {
    const A* from = static_cast<const A*>(of_value ? args.grad_of_value : args.grad_weight) + column;
#pragma unroll 4
    for (std::int64_t group = warp; group < args.groups; group += kWarp) total += from[group * size];
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || column >= size) return;
  for (int other = 1; other < kWarp; ++other) total += sums[other][lane];
  const EdgeMapGradients& to = args.maps;
  const std::int64_t a = column / width, f = column % width;
  if (f >= to.width) return;
  const T sum = narrow<T>(static_cast<Acc<T>>(total));
  if (a < to.edge_width) {
    void* map = of_value ? to.of_value : to.weight;
    if (map != nullptr) static_cast<T*>(map)[f * to.edge_width + a] = sum;
  } else if (a == args.input.edge_width && to.bias != nullptr) {
    static_cast<T*>(to.bias)[f] = sum;
  }
}

// Adds the parts of da over the tiles of the width.
template <typename T>
__global__ void __launch_bounds__(kMessageThreads)
    sum_tiles_kernel(const __grid_constant__ EdgeMessageBackwardArgs args, int tiles) {
  using A = Acc<T>;
  const EdgeMapGradients& to = args.maps;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kMessageThreads + threadIdx.x;
  if (index >= args.num_values * to.edge_width) return;
  const std::int64_t position = index / to.edge_width, a = index % to.edge_width;
  A total = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    total += static_cast<const A*>(
        args.grad_features)[(tile * args.num_values + position) * args.input.edge_width + a];
  }
  static_cast<T*>(to.features)[index] = narrow<T>(total);
}

template <typename T>
void launch(const EdgeMessageBackwardArgs& args, cudaStream_t stream) {
  const EdgeMessageInput& input = args.input;
  if (input.width == 0) return;
  const int lanes = message_lanes(input.width);
  const bool gated = input.message != EdgeMessage::kRelu;
  if (args.split_t.num_slices != 0) {
    const dim3 grid = message_grid(args.split_t.num_slices, input.width, lanes);
    // relu reads signs instead of the edges, so raw features are read only if their own gradient is needed.
    const bool raw = input.weight != nullptr && (gated || args.grad_features != nullptr);
    with_message(input.message, raw, [&](auto message, auto is_raw) {
      edge_messages_column_kernel<T, decltype(message)::value, decltype(is_raw)::value>
          <<<grid, kMessageThreads, 0, stream>>>(args, lanes);
    });
    const auto combine = [&](const void* partial, void* to) {
      combine_partials<T, 1>(args.split_t, partial, Epilogue::only(to, input.width), SameRow{}, stream);
    };
    combine(args.partial_q, args.grad_q);
    if (gated) combine(args.partial_v, args.grad_v);
  }
  if (args.grad_features != nullptr && args.grad_features != args.maps.features &&
      args.num_values * args.maps.edge_width != 0) {
    const int tiles = static_cast<int>(ceil_div(input.width, kTileFeatures * lanes));
    sum_tiles_kernel<T>
        <<<ceil_div(args.num_values * args.maps.edge_width, kMessageThreads), kMessageThreads, 0, stream>>>(
            args, tiles);
  }
  if (args.grad_weight == nullptr || rows_of_group(input) == 0) return;
  dim3 grid = message_grid(args.groups, input.width, lanes);
  grid.z = std::max(ceil_div(input.edge_width, kWeightFeatures<T>), 1u) * (gated ? 2 : 1);
  const auto run = [&](auto kernel) { kernel<<<grid, kMessageThreads, 0, stream>>>(args, lanes); };
  run(gated ? edge_messages_weight_kernel<T, true> : edge_messages_weight_kernel<T, false>);
  const dim3 columns(ceil_div(rows_of_group(input) * input.width, kWarp), gated ? 2 : 1);
  with_type(args.maps.dtype, [&](auto type) {
    sum_groups_kernel<decltype(type), Acc<T>><<<columns, dim3(kWarp, kWarp), 0, stream>>>(args);
  });
}

}  // namespace edge_messages_backward_detail

int edge_messages_backward(const EdgeMessageBackwardArgs& given, void* stream) {
  using namespace edge_messages_backward_detail;
  EdgeMessageBackwardArgs args = given;
  find_maps(args.input);
  const int error = lay_out_edge_maps(args.input.maps, stream);
  if (error != cudaSuccess) return error;
  with_type(args.input.dtype,
            [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
