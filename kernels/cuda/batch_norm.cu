// Batch normalisation over the rows that a mask selects, and its gradient, for padded batches in which only
// the device knows the number of rows. Every row is normalised; the gradient of an unselected row is zero.
//
//   out = (x - mean) inverse w + b              inverse = 1 / sqrt(var + eps)
//   dx  = (dy - db / n - (x - mean) inverse dw / n) inverse w
//   db  = sum of dy,  dw = sum of dy (x - mean) inverse,  n = number of selected rows
//
// The forward and the backward pass have three launches each. Every column has two sums (of x and x^2; of dy
// and dy (x - mean)). They are added in float64, so that the variance stays accurate if the mean is large,
// and in an order that depends on the sizes alone:
// 1. pairs_kernel: rows are divided into parts. The threads of a block are divided into lines of `columns`
//   threads. Thread x of a line handles kVec columns with one load per row, and line y handles every
//   (kThreads / columns)-th row of the part. Lines are added one after the other.
// 2. moments_kernel, gradients_kernel: each lane of a warp handles one column, each of the 32 warps every
//   32nd part.
// 3. normalise_kernel, differentiate_kernel: lines as in 1, with each column's coefficients in registers.
//
// Floors: 3 num_rows width sizeof(T) bytes forward (x twice, out once) and 5 backward. For 13,000 x 256 in
// float32 from memory at 4.8 TB/s these are 8 and 14 us. Batches of molecules fit the L2 cache.
#include <algorithm>

#include "fastsparse/batch_norm.h"
#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {
namespace batch_norm_detail {

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // rows that a thread loads before it uses them

// The columns and rows of a thread.
struct Place {
  std::int64_t column;
  std::int64_t begin, end, step;
  int x, y, lines;
};

template <int kVec>
__device__ __forceinline__ Place place_in(const MaskedRows& rows, int columns) {
  Place place{};
  place.x = static_cast<int>(threadIdx.x) % columns;
  place.y = static_cast<int>(threadIdx.x) / columns;
  place.lines = kThreads / columns;
  place.column = (static_cast<std::int64_t>(blockIdx.x) * columns + place.x) * kVec;
  const std::int64_t length = (rows.num_rows + gridDim.y - 1) / gridDim.y;
  place.begin = blockIdx.y * length + place.y;
  place.end = min((blockIdx.y + 1) * length, rows.num_rows);
  place.step = place.lines;
  if (place.column >= rows.width) place.end = place.begin;
  return place;
}

// Calls f(row, packs of the matrices `from` at the row) for every row of a place.
template <typename T, int kVec, int kMatrices, typename F>
__device__ __forceinline__ void for_rows(const Place& place, std::int64_t width,
                                         const void* const (&from)[kMatrices], F&& f) {
  using Packs = Pack<T, kVec>[kMatrices];
  const auto load = [&](Packs& packs, std::int64_t row) {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      packs[m] = load_pack<T, kVec>(static_cast<const T*>(from[m]) + row * width + place.column);
    }
  };
  std::int64_t row = place.begin;
  for (; row + (kAhead - 1) * place.step < place.end; row += kAhead * place.step) {
    Packs ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(ahead[i], row + i * place.step);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) f(row + i * place.step, ahead[i]);
  }
#pragma unroll 1
  for (; row < place.end; row += place.step) {
    Packs packs;
    load(packs, row);
    f(row, packs);
  }
}

template <int kVec>
__device__ __forceinline__ void read_columns(const float* from, const Place& place, float missing,
                                             float (&to)[kVec]) {
  constexpr int kAtOnce = kVec < 4 ? kVec : 4;
#pragma unroll
  for (int v = 0; v < kVec; v += kAtOnce) {
    Pack<float, kAtOnce> pack;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) pack.lane[i] = missing;
    if (from != nullptr && place.begin < place.end) pack = load_pack<float, kAtOnce>(from + place.column + v);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) to[v + i] = pack.lane[i];
  }
}

