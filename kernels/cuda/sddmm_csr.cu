// Sampled dense-dense product from CSR on CUDA cores: a group of 8 or 32 lanes takes one slice of a row,
// reads the row's features (they stay in the L1) and gathers 4 neighbours at a time. Floors: E * H * D *
// sizeof(T) bytes gathered, E * H * sizeof(out) written, 2 E H D flops.

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

template <typename T, int kVec, int kLanes>
void launch_shape(const SddmmArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kLanes), static_cast<unsigned>(args.heads));
  sddmm_csr_kernel<T, kVec, kLanes><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T>
void launch(const SddmmArgs& args, cudaStream_t stream) {
  const int vec = vector_width<T>({args.head_width, args.x_dst.stride, args.x_src.stride},
                                  {args.x_dst.data, args.x_src.data});
  if (vec * sizeof(T) == 16) {
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
