// Several aggregations at once, backward, from CSR on CUDA cores. Lanes are assigned as in
// multi_aggregate.cu.
//
// A message's gradient is dm_ij = A_i + B_i (m_ij - mean_i) + [m_ij = max_i] C_i + [m_ij = min_i] D_i. In a
// row of n entries, A = d sum + d mean / n, B = 2 (d var + d std / (2 std)) / n, and C, D are the gradients
// of maximum and minimum divided by the number of entries that have them.
//   - The row pass gathers x_j once. It writes A' = A - B (mean - x_i), B, C and D of its row, and marks with
//     a bit per feature which entries have the maximum and which the minimum. If edges have features and W,
//     it multiplies dm by W for the features' gradient, and dm by the features for W's gradient, which each
//     warp sums in shared memory. If e_ij is given per edge, it writes dm.
//   - The column pass sums A' and B of the destinations (8 E F bytes for E entries of width F in float32) and
//     reads the marks (E F / 4 bytes). It adds C and D where a mark is set: once per row and feature except
//     for ties. B is multiplied by x_j, which is taken out of the sum, and by W a_ij. If e_ij is given per
//     edge, it sums dm instead.
//
// Slices of a row and parts of W's gradient are combined in a fixed order, without atomics.

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/multi_aggregate.cuh"

namespace fastsparse::cuda {
namespace multi_aggregate_backward_detail {

// Number of entries in flight. It is smaller if gradients are multiplied by W, which needs registers.
template <typename T, EdgeTerm kEdges>
constexpr int kInFlight = sizeof(T) == 8 || kEdges == EdgeTerm::kFeatures ? 4 : 8;
constexpr int kColumnsInFlight = 4;
enum Slot { kSum, kMean, kMin, kMax, kVar, kStd };

// The gradients of a row's messages, for one lane's features.
template <typename A>
struct RowGradient {
  A base[kQuad] = {}, slope[kQuad] = {}, share[2][kQuad] = {}, extreme[2][kQuad] = {};  // for max and min

  __device__ __forceinline__ A of(int i, A without_destination, unsigned marks) const {
    A grad = base[i] + slope[i] * without_destination;
    if (marks >> i & 1) grad += share[0][i];
    if (marks >> (kQuad + i) & 1) grad += share[1][i];
    return grad;
  }
};

// Reads the forward pass' results for a row of `count` entries. If `writes` is true, stores the gradients for
// the column pass.
template <typename T>
__device__ __forceinline__ void prepare(RowGradient<Acc<T>>& gradient, const MultiAggregateBackwardArgs& args,
                                        const Quad& quad, std::int64_t row, std::int64_t count,
                                        const Acc<T> (&destination)[kQuad], bool writes) {
  using A = Acc<T>;
  const std::int64_t width = args.input.width;
  const A inverse = count > 0 ? A{1} / static_cast<A>(count) : A{0};
  const QuadOfResults<T> place(args.input, quad, row);
  const auto load = [&](Slot slot, const void* results, A(&to)[kQuad]) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) to[i] = 0;
    if (args.input.slot[slot] >= 0) place.load(results, args.input.slot[slot], to);
  };
  A sum[kQuad], mean[kQuad], of_extreme[2][kQuad];
  load(kSum, args.grad, sum);
  load(kMean, args.grad, mean);
  load(kMax, args.grad, of_extreme[0]);
  load(kMin, args.grad, of_extreme[1]);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) gradient.base[i] = sum[i] + mean[i] * inverse;
  if (args.slope != nullptr) {
    A variance[kQuad], deviation[kQuad], std[kQuad], average[kQuad];
    load(kVar, args.grad, variance);
    load(kStd, args.grad, deviation);
    load(kStd, args.out, std);
    quad.load(static_cast<const A*>(args.mean) + row * width, average);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (std[i] != 0) variance[i] += deviation[i] / (2 * std[i]);
      gradient.slope[i] = 2 * inverse * variance[i];
      gradient.base[i] -= gradient.slope[i] * (average[i] - destination[i]);
    }
  }
  if (args.share != nullptr) {
    load(kMax, args.out, gradient.extreme[0]);
    load(kMin, args.out, gradient.extreme[1]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      A ties[kQuad];
      quad.load(static_cast<const A*>(args.ties) + (row * 2 + k) * width, ties);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        gradient.share[k][i] = count > 0 && i < quad.count ? of_extreme[k][i] / ties[i] : A{0};
      }
    }
  }
  if (!writes) return;
  quad.store(gradient.base, static_cast<A*>(args.base) + row * width);
  if (args.slope != nullptr) quad.store(gradient.slope, static_cast<A*>(args.slope) + row * width);
  if (args.share != nullptr) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      quad.store(gradient.share[k], static_cast<A*>(args.share) + (row * 2 + k) * width);
    }
  }
  if (args.grad_dst != nullptr) {
    A total[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      total[i] = sum[i] * static_cast<A>(count) + mean[i] + of_extreme[0][i] + of_extreme[1][i];
      if (count == 0) total[i] = 0;
    }
    quad.store(total, static_cast<T*>(args.grad_dst) + row * width);
  }
}

