// Sparse rows times a sparse structure (SSD; "Decoupled SSD", sections III and IV): a warp takes an edge
// group, adds the kept entries of its sources into a dense row in shared memory, then updates the output at
// warp width: a plain store, or a partial result where other groups share the row (the paper's update_mode).
//
// The paper's slots exist because float sums in shared memory are a load, an addition and a store, which must
// not meet. Integers need none of that: shared memory adds them natively, in any order with the same bits. So
// sums are fixed-point: a term counts in units of the power of two that bounds all terms so far, divided by
// 2^kTermBits. As the maximum of an online softmax, that power is raised, and the row shifted, when a greater
// term comes, which is rare: the first terms' power bounds most others. Nothing is read twice.
//
// Bounds per call, E edges of k kept entries: E k (sizeof(T) + sizeof(Id)) bytes gathered; 32 additions to
// random places of shared memory meet about 3.5 times in a bank.
//
// Groups with infinities, NaN, or nothing but tiny numbers sum plainly, one entry at a time; so do float64
// and rows that are too wide.
#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kAtOnce = 2;            // sources that a lane has under way
constexpr int kTermBits = 24;         // those of a float: 128 terms stay below 2^31
constexpr int kLeastExponent = -100;  // smaller terms sum plainly: their units would not be normal floats
constexpr unsigned kInfinity = 0x7f800000u;
constexpr int kPlainFeatures = 1024;  // of a plain sum: what a warp's buffer holds

// 2^power, for powers of normal numbers.
__device__ __forceinline__ float exp2_of(int power) { return __int_as_float((power + 127) << 23); }

// Four entries of a row as they are stored: turning them into numbers would wait for them.
template <typename T, typename Id>
struct Quad {
  Pack<T, 4> value;
  Pack<Id, 4> id;
};

// The part of every row that a lane takes: entries from 4 * quad on.
template <typename T, typename Id, bool kVector>
struct QuadOfRows {
  const T* values;
  const Id* ids;
  unsigned k;
  int inside;  // entries before the row's end; zeros are loaded beyond it

  __device__ __forceinline__ QuadOfRows(const SsdArgs& args, int quad)
      : values(static_cast<const T*>(args.values) + quad * 4),
        ids(static_cast<const Id*>(args.ids) + quad * 4),
        k(static_cast<unsigned>(args.k)),
        inside(static_cast<int>(args.k) - quad * 4) {}

  __device__ __forceinline__ Quad<T, Id> load(unsigned row) const {
    const std::uint64_t at = std::uint64_t{row} * k;  // one instruction
    Quad<T, Id> quad;
    if constexpr (kVector) {
      quad.value = load_pack<T, 4>(values + at);
      quad.id = load_pack<Id, 4>(ids + at);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        quad.value.lane[i] = i < inside ? values[at + i] : narrow<T>(0.0f);
        quad.id.lane[i] = i < inside ? ids[at + i] : Id{0};
      }
    }
    return quad;
  }
};

template <typename T>
__device__ __forceinline__ Acc<T> weight_of(const SsdArgs& args, std::int64_t entry, std::int64_t source) {
  Acc<T> weight = 1;
  if (args.value.data != nullptr) {
    weight = load_value<T>(args.value, args.value.dtype == args.dtype, edge_position(args.a, entry));
  }
  if (args.scale_src != nullptr) weight *= static_cast<const Acc<T>*>(args.scale_src)[source];
  return weight;
}

// Adds the entries of a group into `buffer`, features [feature0, feature0 + features), one source at a time:
// its ids differ, so that lanes never meet.
template <typename T, typename Id>
__device__ void sum_plainly(const SsdArgs& args, const RowSlice& slice, std::int64_t feature0, int features,
                            Acc<T>* buffer) {
  const int lane = threadIdx.x % kWarp;
  for (std::int64_t entry = slice.begin; entry < slice.begin + slice.length; ++entry) {
    const std::int64_t source = args.a.col[entry];
    const Acc<T> weight = weight_of<T>(args, entry, source);
    for (std::int64_t c = lane; c < args.k; c += kWarp) {
      const std::int64_t at = static_cast<const Id*>(args.ids)[source * args.k + c] - feature0;
      if (at >= 0 && at < features) {
        buffer[at] += weight * widen(static_cast<const T*>(args.values)[source * args.k + c]);
      }
    }
    __syncwarp();
  }
}

// Stores sums of kVec features from `feature` on.
template <typename T, int kVec>
__device__ __forceinline__ void store_sums(const SsdArgs& args, const RowSlice& slice, std::int64_t feature,
                                           const Acc<T> (&sum)[kVec]) {
  if (slice.target < 0) {
    Pack<Acc<T>, kVec> pack;
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.lane[i] = sum[i];
    store_pack(pack, static_cast<Acc<T>*>(args.partial) + ~slice.target * args.width + feature);
  } else {
    const Epilogue epilogue{args.scale_dst, args.bias, false, args.out, args.width};
    store_pack(epilogue.finish<T>(sum, slice.target, feature),
               static_cast<T*>(args.out) + slice.target * args.width + feature);
  }
}

