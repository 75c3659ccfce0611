// How the kernels of attention with edge features assign rows, heads and features to lanes.
//
// `lanes` neighbouring lanes process one head of one slice of a row. Each lane has 8 features of the head
// and, of the features of an edge, every lanes-th group of four. A group of lanes processes neighbouring
// heads of the same slice, so that together they gather contiguous pieces of a row. `lanes` is a run-time
// value, so one kernel supports every width. Every lane of the group reads the columns and positions of the
// next entries one step ahead, which is one memory transaction and needs no shuffle.
#pragma once

#include <type_traits>

#include "fastsparse/head_lanes.cuh"

namespace fastsparse::cuda {

// Number of entries that a group gathers at once. Dot products gather keys and values, so they gather fewer
// entries at once: two more would need so many registers that a third fewer warps fit (with 16-bit features
// on an H100, forward and backward would take 8 to 10 % longer).
template <typename T, int kEdge = 0>
constexpr int kEdgesInFlight = kEdge > 4                     ? 1
                               : kEdge > 0 || sizeof(T) == 4 ? 2
                                                             : 4;
// Thread blocks per multiprocessor for which the compiler limits registers. float32 rows need twice as many
// registers as 16-bit rows.
template <typename T, int kEdge>
constexpr int kDotBlocks = sizeof(T) == 2 && kEdge == 4 ? 6 : 4;
template <typename T>
constexpr int kEdgeVec = 16 / static_cast<int>(sizeof(T));

// Neighbouring elements that stay unconverted in whole registers. Without this type, the compiler would
// convert them once for all uses, or keep 16-bit halves in separate registers, and spill registers.
template <typename T, int kCount>
struct Words {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  std::uint32_t word[kWords];

  // Zeros unless `wanted`.
  __device__ __forceinline__ void load(const T* from, bool wanted) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
    if (!wanted) return;
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
        word[i] = raw.x;
        word[i + 1] = raw.y;
        word[i + 2] = raw.z;
        word[i + 3] = raw.w;
      }
    } else {
      const uint2 raw = __ldg(reinterpret_cast<const uint2*>(from));
      word[0] = raw.x;
      word[1] = raw.y;
    }
  }
  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(word[i]));
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
    } else {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(word[i / 2] >> 16 * (i % 2))));
    }
  }
};

// The features of one lane.
template <typename T>
struct LaneFeatures {
  Words<T, kEdgeVec<T>> chunk[kLaneFeatures / kEdgeVec<T>];

  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (int c = 0; c < kLaneFeatures / kEdgeVec<T>; ++c) chunk[c].stay_packed();
  }
  __device__ __forceinline__ float operator[](int i) const { return chunk[i / kEdgeVec<T>][i % kEdgeVec<T>]; }
};

// The addresses of a lane's features in row 0 of a matrix, from which `load` finds every row.
template <typename T>
struct LaneRows {
  const char* from[kLaneFeatures / kEdgeVec<T>];
  std::uint32_t row_bytes;

  __device__ __forceinline__ LaneFeatures<T> load(std::uint32_t row, bool wanted = true) const {
    LaneFeatures<T> features;
#pragma unroll
    for (int c = 0; c < kLaneFeatures / kEdgeVec<T>; ++c) {
      features.chunk[c].load(
          reinterpret_cast<const T*>(from[c] + static_cast<std::uint64_t>(row) * row_bytes), wanted);
    }
    return features;
  }
};

struct EdgeLane {
  std::int64_t group;  // index of the slice of this lane's group
  int head;            // valid in all lanes, also if `live` is false
  bool live;           // false for lanes beyond the last head
  int sub;             // lane within its head
  int lanes;           // lanes per head
  int group_lanes;     // lanes per slice
  int first;           // the head's first feature in a row of all heads
  int head_width;
  int edge_width;