// Computes the gradients of the edges' features and of W from the gradients of some messages. `of_weight` is
// this lane's place in the sums of its warp; null: not computed. All lanes of the warp must call this
// function.
template <typename T, int kCount>
__device__ __forceinline__ void differentiate_features(const MultiAggregateBackwardArgs& args,
                                                       const Quad& quad, const Entries<kCount>& entries,
                                                       int wanted, const Acc<T> (&grad)[kCount][kQuad],
                                                       Acc<T>* of_weight) {
  using A = Acc<T>;
  const MultiAggregateInput& input = args.input;
  const int edge_width = static_cast<int>(input.edge_width), lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int k = 0; k < edge_width; k += kQuad) {
    if (args.grad_edge != nullptr) {
      A part[kCount * kQuad];
#pragma unroll
      for (int c = 0; c < kQuad; ++c) {
        A w[kQuad];
        quad.load(static_cast<const A*>(input.weight) + (k + c) * input.width, w);
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          part[u * kQuad + c] = 0;
#pragma unroll
          for (int i = 0; i < kQuad; ++i) part[u * kQuad + c] += w[i] * grad[u][i];
        }
      }
      const A number = scatter_sum(part, kWarp);
      const int mine = lane / kQuad;
      if (mine < wanted) {  // lanes from kCount * kQuad on have copies of the numbers
        std::uint32_t position = entries.position[0];
#pragma unroll
        for (int u = 1; u < kCount; ++u) position = mine == u ? entries.position[u] : position;
        const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * args.num_values + position;
        static_cast<A*>(args.grad_edge)[row * edge_width + k + lane % kQuad] = number;
      }
    }
    if (of_weight != nullptr) {
      RawQuad<T> feature[kCount] = {};
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const T* edge =
            static_cast<const T*>(input.edge) + static_cast<std::int64_t>(entries.position[u]) * edge_width;
        if (u < wanted) feature[u].load(edge + k);
      }
#pragma unroll
      for (int c = 0; c < kQuad; ++c) {
        A* to = of_weight + (k + c) * (kWarp * kQuad);
        A total[kQuad];
#pragma unroll
        for (int i = 0; i < kQuad; ++i) total[i] = to[i];
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) total[i] += A{widen(feature[u][c])} * grad[u][i];
        }
        store_quad<A>(total, to);
      }
    }
  }
}

