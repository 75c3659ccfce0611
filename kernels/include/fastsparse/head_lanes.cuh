// How the CSR attention kernels assign rows, heads and features to lanes, and their shared code.
//
// `kHeadLanes` neighbouring lanes process one head of one slice of a row (RowSlice), 8 features each. A group
// of lanes processes heads_per_group neighbouring heads of the same slice, so that together they gather
// contiguous pieces of a row. Entries are processed in batches of kHeadLanes: lane `sub` of a head reads the
// column (and computes the numbers per entry) of the batch's entry `sub`, and passes them to the other lanes
// by shuffles. All groups of a warp loop over the length of the longest slice, and mask entries beyond the
// end of their own slice.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

constexpr int kHeadThreads = 128;  // threads per block
constexpr int kLaneFeatures = 8;
constexpr float kInfinity = __builtin_huge_valf();

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// The features of one lane.
template <typename T, int kVec>
struct Features {
  Pack<T, kVec> pack[kLaneFeatures / kVec];
  __device__ __forceinline__ float operator[](int i) const { return widen(pack[i / kVec].lane[i % kVec]); }
};

// The addresses of a lane's features in row 0 of a matrix, from which `load` finds every row.
template <typename T, int kVec>
struct RowGather {
  const char* from[kLaneFeatures / kVec];
  std::uint32_t row_bytes;
  int chunks;  // number of chunks that the head needs, if chunks are single elements

  __device__ __forceinline__ Features<T, kVec> load(std::uint32_t row) const {
    Features<T, kVec> features;
#pragma unroll
    for (int c = 0; c < kLaneFeatures / kVec; ++c) {
      if (kVec == 1 && c >= chunks) {
        features.pack[c] = Pack<T, kVec>{};
        continue;
      }
      features.pack[c] = load_pack<T, kVec>(
          reinterpret_cast<const T*>(from[c] + static_cast<std::uint64_t>(row) * row_bytes));
    }
    return features;
  }

  // Zeros unless `wanted`.
  __device__ __forceinline__ Features<T, kVec> load(std::uint32_t row, bool wanted) const {
    return wanted ? load(row) : Features<T, kVec>{};
  }
};

template <typename T, int kVec, int kHeadLanes>
struct HeadLane {
  static constexpr int kChunks = kLaneFeatures / kVec;
  static constexpr int kChunkWidth = kHeadLanes * kVec;

  std::int64_t group;  // index of the slice of this lane's group
  int sub;             // lane within its head
  std::int64_t head;   // valid in all lanes, also if `live` is false
  bool live;           // false for lanes beyond the last head
  std::int64_t first;  // the head's first feature in a row of all heads
  bool inside[kChunks];
  int chunks;
  std::uint32_t heads;

  __device__ __forceinline__ HeadLane(std::int64_t num_heads, std::int64_t head_width, int heads_per_group) {
    const int lane = threadIdx.x % kWarp, of_warp = lane / kHeadLanes;
    const int slices_per_warp = kWarp / kHeadLanes / heads_per_group;
    const std::int64_t warp =
        static_cast<std::int64_t>(blockIdx.x) * (kHeadThreads / kWarp) + threadIdx.x / kWarp;
    group = warp * slices_per_warp + of_warp / heads_per_group;
    sub = lane % kHeadLanes;
    head = static_cast<std::int64_t>(blockIdx.y) * heads_per_group + of_warp % heads_per_group;
    heads = static_cast<std::uint32_t>(num_heads);
    live = head < num_heads;
    if (!live) head = num_heads - 1;
    first = head * head_width;
    chunks = static_cast<int>((head_width + kChunkWidth - 1) / kChunkWidth);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) inside[c] = live && place(c) < head_width;
  }

  // First feature of a chunk, within the head.
  __device__ __forceinline__ int place(int chunk) const { return chunk * kChunkWidth + sub * kVec; }

  // Position of this lane's head in a (rows, heads) matrix.
  __device__ __forceinline__ std::int64_t at(std::int64_t row) const {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(row)) * heads) +
           head;
  }

  // Prepares gathering rows of x. Lanes without features gather the first features of their head and do not
  // use them, because a predicate on every load would cost more.
  __device__ __forceinline__ RowGather<T, kVec> gather(const DenseView& x) const {
    RowGather<T, kVec> rows;
    rows.row_bytes = static_cast<std::uint32_t>(x.stride * sizeof(T));
    rows.chunks = chunks;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      rows.from[c] =
          reinterpret_cast<const char*>(static_cast<const T*>(x.data) + first + (inside[c] ? place(c) : 0));
    }
    return rows;
  }

  // Loads the lane's features of a row; zeros beyond the head's last feature, and unless `wanted`. The row is
  // always loaded: if the load depended on `wanted`, GATv2's column kernel would spill three times as much in
  // float32 with heads of up to 32 features (304 bytes in place of 104, nvcc 13.0).
  __device__ __forceinline__ void load(float (&to)[kLaneFeatures], const DenseView& x, std::int64_t row,
                                       bool wanted = true) const {
    const Features<T, kVec> features = gather(x).load(static_cast<std::uint32_t>(row));
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) to[i] = inside[i / kVec] && wanted ? features[i] : 0.0f;
  }

  // Loads the lane's features of a float32 vector, (heads * head_width).
  __device__ __forceinline__ void load_vector(float (&to)[kLaneFeatures], const float* x) const {
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) {
      to[i] = inside[i / kVec] ? x[first + place(i / kVec) + i % kVec] : 0.0f;
    }
  }

  // Writes the lane's features to row `row` of a contiguous (rows, width) matrix of U.
  template <typename U>
  __device__ __forceinline__ void store(void* to, std::int64_t row, std::int64_t width,
                                        const float (&x)[kLaneFeatures]) const {
    U* at = static_cast<U*>(to) + row * width + first;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!inside[c]) continue;
      Pack<U, kVec> pack;
