// Softmax over the entries of every row of edge values, and its gradient, on CUDA cores. Eight lanes take one
// slice of a row and one head. A row in one slice is finished at once; slices of longer rows leave (maximum,
// sum) in their slot, and a second kernel merges a row's slots in order: no atomics. Floors: E * H *
// sizeof(T) bytes read (twice for the gradient) and written, E edge positions.

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 8;

// Sum of exp(score - maximum); for the gradient, whose maximum stays 0, the sum of weight * gradient.
template <typename A>
struct State {
  A maximum;
  A sum;

  __device__ void merge(const State& other) {
    const A highest = other.maximum > maximum || other.maximum != other.maximum ? other.maximum : maximum;
    if (highest == -INFINITY) return;
    sum = sum * exp(maximum - highest) + other.sum * exp(other.maximum - highest);
    maximum = highest;
  }
};

template <typename T, bool kGradient>
struct Entries {
  using A = Acc<T>;
  const EdgeSoftmaxArgs& args;
  RowSlice slice;
  std::int64_t head;
  int lane;

  __device__ std::int64_t at(int offset) const {
    return edge_position(args.a, slice.begin + offset) * args.heads + head;
  }

  __device__ State<A> reduce() const {
    State<A> state{kGradient ? A{0} : -static_cast<A>(INFINITY), A{0}};
    for (int offset = lane; offset < slice.length; offset += kLanes) {
      const A input = widen(static_cast<const T*>(args.input)[at(offset)]);
      if constexpr (kGradient) {
        state.sum += input * widen(static_cast<const T*>(args.grad)[at(offset)]);
      } else {
        state.merge({input, A{1}});
      }
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      const State<A> other{__shfl_xor_sync(kFullWarp, state.maximum, offset, kLanes),
                           __shfl_xor_sync(kFullWarp, state.sum, offset, kLanes)};
      state.merge(other);
    }
    return state;
  }

  __device__ void write(const State<A>& state) const {
    const A inverse = state.sum == A{0} ? A{0} : A{1} / state.sum;
    for (int offset = lane; offset < slice.length; offset += kLanes) {
      const std::int64_t position = at(offset);
      const A input = widen(static_cast<const T*>(args.input)[position]);
      A result;
      if constexpr (kGradient) {
        result = input * (widen(static_cast<const T*>(args.grad)[position]) - state.sum);
      } else {
        result = inverse == A{0} ? A{0} : exp(input - state.maximum) * inverse;
      }
      static_cast<T*>(args.out)[position] = narrow<T>(result);
    }
  }
};

template <typename T, bool kGradient>
__device__ __forceinline__ Entries<T, kGradient> entries_of_group(const EdgeSoftmaxArgs& args) {
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  return {args, load_slice(args.split, group), blockIdx.y, static_cast<int>(threadIdx.x % kLanes)};
}

template <typename T, bool kGradient>
__global__ void __launch_bounds__(kThreads) edge_softmax_kernel(const EdgeSoftmaxArgs args) {
  const auto entries = entries_of_group<T, kGradient>(args);
  const auto state = entries.reduce();
  if (entries.slice.target >= 0) {
    entries.write(state);
  } else if (entries.lane == 0) {
    const std::int64_t slot = ~entries.slice.target;
    static_cast<State<Acc<T>>*>(args.partial)[slot * args.heads + entries.head] = state;
  }
}

template <typename T, bool kGradient>
__global__ void __launch_bounds__(kThreads) finish_split_rows_kernel(const EdgeSoftmaxArgs args) {
  const auto entries = entries_of_group<T, kGradient>(args);
  if (entries.slice.target >= 0) return;
  const std::int64_t row = split_row_of(args.split, ~entries.slice.target);
  const auto* partial = static_cast<const State<Acc<T>>*>(args.partial);
  std::int64_t slot = args.split.split_ptr[row];
  auto state = partial[slot * args.heads + entries.head];
  for (++slot; slot < args.split.split_ptr[row + 1]; ++slot) {
    state.merge(partial[slot * args.heads + entries.head]);
  }
  entries.write(state);
}

template <typename T, bool kGradient>
void launch(const EdgeSoftmaxArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kLanes), static_cast<unsigned>(args.heads));
  edge_softmax_kernel<T, kGradient><<<grid, kThreads, 0, stream>>>(args);
  if (args.split.num_split_rows > 0)
    finish_split_rows_kernel<T, kGradient><<<grid, kThreads, 0, stream>>>(args);
}

}  // namespace

int edge_softmax(const EdgeSoftmaxArgs& args, void* stream) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    args.grad == nullptr ? launch<T, false>(args, static_cast<cudaStream_t>(stream))
                         : launch<T, true>(args, static_cast<cudaStream_t>(stream));
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
