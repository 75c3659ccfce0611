// Sampled dense-dense product from CSR on CUDA cores. Floors: E * H * D * sizeof(T) bytes gathered, E * H *
// sizeof(out) written, 2 E H D flops.
//
// Row by row: a group of 8 or 32 lanes takes one slice of a row, reads the row's features (they stay in the
// L1) and gathers 4 neighbours at a time.
//
// Entry by entry: a group of 4 to 16 lanes takes 4 entries, whatever their rows, 16 bytes a lane. Rows of two
// to five entries leave no lanes idle, nothing is looked up before the entries, and results leave coalesced;
// it reads 4 bytes more per entry, and features of the row for each of its entries, mostly from the L1.

#include <initializer_list>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kEntriesInFlight = 4;

template <typename T, int kVec, int kLanes>
__global__ void __launch_bounds__(kThreads) sddmm_csr_kernel(const SddmmArgs args) {
  using A = Acc<T>;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const RowSlice slice = load_slice(args.split, group);
  // Whole warps loop together, so that the shuffles below need no divergent branches.
  const int longest = __reduce_max_sync(kFullWarp, slice.length);
  const std::int64_t row = slice.length > 0 ? row_of(args.split, slice) : 0;
  const std::int64_t head = blockIdx.y;
  const T* dst = static_cast<const T*>(args.x_dst.data) + row * args.x_dst.stride + head * args.head_width;
  const T* src = static_cast<const T*>(args.x_src.data) + head * args.head_width;
  const A row_scale =
      args.scale_dst != nullptr && slice.length > 0 ? static_cast<const A*>(args.scale_dst)[row] : A{1};

  for (int base = 0; base < longest; base += kEntriesInFlight) {
    std::int64_t col[kEntriesInFlight];
    A sum[kEntriesInFlight] = {};
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) {
      col[u] = base + u < slice.length ? __ldg(args.a.col + slice.begin + base + u) : 0;
    }
    for (std::int64_t f = lane * kVec; f < args.head_width; f += kLanes * kVec) {
      Pack<T, kVec> right[kEntriesInFlight];
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) {
        right[u] = Pack<T, kVec>{};
        if (base + u < slice.length) right[u] = load_pack<T, kVec>(src + col[u] * args.x_src.stride + f);
      }
      Pack<T, kVec> left{};
      if (base < slice.length) left = load_pack<T, kVec>(dst + f);
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[u] += widen(left.lane[i]) * widen(right[u].lane[i]);
      }
    }
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        sum[u] += __shfl_xor_sync(kFullWarp, sum[u], offset, kLanes);
      }
      if (lane == u && base + u < slice.length) {
        A value = sum[u] * row_scale;
        if (args.scale_src != nullptr) value *= static_cast<const A*>(args.scale_src)[col[u]];
        const std::int64_t at = edge_position(args.a, slice.begin + base + u) * args.heads + head;
        if (args.out_dtype == args.dtype) {
          static_cast<T*>(args.out)[at] = narrow<T>(value);
        } else {
          static_cast<A*>(args.out)[at] = value;
        }
      }
    }
  }
}

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) sddmm_entries_kernel(const SddmmArgs args) {
  using A = Acc<T>;
  static_assert(kEntriesInFlight == 4 && kLanes >= 4);
  constexpr int kVec = 16 / static_cast<int>(sizeof(T)), kGroups = kWarp / kLanes;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  // Neighbouring groups take neighbouring entries, kGroups apart are those of one group.
  const std::int64_t first = warp * (kEntriesInFlight * kGroups) + threadIdx.x % kWarp / kLanes;
  const std::int64_t last = args.a.num_edges - 1;
  const std::int64_t head = blockIdx.y;
  const T* dst = static_cast<const T*>(args.x_dst.data) + head * args.head_width;
  const T* src = static_cast<const T*>(args.x_src.data) + head * args.head_width;
  const T* left_row[kEntriesInFlight];
  const T* right_row[kEntriesInFlight];
#pragma unroll
  for (int u = 0; u < kEntriesInFlight; ++u) {
    const std::int64_t entry = min(first + u * kGroups, last);
    left_row[u] = dst + __ldg(args.row + entry) * args.x_dst.stride;
    right_row[u] = src + __ldg(args.a.col + entry) * args.x_src.stride;
  }

  A sum[kEntriesInFlight] = {};
  const int head_width = static_cast<int>(args.head_width);
  for (int f = lane * kVec; f < head_width; f += kLanes * kVec) {
    Pack<T, kVec> left[kEntriesInFlight], right[kEntriesInFlight];
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) {
      left[u] = load_pack<T, kVec>(left_row[u] + f);
      right[u] = load_pack<T, kVec>(right_row[u] + f);
    }
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[u] += widen(left[u].lane[i]) * widen(right[u].lane[i]);
    }
  }

  // Each half of the lanes goes on with half of the sums, twice; then every lane has one.
  const bool upper = (lane & kLanes / 2) != 0, upper_half = (lane & kLanes / 4) != 0;
  A half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const A kept = upper ? sum[2 + i] : sum[i], given = upper ? sum[i] : sum[2 + i];
    half[i] = kept + __shfl_xor_sync(kFullWarp, given, kLanes / 2);
  }
  const A given = upper_half ? half[0] : half[1];
  A value = (upper_half ? half[1] : half[0]) + __shfl_xor_sync(kFullWarp, given, kLanes / 4);