template <typename T, EdgeTerm kEdges>
__global__ void __launch_bounds__(kQuadThreads)
    multi_aggregate_row_kernel(const __grid_constant__ MultiAggregateBackwardArgs args, int lanes,
                               bool aligned) {
  using A = Acc<T>;
  constexpr int kCount = kInFlight<T, kEdges>;
  extern __shared__ __align__(16) unsigned char shared[];
  const MultiAggregateInput& input = args.input;
  const std::int64_t groups_per_block = blockDim.x / lanes;
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * groups_per_block + threadIdx.x / lanes;
  const Quad quad((static_cast<std::int64_t>(blockIdx.y) * lanes + threadIdx.x % lanes) * kQuad, input.width,
                  aligned);
  if (kEdges != EdgeTerm::kFeatures && quad.count == 0)
    return;  // with edge features, all lanes of a warp take part
  const std::int64_t mark_bytes = (input.width + kQuad - 1) / kQuad;
  A* of_weight = nullptr;
  if (kEdges == EdgeTerm::kFeatures && args.grad_weight != nullptr) {
    of_weight = reinterpret_cast<A*>(shared) +
                (threadIdx.x / kWarp * input.edge_width * kWarp + threadIdx.x % kWarp) * kQuad;
    const A zeros[kQuad] = {};
    for (int k = 0; k < input.edge_width; ++k) store_quad<A>(zeros, of_weight + k * (kWarp * kQuad));
  }
  const bool wants_messages = args.marks != nullptr || args.grad_edge != nullptr || of_weight != nullptr;

  for (std::int64_t index = group; index < args.split.num_slices; index += gridDim.x * groups_per_block) {
    const RowSlice slice = load_slice(args.split, index);
    const std::int64_t row = row_of(args.split, slice), begin = args.a.rowptr[row];
    A destination[kQuad];
    load_destination<T>(input, quad, row, destination);
    RowGradient<A> gradient;
    prepare<T>(gradient, args, quad, row, args.a.rowptr[row + 1] - begin, destination,
               slice.length == 0 || slice.begin == begin);
    if (!wants_messages) continue;
    Entries<kCount> next;
    next.read(args.a, slice, 0);
    for (int base = 0; base < slice.length; base += kCount) {
      const Entries<kCount> entries = next;
      const int count = min(kCount, slice.length - base);
      A x[kCount][kQuad];
      gather_messages<T, kEdges>(x, input, quad, entries, count);
      next.read(args.a, slice, base + kCount);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        unsigned marks = 0;
        if (args.share != nullptr && u < count) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            const A m = message<T>(x[u][i], destination[i]);
            if (input.slot[kMax] >= 0 && m == gradient.extreme[0][i]) marks |= 1u << i;
            if (input.slot[kMin] >= 0 && m == gradient.extreme[1][i]) marks |= 16u << i;
          }
        }
        if (args.marks != nullptr && u < count && quad.count > 0) {
          args.marks[entries.position[u] * mark_bytes + quad.first / kQuad] =
              static_cast<std::uint8_t>(marks);
        }
#pragma unroll
        for (int i = 0; i < kQuad; ++i) x[u][i] = u < count ? gradient.of(i, x[u][i], marks) : A{0};
        if (kEdges == EdgeTerm::kRow && args.grad_edge != nullptr && u < count) {
          quad.store(x[u], static_cast<T*>(args.grad_edge) + entries.position[u] * input.width);
        }
      }
      if constexpr (kEdges == EdgeTerm::kFeatures) {
        differentiate_features<T>(args, quad, entries, count, x, of_weight);
      }
    }
  }

  if (kEdges != EdgeTerm::kFeatures || args.grad_weight == nullptr) return;
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * (kWarp * kQuad);
  for (std::int64_t at = threadIdx.x; at < input.edge_width * (kWarp * kQuad); at += blockDim.x) {
    const std::int64_t feature = first + at % (kWarp * kQuad);
    if (feature >= input.width) continue;
    A total = 0;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) {
      total += reinterpret_cast<const A*>(shared)[warp * input.edge_width * (kWarp * kQuad) + at];
    }
    static_cast<A*>(
        args.grad_weight)[(blockIdx.x * input.edge_width + at / (kWarp * kQuad)) * input.width + feature] =
        total;
  }
}

template <typename T, EdgeTerm kEdges>
__global__ void __launch_bounds__(kQuadThreads)
    multi_aggregate_column_kernel(const __grid_constant__ MultiAggregateBackwardArgs args, int lanes,
                                  bool aligned) {
  using A = Acc<T>;
  constexpr int kCount = kColumnsInFlight;
  const MultiAggregateInput& input = args.input;
  const std::int64_t width = input.width;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kQuadThreads / lanes) + threadIdx.x / lanes;
  const Quad quad((static_cast<std::int64_t>(blockIdx.y) * lanes + threadIdx.x % lanes) * kQuad, width,
                  aligned);
  if (group >= args.split_t.num_slices || quad.count == 0) return;
  const RowSlice slice = load_slice(args.split_t, group);
  const std::int64_t mark_bytes = (width + kQuad - 1) / kQuad;
  Entries<kCount> next;
  next.read(args.a_t, slice, 0);
  A total[kQuad] = {}, slopes[kQuad] = {};
  for (int base = 0; base < slice.length; base += kCount) {
    const Entries<kCount> entries = next;
    const int count = min(kCount, slice.length - base);
    const auto counts = [&](int u) { return u < count; };
    const auto row_at = [&](const void* rows) {
      return [&entries, rows, width](int u) { return static_cast<const A*>(rows) + entries.col[u] * width; };
    };
    A grad[kCount][kQuad];
    if constexpr (kEdges == EdgeTerm::kRow) {
      gather_quads<T>(
          grad, quad,
          [&](int u) { return static_cast<const T*>(args.grad_edge) + entries.position[u] * width; }, counts);
      next.read(args.a_t, slice, base + kCount);
    } else {
      unsigned marks[kCount] = {};
      if (args.marks != nullptr) {
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          if (u < count) marks[u] = args.marks[entries.position[u] * mark_bytes + quad.first / kQuad];
        }
      }
      gather_quads<A>(grad, quad, row_at(args.base), counts);
      if (args.slope != nullptr) {
        A slope[kCount][kQuad];
        gather_quads<A>(slope, quad, row_at(args.slope), counts);
        if constexpr (kEdges == EdgeTerm::kFeatures) {
          A edge[kCount][kQuad] = {};
          add_features<T>(edge, input, quad, entries.position, count);
#pragma unroll
          for (int u = 0; u < kCount; ++u) {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) grad[u][i] += slope[u][i] * edge[u][i];
          }
        }
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) slopes[i] += slope[u][i];
        }
      }
      if (args.marks != nullptr) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {  // maximum, minimum
          A share[kCount][kQuad];
          gather_quads<A>(
              share, quad,
              [&](int u) {
                return static_cast<const A*>(args.share) +
                       (static_cast<std::int64_t>(entries.col[u]) * 2 + k) * width;
              },
              [&](int u) { return (marks[u] >> k * kQuad & 15u) != 0; });
#pragma unroll
          for (int u = 0; u < kCount; ++u) {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
              if (marks[u] >> (k * kQuad + i) & 1) grad[u][i] += share[u][i];
            }
          }
        }
      }
      next.read(args.a_t, slice, base + kCount);
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) total[i] += grad[u][i];
    }
  }

  const std::int64_t col = row_of(args.split_t, slice);
  // The features of a source without entries are not used, because they may be NaN.
  if (kEdges != EdgeTerm::kRow && args.slope != nullptr && slice.length > 0) {
    A x[kQuad];
    quad.load(static_cast<const T*>(input.x_src.data) + col * input.x_src.stride, x);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) total[i] += slopes[i] * x[i];
  }
  if (slice.target < 0) {
    quad.store(total, static_cast<A*>(args.partial) + static_cast<std::int64_t>(~slice.target) * width);
  } else {
    quad.store(total, static_cast<T*>(args.grad_src) + col * width);
  }
}

