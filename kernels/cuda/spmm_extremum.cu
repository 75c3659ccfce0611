// Maximum and minimum aggregation from CSR on CUDA cores. Among equal extrema, the first entry of the row is
// chosen; NaN is an extremum, as in PyTorch. kLanes neighbouring lanes handle one slice of a row, with kVec
// features each: lane l of block row y has the features from (y kLanes + l) kVec on. A second kernel compares
// the partial results of split rows in slot order.
//
// Floor: num_edges * width * sizeof(T) bytes gathered, as in spmm, and sizeof(T) + 4 bytes written per row
// and feature.

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/spmm_extremum.h"

namespace fastsparse::cuda {
namespace spmm_extremum_detail {

constexpr int kThreads = 128;

template <typename A>
__device__ __forceinline__ bool beats(A candidate, A best) {
  return candidate > best || (candidate != candidate && best == best);
}

template <typename T, int kVec>
__device__ __forceinline__ void store_features(T* to, const T (&x)[kVec]) {
  constexpr int kAtOnce = kVec * sizeof(T) <= 16 ? kVec : 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int v = 0; v < kVec; v += kAtOnce) {
    Pack<T, kAtOnce> pack;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) pack.lane[i] = x[v + i];
    *reinterpret_cast<Pack<T, kAtOnce>*>(to + v) = pack;
  }
}

// Candidates are negated for the minimum: min(v) = -max(-v). All features of a lane belong to one head.
template <typename T, int kVec, int kLanes>
__global__ void __launch_bounds__(kThreads) spmm_extremum_kernel(const SpmmExtremumArgs args) {
  using A = Acc<T>;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const std::int64_t feature = (static_cast<std::int64_t>(blockIdx.y) * kLanes + lane) * kVec;
  if (group >= args.split.num_slices || feature >= args.width) return;
  const RowSlice slice = load_slice(args.split, group);
  const bool weighted = args.value.data != nullptr;
  const bool value_in_feature_dtype = args.value.dtype == args.dtype;
  const std::int64_t head = weighted ? feature / (args.width / args.value.heads) : 0;
  const T* x = static_cast<const T*>(args.x.data) + feature;
  const A sign = args.minimum ? A{-1} : A{1};
  A best[kVec] = {};
  int chosen[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) chosen[v] = -1;
  const auto features_at = [&](int offset) {
    const std::int64_t source = __ldg(args.a.col + slice.begin + offset);
    return load_pack<T, kVec>(x + source * args.x.stride);
  };
  const auto consider = [&](int offset, const Pack<T, kVec>& features) {
    const std::int64_t entry = slice.begin + offset;
    A value = 0;
    if (weighted) {
      value = load_value<T>(args.value, value_in_feature_dtype,
                            edge_position(args.a, entry) * args.value.heads + head);
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      A candidate = sign * widen(features.lane[v]);
      if (weighted) candidate = args.adds ? candidate + sign * value : candidate * value;
      if (offset == 0 || beats(candidate, best[v])) {
        best[v] = candidate;
        chosen[v] = offset;
      }
    }
  };
  constexpr int kEntriesInFlight = 4;
  int offset = 0;
  for (; offset + kEntriesInFlight <= slice.length; offset += kEntriesInFlight) {
    Pack<T, kVec> features[kEntriesInFlight];
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) features[u] = features_at(offset + u);
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) consider(offset + u, features[u]);
  }
#pragma unroll 1
  for (; offset < slice.length; ++offset) consider(offset, features_at(offset));

  std::int32_t arg[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    arg[v] =
        chosen[v] < 0 ? kNoEdge : static_cast<std::int32_t>(edge_position(args.a, slice.begin + chosen[v]));
  }
  if (slice.target < 0) {
    const std::int64_t at = static_cast<std::int64_t>(~slice.target) * args.width + feature;
    store_features<A, kVec>(static_cast<A*>(args.partial) + at, best);
    store_features<std::int32_t, kVec>(args.partial_arg + at, arg);
  } else {
    const std::int64_t at = static_cast<std::int64_t>(slice.target) * args.width + feature;
    T out[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) out[v] = narrow<T>(chosen[v] < 0 ? A{0} : sign * best[v]);
    store_features<T, kVec>(static_cast<T*>(args.out) + at, out);
    store_features<std::int32_t, kVec>(args.arg + at, arg);
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarp) combine_extrema_kernel(const SpmmExtremumArgs args) {
  using A = Acc<T>;
  const std::int64_t feature = static_cast<std::int64_t>(blockIdx.y) * kWarp + threadIdx.x;
  if (feature >= args.width) return;
  std::int64_t slot = args.split.split_ptr[blockIdx.x];
  const std::int64_t end = args.split.split_ptr[blockIdx.x + 1];
  A best = static_cast<const A*>(args.partial)[slot * args.width + feature];
  std::int32_t arg = args.partial_arg[slot * args.width + feature];
  for (++slot; slot < end; ++slot) {
    const A candidate = static_cast<const A*>(args.partial)[slot * args.width + feature];
    if (beats(candidate, best)) {
      best = candidate;
      arg = args.partial_arg[slot * args.width + feature];
    }
  }
  const std::int64_t at = args.split.split_row[blockIdx.x] * args.width + feature;
  static_cast<T*>(args.out)[at] = narrow<T>(args.minimum ? -best : best);
  args.arg[at] = arg;
}

template <typename T, int kVec, int kLanes>
void launch_lanes(const SpmmExtremumArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kLanes), ceil_div(args.width, kLanes * kVec));
  spmm_extremum_kernel<T, kVec, kLanes><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T>
void launch(const SpmmExtremumArgs& args, cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {  // float64 is used for tests, so one kernel handles every width
    launch_lanes<T, 1, 32>(args, stream);
  } else {
    constexpr int kVec = 16 / static_cast<int>(sizeof(T));
    const std::int64_t head_width = args.value.data == nullptr ? args.width : args.width / args.value.heads;
    const int vec = vector_width<T>({args.width, args.x.stride, head_width},
                                    {args.x.data, args.out, args.arg, args.partial, args.partial_arg});
    if (vec < kVec) {
      args.width <= 8 ? launch_lanes<T, 1, 8>(args, stream) : launch_lanes<T, 1, 32>(args, stream);
    } else if (args.width <= 8 * kVec) {
      launch_lanes<T, kVec, 8>(args, stream);
    } else if (args.width <= 16 * kVec) {
      launch_lanes<T, kVec, 16>(args, stream);
    } else {
      launch_lanes<T, kVec, 32>(args, stream);
    }
  }
  if (args.split.num_split_rows > 0) {
    const dim3 grid(static_cast<unsigned>(args.split.num_split_rows), ceil_div(args.width, kWarp));
    combine_extrema_kernel<T><<<grid, kWarp, 0, stream>>>(args);
  }
}

}  // namespace spmm_extremum_detail

int spmm_extremum(const SpmmExtremumArgs& args, void* stream) {
  using namespace spmm_extremum_detail;
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
