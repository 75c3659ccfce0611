// The transposed product from the untransposed structure. Columns are summed by float atomics, which saves
// the sort of a structure that is used once. Memory traffic: a row of x is read per slice, and E * F * 4
// bytes are added in the L2 cache, 16 bytes at a time on sm_90, for E entries of width F. A group of 8 or 32
// lanes handles a slice of a row for one tile of features: it reads the row once and adds it to the sums of
// all its columns.
//
// In a sampled batch, most columns have one entry. If the entries of every column are counted first, such a
// column is stored directly in the dtype of the result, instead of being cleared, added to and converted.
// That takes a third of the bytes.

#include <type_traits>

#include "fastsparse/atomic_add.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace spmm_csr_transposed_detail {

constexpr int kThreads = 128;

// The address of the result: `sum` for float32, otherwise `out`.
template <typename T>
__device__ __forceinline__ T* result(const SpmmTransposedArgs& args) {
  if constexpr (std::is_same_v<T, float>) return args.sum;
  return static_cast<T*>(args.out);
}

// Tells if a column has a single entry, which is then stored instead of added.
__device__ __forceinline__ bool is_stored(const SpmmTransposedArgs& args, std::int64_t col) {
  return col >= args.num_given && args.count[col] == 1;
}

__global__ void count_kernel(const SpmmTransposedArgs args) {
  const std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  // A padded structure has memory for more entries than its rows have.
  if (e < args.a.rowptr[args.a.num_rows]) atomicAdd(args.count + args.a.col[e], 1);
}

constexpr int kColumnsPerWarp = 8;

// Calls f(i) for all elements i of the columns whose sums are not initialized, if `wanted` accepts the
// column's number of entries.
template <typename Wanted, typename F>
__device__ __forceinline__ void for_elements(const SpmmTransposedArgs& args, Wanted wanted, F f) {
  const int lane = threadIdx.x % kWarp;
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const std::int64_t first = args.num_given + warp * kColumnsPerWarp, mine = first + lane;
  const bool live = lane < kColumnsPerWarp && mine < args.a.num_cols;
  unsigned found = __ballot_sync(kFullWarp, live && wanted(args.count[mine]));
  for (; found != 0; found &= found - 1) {
    const std::int64_t begin = (first + __ffs(found) - 1) * args.width;
#pragma unroll 4
    for (std::int64_t i = begin + lane; i < begin + args.width; i += kWarp) f(i);
  }
}

// Clears the sums of columns with several entries, and the results of columns without entries.
template <typename T>
__global__ void clear_kernel(const SpmmTransposedArgs args) {
  for_elements(args, [](int count) { return count > 1; }, [&](std::int64_t i) { args.sum[i] = 0; });
  for_elements(
      args, [](int count) { return count == 0; },
      [&](std::int64_t i) { result<T>(args)[i] = narrow<T>(0.0f); });
}

template <typename T>
__global__ void convert_kernel(const SpmmTransposedArgs args) {
  for_elements(
      args, [](int count) { return count > 1; },
      [&](std::int64_t i) { result<T>(args)[i] = narrow<T>(args.sum[i]); });
}

