// Reductions of segments of rows on CUDA cores: sum, mean, maximum, minimum, product, variance and standard
// deviation.
//
// A group of lanes handles one slice of a segment. 1, 4, 8 or 32 adjacent lanes cover the features, with
// 16-byte loads if alignment allows it. With fewer than 8 of these lanes, the other lanes of the group handle
// other entries, and the states of all lanes are merged in a fixed tree. Rows are read at the entries'
// positions, so an unsorted index needs no copy. Slices of segments that were cut store their states in
// slots, and a second kernel merges a segment's slots in a fixed order. There are no atomics, so every run
// gives the same bits. Among equal extrema, the first entry is chosen; NaN is an extremum, as in PyTorch.
// Floor, for E entries and N segments of width F: E * F * sizeof(T) bytes and E positions read, N * F *
// sizeof(T) bytes written.

#include <algorithm>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/sort_segments.h"

namespace fastsparse::cuda {
namespace segment_reduce_detail {

constexpr int kThreads = 128;
constexpr int kEntriesInFlight = 4;
// Number of a lane's entries after which its sum is added to a total, so that rounding errors grow much less
// with the length of a slice.
constexpr int kEntriesPerSum = 32;
constexpr int kMinGroup = 8;
constexpr int kCombineWarps = 16;
constexpr unsigned kMostUnseenRows = 1024;  // blocks for cut segments if the host does not know their number

template <typename V>
__device__ __forceinline__ V from_lane(V v, int distance) {
  return __shfl_xor_sync(kFullWarp, v, distance);
}

// States of one feature after some entries. `add` gets a value and the entry that it belongs to. `settle` is
// called after every kEntriesPerSum entries of a lane, and before states are merged.
template <typename A>
struct SumState {
  A sum = 0, total = 0;

  __device__ void add(A v, std::int64_t) { sum += v; }
  __device__ void settle() {
    total += sum;
    sum = 0;
  }
  __device__ SumState of_lane(int distance) const { return {A{0}, from_lane(total, distance)}; }
  __device__ void merge(const SumState& other) { total += other.total; }
};

template <typename A>
struct ProductState {
  A product = 1;

  __device__ void add(A v, std::int64_t) { product *= v; }
  __device__ void settle() {}
  __device__ ProductState of_lane(int distance) const { return {from_lane(product, distance)}; }
  __device__ void merge(const ProductState& other) { product *= other.product; }
};

template <typename A>
struct MaximumState {
  A best = 0;
  std::int64_t entry = -1;

  __device__ void add(A v, std::int64_t at) {
    if (entry < 0 || v > best || (v != v && best == best)) {
      best = v;
      entry = at;
    }
  }
  __device__ void settle() {}
  __device__ MaximumState of_lane(int distance) const {
    return {from_lane(best, distance), from_lane(entry, distance)};
  }
  __device__ void merge(const MaximumState& other) {
    if (other.entry < 0) return;
    const bool is_nan = best != best, other_is_nan = other.best != other.best;
    const bool tie = best == other.best || (is_nan && other_is_nan);
    const bool better = other.best > best || (other_is_nan && !is_nan);
    if (entry < 0 || better || (tie && other.entry < entry)) *this = other;
  }
};

// Mean and sum of squared deviations, by Welford's method. States are merged by Chan's formula.
template <typename A>
struct MomentState {
  A count = 0, mean = 0, squares = 0;

