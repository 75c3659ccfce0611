// Second level of sums: adds the partial sums of rows (or windows of rows) that were cut into slices. They
// are added in a fixed order, so that every run gives the same bits.
#pragma once

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/dependent_launch.cuh"

namespace fastsparse::cuda {

// max(v, 0); NaN if v is NaN.
template <typename A>
__device__ __forceinline__ A rectify(A v) {
  return v < A{0} ? A{0} : v;
}

// An additional entry (i, i) of every row: value * scale_src_i * x_i.
struct Loops {
  const void* value;      // one number in the accumulation type; null: no loops
  const void* scale_src;  // (num_rows) in the accumulation type, null: 1
  DenseView x;            // rows are aligned in the same way as the rows of the result
};

// Operations on a sum before it is stored: out = scale_dst * (sum + loops) + bias, then ReLU if `relu` is
// set.
struct Epilogue {
  const void* scale_dst;  // (num_rows) in the accumulation type, null: 1
  const void* bias;       // (width) in dtype, null: 0
  bool relu;
  void* out;  // (num_rows, width)
  std::int64_t width;
  Loops loops{};

  // An epilogue that only converts the sum to the result's dtype.
  static Epilogue only(void* out, std::int64_t width) { return {nullptr, nullptr, false, out, width}; }

  template <typename T, int kVec>
  __device__ __forceinline__ Pack<T, kVec> finish(const Acc<T> (&sum)[kVec], std::int64_t row,
                                                  std::int64_t feature) const {
    using A = Acc<T>;
    const A scale = scale_dst != nullptr ? static_cast<const A*>(scale_dst)[row] : A{1};
    A weight = 0;
    Pack<T, kVec> own{};
    if (loops.value != nullptr) {
      weight = *static_cast<const A*>(loops.value);
      if (loops.scale_src != nullptr) weight *= static_cast<const A*>(loops.scale_src)[row];
      own = load_pack<T, kVec>(static_cast<const T*>(loops.x.data) + row * loops.x.stride + feature);
    }
    Pack<T, kVec> pack;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      A v = (sum[i] + weight * widen(own.lane[i])) * scale;
      if (bias != nullptr) v += widen(static_cast<const T*>(bias)[feature + i]);
      pack.lane[i] = narrow<T>(relu ? rectify(v) : v);
    }
    return pack;
  }
};

// The epilogue of SpmmArgs or SpmmBsbArgs.
template <typename Args>
__host__ __device__ __forceinline__ Epilogue epilogue_of(const Args& args) {
  return {args.scale_dst, args.bias, args.relu, args.out, args.width, {args.loop, args.scale_src, args.x}};
}

// Maps a row of the structure to the output row with the same number.
struct SameRow {
  __device__ __forceinline__ std::int64_t operator()(std::int64_t row, int) const { return row; }
};

constexpr int kCombineWarps = 8;
constexpr int kCombineFeatures = 4;  // features per lane; their sums are independent, so that loads overlap

// partial: (num_slots, kHeight, width). A thread block processes one split unit (a row, or a window of
// kHeight rows) and 128 features. Its 8 warps divide the rows and, if there are fewer rows than warps, the
// slots of a row; then the first warp of a row adds the sums of its other warps in order. `row_of_unit` maps
// (unit, r) to an output row; -1: none.
template <typename T, int kHeight, typename RowOfUnit>
__global__ void __launch_bounds__(kWarp* kCombineWarps)
    combine_partials_kernel(const RowSplitView split, const void* partial, Epilogue epilogue,
                            RowOfUnit row_of_unit) {
  using A = Acc<T>;
  constexpr int kSlotLanes = kCombineWarps / kHeight;
  __shared__ A shared[kCombineWarps][kWarp * kCombineFeatures];
  const int r = threadIdx.y % kHeight, slot_lane = threadIdx.y / kHeight;
  const std::int64_t width = epilogue.width;
  const std::int64_t feature0 =
      static_cast<std::int64_t>(blockIdx.y) * (kWarp * kCombineFeatures) + threadIdx.x;
  const std::int64_t end = split.split_ptr[blockIdx.x + 1];
  A sum[kCombineFeatures] = {};
  wait_for_kernel_before();
  for (std::int64_t slot = split.split_ptr[blockIdx.x] + slot_lane; slot < end; slot += kSlotLanes) {
    const A* row = static_cast<const A*>(partial) + (slot * kHeight + r) * width;
#pragma unroll
    for (int i = 0; i < kCombineFeatures; ++i) {
      const std::int64_t feature = feature0 + i * kWarp;
      if (feature < width) sum[i] += __ldcg(row + feature);  // __ldg may read stale sums
    }
  }
  if constexpr (kSlotLanes > 1) {
#pragma unroll
    for (int i = 0; i < kCombineFeatures; ++i) shared[threadIdx.y][threadIdx.x + i * kWarp] = sum[i];
    __syncthreads();
    if (slot_lane != 0) return;
#pragma unroll
    for (int other = 1; other < kSlotLanes; ++other) {
#pragma unroll
      for (int i = 0; i < kCombineFeatures; ++i)
        sum[i] += shared[other * kHeight + r][threadIdx.x + i * kWarp];
    }
  }
  const std::int64_t row = row_of_unit(split.split_row[blockIdx.x], r);
  if (row < 0) return;
#pragma unroll
  for (int i = 0; i < kCombineFeatures; ++i) {
    const std::int64_t feature = feature0 + i * kWarp;
    if (feature < width) {
      const A one[1] = {sum[i]};
      store_pack(epilogue.template finish<T>(one, row, feature),
                 static_cast<T*>(epilogue.out) + row * width + feature);
    }
  }
}

template <typename T, int kHeight, typename RowOfUnit>
void combine_partials(const RowSplitView& split, const void* partial, const Epilogue& epilogue,
                      RowOfUnit row_of_unit, cudaStream_t stream) {
  if (split.num_split_rows == 0) return;
  const dim3 grid(static_cast<unsigned>(split.num_split_rows),
                  ceil_div(epilogue.width, kWarp * kCombineFeatures));
  launch_dependent(combine_partials_kernel<T, kHeight, RowOfUnit>, true, grid, dim3(kWarp, kCombineWarps), 0,
                   stream, split, partial, epilogue, row_of_unit);
}

}  // namespace fastsparse::cuda