// Sums of a part, per column: of x and x^2, or in the backward pass of dy and dy (x - mean).
template <typename T, int kVec, bool kGradient>
__global__ void __launch_bounds__(kThreads)
    pairs_kernel(const MaskedRows rows, const void* grad, const float* mean, const int columns) {
  __shared__ double shared[2 * kVec * kThreads];
  const Place place = place_in<kVec>(rows, columns);
  double first[kVec] = {}, second[kVec] = {};
  float centre[kVec];
  read_columns<kVec>(mean, place, 0, centre);
  const void* const from[] = {rows.x, kGradient ? grad : rows.x};
  for_rows<T, kVec>(place, rows.width, from, [&](std::int64_t row, const Pack<T, kVec>(&packs)[2]) {
    if (!rows.mask[row]) return;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float x = widen(packs[0].lane[v]), dy = widen(packs[1].lane[v]);
      first[v] += kGradient ? dy : x;
      second[v] += kGradient ? static_cast<double>(dy * (x - centre[v]))
                             : static_cast<double>(x) * static_cast<double>(x);
    }
  });
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    shared[v * kThreads + threadIdx.x] = first[v];
    shared[(kVec + v) * kThreads + threadIdx.x] = second[v];
  }
  __syncthreads();
  if (place.y > 0 || place.column >= rows.width) return;
#pragma unroll 1
  for (int line = 1; line < place.lines; ++line) {
    const int at = line * columns + place.x;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      first[v] += shared[v * kThreads + at];
      second[v] += shared[(kVec + v) * kThreads + at];
    }
  }
  double* out = rows.partial + blockIdx.y * 2 * rows.width + place.column;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    out[v] = first[v];
    out[rows.width + v] = second[v];
  }
}

// Adds the parts of this lane's column. In the first warp of the block, `first` and `second` get both sums,
// and the function returns true if the column exists.
__device__ __forceinline__ bool add_parts(const MaskedRows& rows, std::int64_t column, double& first,
                                          double& second) {
  __shared__ double sums[2][kWarp][kWarp];
  const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
  first = second = 0;
  if (column < rows.width) {
    for (std::int64_t part = warp; part < rows.num_parts; part += kWarp) {
      first += rows.partial[2 * part * rows.width + column];
      second += rows.partial[(2 * part + 1) * rows.width + column];
    }
  }
  sums[0][warp][lane] = first;
  sums[1][warp][lane] = second;
  __syncthreads();
  if (warp > 0 || column >= rows.width) return false;
  for (int other = 1; other < kWarp; ++other) {
    first += sums[0][other][lane];
    second += sums[1][other][lane];
  }
  return true;
}

__device__ __forceinline__ std::int64_t column_of_lane() {
  return static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
}

__global__ void __launch_bounds__(kWarp* kWarp) moments_kernel(const BatchNormArgs args) {
  const std::int64_t column = column_of_lane();
  double sum, squares;
  if (!add_parts(args.rows, column, sum, squares)) return;
  const double count = fmax(static_cast<double>(*args.rows.count), 1.0);
  const double mean = sum / count, var = fmax(squares / count - mean * mean, 0.0);
  args.mean[column] = static_cast<float>(mean);
  args.inverse[column] = static_cast<float>(1.0 / sqrt(var + static_cast<double>(args.eps)));
  if (args.running_mean == nullptr) return;
  const auto step = [&](float& running, double now) {
    running += args.momentum * (static_cast<float>(now) - running);
  };
  step(args.running_mean[column], mean);
  step(args.running_var[column], var * count / fmax(count - 1.0, 1.0));
}