  __device__ __forceinline__ EdgeLane(const EdgeAttentionInput& input, int head_lanes, int heads_per_group) {
    // Shifts, because both numbers are powers of two. Divisions took a tenth of the time of a row of few
    // entries.
    lanes = head_lanes;
    group_lanes = head_lanes * heads_per_group;
    const int thread = static_cast<int>(threadIdx.x);
    group = (static_cast<std::int64_t>(blockIdx.x) * kHeadThreads + thread) >> (__ffs(group_lanes) - 1);
    sub = thread & (lanes - 1);
    head =
        static_cast<int>(blockIdx.y) * heads_per_group + ((thread & (group_lanes - 1)) >> (__ffs(lanes) - 1));
    const int heads = static_cast<int>(input.heads);
    live = head < heads;
    if (!live) head = heads - 1;
    head_width = static_cast<int>(input.head_width);
    edge_width = static_cast<int>(input.edge_width);
    first = head * head_width;
  }

  // First feature of a chunk, within the head.
  template <int kVec>
  __device__ __forceinline__ int place(int chunk) const {
    return (chunk * lanes + sub) * kVec;
  }

  template <typename T>
  __device__ __forceinline__ LaneRows<T> gather(const DenseView& x) const {
    constexpr int kVec = kEdgeVec<T>;
    LaneRows<T> rows;
    rows.row_bytes = static_cast<std::uint32_t>(x.stride * sizeof(T));
#pragma unroll
    for (int c = 0; c < kLaneFeatures / kVec; ++c) {
      const int at = place<kVec>(c);
      rows.from[c] =
          reinterpret_cast<const char*>(static_cast<const T*>(x.data) + first + (at < head_width ? at : 0));
    }
    return rows;
  }

  // Features of a row, unconverted; zeros beyond the head's last feature.
  template <typename T>
  __device__ __forceinline__ LaneFeatures<T> load_packed(const DenseView& x, std::int64_t row) const {
    constexpr int kVec = kEdgeVec<T>;
    const LaneRows<T> rows = gather<T>(x);
    LaneFeatures<T> features;
#pragma unroll
    for (int c = 0; c < kLaneFeatures / kVec; ++c) {
      const char* at = rows.from[c] + static_cast<std::uint64_t>(row) * rows.row_bytes;
      features.chunk[c].load(reinterpret_cast<const T*>(at), place<kVec>(c) < head_width);
    }
    return features;
  }

  // Does the same as load_packed, but converts the features to float32 and multiplies them by `factor`.
  template <typename T>
  __device__ __forceinline__ void load(float (&to)[kLaneFeatures], const DenseView& x, std::int64_t row,
                                       float factor = 1.0f) const {
    const LaneFeatures<T> features = load_packed<T>(x, row);
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) to[i] = features[i] * factor;
  }

  // Loads elements of a float32 vector, (heads * head_width), in the layout of features of type T.
  template <typename T>
  __device__ __forceinline__ void load_vector(float (&to)[kLaneFeatures], const float* x) const {
    constexpr int kVec = kEdgeVec<T>;
#pragma unroll
    for (int c = 0; c < kLaneFeatures / kVec; ++c) {
      const int at = place<kVec>(c);
#pragma unroll
      for (int i = 0; i < kVec; i += 4) {
        float4 four = make_float4(0, 0, 0, 0);
        if (at < head_width) four = __ldg(reinterpret_cast<const float4*>(x + first + at + i));
        to[c * kVec + i] = four.x;
        to[c * kVec + i + 1] = four.y;
        to[c * kVec + i + 2] = four.z;
        to[c * kVec + i + 3] = four.w;
      }
    }
  }

  // Writes the lane's features to row `row` of a contiguous (rows, width) matrix of U.
  template <typename T, typename U>
  __device__ __forceinline__ void store(void* to, std::int64_t row, std::int64_t width,
                                        const float (&x)[kLaneFeatures], float factor = 1.0f) const {
    constexpr int kVec = kEdgeVec<T>;
    U* at = static_cast<U*>(to) + row * width + first;
#pragma unroll
    for (int c = 0; c < kLaneFeatures / kVec; ++c) {
      if (place<kVec>(c) >= head_width) continue;
      Pack<U, kVec> pack;
#pragma unroll
      for (int i = 0; i < kVec; ++i) pack.lane[i] = narrow<U>(x[c * kVec + i] * factor);
      *reinterpret_cast<Pack<U, kVec>*>(at + place<kVec>(c)) = pack;
    }
  }

  // The first edge feature in the lane's chunk `chunk`, of four features.
  __device__ __forceinline__ int edge_place(int chunk) const { return (chunk * lanes + sub) * 4; }

  // Writes the lane's part of one head's edge features.
  template <typename U, int kEdge>
  __device__ __forceinline__ void store_edge(void* to, std::int64_t row, std::int64_t heads,
                                             const float (&x)[kEdge], float factor = 1.0f) const {
    U* at = static_cast<U*>(to) + (row * heads + head) * edge_width;
#pragma unroll
    for (int c = 0; c < kEdge / 4; ++c) {
      if (edge_place(c) >= edge_width) continue;
      Pack<U, 4> pack;
#pragma unroll
      for (int i = 0; i < 4; ++i) pack.lane[i] = narrow<U>(x[c * 4 + i] * factor);
      *reinterpret_cast<Pack<U, 4>*>(at + edge_place(c)) = pack;
    }
  }
};

