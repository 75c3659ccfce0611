// Second level of the sums: rows (or windows of rows) that were cut into slices get their partial sums added
// in slot order, so that every run gives the same bits.
#pragma once

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

// What happens to a sum before it is stored: out = scale_dst * sum + bias.
struct Epilogue {
  const void* scale_dst;  // (num_rows) in the accumulation type, null: 1
  const void* bias;       // (width) in dtype, null: 0
  void* out;              // (num_rows, width)
  std::int64_t width;

  template <typename T>
  __device__ __forceinline__ T finish(Acc<T> sum, std::int64_t row, std::int64_t feature) const {
    if (scale_dst != nullptr) sum *= static_cast<const Acc<T>*>(scale_dst)[row];
    if (bias != nullptr) sum += widen(static_cast<const T*>(bias)[feature]);
    return narrow<T>(sum);
  }
};

constexpr int kCombineWarps = 8;
constexpr int kCombineFeatures = 4;  // per lane: independent sums, so that loads overlap

// partial: (num_slots, kHeight, width). A block takes one split unit (a row, or a window of kHeight rows) and
// 128 features. Its 8 warps share the rows, and where there are fewer rows than warps the slots of a row:
// then a fixed tree adds what the warps found. `row_of_unit` maps (unit, r) to a row of the output, -1: none.
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
  for (std::int64_t slot = split.split_ptr[blockIdx.x] + slot_lane; slot < end; slot += kSlotLanes) {
    const A* row = static_cast<const A*>(partial) + (slot * kHeight + r) * width;
#pragma unroll
    for (int i = 0; i < kCombineFeatures; ++i) {
      const std::int64_t feature = feature0 + i * kWarp;
      if (feature < width) sum[i] += __ldg(row + feature);
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
      static_cast<T*>(epilogue.out)[row * width + feature] =
          epilogue.template finish<T>(sum[i], row, feature);
    }
  }
}

template <typename T, int kHeight, typename RowOfUnit>
void combine_partials(const RowSplitView& split, const void* partial, const Epilogue& epilogue,
                      RowOfUnit row_of_unit, cudaStream_t stream) {
  if (split.num_split_rows == 0) return;
  const dim3 grid(static_cast<unsigned>(split.num_split_rows),
                  ceil_div(epilogue.width, kWarp * kCombineFeatures));
  combine_partials_kernel<T, kHeight>
      <<<grid, dim3(kWarp, kCombineWarps), 0, stream>>>(split, partial, epilogue, row_of_unit);
}

}  // namespace fastsparse::cuda
