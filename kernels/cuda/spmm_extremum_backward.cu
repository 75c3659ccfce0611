// Gradients of spmm_extremum.cu, from CSR on CUDA cores.
//   - Of sources: a pass over the transpose. A group of lanes handles one slice, with 4 neighbouring features
//     (or one) per lane, and adds the gradients of the destinations whose chosen edge is the entry. Only
//     these gradients are read. Partial results of split rows are added in slot order.
//   - Of values: a group handles one entry. For each head, it sums the gradient times x over the features
//     whose chosen edge is the entry, in a fixed tree. Every value is written once.
//
// Neither pass has atomics. Floor, for E entries of width F: each pass gathers 4 E F bytes of chosen
// positions.

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/spmm_extremum.h"

namespace fastsparse::cuda {
namespace spmm_extremum_backward_detail {

constexpr int kThreads = 128;
constexpr int kInFlight = 4;
constexpr int kEntryLanes = 8;

template <typename T, int kVec, int kLanes>
__global__ void __launch_bounds__(kThreads)
    spmm_extremum_sources_kernel(const __grid_constant__ SpmmExtremumBackwardArgs args) {
  using A = Acc<T>;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const std::int64_t feature = (static_cast<std::int64_t>(blockIdx.y) * kLanes + threadIdx.x % kLanes) * kVec;
  if (group >= args.split_t.num_slices || feature >= args.width) return;
  const RowSlice slice = load_slice(args.split_t, group);
  const bool weighted = args.value.data != nullptr;
  const bool value_in_feature_dtype = args.value.dtype == args.dtype;
  const std::int64_t head_width = weighted ? args.width / args.value.heads : 1;

  A sum[kVec] = {};
  for (int base = 0; base < slice.length; base += kInFlight) {
    std::int64_t row[kInFlight];
    std::int32_t position[kInFlight];
    Pack<std::int32_t, kVec> arg[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const bool has = base + u < slice.length;
      const std::int64_t entry = slice.begin + (has ? base + u : 0);
      row[u] = __ldg(args.a.col + entry);
      position[u] = has ? static_cast<std::int32_t>(edge_position(args.a, entry)) : kNoEdge;
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      arg[u] = load_pack<std::int32_t, kVec>(args.arg + row[u] * args.width + feature);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      bool any = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) any |= arg[u].lane[i] == position[u];
      if (!any) continue;
      const auto grad =
          load_pack<T, kVec>(static_cast<const T*>(args.grad.data) + row[u] * args.grad.stride + feature);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (arg[u].lane[i] != position[u]) continue;
        A term = widen(grad.lane[i]);
        if (weighted) {
          term *= load_value<T>(
              args.value, value_in_feature_dtype,
              static_cast<std::uint32_t>(position[u]) * args.value.heads + (feature + i) / head_width);
        }
        sum[i] += term;
      }
    }
  }
  if (slice.target < 0) {
    A* to = static_cast<A*>(args.partial) + static_cast<std::int64_t>(~slice.target) * args.width + feature;
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = sum[i];
  } else {
    T* to = static_cast<T*>(args.grad_x) + static_cast<std::int64_t>(slice.target) * args.width + feature;
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = narrow<T>(sum[i]);
  }
}

// A group handles one entry of the transpose, so row and column are swapped.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    spmm_extremum_values_kernel(const __grid_constant__ SpmmExtremumBackwardArgs args) {
  using A = Acc<T>;
  const int lane = threadIdx.x % kEntryLanes;
  const std::int64_t entry =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kEntryLanes) + threadIdx.x / kEntryLanes;
  const bool has = entry < args.a.num_edges;
  const std::int64_t position = has ? edge_position(args.a, entry) : 0;
  const std::int64_t row = has ? args.a.col[entry] : 0, source = has ? args.source[position] : 0;
  const std::int32_t* arg = args.arg + row * args.width;
  const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride;
  const T* x = static_cast<const T*>(args.x.data) + source * args.x.stride;
  const std::int64_t head_width = args.width / args.value.heads;
  for (std::int64_t head = 0; head < args.value.heads; ++head) {
    A sum = 0;
    for (std::int64_t f = head * head_width + lane; has && f < (head + 1) * head_width; f += kEntryLanes) {
      if (arg[f] != static_cast<std::int32_t>(position)) continue;
      const A term = widen(grad[f]);
      sum += args.x.data == nullptr ? term : term * widen(x[f]);
    }
#pragma unroll
    for (int offset = kEntryLanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, offset);
    }
    if (has && lane == 0) static_cast<A*>(args.grad_value)[position * args.value.heads + head] = sum;
  }
}

template <typename T, int kVec, int kLanes>
void launch_sources(const SpmmExtremumBackwardArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split_t.num_slices, kThreads / kLanes), ceil_div(args.width, kLanes * kVec));
  spmm_extremum_sources_kernel<T, kVec, kLanes><<<grid, kThreads, 0, stream>>>(args);
  combine_partials<T, 1>(args.split_t, args.partial, Epilogue::only(args.grad_x, args.width), SameRow{},
                         stream);
}

template <typename T>
void launch(const SpmmExtremumBackwardArgs& args, cudaStream_t stream) {
  // Loads have 4 numbers of both arrays if alignment allows it, that is, at most 16 bytes.
  const bool packed = vector_width<float>({args.width, args.grad.stride}, {args.arg, args.grad.data}) == 4;
  if constexpr (sizeof(T) == 8) {  // float64 is used for tests, so one kernel handles every width
    launch_sources<T, 1, 32>(args, stream);
  } else if (packed) {
    args.width <= 32 ? launch_sources<T, 4, 8>(args, stream) : launch_sources<T, 4, 32>(args, stream);
  } else {
    args.width <= 8 ? launch_sources<T, 1, 8>(args, stream) : launch_sources<T, 1, 32>(args, stream);
  }
  if (args.grad_value == nullptr) return;
  const dim3 grid(ceil_div(args.a.num_edges, kThreads / kEntryLanes));
  spmm_extremum_values_kernel<T><<<grid, kThreads, 0, stream>>>(args);
}

}  // namespace spmm_extremum_backward_detail

int spmm_extremum_backward(const SpmmExtremumBackwardArgs& args, void* stream) {
  using namespace spmm_extremum_backward_detail;
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