#pragma unroll
      for (int i = 0; i < kVec; ++i) pack.lane[i] = narrow<U>(x[c * kVec + i]);
      *reinterpret_cast<Pack<U, kVec>*>(at + place(c)) = pack;
    }
  }
};

// Number of entries that a lane gathers at once.
template <int kVec>
constexpr int kEntriesInFlight = kVec == 1 ? 2 : 4;

// Thread blocks per multiprocessor for which the compiler limits registers. `of_16bit` was measured for
// gathers of 16-bit features; others need more registers.
template <typename T, int kVec>
constexpr int resident_blocks(int of_16bit) {
  const int most = kVec == 1 ? 4 : sizeof(T) == 2 ? 8 : 6;
  return of_16bit < most ? of_16bit : most;
}

// Reduces over the lanes of a head. All lanes get the same bits: in every step, both lanes add (or compare)
// the same two numbers.
template <int kHeadLanes>
__device__ __forceinline__ float sum_lanes(float v) {
#pragma unroll
  for (int offset = 1; offset < kHeadLanes; offset *= 2) v += __shfl_xor_sync(kFullWarp, v, offset);
  return v;
}
template <int kHeadLanes>
__device__ __forceinline__ float max_lanes(float v) {
#pragma unroll
  for (int offset = 1; offset < kHeadLanes; offset *= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}

// The lengths of the longest and of the shortest slice of a warp.
struct WarpLength {
  int longest, shortest;
  __device__ __forceinline__ explicit WarpLength(int length)
      : longest(__reduce_max_sync(kFullWarp, length)), shortest(__reduce_min_sync(kFullWarp, length)) {}
};

// Calls f(whole, step) for the steps of the batch of kHeadLanes entries that begins at `base`. `whole`, a
// compile-time 0 or 1, is 1 if every group of the warp has all entries of the step, so that f need not mask
// entries.
template <int kHeadLanes, int kInFlight, typename F>
__device__ __forceinline__ void for_steps(int base, const WarpLength& length, F&& f) {
#pragma unroll 1
  for (int step = 0; step < kHeadLanes; step += kInFlight) {
    if (base + step + kInFlight <= length.shortest) {
      f(Constant<1>{}, step);
    } else if (base + step < length.longest) {
      f(Constant<0>{}, step);
    }
  }
}

// The number that is subtracted from scores: their maximum, or 0 if it is -infinity.
__device__ __forceinline__ float reference_score(float max) { return max == -kInfinity ? 0.0f : max; }

// The log-sum-exp that backward passes subtract: infinity for rows whose scores are all -infinity, so that
// their weights become 0 instead of NaN.
__device__ __forceinline__ float finite_lse(float lse) { return lse == -kInfinity ? kInfinity : lse; }

// Factor that normalises weights to sum 1; 0 if there are no weights.
__device__ __forceinline__ float normaliser(float sum) { return sum == 0 ? 0.0f : 1.0f / sum; }

__device__ __forceinline__ float log_sum_exp(float max, float sum) {
  return sum == 0 ? -kInfinity : max + logf(sum);
}

// Merges the softmax states of the slices of split rows. A block handles one row and 32 features. Each of its
// 8 warps (strands) merges every 8th slot in order, and then the strands are merged in order. There are no
// atomics.
constexpr int kStrands = 8;

// partial: (num_slots, width), relative to the slot's maximum; state: (num_slots, heads), {maximum, sum}.
template <typename T>
__global__ void __launch_bounds__(kWarp* kStrands)
    combine_softmax_kernel(const RowSplitView split, const float* partial, const float2* state,
                           std::int64_t heads, std::int64_t head_width, T* out, float* lse) {
  __shared__ float shared[3][kStrands][kWarp];
  const std::int64_t width = heads * head_width;
  const std::int64_t feature = static_cast<std::int64_t>(blockIdx.y) * kWarp + threadIdx.x;
  const bool inside = feature < width;
  const std::int64_t head = inside ? feature / head_width : 0;
  const std::int64_t end = split.split_ptr[blockIdx.x + 1];
  float max = -kInfinity, sum = 0, acc = 0;
  const auto add = [&](float other_max, float other_sum, float other_acc) {
    const float reference = reference_score(fmaxf(max, other_max));
    const float old_scale = __expf(max - reference), scale = __expf(other_max - reference);
    max = fmaxf(max, other_max);
    sum = sum * old_scale + other_sum * scale;
    acc = acc * old_scale + other_acc * scale;
  };
#pragma unroll 4
  for (std::int64_t slot = split.split_ptr[blockIdx.x] + threadIdx.y; slot < end; slot += kStrands) {
    const float2 other = __ldg(state + slot * heads + head);
    add(other.x, other.y, inside ? __ldg(partial + slot * width + feature) : 0.0f);
  }
  shared[0][threadIdx.y][threadIdx.x] = max;
  shared[1][threadIdx.y][threadIdx.x] = sum;
  shared[2][threadIdx.y][threadIdx.x] = acc;
  __syncthreads();
  if (threadIdx.y != 0 || !inside) return;
#pragma unroll
  for (int y = 1; y < kStrands; ++y) {
    add(shared[0][y][threadIdx.x], shared[1][y][threadIdx.x], shared[2][y][threadIdx.x]);
  }
  const std::int64_t row = split.split_row[blockIdx.x];
  out[row * width + feature] = narrow<T>(acc * normaliser(sum));
  if (feature % head_width == 0) lse[row * heads + head] = log_sum_exp(max, sum);
}

template <typename T>
void combine_softmax(const RowSplitView& split, const float* partial, const float* state, std::int64_t heads,
                     std::int64_t head_width, void* out, float* lse, cudaStream_t stream) {
  if (split.num_split_rows == 0) return;
  const dim3 grid(static_cast<unsigned>(split.num_split_rows), ceil_div(heads * head_width, kWarp));
  combine_softmax_kernel<T><<<grid, dim3(kWarp, kStrands), 0, stream>>>(
      split, partial, reinterpret_cast<const float2*>(state), heads, head_width, static_cast<T*>(out), lse);
}

// Heads per group: as many as fit a warp, a power of two.
inline int heads_per_group(std::int64_t heads, int head_lanes) {
  int count = 1;
  while (count < heads && count * head_lanes < kWarp) count *= 2;
  return count;
}

inline dim3 head_grid(std::int64_t num_slices, std::int64_t heads, int head_lanes) {
  const int per_group = heads_per_group(heads, head_lanes);
  const int slices_per_block = kHeadThreads / head_lanes / per_group;
  return dim3(ceil_div(num_slices, slices_per_block), ceil_div(heads, per_group));
}

// Calls f(element type, elements per load, lanes per head). Loads have 16 bytes, with as few lanes as the
// head needs. If widths, strides or addresses do not allow this, loads have one element, and a head has 32
// lanes.
template <typename F>
void with_head_lanes(Dtype dtype, std::int64_t head_width, std::initializer_list<std::int64_t> strides,
                     std::initializer_list<const void*> addresses, F&& f) {
  const auto call = [&](auto type) {
    using T = decltype(type);
    constexpr int kVec = 16 / sizeof(T);
    bool vectors = head_width % kVec == 0;
    for (const std::int64_t stride : strides) vectors = vectors && stride % kVec == 0;
    for (const void* address : addresses)
      vectors = vectors && reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
    if (!vectors) return f(T{}, Constant<1>{}, Constant<32>{});
    if (head_width <= 4 * kLaneFeatures) return f(T{}, Constant<kVec>{}, Constant<4>{});
    if (head_width <= 8 * kLaneFeatures) return f(T{}, Constant<kVec>{}, Constant<8>{});
    if (head_width <= 16 * kLaneFeatures) return f(T{}, Constant<kVec>{}, Constant<16>{});
    return f(T{}, Constant<kVec>{}, Constant<32>{});
  };
  switch (dtype) {
    case Dtype::kFloat32:
      return call(float{});
    case Dtype::kFloat16:
      return call(__half{});
    case Dtype::kBFloat16:
      return call(__nv_bfloat16{});
    case Dtype::kFloat64:
      return;  // the caller uses the unfused operators
  }
}

}  // namespace fastsparse::cuda
