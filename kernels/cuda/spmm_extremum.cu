// Maximum and minimum aggregation from CSR on CUDA cores. Ties go to the first entry of the row; NaN wins, as
// in torch. A group of lanes takes one slice; partial results of split rows are compared in slot order by a
// second kernel.

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/spmm_extremum.h"

namespace fastsparse::cuda {
namespace in_spmm_extremum {

constexpr int kThreads = 128;

template <typename A>
__device__ __forceinline__ bool beats(A candidate, A best) {
  return candidate > best || (candidate != candidate && best == best);
}

// Candidates are negated for the minimum: min(v) = -max(-v).
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) spmm_extremum_kernel(const SpmmExtremumArgs args) {
  using A = Acc<T>;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const std::int64_t feature = static_cast<std::int64_t>(blockIdx.y) * kLanes + lane;
  if (group >= args.split.num_slices || feature >= args.width) return;
  const RowSlice slice = load_slice(args.split, group);
  const bool weighted = args.value.data != nullptr;
  const bool value_in_feature_dtype = args.value.dtype == args.dtype;
  const std::int64_t head = weighted ? feature / (args.width / args.value.heads) : 0;
  const T* x = static_cast<const T*>(args.x.data) + feature;
  const A sign = args.minimum ? A{-1} : A{1};
  A best = 0;
  int chosen = -1;
  auto consider = [&](int offset, A candidate) {
    if (offset == 0 || beats(candidate, best)) {
      best = candidate;
      chosen = offset;
    }
  };
  auto candidate_at = [&](int offset) {
    const std::int64_t entry = slice.begin + offset;
    A candidate = sign * widen(x[static_cast<std::int64_t>(__ldg(args.a.col + entry)) * args.x.stride]);
    if (weighted) {
      const A value = load_value<T>(args.value, value_in_feature_dtype,
                                    edge_position(args.a, entry) * args.value.heads + head);
      candidate = args.adds ? candidate + sign * value : candidate * value;
    }
    return candidate;
  };
  constexpr int kEntriesInFlight = 4;
  int offset = 0;
  for (; offset + kEntriesInFlight <= slice.length; offset += kEntriesInFlight) {
    A candidate[kEntriesInFlight];
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) candidate[u] = candidate_at(offset + u);
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) consider(offset + u, candidate[u]);
  }
#pragma unroll 1
  for (; offset < slice.length; ++offset) consider(offset, candidate_at(offset));

  const std::int32_t arg =
      chosen < 0 ? kNoEdge : static_cast<std::int32_t>(edge_position(args.a, slice.begin + chosen));
  if (slice.target < 0) {
    const std::int64_t at = static_cast<std::int64_t>(~slice.target) * args.width + feature;
    static_cast<A*>(args.partial)[at] = best;
    args.partial_arg[at] = arg;
  } else {
    const std::int64_t at = static_cast<std::int64_t>(slice.target) * args.width + feature;
    static_cast<T*>(args.out)[at] = narrow<T>(chosen < 0 ? A{0} : sign * best);
    args.arg[at] = arg;
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

template <typename T, int kLanes>
void launch_lanes(const SpmmExtremumArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kLanes), ceil_div(args.width, kLanes));
  spmm_extremum_kernel<T, kLanes><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T>
void launch(const SpmmExtremumArgs& args, cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {  // float64 is for checks: one kernel takes every width
    launch_lanes<T, 32>(args, stream);
  } else {
    args.width <= 8 ? launch_lanes<T, 8>(args, stream) : launch_lanes<T, 32>(args, stream);
  }
  if (args.split.num_split_rows > 0) {
    const dim3 grid(static_cast<unsigned>(args.split.num_split_rows), ceil_div(args.width, kWarp));
    combine_extrema_kernel<T><<<grid, kWarp, 0, stream>>>(args);
  }
}

}  // namespace in_spmm_extremum

int spmm_extremum(const SpmmExtremumArgs& args, void* stream) {
  using namespace in_spmm_extremum;
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
