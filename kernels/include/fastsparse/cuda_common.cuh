// Shared code of the CUDA kernels: element types, vector loads, dispatch from run-time dtypes to types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "fastsparse/views.h"

namespace fastsparse::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarp = 32;

template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <typename T>
using Acc = typename AccOf<T>::type;

__device__ __forceinline__ double widen(double v) { return v; }
__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T narrow(Acc<T> v);
template <>
__device__ __forceinline__ double narrow<double>(double v) {
  return v;
}
template <>
__device__ __forceinline__ float narrow<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// kVec elements that are loaded or stored in one instruction.
template <typename T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  T lane[kVec];
};

template <typename T, int kVec>
__device__ __forceinline__ Pack<T, kVec> load_pack(const T* from) {
  constexpr int kBytes = static_cast<int>(sizeof(T)) * kVec;
  Pack<T, kVec> pack;
  if constexpr (kBytes == 16) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
    memcpy(&pack, &raw, kBytes);
  } else if constexpr (kBytes == 8) {
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(from));
    memcpy(&pack, &raw, kBytes);
  } else if constexpr (kBytes == 4) {
    const unsigned raw = __ldg(reinterpret_cast<const unsigned*>(from));
    memcpy(&pack, &raw, kBytes);
  } else {
    const unsigned short raw = __ldg(reinterpret_cast<const unsigned short*>(from));
    memcpy(&pack, &raw, kBytes);
  }
  return pack;
}

// Stores a pack in one instruction. For a plain assignment of 16-bit elements, the compiler emits several
// instructions.
template <typename T, int kVec>
__device__ __forceinline__ void store_pack(const Pack<T, kVec>& pack, T* to) {
  constexpr int kBytes = static_cast<int>(sizeof(T)) * kVec;
  if constexpr (kBytes == 16) {
    uint4 raw;
    memcpy(&raw, &pack, kBytes);
    *reinterpret_cast<uint4*>(to) = raw;
  } else if constexpr (kBytes == 8) {
    uint2 raw;
    memcpy(&raw, &pack, kBytes);
    *reinterpret_cast<uint2*>(to) = raw;
  } else if constexpr (kBytes == 4) {
    unsigned raw;
    memcpy(&raw, &pack, kBytes);
    *reinterpret_cast<unsigned*>(to) = raw;
  } else {
    *to = pack.lane[0];
  }
}

// Loads an edge value, which has the features' dtype or their accumulation type.
template <typename T>
__device__ __forceinline__ Acc<T> load_value(const EdgeValueView& value, bool in_feature_dtype,
                                             std::int64_t index) {
  return in_feature_dtype ? widen(static_cast<const T*>(value.data)[index])
                          : static_cast<const Acc<T>*>(value.data)[index];
}

// Loads a slice of the list, one per lane group. Groups beyond the end of the list get an empty slice, so
// that warps do not diverge.
__device__ __forceinline__ RowSlice load_slice(const RowSplitView& split, std::int64_t index) {
  RowSlice slice{0, 0, 0};
  if (index < split.num_slices) {
    const int4 raw = __ldg(reinterpret_cast<const int4*>(split.slices) + index);
    memcpy(&slice, &raw, sizeof slice);
  }
  return slice;
}

// The number of the split row that owns a slot, found by binary search among the few split rows.
__device__ __forceinline__ std::int64_t split_row_of(const RowSplitView& split, std::int64_t slot) {
  std::int64_t low = 0, high = split.num_split_rows - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (split.split_ptr[middle] <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The row to which a slice belongs: its target, or the split row that owns its slot.
__device__ __forceinline__ std::int64_t row_of(const RowSplitView& split, const RowSlice& slice) {
  return slice.target >= 0 ? slice.target : split.split_row[split_row_of(split, ~slice.target)];
}

// Calls f with a value of the device type behind `dtype`.
template <typename F>
void with_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat64:
      return f(double{});
    case Dtype::kFloat32:
      return f(float{});
    case Dtype::kFloat16:
      return f(__half{});
    case Dtype::kBFloat16:
      return f(__nv_bfloat16{});
  }
}

// Largest number of elements per load, among 16 bytes, 4 bytes and one element, that divides all of
// `divisors` (element counts) and to which all of `addresses` are aligned.
template <typename T>
int vector_width(std::initializer_list<std::int64_t> divisors, std::initializer_list<const void*> addresses) {
  for (const int bytes : {16, 4}) {
    const int width = bytes / static_cast<int>(sizeof(T));
    if (width <= 1) continue;
    bool fits = true;
    for (const std::int64_t count : divisors) fits = fits && count % width == 0;
    for (const void* address : addresses)
      fits = fits && reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
    if (fits) return width;
  }
  return 1;
}

inline unsigned ceil_div(std::int64_t count, std::int64_t size) {
  return static_cast<unsigned>((count + size - 1) / size);
}

}  // namespace fastsparse::cuda
