// Shared code of the kernels of several aggregations: four features per lane, and the messages of entries.
#pragma once

#include <type_traits>

#include "fastsparse/edge_attention.cuh"

namespace fastsparse::cuda {

constexpr int kQuad = 4;  // features per lane
constexpr int kQuadThreads = 128;

// The edges' term of a message: none, W a_ij from edge features a_ij, or one row e_ij per edge with the width
// of the message.
enum class EdgeTerm { kNone, kFeatures, kRow };

// Calls f with the edges' term as a constant.
template <typename F>
void with_edge_term(const MultiAggregateInput& input, F&& f) {
  if (input.edge == nullptr) return f(std::integral_constant<EdgeTerm, EdgeTerm::kNone>{});
  if (input.weight != nullptr) return f(std::integral_constant<EdgeTerm, EdgeTerm::kFeatures>{});
  f(std::integral_constant<EdgeTerm, EdgeTerm::kRow>{});
}

// Four neighbouring elements, aligned and unconverted, loaded with up to 16 bytes at once.
template <typename T>
struct RawQuad {
  static constexpr int kVec = sizeof(T) == 8 ? 2 : kQuad;
  Pack<T, kVec> part[kQuad / kVec];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int c = 0; c < kQuad / kVec; ++c) part[c] = load_pack<T, kVec>(from + c * kVec);
  }
  __device__ __forceinline__ T& operator[](int i) { return part[i / kVec].lane[i % kVec]; }
};

template <typename T>
__device__ __forceinline__ void load_quad(const T* from, Acc<T> (&to)[kQuad]) {
  RawQuad<T> raw;
  raw.load(from);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) to[i] = widen(raw[i]);
}

template <typename T>
__device__ __forceinline__ void store_quad(const Acc<T> (&from)[kQuad], T* to) {
  constexpr int kVec = sizeof(T) == 8 ? 2 : kQuad;
#pragma unroll
  for (int c = 0; c < kQuad; c += kVec) {
    Pack<T, kVec> pack;
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.lane[i] = narrow<T>(from[c + i]);
    store_pack(pack, to + c);
  }
}

// The features of a lane in rows of `width` features. If all rows are aligned, the features are loaded and
// stored together, otherwise one by one.
struct Quad {
  std::int64_t first;
  int count;  // number of the lane's features below the width
  bool aligned;

  __device__ __forceinline__ Quad(std::int64_t feature, std::int64_t width, bool all_aligned)
      : first(feature) {
    const std::int64_t left = width - feature;
    count = left >= kQuad ? kQuad : left < 0 ? 0 : static_cast<int>(left);
    aligned = all_aligned && count > 0;
  }

  // Zeros beyond the width.
  template <typename T>
  __device__ __forceinline__ void load(const T* row, Acc<T> (&to)[kQuad]) const {
    if (aligned) return load_quad(row + first, to);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) to[i] = i < count ? widen(row[first + i]) : Acc<T>{0};
  }
  template <typename T>
  __device__ __forceinline__ void store(const Acc<T> (&from)[kQuad], T* row) const {
    if (aligned) return store_quad(from, row + first);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i < count) row[first + i] = narrow<T>(from[i]);
    }
  }
};

// The positions of a quad in a row of results (MultiAggregateInput::place), computed with one division for
// all aggregations.
template <typename T>
class QuadOfResults {
 public:
  __device__ __forceinline__ QuadOfResults(const MultiAggregateInput& input, const Quad& quad,
                                           std::int64_t row)
      : quad_(quad), group_width_(input.group_width) {
    // Rows have fewer than 2^32 features.
    const auto feature = static_cast<std::uint32_t>(quad.first);
    const std::uint32_t group = feature / static_cast<std::uint32_t>(group_width_);
    const std::int64_t between =
        (input.num_slots - 1) * group_width_;  // elements between the results of two groups
    first_ = row * input.num_slots * input.width + group * between + feature;
    std::int64_t to_next = (group + 1) * group_width_ - feature, skipped = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i == to_next) {
        skipped += between;
        to_next += group_width_;
      }
      offset_[i] = skipped + i;
    }
  }

  // Loads the results of one aggregation; zeros beyond the width. An aligned quad is within one group of
  // features.
  __device__ __forceinline__ void load(const void* results, int slot, Acc<T> (&to)[kQuad]) const {
    const T* from = static_cast<const T*>(results) + first_ + slot * group_width_;
    if (quad_.aligned) return load_quad(from, to);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) to[i] = i < quad_.count ? widen(from[offset_[i]]) : Acc<T>{0};
  }
  __device__ __forceinline__ void store(const Acc<T> (&from)[kQuad], void* results, int slot) const {
    T* to = static_cast<T*>(results) + first_ + slot * group_width_;
    if (quad_.aligned) return store_quad(from, to);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i < quad_.count) to[offset_[i]] = narrow<T>(from[i]);
    }
  }

 private:
  const Quad& quad_;
  std::int64_t group_width_;
  std::int64_t first_;          // position of the first feature's first aggregation
  std::int64_t offset_[kQuad];  // position of each feature, relative to first_
};