template <typename T, EdgeTerm kEdges>
cudaError_t launch_rows(const MultiAggregateBackwardArgs& args, bool aligned, cudaStream_t stream) {
  const MultiAggregateInput& input = args.input;
  const bool features = kEdges == EdgeTerm::kFeatures;
  const int lanes = features ? kWarp : quad_lanes(input.width);
  const int threads = features && sizeof(T) == 8 ? kQuadThreads / 2 : kQuadThreads;
  dim3 grid(ceil_div(args.split.num_slices, threads / lanes), ceil_div(input.width, lanes * kQuad));
  std::size_t bytes = 0;
  if (features && args.grad_weight != nullptr) {
    grid.x = static_cast<unsigned>(args.weight_parts);
    bytes = threads * kQuad * input.edge_width * sizeof(Acc<T>);
    const cudaError_t error =
        cudaFuncSetAttribute(multi_aggregate_row_kernel<T, kEdges>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
  }
  multi_aggregate_row_kernel<T, kEdges><<<grid, threads, bytes, stream>>>(args, lanes, aligned);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch(const MultiAggregateBackwardArgs& args, cudaStream_t stream) {
  const std::int64_t width = args.input.width;
  const int lanes = quad_lanes(width);
  const bool aligned =
      quads_aligned<T>(args.input, {args.out, args.mean, args.ties, args.grad, args.base, args.slope,
                                    args.share, args.grad_src, args.grad_dst, args.partial, args.input.weight,
                                    args.input.weight == nullptr ? args.grad_edge : nullptr});
  if (width == 0) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  with_edge_term(args.input, [&](auto edges) {
    constexpr EdgeTerm kEdges = decltype(edges)::value;
    if (args.split.num_slices > 0) error = launch_rows<T, kEdges>(args, aligned, stream);
    if (error != cudaSuccess || args.grad_src == nullptr || args.split_t.num_slices == 0) return;
    const dim3 grid(ceil_div(args.split_t.num_slices, kQuadThreads / lanes), ceil_div(width, lanes * kQuad));
    multi_aggregate_column_kernel<T, kEdges><<<grid, kQuadThreads, 0, stream>>>(args, lanes, aligned);
    combine_partials<T, 1>(args.split_t, args.partial, Epilogue::only(args.grad_src, width), SameRow{},
                           stream);
    error = cudaGetLastError();
  });
  return error;
}

}  // namespace multi_aggregate_backward_detail

int multi_aggregate_backward(const MultiAggregateBackwardArgs& args, void* stream) {
  using namespace multi_aggregate_backward_detail;
  cudaError_t error = cudaSuccess;
  with_type(args.input.dtype,
            [&](auto type) { error = launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return error;
}

}  // namespace fastsparse::cuda