template <typename T, int kVec, int kLanes, bool kWeighted, bool kCounted>
__global__ void __launch_bounds__(kThreads) spmm_csr_transposed_kernel(const SpmmTransposedArgs args) {
  const int lane = threadIdx.x % kLanes;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const RowSlice slice = load_slice(args.split, group);
  // All groups of a warp loop to the end of the longest slice, so that shuffles need no divergent branches.
  const int longest = __reduce_max_sync(kFullWarp, slice.length);
  const std::int64_t feature = (static_cast<std::int64_t>(blockIdx.y) * kLanes + lane) * kVec;
  const bool inside = feature < args.width;

  float scaled[kVec] = {};
  if (slice.length > 0 && inside) {
    const std::int64_t row = row_of(args.split, slice);
    const float scale = args.scale_dst != nullptr ? args.scale_dst[row] : 1.0f;
    const Pack<T, kVec> pack =
        load_pack<T, kVec>(static_cast<const T*>(args.x.data) + row * args.x.stride + feature);
#pragma unroll
    for (int i = 0; i < kVec; ++i) scaled[i] = scale * widen(pack.lane[i]);
  }
  for (int base = 0; base < longest; base += kLanes) {
    const int mine = base + lane;
    int my_col = 0;
    float my_weight = 1;
    if (mine < slice.length) {
      my_col = __ldg(args.a.col + slice.begin + mine);
      if constexpr (kWeighted) {
        if (args.value.data != nullptr) {
          my_weight = load_value<T>(args.value, args.value.dtype == args.dtype,
                                    edge_position(args.a, slice.begin + mine));
        }
        if (args.scale_src != nullptr) my_weight *= args.scale_src[my_col];
      }
      if (kCounted && is_stored(args, my_col)) my_col = ~my_col;
    }
    const int steps = min(kLanes, longest - base);
    for (int step = 0; step < steps; ++step) {
      const int col = __shfl_sync(kFullWarp, my_col, step, kLanes);
      float weight = 1;
      if constexpr (kWeighted) weight = __shfl_sync(kFullWarp, my_weight, step, kLanes);
      if (!inside || base + step >= slice.length) continue;
      float term[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) term[i] = kWeighted ? weight * scaled[i] : scaled[i];
      if (kCounted && col < 0) {
        Pack<T, kVec> pack;
#pragma unroll
        for (int i = 0; i < kVec; ++i) pack.lane[i] = narrow<T>(term[i]);
        store_pack(pack, result<T>(args) + static_cast<std::int64_t>(~col) * args.width + feature);
      } else {
        atomic_add(args.sum + static_cast<std::int64_t>(col) * args.width + feature, term);
      }
    }
  }
}

template <typename T, int kVec, int kLanes, bool kCounted>
void launch_shape(const SpmmTransposedArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kLanes), ceil_div(args.width, kLanes * kVec));
  if (args.value.data != nullptr || args.scale_src != nullptr) {
    spmm_csr_transposed_kernel<T, kVec, kLanes, true, kCounted><<<grid, kThreads, 0, stream>>>(args);
  } else {
    spmm_csr_transposed_kernel<T, kVec, kLanes, false, kCounted><<<grid, kThreads, 0, stream>>>(args);
  }
}

template <typename T, bool kCounted>
void launch(const SpmmTransposedArgs& args, cudaStream_t stream) {
  const auto aligned = [](const void* address, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  const bool vectors = args.width % 4 == 0 && args.x.stride % 4 == 0 && aligned(args.x.data, 4 * sizeof(T)) &&
                       aligned(args.sum, 16) && aligned(args.out, 4 * sizeof(T));
  if (!vectors) return launch_shape<T, 1, 32, kCounted>(args, stream);
  args.width <= 32 ? launch_shape<T, 4, 8, kCounted>(args, stream)
                   : launch_shape<T, 4, 32, kCounted>(args, stream);
}

template <typename T>
cudaError_t launch_counted(const SpmmTransposedArgs& args, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(args.count, 0, args.a.num_cols * sizeof *args.count, stream);
  if (error != cudaSuccess) return error;
  if (args.a.num_edges > 0) {
    count_kernel<<<ceil_div(args.a.num_edges, kThreads), kThreads, 0, stream>>>(args);
  }
  const unsigned blocks = ceil_div(args.a.num_cols - args.num_given, kThreads / kWarp * kColumnsPerWarp);
  if (blocks > 0) clear_kernel<T><<<blocks, kThreads, 0, stream>>>(args);
  if (args.split.num_slices > 0 && args.width > 0) launch<T, true>(args, stream);
  if (args.out != nullptr && blocks > 0) convert_kernel<T><<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_uncounted(const SpmmTransposedArgs& args, cudaStream_t stream) {
  const std::int64_t num_zeros = (args.a.num_cols - args.num_given) * args.width;
  if (num_zeros > 0) {
    float* zeros = args.sum + args.num_given * args.width;
    const cudaError_t error = cudaMemsetAsync(zeros, 0, num_zeros * sizeof *zeros, stream);
    if (error != cudaSuccess) return error;
  }
  if (args.split.num_slices > 0 && args.width > 0) launch<T, false>(args, stream);
  return cudaGetLastError();
}

}  // namespace spmm_csr_transposed_detail

int spmm_csr_transposed(const SpmmTransposedArgs& args, void* stream) {
  using namespace spmm_csr_transposed_detail;
  auto* queue = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaSuccess;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, double>) {
      error = args.count != nullptr ? launch_counted<T>(args, queue) : launch_uncounted<T>(args, queue);
    }
  });
  return error;
}

}  // namespace fastsparse::cuda