// A quad of several rows. Rows with `wanted(u)` are read, others are zeros. All loads are issued before their
// results are used.
template <typename T, int kCount, typename RowAt, typename Wanted>
__device__ __forceinline__ void gather_quads(Acc<T> (&to)[kCount][kQuad], const Quad& quad, RowAt row_at,
                                             Wanted wanted) {
  RawQuad<T> raw[kCount] = {};
  if (quad.aligned) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (wanted(u)) raw[u].load(row_at(u) + quad.first);
    }
  } else {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (wanted(u) && i < quad.count) raw[u][i] = row_at(u)[quad.first + i];
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) to[u][i] = widen(raw[u][i]);
  }
}

// Tells if quads of every array can be loaded together, in the features' dtype and in the accumulation type.
template <typename T>
bool quads_aligned(const MultiAggregateInput& input, std::initializer_list<const void*> others) {
  const auto fits = [](const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % (sizeof(T) == 2 ? 8 : 16) == 0;
  };
  bool aligned = input.width % kQuad == 0 && input.group_width % kQuad == 0 &&
                 input.x_src.stride % kQuad == 0 && input.x_dst.stride % kQuad == 0 &&
                 fits(input.x_src.data) && fits(input.x_dst.data) && fits(input.edge);
  for (const void* address : others) aligned = aligned && fits(address);
  return aligned;
}

// Lanes per row, a power of two.
inline int quad_lanes(std::int64_t width) {
  int lanes = 1;
  while (lanes < kWarp && lanes * kQuad < width) lanes *= 2;
  return lanes;
}

// Adds W a_ij of the first `wanted` of kCount entries. Every weight is read once for all of these entries.
template <typename T, int kCount>
__device__ __forceinline__ void add_features(Acc<T> (&x)[kCount][kQuad], const MultiAggregateInput& input,
                                             const Quad& quad, const std::uint32_t (&position)[kCount],
                                             int wanted) {
  using A = Acc<T>;
  const int edge_width = static_cast<int>(input.edge_width);
#pragma unroll 1
  for (int k = 0; k < edge_width; k += kQuad) {
    RawQuad<T> feature[kCount] = {};
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const T* edge = static_cast<const T*>(input.edge) + static_cast<std::int64_t>(position[u]) * edge_width;
      if (u < wanted) feature[u].load(edge + k);
    }
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      A w[kQuad];
      quad.load(static_cast<const A*>(input.weight) + (k + c) * input.width, w);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) x[u][i] = fma(A{widen(feature[u][c])}, w[i], x[u][i]);
      }
    }
  }
}

// Computes x_j + e_ij of the first `wanted` of kCount entries.
template <typename T, EdgeTerm kEdges, int kCount>
__device__ __forceinline__ void gather_messages(Acc<T> (&x)[kCount][kQuad], const MultiAggregateInput& input,
                                                const Quad& quad, const Entries<kCount>& entries,
                                                int wanted) {
  const auto counts = [&](int u) { return u < wanted; };
  const T* rows = static_cast<const T*>(input.x_src.data);
  gather_quads<T>(
      x, quad, [&](int u) { return rows + static_cast<std::int64_t>(entries.col[u]) * input.x_src.stride; },
      counts);
  if constexpr (kEdges == EdgeTerm::kFeatures) {
    add_features<T>(x, input, quad, entries.position, wanted);
  } else if constexpr (kEdges == EdgeTerm::kRow) {
    Acc<T> edge[kCount][kQuad];
    gather_quads<T>(
        edge, quad,
        [&](int u) { return static_cast<const T*>(input.edge) + entries.position[u] * input.width; }, counts);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) x[u][i] += edge[u][i];
    }
  }
}

// Rounds the message to the features' dtype.
template <typename T>
__device__ __forceinline__ Acc<T> message(Acc<T> without_destination, Acc<T> destination) {
  return widen(narrow<T>(without_destination + destination));
}

template <typename T>
__device__ __forceinline__ void load_destination(const MultiAggregateInput& input, const Quad& quad,
                                                 std::int64_t row, Acc<T> (&to)[kQuad]) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) to[i] = 0;
  if (input.x_dst.data != nullptr) {
    quad.load(static_cast<const T*>(input.x_dst.data) + row * input.x_dst.stride, to);
  }
}

}  // namespace fastsparse::cuda