  __device__ void add(A v, std::int64_t) {
    count += 1;
    const A deviation = v - mean;
    mean += deviation / count;
    squares += deviation * (v - mean);
  }
  __device__ void settle() {}
  __device__ MomentState of_lane(int distance) const {
    return {from_lane(count, distance), from_lane(mean, distance), from_lane(squares, distance)};
  }
  __device__ void merge(const MomentState& other) {
    if (other.count == A{0}) return;
    const A all = count + other.count, difference = other.mean - mean, share = other.count / all;
    mean += difference * share;
    squares += other.squares + difference * difference * count * share;
    count = all;
  }
};

// The result of a whole segment.
template <typename T>
__device__ T finish(const SegmentReduceArgs& args, const SumState<Acc<T>>& state, std::int64_t row,
                    std::int64_t) {
  Acc<T> sum = state.total;
  if (args.reduction == Reduction::kMean) {
    const std::int64_t count = args.a.rowptr[row + 1] - args.a.rowptr[row];
    sum /= static_cast<Acc<T>>(count > 0 ? count : 1);
  }
  return narrow<T>(sum);
}

template <typename T>
__device__ T finish(const SegmentReduceArgs&, const ProductState<Acc<T>>& state, std::int64_t, std::int64_t) {
  return narrow<T>(state.product);
}

template <typename T>
__device__ T finish(const SegmentReduceArgs& args, const MaximumState<Acc<T>>& state, std::int64_t row,
                    std::int64_t feature) {
  const bool empty = state.entry < 0;
  static_cast<std::int64_t*>(args.extra)[row * args.width + feature] =
      empty ? args.a.num_edges : edge_position(args.a, state.entry);
  if (empty) return narrow<T>(Acc<T>{0});
  return narrow<T>(args.reduction == Reduction::kMin ? -state.best : state.best);
}

template <typename T>
__device__ T finish(const SegmentReduceArgs& args, const MomentState<Acc<T>>& state, std::int64_t row,
                    std::int64_t feature) {
  using A = Acc<T>;
  static_cast<A*>(args.extra)[row * args.width + feature] = state.mean;
  const A variance = state.count > A{0} ? state.squares / state.count : A{0};
  return narrow<T>(args.reduction == Reduction::kDeviation ? sqrt(variance) : variance);
}

template <typename T, int kVec, int kFeatureLanes, typename State>
__global__ void __launch_bounds__(kThreads) segment_reduce_kernel(const SegmentReduceArgs args) {
  using A = Acc<T>;
  constexpr int kGroup = kFeatureLanes < kMinGroup ? kMinGroup : kFeatureLanes;
  constexpr int kEntryLanes = kGroup / kFeatureLanes;
  const int lane = threadIdx.x % kGroup;
  const int entry_lane = lane / kFeatureLanes;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  const std::int64_t feature =
      (static_cast<std::int64_t>(blockIdx.y) * kFeatureLanes + lane % kFeatureLanes) * kVec;
  const bool inside = feature < args.width;
  const RowSlice slice = load_slice(args.split, group);
  const T* x = static_cast<const T*>(args.x.data) + feature;
  const A sign = args.reduction == Reduction::kMin ? A{-1} : A{1};  // min(v) = -max(-v)

  const auto load = [&](std::int64_t entry) {
    return load_pack<T, kVec>(x + edge_position(args.a, entry) * args.x.stride);
  };
  State state[kVec];
  const auto add = [&](const Pack<T, kVec>& pack, std::int64_t entry) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) state[i].add(sign * widen(pack.lane[i]), entry);
  };
  const int length = inside ? slice.length : 0;
  int offset = entry_lane;
  while (offset < length) {
    const int stop = min(offset + kEntriesPerSum * kEntryLanes, length);
    for (; offset + (kEntriesInFlight - 1) * kEntryLanes < stop; offset += kEntriesInFlight * kEntryLanes) {
      Pack<T, kVec> pack[kEntriesInFlight];
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) pack[u] = load(slice.begin + offset + u * kEntryLanes);
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) add(pack[u], slice.begin + offset + u * kEntryLanes);
    }
#pragma unroll 1
    for (; offset < stop; offset += kEntryLanes) add(load(slice.begin + offset), slice.begin + offset);
#pragma unroll
    for (int i = 0; i < kVec; ++i) state[i].settle();
  }
#pragma unroll
  for (int distance = kGroup / 2; distance >= kFeatureLanes; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) state[i].merge(state[i].of_lane(distance));
  }

  if (group >= args.split.num_slices || !inside || entry_lane != 0) return;
  if (slice.target < 0) {
    if (slice.target == kNoTarget) return;
    auto* partial = static_cast<State*>(args.partial) + ~slice.target * args.width + feature;
#pragma unroll
    for (int i = 0; i < kVec; ++i) partial[i] = state[i];
  } else {
    const std::int64_t row = slice.target;
    Pack<T, kVec> pack;
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.lane[i] = finish<T>(args, state[i], row, feature + i);
    store_pack(pack, static_cast<T*>(args.out) + row * args.width + feature);
  }
}