// The address of a row of a contiguous matrix of edge features.
template <typename T>
__device__ __forceinline__ const T* edge_row(const void* from, std::uint32_t row, int edge_width) {
  return static_cast<const T*>(from) +
         static_cast<std::uint64_t>(row) * static_cast<std::uint32_t>(edge_width);
}

// The addresses of a lane's part of the edge features, from which `load` finds the part of every edge.
template <typename T>
struct LaneEdges {
  const char* from;
  std::uint32_t row_bytes;

  __device__ __forceinline__ LaneEdges(const EdgeLane& lane, const void* edge)
      : from(reinterpret_cast<const char*>(static_cast<const T*>(edge) + lane.edge_place(0))),
        row_bytes(static_cast<std::uint32_t>(lane.edge_width * sizeof(T))) {}
};

// A lane's part of the features of one edge, or other numbers in the same layout.
template <typename T, int kEdge>
struct EdgePart {
  Words<T, 4> four[kEdge / 4];

  EdgePart() = default;
  __device__ __forceinline__ EdgePart(const EdgeLane& lane, const LaneEdges<T>& edges, std::uint32_t row,
                                      bool wanted) {
    const char* at = edges.from + static_cast<std::uint64_t>(row) * edges.row_bytes;
#pragma unroll
    for (int c = 0; c < kEdge / 4; ++c) {
      four[c].load(reinterpret_cast<const T*>(at) + c * lane.lanes * 4,
                   wanted && lane.edge_place(c) < lane.edge_width);
    }
  }
  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (int c = 0; c < kEdge / 4; ++c) four[c].stay_packed();
  }
  __device__ __forceinline__ float operator[](int i) const { return four[i / 4][i % 4]; }
};

