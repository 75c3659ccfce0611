// Recomputes the gradient of a linear map's weight where it is not finite, without the rows whose gradient is
// 0. The reason is that 0 times NaN is NaN, and a row that no edge reads must not change the weight.
//
// The product is grad^T x. The columns of grad, which are rows of the product, are divided into parts
// (WeightGradientArgs), because a row may have a gradient in one part and zeros in another.
//
// The host would have to wait for the device to know if a product is finite, so this kernel is launched after
// every product. A block checks kColumns columns of one part of the product, and ends at once if they are
// finite. The check reads the product once, mostly from the L2 cache. Otherwise, the block recomputes these
// columns: a lane has kWidth columns of the gradient, and a warp handles every kWarps-th row. The order of
// the additions is fixed. The kernel checks if a row's gradient is 0 in the part only if a number of the row
// in these columns of x is not finite.

#include <cmath>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace weight_gradient_detail {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kColumns = 4;  // number of columns of x per block
constexpr int kWidth = 4;    // number of columns of the gradient per lane

__device__ __forceinline__ bool is_finite_at(const void* out, Dtype dtype, std::int64_t at) {
  switch (dtype) {
    case Dtype::kFloat64:
      return isfinite(static_cast<const double*>(out)[at]);
    case Dtype::kFloat32:
      return isfinite(static_cast<const float*>(out)[at]);
    case Dtype::kFloat16:
      return isfinite(widen(static_cast<const __half*>(out)[at]));
    case Dtype::kBFloat16:
      return isfinite(widen(static_cast<const __nv_bfloat16*>(out)[at]));
  }
  return true;
}

__device__ __forceinline__ void store_at(void* out, Dtype dtype, std::int64_t at, double number) {
  switch (dtype) {
    case Dtype::kFloat64:
      static_cast<double*>(out)[at] = number;
      return;
    case Dtype::kFloat32:
      static_cast<float*>(out)[at] = static_cast<float>(number);
      return;
    case Dtype::kFloat16:
      static_cast<__half*>(out)[at] = narrow<__half>(static_cast<float>(number));
      return;
    case Dtype::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[at] = narrow<__nv_bfloat16>(static_cast<float>(number));
      return;
  }
}

template <typename T>
__device__ bool is_zero(const T* row, std::int64_t width) {
  for (std::int64_t column = 0; column < width; ++column) {
    if (!(widen(row[column]) == 0)) return false;
  }
  return true;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) again_kernel(const WeightGradientArgs args) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kColumns;
  const std::int64_t part = blockIdx.y * args.part_width;  // first column of the part
  const int columns = static_cast<int>(min(args.x_width - first, static_cast<std::int64_t>(kColumns)));
  bool is_finite = true;
  for (std::int64_t at = threadIdx.x; at < args.part_width; at += kThreads) {
    for (int c = 0; c < columns; ++c) {
      is_finite =
          is_finite && is_finite_at(args.out, args.out_dtype,
                                    (part + at) * args.out_row_stride + (first + c) * args.out_column_stride);
    }
  }
  if (!__syncthreads_or(!is_finite)) return;

  __shared__ Acc<T> sums[kWarps][kColumns][kWidth * kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  for (std::int64_t begin = 0; begin < args.part_width; begin += kWidth * kWarp) {
    Acc<T> total[kColumns][kWidth] = {};
    for (std::int64_t row = warp; row < args.num_rows; row += kWarps) {
      const T* grad = static_cast<const T*>(args.grad) + row * args.grad_stride + part;
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride + first * args.x_column_stride;
      Acc<T> numbers[kColumns] = {};
      bool are_finite = true;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c < columns) numbers[c] = widen(x[c * args.x_column_stride]);
        are_finite = are_finite && isfinite(numbers[c]);
      }
      if (!are_finite && is_zero(grad, args.part_width)) continue;
      for (int w = 0; w < kWidth; ++w) {
        const std::int64_t at = begin + w * kWarp + lane;
        if (at >= args.part_width) break;
        const Acc<T> factor = widen(grad[at]);
        for (int c = 0; c < kColumns; ++c) total[c][w] += factor * numbers[c];
      }
    }
    for (int c = 0; c < kColumns; ++c) {
      for (int w = 0; w < kWidth; ++w) sums[warp][c][w * kWarp + lane] = total[c][w];
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < kColumns * kWidth * kWarp; at += kThreads) {
      const int c = at / (kWidth * kWarp), w = at % (kWidth * kWarp);
      if (c >= columns || begin + w >= args.part_width) continue;
      Acc<T> sum = 0;
      for (int of = 0; of < kWarps; ++of) sum += sums[of][c][w];
      store_at(args.out, args.out_dtype,
               (part + begin + w) * args.out_row_stride + (first + c) * args.out_column_stride, sum);
    }
    __syncthreads();
  }
}

}  // namespace weight_gradient_detail

int weight_gradient(const WeightGradientArgs& args, void* stream) {
  using namespace weight_gradient_detail;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const dim3 grid(ceil_div(args.x_width, kColumns), static_cast<unsigned>(args.num_parts));
    again_kernel<T><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