// A block handles 32 features of one segment with several slices, and then possibly of further segments. Its
// warps share the slots of the segment.
template <typename T, typename State>
__global__ void __launch_bounds__(kWarp* kCombineWarps)
    combine_slices_kernel(const SegmentReduceArgs args, const std::int64_t* facts) {
  __shared__ State shared[kCombineWarps][kWarp];
  const RowSplitView& split = args.split;
  const std::int64_t num_split_rows = facts == nullptr ? split.num_split_rows : facts[kCutSegments];
  const std::int64_t feature = static_cast<std::int64_t>(blockIdx.y) * kWarp + threadIdx.x;
  const bool inside = feature < args.width;
  for (std::int64_t nth = blockIdx.x; nth < num_split_rows; nth += gridDim.x) {
    const std::int64_t end = inside ? split.split_ptr[nth + 1] : 0;
    State state;
#pragma unroll 4
    for (std::int64_t slot = split.split_ptr[nth] + threadIdx.y; slot < end; slot += kCombineWarps)
      state.merge(static_cast<const State*>(args.partial)[slot * args.width + feature]);
    shared[threadIdx.y][threadIdx.x] = state;
    __syncthreads();
    if (threadIdx.y == 0 && inside) {
#pragma unroll 1
      for (int warp = 1; warp < kCombineWarps; ++warp) state.merge(shared[warp][threadIdx.x]);
      const std::int64_t row = split.split_row[nth];
      static_cast<T*>(args.out)[row * args.width + feature] = finish<T>(args, state, row, feature);
    }
    __syncthreads();
  }
}

template <typename T, int kVec, int kFeatureLanes, typename State>
void launch_lanes(const SegmentReduceArgs& args, cudaStream_t stream) {
  constexpr int kGroup = std::max(kFeatureLanes, kMinGroup);
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kGroup),
                  ceil_div(args.width, kFeatureLanes * kVec));
  segment_reduce_kernel<T, kVec, kFeatureLanes, State><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T, int kVec, typename State>
void launch_vector(const SegmentReduceArgs& args, cudaStream_t stream) {
  const std::int64_t lanes = (args.width + kVec - 1) / kVec;
  if constexpr (sizeof(T) == 8) {  // float64 is used for tests, so one kernel handles every width
    launch_lanes<T, kVec, 32, State>(args, stream);
  } else if (lanes <= 1) {
    launch_lanes<T, kVec, 1, State>(args, stream);
  } else if (lanes <= 4) {
    launch_lanes<T, kVec, 4, State>(args, stream);
  } else if (lanes <= 8) {
    launch_lanes<T, kVec, 8, State>(args, stream);
  } else {
    launch_lanes<T, kVec, 32, State>(args, stream);
  }
}

template <typename T, template <typename> class State>
void launch(const SegmentReduceArgs& args, const std::int64_t* facts, cudaStream_t stream) {
  using Of = State<Acc<T>>;
  constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  // Products and moments are rare, so they have no kernels with vector loads.
  constexpr bool kHasVectors =
      sizeof(T) < 8 && (std::is_same_v<Of, SumState<Acc<T>>> || std::is_same_v<Of, MaximumState<Acc<T>>>);
  const bool aligned = vector_width<T>({args.width, args.x.stride}, {args.x.data, args.out}) == kVec;
  if constexpr (kHasVectors) {
    aligned ? launch_vector<T, kVec, Of>(args, stream) : launch_vector<T, 1, Of>(args, stream);
  } else {
    launch_vector<T, 1, Of>(args, stream);
  }
  if (args.split.num_split_rows > 0) {
    auto blocks = static_cast<unsigned>(args.split.num_split_rows);
    if (facts != nullptr) blocks = std::min(blocks, kMostUnseenRows);
    const dim3 grid(blocks, ceil_div(args.width, kWarp));
    combine_slices_kernel<T, Of><<<grid, dim3(kWarp, kCombineWarps), 0, stream>>>(args, facts);
  }
}

}  // namespace segment_reduce_detail

int segment_reduce_unseen(const SegmentReduceArgs& args, const std::int64_t* facts, void* stream) {
  using namespace segment_reduce_detail;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    auto* queue = static_cast<cudaStream_t>(stream);
    switch (args.reduction) {
      case Reduction::kSum:
      case Reduction::kMean:
        return launch<T, SumState>(args, facts, queue);
      case Reduction::kMax:
      case Reduction::kMin:
        return launch<T, MaximumState>(args, facts, queue);
      case Reduction::kProduct:
        return launch<T, ProductState>(args, facts, queue);
      case Reduction::kVariance:
      case Reduction::kDeviation:
        return launch<T, MomentState>(args, facts, queue);
    }
  });
  return cudaGetLastError();
}

int segment_reduce(const SegmentReduceArgs& args, void* stream) {
  return segment_reduce_unseen(args, nullptr, stream);
}

}  // namespace fastsparse::cuda
