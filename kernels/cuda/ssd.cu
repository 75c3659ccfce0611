// Sparse rows times a sparse structure (SSD; "Decoupled SSD", sections III and IV): a warp takes an edge
// group, adds the kept entries of its sources into a dense row in shared memory, then updates the output at
// warp width: a plain store, or a partial result where other groups share the row (the paper's update_mode).
//
// The paper's slots exist because float sums in shared memory are a load, an addition and a store, which must
// not meet. Integers need none of that: shared memory adds them natively, in any order with the same bits. So
// sums are fixed-point: a power of two bounds the terms of a group, and they get as many bits below it as
// their number leaves of 31, 24 for 128 entries. A first small kernel packs values, as fixed-point numbers
// relative to their row, with their ids into words: 4 bytes a kept entry instead of 5, in 16-byte loads,
// whatever k and the dtype.
//
// Groups with infinities, NaN, or numbers beyond the range of the units sum plainly, one entry at a time; so
// do float64 and rows that are too wide.
#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksAtOnce = 12;   // per multiprocessor: leaves a thread 40 registers
constexpr int kLongestGroup = 128;  // entries
constexpr int kEntriesPerLane = kLongestGroup / kWarp;
constexpr int kMostTermBits = 29;     // weights then stay below 2^31
constexpr int kPlainFeatures = 1024;  // of a plain sum: what a warp's buffer holds

// 2^power, for powers of normal numbers.
__device__ __forceinline__ float exp2_of(int power) { return __int_as_float((power + 127) << 23); }

// ---------------------------------------------------------------- packing

// Four entries of a row, zeros beyond its end.
template <typename T, typename Id>
__device__ __forceinline__ void load_entries(const SsdArgs& args, bool vector, std::int64_t row,
                                             std::int64_t first, float (&value)[4], unsigned (&id)[4]) {
  const T* values = static_cast<const T*>(args.values) + row * args.k + first;
  const Id* ids = static_cast<const Id*>(args.ids) + row * args.k + first;
  if (vector) {
    const auto value_pack = load_pack<T, 4>(values);
    const auto id_pack = load_pack<Id, 4>(ids);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[i] = widen(value_pack.lane[i]);
      id[i] = id_pack.lane[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = first + i < args.k;
      value[i] = inside ? widen(values[i]) : 0.0f;
      id[i] = inside ? ids[i] : 0u;
    }
  }
}

// 2^lanes_log lanes take a row, four entries each at a time.
template <typename T, typename Id>
__global__ void __launch_bounds__(kThreads) pack_kernel(const SsdArgs args, int lanes_log, bool vector) {
  const int lanes = 1 << lanes_log;
  const int lane = threadIdx.x & (lanes - 1);
  const std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> lanes_log;
  const bool live = row < args.a.num_cols;
  float value[4];
  unsigned id[4];
  unsigned greatest = 0;  // of the magnitudes' bits: NaN above infinity above numbers
  for (std::int64_t first = lane * 4; live && first < args.k; first += lanes * 4) {
    load_entries<T, Id>(args, vector, row, first, value, id);
#pragma unroll
    for (int i = 0; i < 4; ++i) greatest = max(greatest, __float_as_uint(fabsf(value[i])));
  }
  for (int other = 1; other < lanes; other *= 2) {
    greatest = max(greatest, __shfl_xor_sync(kFullWarp, greatest, other));
  }
  if (!live) return;
  const int exponent = greatest == 0 ? 0 : min((greatest >> 23) + 1, 255u);
  if (lane == 0) args.packed.exponent[row] = static_cast<std::uint8_t>(exponent);
  // In two factors: of subnormal numbers their product would be no float.
  const float to_one = exp2_of(max(-126, min(127 - exponent, 126))),
              to_fixed = exp2_of(31 - args.packed.id_bits);
  const int most = (1 << (31 - args.packed.id_bits)) - 1;
  const std::int64_t words = (args.k + 3) / 4;
  for (std::int64_t first = lane * 4; first < args.k; first += lanes * 4) {
    if (args.k > lanes * 4) load_entries<T, Id>(args, vector, row, first, value, id);
    uint4 word;
    unsigned* part = &word.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int fixed = max(-most, min(most, __float2int_rn(value[i] * to_one * to_fixed)));
      part[i] = (static_cast<unsigned>(fixed) << args.packed.id_bits) | id[i];
    }
    reinterpret_cast<uint4*>(args.packed.words)[row * words + first / 4] = word;
  }
}

// ---------------------------------------------------------------- sums

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

struct Entry {
  unsigned source;
  int weight;  // fixed-point: by which a word is multiplied, / 2^32, for a term in the group's unit
};