// Stores the row in `buffer`, times `unit`.
template <typename T, int kVec, typename Sum>
__device__ __forceinline__ void store_row(const SsdArgs& args, const RowSlice& slice, const Sum* buffer,
                                          float unit) {
  for (int feature = threadIdx.x % kWarp * kVec; feature < args.width; feature += kWarp * kVec) {
    const auto pack = *reinterpret_cast<const Pack<Sum, kVec>*>(buffer + feature);
    float sum[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] = static_cast<float>(pack.lane[i]) * unit;
    store_sums<T, kVec>(args, slice, feature, sum);
  }
}

template <typename T, typename Sum>
__device__ __forceinline__ void store_row(const SsdArgs& args, const RowSlice& slice, const Sum* buffer,
                                          float unit) {
  args.width % 4 == 0 ? store_row<T, 4>(args, slice, buffer, unit)
                      : store_row<T, 1>(args, slice, buffer, unit);
}

// A row in shared memory, in fixed point, shared by the lanes of a warp.
struct FixedRow {
  int* sum;
  int features;
  int exponent = kLeastExponent;  // every term is below 2^exponent
  unsigned greatest = 0;          // bits of the greatest magnitude

  // Makes room for terms of magnitudes up to the one with the bits `most`, a number.
  __device__ __forceinline__ void make_room(unsigned most) {
    const unsigned limit = static_cast<unsigned>(exponent + 127) << 23;
    if (most >= limit) {
      const int raised = static_cast<int>(most >> 23) - 126;
      if (greatest != 0) {
        const int shift = min(raised - exponent, 31);
        __syncwarp();
        for (int i = threadIdx.x % kWarp; i < features; i += kWarp) {
          sum[i] = ((sum[i] >> (shift - 1)) + 1) >> 1;
        }
        __syncwarp();
      }
      exponent = raised;
    }
    greatest = max(greatest, most);
  }

  __device__ __forceinline__ void add(unsigned id, float term) {
    atomicAdd(sum + id, __float2int_rn(term * exp2_of(kTermBits - exponent)));
  }

  __device__ __forceinline__ float unit() const { return exp2_of(exponent - kTermBits); }
};

// Entries of a group that a lane takes at once: kAtOnce quads, `step` sources apart.
template <typename T, typename Id>
struct Chunk {
  Quad<T, Id> quad[kAtOnce];
  float weight[kAtOnce];
};

// Adds the entries of a group; false if it has terms that fixed point cannot hold.
template <typename T, typename Id, bool kVector, bool kWeighted>
__device__ __forceinline__ bool sum_fixed(const SsdArgs& args, const RowSlice& slice, int lanes_log,
                                          FixedRow& row) {
  const int lane = threadIdx.x % kWarp;
  // Lanes of a source, and sources at once.
  const int lanes = 1 << lanes_log, step = kWarp >> lanes_log;
  const int nth = lane >> lanes_log, lane_of_source = lane & (lanes - 1);
  const int quads = static_cast<int>((args.k + 3) / 4);

  const int* sources = args.a.col + slice.begin + nth;
  const int last = slice.length - 1 - nth;  // of this lane's entries, counted from `sources`

  // Lanes without an entry load another: without branches all loads are under way at once.
  const auto load_sources = [&](int first, unsigned (&source)[kAtOnce]) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      source[u] = first + u * step <= last ? __ldg(sources + first + u * step) : 0;
    }
  };
  const auto load_chunk = [&](int first, const QuadOfRows<T, Id, kVector>& rows,
                              const unsigned (&source)[kAtOnce], Chunk<T, Id>& chunk) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      chunk.quad[u] = rows.load(source[u]);
      if constexpr (kWeighted) {
        const int entry = max(min(first + u * step, last), -nth);
        chunk.weight[u] = weight_of<T>(args, slice.begin + nth + entry, source[u]);
      }
    }
  };

  // With many kept entries a lane takes several quads of a source.
  for (int quad0 = 0; quad0 < quads; quad0 += lanes) {
    const int quad = quad0 + lane_of_source;
    const int end = quad < quads ? last : -1;  // of the entries that this lane adds
    const QuadOfRows<T, Id, kVector> rows(args, min(quad, quads - 1));
    unsigned source[kAtOnce];
    Chunk<T, Id> next;
    load_sources(0, source);
    if (slice.length > 0) load_chunk(0, rows, source, next);
    load_sources(kAtOnce * step, source);
    // One chunk ahead of the additions, two ahead for the sources: each load waits for the one before.
    for (int first = 0; first < slice.length; first += kAtOnce * step) {
      const Chunk<T, Id> chunk = next;
      load_chunk(first + kAtOnce * step, rows, source, next);
      load_sources(first + 2 * kAtOnce * step, source);

      float term[kAtOnce][4];
      unsigned most = 0;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = widen(chunk.quad[u].value.lane[i]);
          term[u][i] = first + u * step > end ? 0.0f : kWeighted ? value * chunk.weight[u] : value;
          most = max(most, __float_as_uint(fabsf(term[u][i])));
        }
      }
      most = __reduce_max_sync(kFullWarp, most);
      if (most >= kInfinity) return false;
      row.make_room(most);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (first + u * step > end) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) row.add(chunk.quad[u].id.lane[i], term[u][i]);
      }
    }
  }
  return row.greatest == 0 || row.exponent > kLeastExponent;
}

