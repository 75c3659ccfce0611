// Several aggregations of messages m_ij = x_i + x_j + e_ij at once, from CSR on CUDA cores.
//
// A group of up to 32 lanes handles one slice of a row, with 4 features per lane, and gathers 8 entries at a
// time (4 in float64). It always computes the sum, squared deviations, the maximum and the minimum, and the
// number of entries that equal each of the two. It stores only the results that the caller requested. This
// takes about 10 instructions per number, which the gather hides.
//
// Squared deviations are computed relative to the mean of the entries that are gathered together, and then
// merged (Chan et al., Updating formulae and a pairwise algorithm for computing sample variances, 1979), to
// avoid cancellation. W a_ij is computed from the edge's features, with W in the L1 cache. A second kernel
// merges the slices of a row in a fixed order, without atomics.
//
// Floor, for E entries of width F: E F sizeof(T) bytes gathered, and E A sizeof(T) for A features per edge (E
// F sizeof(T) if e_ij is given per edge).

#include "fastsparse/launchers.h"
#include "fastsparse/multi_aggregate.cuh"

namespace fastsparse::cuda {
namespace multi_aggregate_detail {

constexpr int kPlanes = 6;  // number of arrays in a partial result
template <typename T>
constexpr int kInFlight = sizeof(T) == 8 ? 4 : 8;

// State of a row after some of its entries were added, for kWidth features.
template <typename A, int kWidth>
struct Aggregates {
  A count = 0;
  A sum[kWidth] = {}, squares[kWidth] = {}, high[kWidth] = {}, low[kWidth] = {};
  A high_ties[kWidth] = {}, low_ties[kWidth] = {};

  __device__ __forceinline__ void see(int i, A m, bool first) {
    if (first || m > high[i] || m != m) {
      high[i] = m;
      high_ties[i] = 1;
    } else if (m == high[i]) {
      high_ties[i] += 1;
    }
    if (first || m < low[i] || m != m) {
      low[i] = m;
      low_ties[i] = 1;
    } else if (m == low[i]) {
      low_ties[i] += 1;
    }
  }

  // Adds the first `entries` messages.
  template <int kCount>
  __device__ __forceinline__ void add(const A (&m)[kCount][kWidth], int entries) {
    const A of_entries = A{1} / static_cast<A>(entries), of_count = count > 0 ? A{1} / count : A{0};
    const A both = count * static_cast<A>(entries) / (count + static_cast<A>(entries));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      A total = 0;
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        if (u >= entries) continue;
        total += m[u][i];
        see(i, m[u][i], u == 0 && count == 0);
      }
      const A mean = total * of_entries;
      A deviations = 0;
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const A deviation = u < entries ? m[u][i] - mean : A{0};
        deviations += deviation * deviation;
      }
      const A shift = mean - sum[i] * of_count;
      squares[i] += deviations + shift * shift * both;
      sum[i] += total;
    }
    count += static_cast<A>(entries);
  }

  __device__ __forceinline__ void merge(const Aggregates& other) {
    if (other.count == 0) return;
    const A of_count = count > 0 ? A{1} / count : A{0};
    const A both = count * other.count / (count + other.count);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const A shift = other.sum[i] / other.count - sum[i] * of_count;
      squares[i] += other.squares[i] + shift * shift * both;
      sum[i] += other.sum[i];
      if (other.high[i] == high[i] && count > 0) {
        high_ties[i] += other.high_ties[i];
      } else if (count == 0 || other.high[i] > high[i] || other.high[i] != other.high[i]) {
        high[i] = other.high[i];
        high_ties[i] = other.high_ties[i];
      }
      if (other.low[i] == low[i] && count > 0) {
        low_ties[i] += other.low_ties[i];
      } else if (count == 0 || other.low[i] < low[i] || other.low[i] != other.low[i]) {
        low[i] = other.low[i];
        low_ties[i] = other.low_ties[i];
      }
    }
    count += other.count;
  }

  // The result of an aggregation: 0 sum, 1 mean, 2 min, 3 max, 4 var, 5 std.
  __device__ __forceinline__ A result(int aggregation, int i, A inverse, A min_variance) const {
    if (aggregation == 0) return sum[i];
    if (aggregation == 1) return sum[i] * inverse;
    if (aggregation == 2) return low[i];
    if (aggregation == 3) return high[i];
    const A variance = low[i] == high[i] ? A{0} : squares[i] * inverse;
    if (aggregation == 4) return variance;
    return variance <= min_variance ? A{0} : sqrt(variance);
  }
};

template <typename T>
__device__ __forceinline__ void store_row(const MultiAggregateArgs& args, const Quad& quad, std::int64_t row,
                                          const Aggregates<Acc<T>, kQuad>& of_row) {
  using A = Acc<T>;
  const MultiAggregateInput& input = args.input;
  const A inverse = of_row.count > 0 ? A{1} / of_row.count : A{0};
  const QuadOfResults<T> results(input, quad, row);
#pragma unroll 1
  for (int k = 0; k < kNumAggregations; ++k) {
    if (input.slot[k] < 0) continue;
    A result[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i)
      result[i] = of_row.result(k, i, inverse, static_cast<A>(input.min_variance));
    results.store(result, args.out, input.slot[k]);
  }
  if (args.mean != nullptr) {
    A mean[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) mean[i] = of_row.sum[i] * inverse;
    quad.store(mean, static_cast<A*>(args.mean) + row * input.width);
  }
  if (args.ties != nullptr) {
    A* ties = static_cast<A*>(args.ties) + row * 2 * input.width;
    quad.store(of_row.high_ties, ties);
    quad.store(of_row.low_ties, ties + input.width);
  }
}

