// Sums of the columns of a tall matrix, for the gradient of a bias: one pass over the matrix, in float64.
// PyTorch's sum leaves most of the GPU idle, and a product with a vector of ones adds in float32.
//
// Rows are divided into parts, a few per multiprocessor. The threads of a block are divided into lines of
// `columns` threads. Thread x of a line handles kVec columns with one load per row (16 bytes if alignment
// allows), and line y handles every (kThreads / columns)-th row of the part. Four rows are loaded ahead and
// added pairwise in the accumulation type. All further sums are in float64, in an order that depends only on
// the sizes: first the lines of a block, then the parts (combine_kernel). So sums whose terms cancel stay
// accurate, and every run gives the same bits.
//
// Sums of one call (the gradients of a layer's biases) share one launch of each kernel, because small
// matrices take less time than launches.

#include <algorithm>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/sum_of_rows.h"

namespace fastsparse::cuda {
namespace sum_of_rows_detail {

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // rows that a thread loads before it adds

struct Sums {
  SumOfRowsArgs of[kMostSums];
  int columns[kMostSums];  // threads per line
  bool packed[kMostSums];  // whether rows can be read 16 bytes at a time
};

// Sums a part of the rows. `sums`: (kVec, kThreads) in shared memory.
template <typename T, int kVec>
__device__ __forceinline__ void add_part(const SumOfRowsArgs& args, const int columns, double* sums) {
  const int x = static_cast<int>(threadIdx.x) % columns, y = static_cast<int>(threadIdx.x) / columns;
  const int lines = kThreads / columns;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * columns + x) * kVec;
  const std::int64_t length = (args.num_rows + args.num_parts - 1) / args.num_parts;
  const std::int64_t begin = blockIdx.y * length;
  const std::int64_t end = min(begin + length, args.num_rows);
  double total[kVec] = {};
  if (column < args.width) {
    const T* from = static_cast<const T*>(args.rows) + column;
    std::int64_t row = begin + y;
    for (; row + (kAhead - 1) * lines < end; row += kAhead * lines) {
      Pack<T, kVec> ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        ahead[i] = load_pack<T, kVec>(from + (row + i * lines) * args.row_stride);
      }
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        total[v] += (widen(ahead[0].lane[v]) + widen(ahead[1].lane[v])) +
                    (widen(ahead[2].lane[v]) + widen(ahead[3].lane[v]));
      }
    }
#pragma unroll 1
    for (; row < end; row += lines) {
      const Pack<T, kVec> pack = load_pack<T, kVec>(from + row * args.row_stride);
#pragma unroll
      for (int v = 0; v < kVec; ++v) total[v] += widen(pack.lane[v]);
    }
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) sums[v * kThreads + threadIdx.x] = total[v];
  __syncthreads();
  if (y > 0 || column >= args.width) return;
  double* out = args.partial + blockIdx.y * args.width + column;
  // Lines are added in a loop that is not unrolled: the loads of a line overlap, and the code stays short.
#pragma unroll 1
  for (int line = 1; line < lines; ++line) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) total[v] += sums[v * kThreads + line * columns + x];
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) out[v] = total[v];
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) parts_kernel(const SumOfRowsArgs args, const int columns) {
  __shared__ double sums[kVec * kThreads];
  add_part<T, kVec>(args, columns, sums);
}

// Sums one matrix of T or float32 per blockIdx.z.
template <typename T>
__global__ void __launch_bounds__(kThreads) parts_of_each_kernel(const __grid_constant__ Sums sums) {
  constexpr int kVec = 16 / sizeof(T);
  __shared__ double shared[kVec * kThreads];
  const SumOfRowsArgs& of = sums.of[blockIdx.z];
  const int columns = sums.columns[blockIdx.z];
  const bool packed = sums.packed[blockIdx.z];
  if (blockIdx.y >= of.num_parts) return;
  if (sizeof(T) == sizeof(float) || of.dtype == Dtype::kFloat32) {
    packed ? add_part<float, 4>(of, columns, shared) : add_part<float, 1>(of, columns, shared);
  } else {
    packed ? add_part<T, kVec>(of, columns, shared) : add_part<T, 1>(of, columns, shared);
  }
}