// Keeps an address in a register. Otherwise, the compiler computes it from the kernel's arguments for every
// entry.
template <typename T>
__device__ __forceinline__ T* kept_in_register(T* address) {
  asm volatile("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
  return address;
}

// Where the columns and positions of a slice's entries are stored.
struct SliceEntries {
  const std::int32_t* cols;
  const std::uint32_t* ids;  // positions of values; of 64-bit positions only the lower halves, because there
                             // are fewer than 2^32 values
  int id_words;
  std::uint32_t begin;
  int length;
  bool in_order;  // whether the position of an entry is its number in the structure

  __device__ __forceinline__ SliceEntries(const CsrView& a, const RowSlice& slice)
      : id_words(a.edge_id_is_64bit ? 2 : 1),
        begin(static_cast<std::uint32_t>(slice.begin)),
        length(slice.length),
        in_order(a.edge_id == nullptr) {
    cols = kept_in_register(a.col + slice.begin);
    ids = kept_in_register(static_cast<const std::uint32_t*>(a.edge_id) + slice.begin * id_words);
  }
};

// Column and position in the caller's edge order of some entries of a slice.
template <int kCount>
struct Entries {
  std::uint32_t col[kCount];
  std::uint32_t position[kCount];

  // Entries beyond the end of the slice get column 0 and must not be used.
  __device__ __forceinline__ void read(const SliceEntries& slice, int base) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const bool has = base + u < slice.length;
      col[u] = 0;
      if (has) col[u] = static_cast<std::uint32_t>(__ldg(slice.cols + base + u));
      position[u] = slice.begin + base + u;
      if (has && !slice.in_order) position[u] = __ldg(slice.ids + (base + u) * slice.id_words);
    }
  }
  __device__ __forceinline__ void read(const CsrView& a, const RowSlice& slice, int base) {
    read(SliceEntries(a, slice), base);
  }
};

// Calls add(whole, entries, base) for all entries of the slices of a warp, kCount entries at a time. `whole`,
// a compile-time 0 or 1, is 1 while every group has kCount more entries; afterwards, `add` must mask entries.
// The last call passes only kRest entries, if no group has more. How entries are combined affects rounding,
// so it must not depend on the other slices of the warp. The caller reads the first entries into `next`. Each
// call of `add` must read the following entries into `next`.
template <int kCount, int kRest, typename F>
__device__ __forceinline__ void for_entries(int longest, int shortest, const Entries<kCount>& next, F&& add) {
  int base = 0;
  if constexpr (kRest < kCount) {
    for (; base + kCount <= shortest; base += kCount) {
      const Entries<kCount> entries = next;
      add(Constant<1>{}, entries, base);
    }
  }
  for (; base + kRest < longest; base += kCount) {
    const Entries<kCount> entries = next;
    add(Constant<0>{}, entries, base);
  }
  if (base < longest) {
    Entries<kRest> entries;
#pragma unroll
    for (int u = 0; u < kRest; ++u) {
      entries.col[u] = next.col[u];
      entries.position[u] = next.position[u];
    }
    add(Constant<0>{}, entries, base);
  }
}

// Sums over lanes of a group, by shuffles over the distances from, 2 * from, 4 * from and so on below `to`.
// All lanes get the same bits.
template <int kCount>
__device__ __forceinline__ void sum_over(float (&v)[kCount], int to, int from = 1) {
#pragma unroll 1
  for (int offset = from; offset < to; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] += __shfl_xor_sync(kFullWarp, v[i], offset);
  }
}

// The steps of `scatter_sum`, one function per step. The compiler would not unroll a loop that halves its
// counter, and the numbers would be in local memory.
template <int kHalf, typename A, int kCount>
__device__ __forceinline__ void scatter_halves(A (&v)[kCount]) {
  const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const A given = upper ? v[i] : v[i + kHalf];
    const A kept = upper ? v[i + kHalf] : v[i];
    v[i] = kept + __shfl_xor_sync(kFullWarp, given, kHalf);
  }
  if constexpr (kHalf > 1) scatter_halves<kHalf / 2>(v);
}

// Sums each of kCount numbers over the lanes of a group of at least kCount lanes; lane l of the group gets
// sum l % kCount. In each step, lanes exchange half of the numbers, so there are about as many shuffles as
// numbers.
template <typename A, int kCount>
__device__ __forceinline__ A scatter_sum(A (&v)[kCount], int group_lanes) {
  scatter_halves<kCount / 2>(v);
  for (int offset = kCount; offset < group_lanes; offset *= 2)
    v[0] += __shfl_xor_sync(kFullWarp, v[0], offset);
  return v[0];
}