#pragma unroll
  for (int offset = kLanes / 8; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);

  const std::int64_t entry = first + (2 * upper + upper_half) * kGroups;
  if (lane % (kLanes / 4) != 0 || entry > last) return;
  if (args.scale_dst != nullptr) value *= static_cast<const A*>(args.scale_dst)[args.row[entry]];
  if (args.scale_src != nullptr) value *= static_cast<const A*>(args.scale_src)[args.a.col[entry]];
  const std::int64_t at = edge_position(args.a, entry) * args.heads + head;
  if (args.out_dtype == args.dtype) {
    static_cast<T*>(args.out)[at] = narrow<T>(value);
  } else {
    static_cast<A*>(args.out)[at] = value;
  }
}

template <typename T, int kLanes>
void launch_entries(const SddmmArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.a.num_edges, kEntriesInFlight * kThreads / kLanes),
                  static_cast<unsigned>(args.heads));
  sddmm_entries_kernel<T, kLanes><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T, int kVec, int kLanes>
void launch_shape(const SddmmArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kLanes), static_cast<unsigned>(args.heads));
  sddmm_csr_kernel<T, kVec, kLanes><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T>
void launch(const SddmmArgs& args, cudaStream_t stream) {
  const int vec = vector_width<T>({args.head_width, args.x_dst.stride, args.x_src.stride},
                                  {args.x_dst.data, args.x_src.data});
  if (vec * sizeof(T) == 16 && args.row != nullptr) {
    const std::int64_t bytes = args.head_width * static_cast<std::int64_t>(sizeof(T));
    bytes <= 64    ? launch_entries<T, 4>(args, stream)
    : bytes <= 128 ? launch_entries<T, 8>(args, stream)
                   : launch_entries<T, 16>(args, stream);
  } else if (vec * sizeof(T) == 16) {
    launch_shape<T, 16 / sizeof(T), 8>(args, stream);
  } else if constexpr (sizeof(T) < 4) {
    vec > 1 ? launch_shape<T, 4 / sizeof(T), 32>(args, stream) : launch_shape<T, 1, 32>(args, stream);
  } else {
    args.head_width <= 8 ? launch_shape<T, 1, 8>(args, stream) : launch_shape<T, 1, 32>(args, stream);
  }
}

}  // namespace

int sddmm_csr(const SddmmArgs& args, void* stream) {
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
