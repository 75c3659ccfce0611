// Sums of messages that depend on edge features, from CSR on CUDA cores: GINE and gated layers. The message
// is a template parameter of one kernel (formulas in edge_messages.h).
//
// Every feature of a message is computed independently, so tiles of the width are independent and nothing is
// summed over lanes (edge_messages.cuh explains the lanes). Raw edge features are multiplied by W here, with
// W in the L1 cache. Each weight is read once for all edges in flight, and W a_ij is not stored.
//
// Floors in bytes, for E entries of width F, A raw features, T bytes per number:
//   - relu: E F T gathered, E F T or E A T of edges read, E F / 8 of signs written. The backward pass reads
//     the signs instead of x and the edges.
//   - gates: 2 E F T gathered; with state, also E F T read and written.
//
// kGate also sums sigmoid'(z) v_ij. The gradient of k_i is that sum times the gradient of out_i, so the
// backward pass needs no row pass for it. Slices of a row are added in slot order, without atomics.

#include "fastsparse/edge_messages.cuh"

namespace fastsparse::cuda {
namespace edge_messages_detail {

constexpr int kMapThreads = 256;

__host__ __device__ std::int64_t map_rows(const EdgeMapsArgs& args) {
  return args.edge_width * (args.of_value.data == nullptr ? 1 : 2) + (args.bias == nullptr ? 0 : 1);
}

template <typename T, EdgeMessage kMessage, bool kRaw>
__global__ void __launch_bounds__(kMessageThreads, kMessageBlocks<T>)
    edge_messages_kernel(const __grid_constant__ EdgeMessageArgs args, int lanes) {
  using A = Acc<T>;
  constexpr bool kGated = kMessage != EdgeMessage::kRelu, kState = kMessage == EdgeMessage::kGateAndState;
  constexpr bool kRows = !kRaw && kMessage != EdgeMessage::kGate;
  constexpr int kInFlight = kMessagesInFlight < T, 1 + kGated + kRows, kRaw && kGated ? 2 : 4 > ;
  const EdgeMessageInput& input = args.input;
  const MessageLane<T> lane(input.width, lanes);
  if (lane.group >= args.split.num_slices) return;
  const RowSlice slice = load_slice(args.split, lane.group);
  NextEntries<kInFlight> next;
  next.read(args.a, slice, 0);

  A of_row[kTileFeatures] = {}, sum[kTileFeatures] = {}, side[kTileFeatures] = {};
  if constexpr (kGated) {
    lane.load(of_row, input.k, row_of(args.split, slice));
  } else if constexpr (kRaw) {
    if (input.bias != nullptr) lane.load_wide(of_row, input.bias, 0);
  }

  for (int base = 0; base < slice.length; base += kInFlight) {
    const NextEntries<kInFlight> entries = next;
    bool has[kInFlight];
    TileRow<T> q[kInFlight], v[kInFlight], edge[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      has[u] = base + u < slice.length;
      q[u] = lane.load(input.q, entries.col[u], has[u]);
      if constexpr (kGated) v[u] = lane.load(input.v, entries.col[u], has[u]);
      if constexpr (kRows) edge[u] = lane.load(input.edge, entries.position[u], has[u]);
    }
    next.read(args.a, slice, base + kInFlight);

    A z[kInFlight][kTileFeatures], value[kInFlight][kTileFeatures];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
      for (int i = 0; i < kTileFeatures; ++i) {
        z[u][i] = of_row[i] + q[u][i];
        if constexpr (kRows) z[u][i] += edge[u][i];
        if constexpr (kGated) value[u][i] = v[u][i];
      }
    }
    if constexpr (kRaw) {
      add_projected(z, lane, input, input.weight, entries.position, has);
      if constexpr (kGated) add_projected(value, lane, input, input.of_value, entries.position, has);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (!has[u]) continue;
      if constexpr (kState) lane.template store<T>(args.state, entries.position[u], z[u]);
      unsigned positive = 0;
#pragma unroll
      for (int i = 0; i < kTileFeatures; ++i) {
        if constexpr (kGated) {
          const A gate = sigmoid(z[u][i]), message = gate * value[u][i];
          sum[i] += message;
          side[i] += kState ? gate : message * (A{1} - gate);
        } else {
          const bool kept = !(z[u][i] <= A{0});  // keeps NaN, as PyTorch's relu does
          sum[i] += kept ? z[u][i] : A{0};
          positive |= kept ? 1u << i : 0u;
        }
      }
      if constexpr (!kGated) {
        if (args.positive != nullptr) {
          *lane.signs(args.positive, entries.position[u], args.sign_bytes) =
              static_cast<std::uint8_t>(positive);
        }
      }
    }
  }
  if (!kState && args.root.data != nullptr) {
    A scale = 1;
    if (!kGated && args.eps != nullptr) {
      const T rounded = narrow<T>(A{1} + widen(*static_cast<const T*>(args.eps)));
      scale = widen(rounded);
      const bool is_first = lane.group == 0 && lane.sub == 0 && blockIdx.y == 0;
      if (is_first && args.scale != nullptr) *static_cast<T*>(args.scale) = rounded;
    }
    lane.add_root(sum, args.root, scale, args.a, args.split, slice);
  }
  lane.store_sum(slice, args.out, args.partial, sum);
  if (kGated && args.side != nullptr) lane.store_sum(slice, args.side, args.partial_side, side);
}

template <typename T>
__global__ void __launch_bounds__(kMapThreads)
    lay_out_maps_kernel(const __grid_constant__ EdgeMapsArgs args) {
  using A = Acc<T>;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kMapThreads + threadIdx.x;
  if (index >= map_rows(args) * args.width) return;
  const std::int64_t row = index / args.width, f = index % args.width;
  const bool is_value = row >= args.edge_width && args.of_value.data != nullptr && row < 2 * args.edge_width;
  const bool is_bias = !is_value && row >= args.edge_width;
  const std::int64_t a = is_value ? row - args.edge_width : row;
  A found = 0;
  if (f < args.given_width && (is_bias || a < args.given_edge_width)) {
    const auto at = [&](const DenseView& map) { return widen(row_from<T>(map, f)[a]); };
    if (is_bias) {
      found = widen(static_cast<const T*>(args.bias)[f]);
    } else {
      found = at(is_value ? args.of_value : args.weight);
      if (!is_value && args.added.data != nullptr) found += at(args.added);
    }
  }
  static_cast<A*>(args.out)[index] = found;
}

template <typename T>
void launch(const EdgeMessageArgs& args, cudaStream_t stream) {
  const EdgeMessageInput& input = args.input;
  if (args.split.num_slices == 0 || input.width == 0) return;
  const int lanes = message_lanes(input.width);
  const dim3 grid = message_grid(args.split.num_slices, input.width, lanes);
  with_message(input.message, input.weight != nullptr, [&](auto message, auto raw) {
    edge_messages_kernel<T, decltype(message)::value, decltype(raw)::value>
        <<<grid, kMessageThreads, 0, stream>>>(args, lanes);
  });
  const auto combine = [&](const void* partial, void* to) {
    combine_partials<T, 1>(args.split, partial, Epilogue::only(to, input.width), SameRow{}, stream);
  };
  combine(args.partial, args.out);
  if (args.side != nullptr) combine(args.partial_side, args.side);
}

}  // namespace edge_messages_detail

int lay_out_edge_maps(const EdgeMapsArgs& args, void* stream) {
  using namespace edge_messages_detail;
  const std::int64_t size = map_rows(args) * args.width;
  if (size == 0 || args.weight.data == nullptr) return cudaSuccess;
  with_type(args.dtype, [&](auto type) {
    lay_out_maps_kernel<decltype(type)>
        <<<ceil_div(size, kMapThreads), kMapThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  return cudaGetLastError();
}

int edge_messages(const EdgeMessageArgs& given, void* stream) {
  using namespace edge_messages_detail;
  EdgeMessageArgs args = given;
  find_maps(args.input);
  const int error = lay_out_edge_maps(args.input.maps, stream);
  if (error != cudaSuccess) return error;
  with_type(args.input.dtype,
            [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