// The addresses of a lane's weights in the rows of W transposed, in the features' type. Reading W twice per
// row dominates the L1 traffic of rows with few entries. A row of W transposed is stored as (chunks, heads,
// lanes, 16 bytes), so that a warp reads contiguous memory.
template <typename T>
struct LaneWeights {
  const char* from;
  std::uint32_t chunk_bytes;

  __device__ __forceinline__ LaneWeights(const EdgeLane& lane, const EdgeAttentionInput& input)
      : from(static_cast<const char*>(input.weight) + (lane.head * lane.lanes + lane.sub) * 16),
        chunk_bytes(static_cast<std::uint32_t>(input.heads * lane.lanes * 16)) {}

  __device__ __forceinline__ LaneFeatures<T> load(int row) const {
    constexpr int kChunks = kLaneFeatures / kEdgeVec<T>;
    const char* at =
        from + static_cast<std::uint64_t>(kChunks * static_cast<std::uint32_t>(row)) * chunk_bytes;
    LaneFeatures<T> weights;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      weights.chunk[c].load(reinterpret_cast<const T*>(at + c * chunk_bytes), true);
    return weights;
  }
};

// Computes W_h^T x for the head of every lane; a lane gets the elements of the result that belong to its edge
// features. kCount vectors share the reads of W.
template <int kEdge, int kCount, typename T>
__device__ __forceinline__ void to_edge_width(float (&to)[kCount][kEdge], const EdgeLane& lane,
                                              const LaneWeights<T>& weight,
                                              const float (&x)[kCount][kLaneFeatures]) {
#pragma unroll
  for (int c = 0; c < kEdge / 4; ++c) {
#pragma unroll
    for (int i = 0; i < kCount * 4; ++i) to[i / 4][c * 4 + i % 4] = 0;
#pragma unroll 1
    for (int owner = 0; owner < lane.lanes; ++owner) {
      const int first = (c * lane.lanes + owner) * 4;
      if (first >= lane.edge_width) break;
      float sum[kCount * 4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const LaneFeatures<T> w = weight.load(first + i);
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
#pragma unroll
          for (int f = 0; f < kLaneFeatures; ++f) sum[n * 4 + i] += w[f] * x[n][f];
        }
      }
      sum_over(sum, lane.lanes);
#pragma unroll
      for (int i = 0; i < kCount * 4; ++i) {
        float& number = to[i / 4][c * 4 + i % 4];
        number = owner == lane.sub ? sum[i] : number;
      }
    }
  }
}

// Adds W_h e of every lane's head to the lane's features: the transpose of `to_edge_width`.
template <int kEdge, typename T>
__device__ __forceinline__ void add_from_edge_width(float (&to)[kLaneFeatures], const EdgeLane& lane,
                                                    const LaneWeights<T>& weight, const float (&e)[kEdge]) {
#pragma unroll
  for (int c = 0; c < kEdge / 4; ++c) {
#pragma unroll 1
    for (int owner = 0; owner < lane.lanes; ++owner) {
      const int first = (c * lane.lanes + owner) * 4;
      if (first >= lane.edge_width) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float number = __shfl_sync(kFullWarp, e[c * 4 + i], owner, lane.lanes);
        const LaneFeatures<T> w = weight.load(first + i);
#pragma unroll
        for (int f = 0; f < kLaneFeatures; ++f) to[f] += w[f] * number;
      }
    }
  }
}