template <typename T, EdgeTerm kEdges>
__global__ void __launch_bounds__(kQuadThreads)
    multi_aggregate_kernel(const __grid_constant__ MultiAggregateArgs args, int lanes, bool aligned) {
  using A = Acc<T>;
  constexpr int kCount = kInFlight<T>;
  const MultiAggregateInput& input = args.input;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kQuadThreads / lanes) + threadIdx.x / lanes;
  const Quad quad((static_cast<std::int64_t>(blockIdx.y) * lanes + threadIdx.x % lanes) * kQuad, input.width,
                  aligned);
  if (group >= args.split.num_slices || quad.count == 0) return;
  const RowSlice slice = load_slice(args.split, group);
  const std::int64_t row = row_of(args.split, slice);
  Entries<kCount> next;
  next.read(args.a, slice, 0);
  A destination[kQuad];
  load_destination<T>(input, quad, row, destination);

  Aggregates<A, kQuad> of_slice;
  for (int base = 0; base < slice.length; base += kCount) {
    const Entries<kCount> entries = next;
    const int count = min(kCount, slice.length - base);
    A m[kCount][kQuad];
    gather_messages<T, kEdges>(m, input, quad, entries, count);
    next.read(args.a, slice, base + kCount);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) m[u][i] = message<T>(m[u][i], destination[i]);
    }
    of_slice.add(m, count);
  }

  if (slice.target >= 0) return store_row<T>(args, quad, row, of_slice);
  const std::int64_t slot = ~slice.target, width = input.width;
  A* partial = static_cast<A*>(args.partial) + slot * kPlanes * width;
  quad.store(of_slice.sum, partial);
  quad.store(of_slice.squares, partial + width);
  quad.store(of_slice.high, partial + 2 * width);
  quad.store(of_slice.low, partial + 3 * width);
  quad.store(of_slice.high_ties, partial + 4 * width);
  quad.store(of_slice.low_ties, partial + 5 * width);
  if (quad.first == 0) {
    const std::int64_t num_slots = args.split.split_ptr[args.split.num_split_rows];
    static_cast<A*>(args.partial)[num_slots * kPlanes * width + slot] = of_slice.count;
  }
}

constexpr int kMergeWarps = 4;

// A block merges the slots of one row for 128 features: each of its four warps merges every fourth slot, and
// then the states of the warps are merged.
template <typename T>
__global__ void __launch_bounds__(kWarp* kMergeWarps)
    merge_slices_kernel(const __grid_constant__ MultiAggregateArgs args, bool aligned) {
  using A = Acc<T>;
  __shared__ Aggregates<A, kQuad> shared[kMergeWarps][kWarp];
  const std::int64_t width = args.input.width;
  const Quad quad((static_cast<std::int64_t>(blockIdx.y) * kWarp + threadIdx.x) * kQuad, width, aligned);
  const std::int64_t end = args.split.split_ptr[blockIdx.x + 1];
  const auto* counts =
      static_cast<const A*>(args.partial) + args.split.split_ptr[args.split.num_split_rows] * kPlanes * width;
  Aggregates<A, kQuad> mine;
  if (quad.count > 0) {
    for (std::int64_t slot = args.split.split_ptr[blockIdx.x] + threadIdx.y; slot < end;
         slot += kMergeWarps) {
      const A* partial = static_cast<const A*>(args.partial) + slot * kPlanes * width;
      Aggregates<A, kQuad> other;
      quad.load(partial, other.sum);
      quad.load(partial + width, other.squares);
      quad.load(partial + 2 * width, other.high);
      quad.load(partial + 3 * width, other.low);
      quad.load(partial + 4 * width, other.high_ties);
      quad.load(partial + 5 * width, other.low_ties);
      other.count = counts[slot];
      mine.merge(other);
    }
  }
  shared[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y != 0 || quad.count == 0) return;
  for (int warp = 1; warp < kMergeWarps; ++warp) mine.merge(shared[warp][threadIdx.x]);
  store_row<T>(args, quad, args.split.split_row[blockIdx.x], mine);
}

template <typename T>
void launch(const MultiAggregateArgs& args, cudaStream_t stream) {
  const std::int64_t width = args.input.width;
  const int lanes = quad_lanes(width);
  const bool aligned = quads_aligned<T>(args.input, {args.out, args.mean, args.ties, args.partial});
  if (args.split.num_slices == 0 || width == 0) return;
  const dim3 grid(ceil_div(args.split.num_slices, kQuadThreads / lanes), ceil_div(width, lanes * kQuad));
  with_edge_term(args.input, [&](auto edges) {
    multi_aggregate_kernel<T, decltype(edges)::value>
        <<<grid, kQuadThreads, 0, stream>>>(args, lanes, aligned);
  });
  if (args.split.num_split_rows > 0) {
    const dim3 rows(static_cast<unsigned>(args.split.num_split_rows), ceil_div(width, kWarp * kQuad));
    merge_slices_kernel<T><<<rows, dim3(kWarp, kMergeWarps), 0, stream>>>(args, aligned);
  }
}

}  // namespace multi_aggregate_detail

int multi_aggregate(const MultiAggregateArgs& args, void* stream) {
  using namespace multi_aggregate_detail;
  with_type(args.input.dtype,
            [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