template <typename T>
__device__ __forceinline__ void store(void* to, std::int64_t at, double number) {
  static_cast<T*>(to)[at] = narrow<T>(static_cast<Acc<T>>(number));
}

// Adds the parts of one matrix per blockIdx.y. Each lane handles one column, and each of the 32 warps every
// 32nd part.
__global__ void __launch_bounds__(kWarp* kWarp) combine_kernel(const __grid_constant__ Sums all) {
  __shared__ double sums[kWarp][kWarp];
  const SumOfRowsArgs& args = all.of[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + lane;
  double total = 0;
  if (column < args.width) {
    for (std::int64_t part = warp; part < args.num_parts; part += kWarp) {
      total += args.partial[part * args.width + column];
    }
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || column >= args.width) return;
  for (int other = 1; other < kWarp; ++other) total += sums[other][lane];
  switch (args.out_dtype) {
    case Dtype::kFloat64:
      return store<double>(args.out, column, total);
    case Dtype::kFloat32:
      return store<float>(args.out, column, total);
    case Dtype::kFloat16:
      return store<__half>(args.out, column, total);
    case Dtype::kBFloat16:
      return store<__nv_bfloat16>(args.out, column, total);
  }
}

template <typename T>
bool is_packed(const SumOfRowsArgs& args) {
  return vector_width<T>({args.width, args.row_stride}, {args.rows}) == 16 / static_cast<int>(sizeof(T));
}

// Number of threads per line, if a thread reads `vec` elements at a time.
int columns_of(const SumOfRowsArgs& args, std::int64_t vec) {
  int columns = 1;
  while (columns < args.width / vec && columns < kThreads) columns *= 2;
  return columns;
}

template <typename T, int kVec>
void launch_parts(const SumOfRowsArgs& args, cudaStream_t queue) {
  const int columns = columns_of(args, kVec);
  const dim3 grid(ceil_div(args.width / kVec, columns), static_cast<unsigned>(args.num_parts));
  parts_kernel<T, kVec><<<grid, kThreads, 0, queue>>>(args, columns);
}

}  // namespace sum_of_rows_detail

int sum_of_rows(const SumOfRowsArgs& args, void* stream) {
  using namespace sum_of_rows_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    is_packed<T>(args) ? launch_parts<T, 16 / sizeof(T)>(args, queue) : launch_parts<T, 1>(args, queue);
  });
  combine_kernel<<<ceil_div(args.width, kWarp), dim3(kWarp, kWarp), 0, queue>>>({{args}, {}, {}});
  return cudaGetLastError();
}

int sums_of_rows(const SumOfRowsArgs* each, int count, void* stream) {
  using namespace sum_of_rows_detail;
  if (count == 0) return cudaSuccess;
  if (count == 1) return sum_of_rows(each[0], stream);
  const auto queue = static_cast<cudaStream_t>(stream);
  Sums sums{};
  Dtype dtype = Dtype::kFloat32;
  std::int64_t blocks = 0, parts = 0, widest = 0;
  for (int i = 0; i < count; ++i) {
    const SumOfRowsArgs& args = sums.of[i] = each[i];
    if (args.dtype != Dtype::kFloat32) dtype = args.dtype;
    with_type(args.dtype, [&](auto type) {
      using T = decltype(type);
      sums.packed[i] = is_packed<T>(args);
      const std::int64_t vec = sums.packed[i] ? 16 / sizeof(T) : 1;
      sums.columns[i] = columns_of(args, vec);
      blocks = std::max<std::int64_t>(blocks, ceil_div(args.width / vec, sums.columns[i]));
    });
    parts = std::max(parts, args.num_parts);
    widest = std::max(widest, args.width);
  }
  const auto many = static_cast<unsigned>(count);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts), many);
  if (dtype == Dtype::kFloat32) {
    parts_of_each_kernel<float><<<grid, kThreads, 0, queue>>>(sums);
  } else if (dtype == Dtype::kFloat16) {
    parts_of_each_kernel<__half><<<grid, kThreads, 0, queue>>>(sums);
  } else {
    parts_of_each_kernel<__nv_bfloat16><<<grid, kThreads, 0, queue>>>(sums);
  }
  combine_kernel<<<dim3(ceil_div(widest, kWarp), many), dim3(kWarp, kWarp), 0, queue>>>(sums);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