// Adds W a_ij to z, for kCount edges. The result is the argument of GATv2's leaky ReLU if z is x_dst_i +
// x_src_j before. Every weight is read once for all of these edges.
template <typename T, int kCount>
__device__ __forceinline__ void add_projected(float (&z)[kCount][kLaneFeatures], const EdgeLane& lane,
                                              const EdgeAttentionInput& input,
                                              const std::uint32_t (&position)[kCount],
                                              const bool (&has)[kCount]) {
  const std::int64_t width = input.heads * input.head_width;
  const float* weight = static_cast<const float*>(input.weight);
#pragma unroll 1
  for (int first = 0; first < lane.edge_width; first += 4) {
    Words<T, 4> edge[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      edge[u].load(edge_row<T>(input.edge, position[u], lane.edge_width) + first, has[u]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float w[kLaneFeatures];
      lane.load_vector<T>(w, weight + (first + i) * width);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const float a = edge[u][i];
#pragma unroll
        for (int f = 0; f < kLaneFeatures; ++f) z[u][f] += w[f] * a;
      }
    }
  }
}

// If edges have at most this many features, a lane keeps W in registers: its features of all rows of W
// transposed.
constexpr int kKeptWeight = 8;

template <typename T>
struct KeptWeight {
  float of[kKeptWeight][kLaneFeatures];

  __device__ __forceinline__ KeptWeight(const EdgeLane& lane, const EdgeAttentionInput& input) {
    const std::int64_t width = input.heads * input.head_width;
#pragma unroll
    for (int a = 0; a < kKeptWeight; ++a) {
#pragma unroll
      for (int f = 0; f < kLaneFeatures; ++f) of[a][f] = 0;
      if (a < lane.edge_width) {
        lane.load_vector<T>(of[a], static_cast<const float*>(input.weight) + a * width);
      }
    }
  }

  // Does the same as add_projected, with edge features that are already in registers.
  __device__ __forceinline__ void add_to(float (&z)[kLaneFeatures],
                                         const Words<T, 4> (&edge)[kKeptWeight / 4]) const {
#pragma unroll
    for (int a = 0; a < kKeptWeight; ++a) {
      const float number = edge[a / 4][a % 4];
#pragma unroll
      for (int f = 0; f < kLaneFeatures; ++f) z[f] += of[a][f] * number;
    }
  }
};

struct NoWeight {
  __device__ __forceinline__ NoWeight(const EdgeLane&, const EdgeAttentionInput&) {}
};

// Loads the features of one edge for `KeptWeight`, padded with zeros.
template <typename T>
__device__ __forceinline__ void load_edge(Words<T, 4> (&edge)[kKeptWeight / 4], const EdgeLane& lane,
                                          const void* from, std::uint32_t row, bool wanted) {
#pragma unroll
  for (int c = 0; c < kKeptWeight / 4; ++c) {
    edge[c].load(edge_row<T>(from, row, lane.edge_width) + c * 4, wanted && c * 4 < lane.edge_width);
  }
}

// exp(x) like __expf, but results below 2^-126 are 0, which saves instructions.
__device__ __forceinline__ float exp_or_zero(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// Largest number of edge features that a lane has registers for, with dot products.
constexpr int kMostEdge = 16;

// Number of lanes per head, a power of two: enough for the head (8 features per lane) and, with dot products,
// for the edge features (kMostEdge per lane).
inline int edge_head_lanes(const EdgeAttentionInput& input) {
  int lanes = 1;
  while (lanes * kLaneFeatures < input.head_width || (!input.gatv2 && lanes * kMostEdge < input.edge_width)) {
    lanes *= 2;
  }
  return lanes;
}

// True if there is neither bias nor dropout. Testing for both in the loop over a row's entries takes more
// than a tenth of the loop's time.
inline bool is_plain(const EdgeAttentionInput& input) {
  return input.bias.data == nullptr && input.dropout.threshold == 0;
}

// Calls f with the element type.
template <typename F>
void with_edge_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(float{});
    case Dtype::kFloat16:
      return f(__half{});
    case Dtype::kBFloat16:
      return f(__nv_bfloat16{});
    case Dtype::kFloat64:
      return;  // the caller uses the unfused operators
  }
}

}  // namespace fastsparse::cuda