template <typename T, typename Id>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) ssd_kernel(const SsdArgs args, int lanes_log) {
  extern __shared__ int4 shared[];
  __shared__ Entry entries[kWarps][kLongestGroup];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (group >= args.groups.num_slices) return;
  const RowSlice slice = load_slice(args.groups, group);
  const int vectors = static_cast<int>((args.width + 3) / 4);
  int4* buffer4 = shared + warp * vectors;
  int* buffer = reinterpret_cast<int*>(buffer4);

  // Lanes of a source, and sources at once. With many kept entries the lanes take several words each.
  const int lanes = 1 << lanes_log, step = kWarp >> lanes_log;
  const int nth = lane >> lanes_log, lane_of_source = lane & (lanes - 1);
  const int row_words = static_cast<int>((args.k + 3) / 4);
  const uint4* words = reinterpret_cast<const uint4*>(args.packed.words);
  const auto load_word = [&](int entry, unsigned source, int place) {
    const bool live = entry < slice.length && place < row_words;
    const std::uint64_t row = std::uint64_t{source} * static_cast<unsigned>(row_words);
    return live ? __ldg(words + row + place) : uint4{0, 0, 0, 0};
  };

  unsigned source[kEntriesPerLane];
#pragma unroll
  for (int i = 0; i < kEntriesPerLane; ++i) {
    const int entry = lane + i * kWarp;
    source[i] = entry < slice.length ? __ldg(args.a.col + slice.begin + entry) : 0;
  }
  // The first words are under way before the group's unit is known.
  const unsigned first_source = __shfl_sync(kFullWarp, source[0], nth);
  const unsigned second_source =
      __shfl_sync(kFullWarp, step == kWarp ? source[1] : source[0], (nth + step) % kWarp);
  uint4 word = load_word(nth, first_source, lane_of_source);
  uint4 next_word = load_word(nth + step, second_source, lane_of_source);
  for (int i = lane; i < vectors; i += kWarp) buffer4[i] = int4{0, 0, 0, 0};

  float bound[kEntriesPerLane];
  unsigned greatest = 0;
#pragma unroll
  for (int i = 0; i < kEntriesPerLane; ++i) {
    const int entry = lane + i * kWarp;
    bound[i] = 0;
    if (entry < slice.length) {
      bound[i] = __uint_as_float(static_cast<unsigned>(__ldg(args.packed.exponent + source[i])) << 23);
      bound[i] *= weight_of<T>(args, slice.begin + entry, source[i]);
    }
    greatest = max(greatest, __float_as_uint(fabsf(bound[i])));
  }
  greatest = __reduce_max_sync(kFullWarp, greatest);
  const int exponent = static_cast<int>(greatest >> 23) - 127 + ((greatest & 0x7fffffu) != 0);
  const bool in_range = greatest == 0 || (exponent >= -90 && exponent <= 127);
  // Sums of all terms stay below 2^31: a term is at most the bound less a unit of its row.
  const int term_bits = min(kMostTermBits, 31 - (slice.length > 1 ? 32 - __clz(slice.length - 1) : 0));
  const float to_unit = greatest == 0 || !in_range ? 0.0f : exp2_of(term_bits + 1 - exponent);
  if (in_range) {
#pragma unroll
    for (int i = 0; i < kEntriesPerLane; ++i) {
      entries[warp][lane + i * kWarp] = {source[i], __float2int_rn(bound[i] * to_unit)};
    }
  }
  __syncwarp();

  if (!in_range) {
    auto* sums = reinterpret_cast<float*>(buffer);
    sum_plainly<T, Id>(args, slice, 0, static_cast<int>(args.width), sums);
    store_row<T>(args, slice, sums, 1.0f);
    return;
  }

  const unsigned id_mask = (1u << args.packed.id_bits) - 1;
  const auto add = [&](const uint4& four, int weight) {
    const unsigned part[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int fixed = static_cast<int>(part[i] & ~id_mask);
      // Ties, which are many where units are powers of two, go by the sign: else they would add up to a bias.
      const std::int64_t product = static_cast<std::int64_t>(fixed + (fixed >> 31)) * weight;
      atomicAdd(buffer + (part[i] & id_mask), static_cast<int>((product + (std::int64_t{1} << 31)) >> 32));
    }
  };
  for (int place = lane_of_source; place < row_words; place += lanes) {
    if (place != lane_of_source) {
      word = load_word(nth, entries[warp][nth].source, place);
      next_word = load_word(nth + step, entries[warp][(nth + step) % kLongestGroup].source, place);
    }
    for (int entry = nth; entry < slice.length; entry += 2 * step) {
      const uint4 now[2] = {word, next_word};
      const int ahead = entry + 2 * step;
      if (ahead < slice.length) word = load_word(ahead, entries[warp][ahead].source, place);
      if (ahead + step < slice.length) {
        next_word = load_word(ahead + step, entries[warp][ahead + step].source, place);
      }
      add(now[0], entries[warp][entry].weight);
      if (entry + step < slice.length) add(now[1], entries[warp][entry + step].weight);
    }
  }
  __syncwarp();

  store_row<T>(args, slice, buffer, exp2_of(greatest == 0 ? 0 : exponent - term_bits));
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

template <typename T, typename Id>
void launch_packed(const SsdArgs& args, cudaStream_t stream) {
  int lanes_log = 0;
  while (lanes_log < 5 && (4 << lanes_log) < args.k) ++lanes_log;
  const auto aligned = [](const void* address, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  const bool vector =
      args.k % 4 == 0 && aligned(args.values, 4 * sizeof(T)) && aligned(args.ids, 4 * sizeof(Id));
  if (args.a.num_cols > 0) {
    const unsigned blocks = ceil_div(args.a.num_cols << lanes_log, kThreads);
    pack_kernel<T, Id><<<blocks, kThreads, 0, stream>>>(args, lanes_log, vector);
  }
  const auto buffers = static_cast<std::size_t>((args.width + 3) / 4 * 16 * kWarps);
  ssd_kernel<T, Id><<<ceil_div(args.groups.num_slices, kWarps), kThreads, buffers, stream>>>(args, lanes_log);
}

template <typename T, typename Id>
void launch(const SsdArgs& args, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    if (args.packed.words != nullptr) return launch_packed<T, Id>(args, stream);
  }
  ssd_plain_kernel<T, Id><<<ceil_div(args.groups.num_slices, kWarps), kThreads, 0, stream>>>(args);
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
