// The work of one lane in the kernels of edge_messages.cu. A group of `lanes` neighbouring lanes processes
// one slice of a row for one tile of the width. A lane has 8 features, loaded in chunks of 16 bytes, so that
// the group's loads of a chunk are contiguous. Only gradients of raw features are summed over lanes, so the
// number of lanes can be a run-time value. Tiles are the slow dimension of the grid, as in spmm_csr.cu,
// because one tile of a matrix is more likely to stay in the L2 cache than the whole matrix.
#pragma once

#include <algorithm>
#include <type_traits>

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/edge_messages.h"

namespace fastsparse::cuda {

constexpr int kMessageThreads = 128;
constexpr int kTileFeatures = 8;  // features per lane

template <typename T>
constexpr int kTileVec = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int kTileChunks = kTileFeatures / kTileVec<T>;

// Thread blocks per multiprocessor for which the compiler limits registers.
template <typename T>
constexpr int kMessageBlocks = sizeof(Acc<T>) == 4 ? 4 : 2;

// Number of entries that a group gathers at once, at most kMost: their rows take 128 bytes of a lane's
// registers.
template <typename T, int kRows, int kMost = 4>
constexpr int kMessagesInFlight =
    std::clamp(128 / (kTileFeatures * static_cast<int>(sizeof(T)) * kRows), 1, kMost);

// Address of a row, with one multiplication of 32-bit numbers; 64-bit numbers would take four per gathered
// row.
template <typename T>
__device__ __forceinline__ const T* row_from(const DenseView& x, std::uint32_t row) {
  const auto row_bytes = static_cast<std::uint32_t>(x.stride * static_cast<std::int64_t>(sizeof(T)));
  return reinterpret_cast<const T*>(static_cast<const char*>(x.data) +
                                    static_cast<std::uint64_t>(row) * row_bytes);
}

// A lane's features of one row, unconverted.
template <typename T>
struct TileRow {
  Pack<T, kTileVec<T>> chunk[kTileChunks<T>];

  __device__ __forceinline__ Acc<T> operator[](int i) const {
    return widen(chunk[i / kTileVec<T>].lane[i % kTileVec<T>]);
  }
};

template <typename T>
struct MessageLane {
  static constexpr int kVec = kTileVec<T>, kChunks = kTileChunks<T>;
  using A = Acc<T>;

  std::int64_t group;  // index of the slice of this lane's group
  std::int64_t width;
  std::int64_t first;  // first feature of the lane's first chunk
  int lanes;
  int sub;  // lane within its group

  __device__ __forceinline__ MessageLane(std::int64_t width, int lanes) : width(width), lanes(lanes) {
    sub = static_cast<int>(threadIdx.x) & (lanes - 1);  // a power of two
    group = (static_cast<std::int64_t>(blockIdx.x) * kMessageThreads + threadIdx.x) >> (__ffs(lanes) - 1);
    first = (static_cast<std::int64_t>(blockIdx.y) * kTileFeatures * lanes) + sub * kVec;
  }

  __device__ __forceinline__ std::int64_t feature(int chunk) const { return first + chunk * lanes * kVec; }
  // The lane's byte among the signs of an edge.
  template <typename Byte>
  __device__ __forceinline__ Byte* signs(Byte* of_edges, std::uint32_t position,
                                         std::int64_t sign_bytes) const {
    return of_edges + (blockIdx.y * static_cast<std::uint32_t>(lanes) + sub) +
           static_cast<std::uint64_t>(position) * static_cast<std::uint32_t>(sign_bytes);
  }

  // Zeros unless `wanted`, and beyond the width. The number of rows, and the bytes of one row, must be less
  // than 2^32.
  __device__ __forceinline__ TileRow<T> load(const DenseView& x, std::int64_t row, bool wanted = true) const {
    const T* from = row_from<T>(x, static_cast<std::uint32_t>(row));
    TileRow<T> found;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      found.chunk[c] = Pack<T, kVec>{};
      if (wanted && feature(c) < width) found.chunk[c] = load_pack<T, kVec>(from + feature(c));
    }
    return found;
  }