template <typename T, typename Id, bool kVector, bool kWeighted>
__global__ void __launch_bounds__(kThreads) ssd_kernel(const SsdArgs args, int lanes_log) {
  extern __shared__ int4 shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (group >= args.groups.num_slices) return;
  const RowSlice slice = load_slice(args.groups, group);
  const int vectors = static_cast<int>((args.width + 3) / 4);
  int4* buffer = shared + warp * vectors;
  const auto clear = [&] {
    for (int i = lane; i < vectors; i += kWarp) buffer[i] = int4{0, 0, 0, 0};
    __syncwarp();
  };
  clear();
  FixedRow row{reinterpret_cast<int*>(buffer), 4 * vectors};
  if (sum_fixed<T, Id, kVector, kWeighted>(args, slice, lanes_log, row)) {
    __syncwarp();
    store_row<T>(args, slice, row.sum, row.unit());
  } else {
    __syncwarp();
    clear();
    auto* sums = reinterpret_cast<float*>(buffer);
    sum_plainly<T, Id>(args, slice, 0, static_cast<int>(args.width), sums);
    store_row<T>(args, slice, sums, 1.0f);
  }
}

// Any width and dtype: tiles of kPlainFeatures features, all entries of a group for each.
template <typename T, typename Id>
__global__ void __launch_bounds__(kThreads) ssd_plain_kernel(const SsdArgs args) {
  __shared__ Acc<T> buffers[kWarps][kPlainFeatures];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (group >= args.groups.num_slices) return;
  const RowSlice slice = load_slice(args.groups, group);
  Acc<T>* buffer = buffers[warp];
  for (std::int64_t feature0 = 0; feature0 < args.width; feature0 += kPlainFeatures) {
    const int features =
        static_cast<int>(min(args.width - feature0, static_cast<std::int64_t>(kPlainFeatures)));
    for (int i = lane; i < features; i += kWarp) buffer[i] = 0;
    __syncwarp();
    sum_plainly<T, Id>(args, slice, feature0, features, buffer);
    for (int i = lane; i < features; i += kWarp) {
      const Acc<T> sum[1] = {buffer[i]};
      store_sums<T, 1>(args, slice, feature0 + i, sum);
    }
    __syncwarp();
  }
}

struct SameRow {
  __device__ __forceinline__ std::int64_t operator()(std::int64_t row, int) const { return row; }
};

template <typename T, typename Id, bool kVector>
void launch_fixed(const SsdArgs& args, unsigned blocks, cudaStream_t stream) {
  int lanes_log = 0;
  while (lanes_log < 5 && (4 << lanes_log) < args.k) ++lanes_log;
  const auto buffers = static_cast<std::size_t>((args.width + 3) / 4 * 16 * kWarps);
  if (args.value.data != nullptr || args.scale_src != nullptr) {
    ssd_kernel<T, Id, kVector, true><<<blocks, kThreads, buffers, stream>>>(args, lanes_log);
  } else {
    ssd_kernel<T, Id, kVector, false><<<blocks, kThreads, buffers, stream>>>(args, lanes_log);
  }
}

template <typename T, typename Id>
void launch(const SsdArgs& args, cudaStream_t stream) {
  const unsigned blocks = ceil_div(args.groups.num_slices, kWarps);
  if constexpr (sizeof(T) <= 4) {
    if (args.width <= kPlainFeatures) {
      const auto aligned = [](const void* address, std::size_t bytes) {
        return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
      };
      if (args.k % 4 == 0 && aligned(args.values, 4 * sizeof(T)) && aligned(args.ids, 4 * sizeof(Id))) {
        launch_fixed<T, Id, true>(args, blocks, stream);
      } else {
        launch_fixed<T, Id, false>(args, blocks, stream);
      }
      return;
    }
  }
  ssd_plain_kernel<T, Id><<<blocks, kThreads, 0, stream>>>(args);
}

}  // namespace

int ssd(const SsdArgs& args, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    args.width <= 256 ? launch<T, std::uint8_t>(args, queue) : launch<T, std::uint16_t>(args, queue);
    const Epilogue epilogue{args.scale_dst, args.bias, false, args.out, args.width};
    combine_partials<T, 1>(args.groups, args.partial, epilogue, SameRow{}, queue);
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
