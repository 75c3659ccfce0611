// Softmax over the entries of every row of edge values, and its gradient, on CUDA cores. A group of lanes
// handles one slice of a row. 1, 4, 8 or 32 adjacent lanes handle adjacent heads, so that entries with many
// heads are read in whole cache lines. With fewer than 8 of these lanes, the other lanes of the group handle
// other entries. A row with one slice is finished at once. Slices of longer rows store (maximum, sum) in
// their slots, and a second kernel merges a row's slots in order, without atomics. Floors: E * H * sizeof(T)
// bytes read (twice for the gradient) and written, and E edge positions read.

#include <algorithm>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace edge_softmax_detail {

constexpr int kThreads = 128;
constexpr int kMinGroup = 8;

// Forward: the sum of exp(score - maximum). Backward: the sum of weight * gradient, where the maximum stays
// 0.
template <typename A>
struct State {
  A maximum;
  A sum;

  __device__ void add(A score) {
    const bool is_higher = score > maximum || score != score;
    if (!is_higher && maximum == -INFINITY) return;
    const A factor = exp(is_higher ? maximum - score : score - maximum);
    sum = is_higher ? sum * factor + A{1} : sum + factor;
    if (is_higher) maximum = score;
  }

  __device__ void merge(const State& other) {
    const A highest = other.maximum > maximum || other.maximum != other.maximum ? other.maximum : maximum;
    if (highest == -INFINITY) return;
    sum = sum * exp(maximum - highest) + other.sum * exp(other.maximum - highest);
    maximum = highest;
  }

  // The factor that makes the weights sum to 1; 0 if there are no weights. If the maximum is infinity or NaN,
  // the factor is NaN: a first score of infinity counts as 1 in the sum, and correcting that here costs
  // nothing per entry.
  __device__ A normaliser() const { return sum == A{0} ? A{0} : A{1} / (sum + (maximum - maximum)); }
};

template <typename T, bool kGradient, int kHeadLanes>
struct Entries {
  using A = Acc<T>;
  static constexpr int kGroup = std::max(kHeadLanes, kMinGroup);
  static constexpr int kEntryLanes = kGroup / kHeadLanes;

  const EdgeSoftmaxArgs& args;
  RowSlice slice;
  std::int64_t head;
  int first;  // the first of the slice's entries that this lane reads

  __device__ explicit Entries(const EdgeSoftmaxArgs& args)
      : args(args),
        slice(load_slice(args.split,
                         static_cast<std::int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup)),
        head(static_cast<std::int64_t>(blockIdx.y) * kHeadLanes + threadIdx.x % kHeadLanes),
        first(threadIdx.x % kGroup / kHeadLanes) {
    if (head >= args.heads) slice.length = 0;
  }

  __device__ bool has_slot() const { return slice.target < 0 && head < args.heads; }

  __device__ std::int64_t at(int offset) const {
    return edge_position(args.a, slice.begin + offset) * args.heads + head;
  }

  __device__ static A load(const void* from, std::int64_t position) {
    return widen(load_pack<T, 1>(static_cast<const T*>(from) + position).lane[0]);
  }

  __device__ State<A> reduce() const {
    State<A> state{kGradient ? A{0} : -static_cast<A>(INFINITY), A{0}};
#pragma unroll 4
    for (int offset = first; offset < slice.length; offset += kEntryLanes) {
      const std::int64_t position = at(offset);
      const A input = load(args.input, position);
      if constexpr (kGradient) {
        state.sum += input * load(args.grad, position);
      } else {
        state.add(input);
      }
    }
#pragma unroll
    for (int distance = kGroup / 2; distance >= kHeadLanes; distance /= 2) {
      const State<A> other{__shfl_xor_sync(kFullWarp, state.maximum, distance),
                           __shfl_xor_sync(kFullWarp, state.sum, distance)};
      state.merge(other);
    }
    return state;
  }

  __device__ void write(const State<A>& state) const {
    const A inverse = state.normaliser();
#pragma unroll 4
    for (int offset = first; offset < slice.length; offset += kEntryLanes) {
      const std::int64_t position = at(offset);
      const A input = load(args.input, position);
      A result;
      if constexpr (kGradient) {
        result = input * (load(args.grad, position) - state.sum);
      } else {
        result = inverse == A{0} ? A{0} : exp(input - state.maximum) * inverse;
      }
      static_cast<T*>(args.out)[position] = narrow<T>(result);
    }
  }
};

template <typename T, bool kGradient, int kHeadLanes>
__global__ void __launch_bounds__(kThreads) edge_softmax_kernel(const EdgeSoftmaxArgs args) {
  const Entries<T, kGradient, kHeadLanes> entries(args);
  const auto state = entries.reduce();
  if (entries.slice.target >= 0) {
    entries.write(state);
  } else if (entries.has_slot() && entries.first == 0) {
    const std::int64_t slot = ~entries.slice.target;
    static_cast<State<Acc<T>>*>(args.partial)[slot * args.heads + entries.head] = state;
  }
}

template <typename T, bool kGradient, int kHeadLanes>
__global__ void __launch_bounds__(kThreads) finish_split_rows_kernel(const EdgeSoftmaxArgs args) {
  const Entries<T, kGradient, kHeadLanes> entries(args);
  if (!entries.has_slot()) return;
  const std::int64_t row = split_row_of(args.split, ~entries.slice.target);
  const auto* partial = static_cast<const State<Acc<T>>*>(args.partial);
  std::int64_t slot = args.split.split_ptr[row];
  auto state = partial[slot * args.heads + entries.head];
  for (++slot; slot < args.split.split_ptr[row + 1]; ++slot) {
    state.merge(partial[slot * args.heads + entries.head]);
  }
  entries.write(state);
}

template <typename T, bool kGradient, int kHeadLanes>
void launch_lanes(const EdgeSoftmaxArgs& args, cudaStream_t stream) {
  constexpr int kGroup = Entries<T, kGradient, kHeadLanes>::kGroup;
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kGroup), ceil_div(args.heads, kHeadLanes));
  edge_softmax_kernel<T, kGradient, kHeadLanes><<<grid, kThreads, 0, stream>>>(args);
  if (args.split.num_split_rows > 0)
    finish_split_rows_kernel<T, kGradient, kHeadLanes><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T, bool kGradient>
void launch(const EdgeSoftmaxArgs& args, cudaStream_t stream) {
  if constexpr (sizeof(T) == 8) {  // float64 is used for tests, so one kernel handles every number of heads
    launch_lanes<T, kGradient, 4>(args, stream);
  } else if (args.heads == 1) {
    launch_lanes<T, kGradient, 1>(args, stream);
  } else if (args.heads <= 4) {
    launch_lanes<T, kGradient, 4>(args, stream);
  } else if (args.heads <= 8) {
    launch_lanes<T, kGradient, 8>(args, stream);
  } else {
    launch_lanes<T, kGradient, kWarp>(args, stream);
  }
}

}  // namespace edge_softmax_detail

int edge_softmax(const EdgeSoftmaxArgs& args, void* stream) {
  using namespace edge_softmax_detail;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    args.grad == nullptr ? launch<T, false>(args, static_cast<cudaStream_t>(stream))
                         : launch<T, true>(args, static_cast<cudaStream_t>(stream));
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