  __device__ __forceinline__ void load(A (&to)[kTileFeatures], const DenseView& x, std::int64_t row) const {
    const TileRow<T> found = load(x, row);
#pragma unroll
    for (int i = 0; i < kTileFeatures; ++i) to[i] = found[i];
  }

  // Loads a row of a contiguous matrix (rows, width) in the accumulation type, and keeps it in the L1 cache.
  __device__ __forceinline__ void load_wide(A (&to)[kTileFeatures], const void* x, std::int64_t row) const {
    constexpr int kWide = kVec < kTileVec<A> ? kVec : kTileVec<A>;
    const A* from = static_cast<const A*>(x) + row * width;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const bool inside = feature(c) < width;
#pragma unroll
      for (int i = 0; i < kVec; i += kWide) {
        Pack<A, kWide> pack{};
        if (inside) pack = load_pack<A, kWide>(from + feature(c) + i);
#pragma unroll
        for (int k = 0; k < kWide; ++k) to[c * kVec + i + k] = pack.lane[k];
      }
    }
  }

  // Loads the lane's weights in a row of a map. Weights beyond the width are undefined, because the results
  // there are not stored.
  __device__ __forceinline__ void load_weights(A (&to)[kTileFeatures], const A* row) const {
    constexpr int kWide = kVec < kTileVec<A> ? kVec : kTileVec<A>;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const A* from = row + (feature(c) < width ? feature(c) : 0);
#pragma unroll
      for (int i = 0; i < kVec; i += kWide) {
        const auto pack = load_pack<A, kWide>(from + i);
#pragma unroll
        for (int k = 0; k < kWide; ++k) to[c * kVec + i + k] = pack.lane[k];
      }
    }
  }

  // Stores the lane's features to row `row` of a contiguous (rows, width) matrix of U.
  template <typename U>
  __device__ __forceinline__ void store(void* to, std::int64_t row, const A (&x)[kTileFeatures]) const {
    constexpr int kMost = 16 / static_cast<int>(sizeof(U));
    constexpr int kStore = kVec < kMost ? kVec : kMost;
    U* at = static_cast<U*>(to) + row * width;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (feature(c) >= width) continue;
#pragma unroll
      for (int i = 0; i < kVec; i += kStore) {
        Pack<U, kStore> pack;
#pragma unroll
        for (int k = 0; k < kStore; ++k) pack.lane[k] = narrow<U>(x[c * kVec + i + k]);
        store_pack(pack, at + feature(c) + i);
      }
    }
  }

  // Adds the slice's row of x, times `factor`, to `sum`, if the slice is the first of its row.
  __device__ __forceinline__ void add_root(A (&sum)[kTileFeatures], const DenseView& x, A factor,
                                           const CsrView& a, const RowSplitView& split,
                                           const RowSlice& slice) const {
    const std::int64_t row = row_of(split, slice);
    if (slice.target < 0 && slice.begin != a.rowptr[row]) return;
    const TileRow<T> own = load(x, row);
#pragma unroll
    for (int i = 0; i < kTileFeatures; ++i) sum[i] += factor * own[i];
  }

  // Stores the result of a slice: to its row if it is the only slice, otherwise to its slot.
  __device__ __forceinline__ void store_sum(const RowSlice& slice, void* out, void* partial,
                                            const A (&sum)[kTileFeatures]) const {
    if (slice.target < 0) {
      store<A>(partial, ~slice.target, sum);
    } else {
      store<T>(out, slice.target, sum);
    }
  }
};

// The columns of some entries of a slice, and their positions in the caller's edge order. Every lane of a
// group reads all of them, which is one memory transaction and needs no shuffle.
template <int kCount>
struct NextEntries {
  std::uint32_t col[kCount];
  std::uint32_t position[kCount];  // there are fewer than 2^32 values