__global__ void __launch_bounds__(kWarp* kWarp) gradients_kernel(const BatchNormBackwardArgs args) {
  const std::int64_t column = column_of_lane();
  double sum, product;
  if (!add_parts(args.rows, column, sum, product)) return;
  args.grad_bias[column] = static_cast<float>(sum);
  args.grad_weight[column] = static_cast<float>(product * static_cast<double>(args.inverse[column]));
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) normalise_kernel(const BatchNormArgs args, const int columns) {
  const Place place = place_in<kVec>(args.rows, columns);
  float mean[kVec], scale[kVec], weight[kVec], bias[kVec];
  read_columns<kVec>(args.mean, place, 0, mean);
  read_columns<kVec>(args.inverse, place, 0, scale);
  read_columns<kVec>(args.weight, place, 1, weight);
  read_columns<kVec>(args.bias, place, 0, bias);
#pragma unroll
  for (int v = 0; v < kVec; ++v) scale[v] *= weight[v];
  const void* const from[] = {args.rows.x};
  for_rows<T, kVec>(place, args.rows.width, from, [&](std::int64_t row, const Pack<T, kVec>(&packs)[1]) {
    Pack<T, kVec> out;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      out.lane[v] = narrow<T>((widen(packs[0].lane[v]) - mean[v]) * scale[v] + bias[v]);
    }
    store_pack<T, kVec>(out, static_cast<T*>(args.out) + row * args.rows.width + place.column);
  });
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    differentiate_kernel(const BatchNormBackwardArgs args, const int columns) {
  const Place place = place_in<kVec>(args.rows, columns);
  float mean[kVec], inverse[kVec], weight[kVec], grad_bias[kVec], grad_weight[kVec];
  read_columns<kVec>(args.mean, place, 0, mean);
  read_columns<kVec>(args.inverse, place, 0, inverse);
  read_columns<kVec>(args.weight, place, 1, weight);
  read_columns<kVec>(args.grad_bias, place, 0, grad_bias);
  read_columns<kVec>(args.grad_weight, place, 0, grad_weight);
  const float share = 1.0f / fmaxf(*args.rows.count, 1.0f);
  const void* const from[] = {args.rows.x, args.grad};
  for_rows<T, kVec>(place, args.rows.width, from, [&](std::int64_t row, const Pack<T, kVec>(&packs)[2]) {
    const bool is_named = args.rows.mask[row];
    Pack<T, kVec> out;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float normal = (widen(packs[0].lane[v]) - mean[v]) * inverse[v];
      const float centred = widen(packs[1].lane[v]) - share * (grad_bias[v] + normal * grad_weight[v]);
      out.lane[v] = narrow<T>(is_named ? centred * inverse[v] * weight[v] : 0.0f);
    }
    store_pack<T, kVec>(out, static_cast<T*>(args.out) + row * args.rows.width + place.column);
  });
}

// Threads per line, and the grids of a pass.
struct Shape {
  int columns;
  dim3 parts, rows, sums;
};

Shape shape_of(const MaskedRows& rows, int vec) {
  int columns = 1;
  while (columns < rows.width / vec && columns < kThreads) columns *= 2;
  const unsigned across = ceil_div(rows.width / vec, columns);
  // A thread normalises a multiple of kAhead rows, and only kAhead rows if there are few rows.
  const std::int64_t block_rows = kThreads / columns * kAhead;
  const std::int64_t times = ceil_div(rows.num_rows, 4 * rows.num_parts * block_rows);
  const unsigned down = std::max(ceil_div(rows.num_rows, std::max<std::int64_t>(times, 1) * block_rows), 1u);
  return {columns, dim3(across, static_cast<unsigned>(rows.num_parts)), dim3(across, down),
          dim3(ceil_div(rows.width, kWarp))};
}

// Calls f(a value of type T, the number of elements per load as a constant, shape).
template <typename F>
void with_loads(const MaskedRows& rows, std::initializer_list<const void*> addresses, F&& f) {
  with_type(rows.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) < sizeof(double)) {
      constexpr int kVec = 16 / static_cast<int>(sizeof(T));
      if (vector_width<T>({rows.width}, addresses) == kVec) {
        f(type, std::integral_constant<int, kVec>{}, shape_of(rows, kVec));
      } else {
        f(type, std::integral_constant<int, 1>{}, shape_of(rows, 1));
      }
    }
  });
}

}  // namespace batch_norm_detail

int batch_norm(const BatchNormArgs& args, void* stream) {
  using namespace batch_norm_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  const dim3 warps(kWarp, kWarp);
  with_loads(args.rows, {args.rows.x, args.out}, [&](auto type, auto vec, const Shape& shape) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    pairs_kernel<T, kVec, false>
        <<<shape.parts, kThreads, 0, queue>>>(args.rows, nullptr, nullptr, shape.columns);
    moments_kernel<<<shape.sums, warps, 0, queue>>>(args);
    normalise_kernel<T, kVec><<<shape.rows, kThreads, 0, queue>>>(args, shape.columns);
  });
  return cudaGetLastError();
}

int batch_norm_backward(const BatchNormBackwardArgs& args, void* stream) {
  using namespace batch_norm_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  const dim3 warps(kWarp, kWarp);
  with_loads(args.rows, {args.rows.x, args.grad, args.out}, [&](auto type, auto vec, const Shape& shape) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    pairs_kernel<T, kVec, true>
        <<<shape.parts, kThreads, 0, queue>>>(args.rows, args.grad, args.mean, shape.columns);
    gradients_kernel<<<shape.sums, warps, 0, queue>>>(args);
    differentiate_kernel<T, kVec><<<shape.rows, kThreads, 0, queue>>>(args, shape.columns);
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