  __device__ __forceinline__ void read(const CsrView& a, const RowSlice& slice, int base) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      col[u] = 0;
      position[u] = 0;
      if (base + u < slice.length) {
        const std::int64_t entry = slice.begin + base + u;
        col[u] = static_cast<std::uint32_t>(__ldg(a.col + entry));
        position[u] = static_cast<std::uint32_t>(edge_position(a, entry));
      }
    }
  }
};

// Four neighbouring raw features of an edge, unconverted; zeros unless `wanted`.
template <typename T>
struct FourFeatures {
  static constexpr int kVec = kTileVec<T> < 4 ? kTileVec<T> : 4;
  Pack<T, kVec> part[4 / kVec];

  __device__ __forceinline__ void load(const T* from, bool wanted) {
#pragma unroll
    for (int i = 0; i < 4 / kVec; ++i) {
      part[i] = Pack<T, kVec>{};
      if (wanted) part[i] = load_pack<T, kVec>(from + i * kVec);
    }
  }
  __device__ __forceinline__ Acc<T> operator[](int i) const { return widen(part[i / kVec].lane[i % kVec]); }
};

// Adds W a of some edges to `to`. Every weight is read once for all of these edges.
template <typename T, int kCount>
__device__ __forceinline__ void add_projected(Acc<T> (&to)[kCount][kTileFeatures], const MessageLane<T>& lane,
                                              const EdgeMessageInput& input, const void* weight,
                                              const std::uint32_t (&position)[kCount],
                                              const bool (&has)[kCount]) {
  const Acc<T>* row = static_cast<const Acc<T>*>(weight);
  const T* from[kCount];
#pragma unroll
  for (int u = 0; u < kCount; ++u) from[u] = row_from<T>(input.edge, position[u]);
#pragma unroll 1
  for (std::int64_t first = 0; first < input.edge_width; first += 4) {
    FourFeatures<T> edge[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      edge[u].load(from[u], has[u]);
      from[u] += 4;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Acc<T> w[kTileFeatures];
      lane.load_weights(w, row);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int f = 0; f < kTileFeatures; ++f) to[u][f] += w[f] * edge[u][i];
      }
      row += lane.width;
    }
  }
}

__device__ __forceinline__ float sigmoid(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }
__device__ __forceinline__ double sigmoid(double z) { return 1.0 / (1.0 + exp(-z)); }

// Calls f(message, is_raw) with constants: the kind of message, and whether edge features are raw.
template <typename F>
void with_message(EdgeMessage message, bool raw, F&& f) {
  using std::bool_constant;
  using Relu = std::integral_constant<EdgeMessage, EdgeMessage::kRelu>;
  using Gate = std::integral_constant<EdgeMessage, EdgeMessage::kGate>;
  using State = std::integral_constant<EdgeMessage, EdgeMessage::kGateAndState>;
  switch (message) {
    case EdgeMessage::kRelu:
      return raw ? f(Relu{}, bool_constant<true>{}) : f(Relu{}, bool_constant<false>{});
    case EdgeMessage::kGate:
      return raw ? f(Gate{}, bool_constant<true>{}) : f(Gate{}, bool_constant<false>{});
    case EdgeMessage::kGateAndState:
      return f(State{}, bool_constant<false>{});
  }
}

// Lanes per group: as many as the width needs. The largest group covers 128 bytes of 16-bit features, or 256
// bytes of wider features.
inline int message_lanes(std::int64_t width) {
  int lanes = 1;
  while (lanes < 8 && lanes * kTileFeatures < width) lanes *= 2;
  return lanes;
}

inline dim3 message_grid(std::int64_t groups, std::int64_t width, int lanes) {
  return {ceil_div(groups * lanes, kMessageThreads), ceil_div(width, kTileFeatures * lanes)};
}

}  // namespace fastsparse::cuda
