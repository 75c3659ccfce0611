// A sparse structure times sparse rows (SSD; "Decoupled SSD", sections III and IV). Every source has k kept
// entries: values and their ids, which are their features. Every row of the structure is cut into edge groups
// of consecutive edges. A warp handles an edge group: it adds the kept entries of the group's sources to a
// dense row in shared memory, and then updates the output with all lanes. The update is a plain store or, if
// other groups share the row, a partial result (the paper's update_mode). Groups of few edges share a warp.
//
// The paper needs slots (one buffer per lane group) because a float sum in shared memory is a load, an
// addition and a store, and two of them must not overlap. Integers need no slots: shared memory adds them
// natively, with the same bits in any order. So sums are fixed-point. A term is a kept value times the
// weight of its edge. The unit of the sums is 2^-kTermBits times a power of two that bounds all terms so far.
// If a larger term comes, the power is raised and the row is shifted, as for the maximum of an online
// softmax. This is rare, because the bound of the first terms usually also bounds the others. Nothing is read
// twice.
//
// If sources have many edges, a first kernel packs the kept entries: four entries in 16 bytes, as fixed-point
// numbers with one power of two for the four. Then a source is one run of 4 k bytes in every dtype instead of
// two runs in two arrays, and an entry takes fewer instructions.
//
// Bounds per call, for E edges: E k (sizeof(T) + sizeof(Id)) bytes gathered (4 E k if packed). 32 additions
// at random addresses of shared memory have on average a 3.5-way bank conflict.
//
// Groups with infinities, NaN or only tiny terms are summed in floating point, one edge at a time. The same
// holds for float64, and for rows of more than kSharedFeatures features.
#include <cstddef>
#include <type_traits>

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/dependent_launch.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace ssd_detail {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTermBits = 24;  // as in a float; the sum of kPieceEntries terms stays below 2^31
// Maximum number of edges that are summed in fixed point. Longer groups are cut into pieces of this length,
// whose sums are added as floats.
constexpr int kPieceEntries = 128;
// Groups whose terms are all smaller than 2^kMinExponent are summed as floats, because the unit of a
// fixed-point sum might not be a normal float.
constexpr int kMinExponent = -100;
constexpr unsigned kInfinity = 0x7f800000u;
constexpr int kSharedFeatures = 1024;  // widest rows that are summed in shared memory at once
constexpr int kPlainFeatures = 1024;   // number of features in a warp's buffer of ssd_plain_kernel
constexpr int kShortGroups = 4;  // groups of at most kShortGroupEntries edges that a warp handles together
constexpr int kShortAhead = 4;   // number of edges of these groups whose kept entries are loaded at once
static_assert(kShortGroups * kShortGroupEntries <= kWarp);
// If rows have on average at least this number of edges, most groups are full. Then it is worth loading four
// packed quads per lane at once instead of two, although a group's last such load is only partly used.
constexpr std::int64_t kManyPerRow = 256;
constexpr int kTeams = 4;  // number of groups of medium size that share a warp; each has a quarter of it

// 2^power as the bits of a float, if it is a normal number.
__device__ __forceinline__ unsigned exponent_bits(int power) {
  return static_cast<unsigned>(power + 127) << 23;
}
__device__ __forceinline__ float exp2_of(int power) { return __uint_as_float(exponent_bits(power)); }

// The lanes that handle one group: a warp, or one of its kTeams equal parts. All teams of a warp run the same
// number of loop iterations.
template <int kTeams>
struct Team {
  static constexpr int kLanes = kWarp / kTeams;

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % kLanes); }

  // Orders the lanes' reads and writes of shared memory.
  static __device__ __forceinline__ void sync() {
    if constexpr (kTeams == 1) {
      __syncwarp();
    } else {
      __syncwarp(((1u << kLanes) - 1) << threadIdx.x % kWarp / kLanes * kLanes);
    }
  }

  // The largest number in any lane of the team. All teams of the warp must call it.
  static __device__ __forceinline__ unsigned max_of(unsigned v) {
    if constexpr (kTeams == 1) {
      v = __reduce_max_sync(kFullWarp, v);
    } else {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        v = max(v, __shfl_xor_sync(kFullWarp, v, offset));
      }
    }
    return v;
  }
};

// Four kept entries of a source. They stay in the words that were loaded, because unpacking them would wait
// for the load.
template <typename T, typename Id>
struct Quad {
  unsigned values[sizeof(T)];
  unsigned ids[sizeof(Id)];

  __device__ __forceinline__ float value(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(values[i]);
    } else {
      const auto bits = static_cast<unsigned short>(values[i / 2] >> i % 2 * 16);
      T value;
      memcpy(&value, &bits, sizeof value);
      return widen(value);
    }
  }

  __device__ __forceinline__ unsigned id(int i) const {
    if constexpr (sizeof(Id) == 1) {
      return __byte_perm(ids[0], 0, 0x4440 + i);
    } else {
      return __byte_perm(ids[i / 2], 0, i % 2 ? 0x4432 : 0x4410);
    }
  }
};

// Loads four consecutive numbers as words. Without kVector, numbers beyond the first `inside` become 0.
template <bool kVector, typename N>
__device__ __forceinline__ void load_words(const std::byte* address, int inside,
                                           unsigned (&word)[sizeof(N)]) {
  if constexpr (kVector) {
    const auto pack = load_pack<N, 4>(reinterpret_cast<const N*>(address));
    memcpy(word, &pack, sizeof word);
  } else {
    Pack<N, 4> pack;
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.lane[i] = i < inside ? reinterpret_cast<const N*>(address)[i] : N{};
    memcpy(word, &pack, sizeof word);
  }
}

// Loads a lane's quad of any source: the kept entries 4 * quad .. 4 * quad + 3.
template <typename T, typename Id, bool kVector>
struct QuadOfRows {
  using Entries = Quad<T, Id>;
  static constexpr bool kPacked = false;
  const std::byte* values;
  const std::byte* ids;
  unsigned k;
  int inside;  // number of kept entries from the quad's first one on

  __device__ __forceinline__ QuadOfRows(const SsdArgs& args, int quad)
      : values(static_cast<const std::byte*>(args.values) + quad * (4 * sizeof(T))),
        ids(static_cast<const std::byte*>(args.ids) + quad * (4 * sizeof(Id))),
        k(static_cast<unsigned>(args.k)),
        inside(static_cast<int>(args.k) - quad * 4) {
    // Hides from the compiler where the addresses come from. Otherwise it would compute the address of every
    // load from the arguments again, which would be half of the instructions around the load.
    asm("" : "+l"(values), "+l"(ids));
  }

  __device__ __forceinline__ Quad<T, Id> load(unsigned row) const {
    Quad<T, Id> quad;
    load_words<kVector, T>(values + std::uint64_t{row} * (k * static_cast<unsigned>(sizeof(T))), inside,
                           quad.values);
    load_words<kVector, Id>(ids + std::uint64_t{row} * (k * static_cast<unsigned>(sizeof(Id))), inside,
                            quad.ids);
    return quad;
  }
};

// Four packed entries. A word has, from its highest bit, a signed fixed-point number of magnitude at most one
// (22 bits), an id (8 bits, so that masking gives 4 * id, the byte offset of its sum), and 2 bits of an
// exponent. The four words together have the 8 bits of the largest entry's biased exponent, lowest bits
// first. An entry is its number times 2 * power().
struct PackedQuad {
  static constexpr unsigned kNumber = 0xfffffc00u, kOffset = 0x3fcu;
  unsigned word[4];

  // Returns 2^exponent; its double bounds every entry. It is 0 for four zeros, and infinity if an entry is
  // infinite or NaN.
  __device__ __forceinline__ float power() const {
    const unsigned exponent = (word[0] & 3) | (word[1] & 3) << 2 | (word[2] & 3) << 4 | (word[3] & 3) << 6;
    return __uint_as_float(exponent << 23);
  }
};

// Loads a lane's quad of any source from the packed entries.
struct QuadOfPackedRows {
  using Entries = PackedQuad;
  static constexpr bool kPacked = true;
  const uint4* quads;
  unsigned per_row;

  __device__ __forceinline__ QuadOfPackedRows(const SsdArgs& args, int quad)
      : quads(static_cast<const uint4*>(args.packed) + quad), per_row(static_cast<unsigned>(args.k / 4)) {
    asm("" : "+l"(quads));  // see QuadOfRows
  }

  __device__ __forceinline__ PackedQuad load(unsigned row) const {
    const uint4 raw = __ldg(quads + std::uint64_t{row} * per_row);
    return {{raw.x, raw.y, raw.z, raw.w}};
  }
};

// A thread packs four entries.
template <typename T>
__global__ void __launch_bounds__(kThreads) pack_kernel(const SsdArgs args, std::int64_t num_quads) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= num_quads) return;
  const auto values = load_pack<T, 4>(static_cast<const T*>(args.values) + at * 4);
  const auto ids = load_pack<std::uint8_t, 4>(static_cast<const std::uint8_t*>(args.ids) + at * 4);
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = max(most, __float_as_uint(fabsf(widen(values.lane[i]))));
  // Subnormal numbers count as the smallest normal ones: only zeros have exponent 0.
  const int exponent = static_cast<int>(most >> 23) + (most != 0 && most >> 23 == 0);
  // Scales the bound of the entries to 2^21. Two factors, because their product may be larger than a float
  // can represent.
  const int scale = 147 - exponent;
  const float half = exp2_of(scale / 2), other_half = exp2_of(scale - scale / 2);
  constexpr int kGreatest = (1 << 21) - 1;
  PackedQuad quad;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int number = min(__float2int_rn(widen(values.lane[i]) * half * other_half), kGreatest);
    quad.word[i] = static_cast<unsigned>(number) << 10 | static_cast<unsigned>(ids.lane[i]) << 2 |
                   (static_cast<unsigned>(exponent) >> 2 * i & 3);
  }
  static_cast<uint4*>(args.packed)[at] = uint4{quad.word[0], quad.word[1], quad.word[2], quad.word[3]};
}

// Stands for the dtype in kernels that read the dtype from the arguments. These kernels read packed entries.
// They need the dtype only for the bias, the result, and the values that they sum as floats.
struct AnyDtype {};

__device__ __forceinline__ float number_at(const void* numbers, Dtype dtype, std::int64_t index) {
  if (dtype == Dtype::kFloat16) return widen(static_cast<const __half*>(numbers)[index]);
  if (dtype == Dtype::kBFloat16) return widen(static_cast<const __nv_bfloat16*>(numbers)[index]);
  return static_cast<const float*>(numbers)[index];
}

// Reads a kept value.
template <typename T>
__device__ __forceinline__ Acc<T> kept_value(const SsdArgs& args, std::int64_t index) {
  if constexpr (std::is_same_v<T, AnyDtype>) {
    return number_at(args.values, args.dtype, index);
  } else {
    return widen(static_cast<const T*>(args.values)[index]);
  }
}

template <typename T>
__device__ __forceinline__ Acc<T> weight_of(const SsdArgs& args, std::int64_t entry, std::int64_t source) {
  Acc<T> weight = 1;
  if constexpr (!std::is_same_v<T, AnyDtype>) {  // kernels for any dtype have no weights
    if (args.value.data != nullptr) {
      weight = load_value<T>(args.value, args.value.dtype == args.dtype, edge_position(args.a, entry));
    }
    if (args.scale_src != nullptr) weight *= static_cast<const Acc<T>*>(args.scale_src)[source];
  }
  return weight;
}

// Adds the terms of a group to `buffer` in floating point, for features [feature0, feature0 + features). It
// adds one source at a time: the ids of a source differ, so no two lanes add to the same address.
template <typename T, typename Id, typename OfTeam = Team<1>>
__device__ void sum_plainly(const SsdArgs& args, const RowSlice& slice, std::int64_t feature0, int features,
                            Acc<T>* buffer) {
#pragma unroll 1
  for (std::int64_t entry = slice.begin; entry < slice.begin + slice.length; ++entry) {
    const std::int64_t source = args.a.col[entry];
    const Acc<T> weight = weight_of<T>(args, entry, source);
#pragma unroll 1
    for (std::int64_t c = OfTeam::lane(); c < args.k; c += OfTeam::kLanes) {
      const std::int64_t at = static_cast<const Id*>(args.ids)[source * args.k + c] - feature0;
      if (at >= 0 && at < features) {
        buffer[at] += weight * kept_value<T>(args, source * args.k + c);
      }
    }
    OfTeam::sync();
  }
}

// Stores sums of kVec features from `feature` on: in `partial` if other groups share the row, else in `out`.
template <typename T, int kVec>
__device__ __forceinline__ void store_sums(const SsdArgs& args, const RowSlice& slice, std::int64_t feature,
                                           const Acc<T> (&sum)[kVec]) {
  if (slice.target < 0) {
    Pack<Acc<T>, kVec> pack;
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.lane[i] = sum[i];
    store_pack(pack, static_cast<Acc<T>*>(args.partial) + ~slice.target * args.width + feature);
  } else if constexpr (std::is_same_v<T, AnyDtype>) {
    Epilogue epilogue{args.scale_dst, nullptr, false, args.out, args.width};
    auto pack = epilogue.finish<float>(sum, slice.target, feature);
    const std::int64_t at = slice.target * args.width + feature;
    if (args.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) pack.lane[i] += number_at(args.bias, args.dtype, feature + i);
    }
    const auto store = [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      Pack<Out, kVec> rounded;
#pragma unroll
      for (int i = 0; i < kVec; ++i) rounded.lane[i] = narrow<Out>(pack.lane[i]);
      store_pack(rounded, out + at);
    };
    if (args.dtype == Dtype::kFloat32) {
      store(static_cast<float*>(args.out));
    } else if (args.dtype == Dtype::kFloat16) {
      store(static_cast<__half*>(args.out));
    } else {
      store(static_cast<__nv_bfloat16*>(args.out));
    }
  } else {
    const Epilogue epilogue{args.scale_dst, args.bias, false, args.out, args.width};
    store_pack(epilogue.finish<T>(sum, slice.target, feature),
               static_cast<T*>(args.out) + slice.target * args.width + feature);
  }
}

// Stores the sums of a row, which are in `buffer`. They are fixed-point numbers in multiples of `unit`, or
// floats if `unit` is 0.
template <typename OfTeam, int kVec, typename T>
__device__ __forceinline__ void store_vectors(const SsdArgs& args, const RowSlice& slice, const int* buffer,
                                              float unit) {
#pragma unroll 1
  for (int feature = OfTeam::lane() * kVec; feature < args.width; feature += OfTeam::kLanes * kVec) {
    const auto pack = *reinterpret_cast<const Pack<int, kVec>*>(buffer + feature);
    float sum[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sum[i] = unit != 0 ? static_cast<float>(pack.lane[i]) * unit : __int_as_float(pack.lane[i]);
    }
    store_sums<T, kVec>(args, slice, feature, sum);
  }
}

template <typename T, typename OfTeam = Team<1>>
__device__ __forceinline__ void store_row(const SsdArgs& args, const RowSlice& slice, const int4* row,
                                          float unit) {
  const int* buffer = reinterpret_cast<const int*>(row);
  args.width % 4 == 0 ? store_vectors<OfTeam, 4, T>(args, slice, buffer, unit)
                      : store_vectors<OfTeam, 1, T>(args, slice, buffer, unit);
}

// The larger of `most` and |term|, or NaN if either is NaN.
__device__ __forceinline__ float greater_magnitude(float most, float term) {
  float greater;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(most), "f"(fabsf(term)));
  return greater;
}

// A fixed-point row in shared memory, shared by the lanes of a team.
template <typename OfTeam>
struct FixedRow {
  int* sum;
  int vectors;                                  // number of sums / 4, rounded up
  int exponent = kMinExponent;                  // every term is below 2^exponent
  unsigned limit = exponent_bits(exponent);     // 2^exponent as the bits of a float
  float scale = exp2_of(kTermBits - exponent);  // units per 1.0
  bool empty = true;                            // whether all terms so far are 0

  __device__ __forceinline__ FixedRow(int* sum, int vectors) : sum(sum), vectors(vectors) {}

  // Rescales the row if `most`, the bits of a finite float, is not below the limit. Afterwards, terms of this
  // magnitude can be added.
  __device__ __forceinline__ void rescale_for(unsigned most) {
    if (most >= limit) {
      const int raised = static_cast<int>(most >> 23) - 126;
      if (!empty) {
        const int shift = min(raised - exponent, 31);
        OfTeam::sync();
#pragma unroll 1
        for (int i = OfTeam::lane(); i < 4 * vectors; i += OfTeam::kLanes) {
          sum[i] = ((sum[i] >> (shift - 1)) + 1) >> 1;
        }
        OfTeam::sync();
      }
      exponent = raised;
      limit = exponent_bits(raised);
      scale = exp2_of(kTermBits - raised);
    }
    if (most != 0) empty = false;
  }

  __device__ __forceinline__ void add(unsigned id, float term) {
    atomicAdd(sum + id, __float2int_rn(term * scale));
  }

  // Adds four packed entries times `weight`. A term is the upper half of a 64-bit product, rounded: the
  // entry's number times a factor that the four entries share.
  __device__ __forceinline__ void add(const PackedQuad& quad, float weight) {
    const int factor = __float2int_rn(weight * quad.power() * (4 * scale));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto number = static_cast<int>(quad.word[i] & PackedQuad::kNumber);
      const long long term = static_cast<long long>(number) * factor + 0x80000000ll;
      auto* to = reinterpret_cast<char*>(sum) + (quad.word[i] & PackedQuad::kOffset);
      atomicAdd(reinterpret_cast<int*>(to), static_cast<int>(term >> 32));
    }
  }

  __device__ __forceinline__ float unit() const { return exp2_of(exponent - kTermBits); }
};

// What a lane handles at once: one quad of each of kAtOnce edges of the group, which are `step` edges apart
// (sum_fixed).
template <int kAtOnce, typename Entries>
struct Chunk {
  Entries quad[kAtOnce];
  float weight[kAtOnce];
};

// Adds the first `count` quads of this lane's chunk. All lanes of the warp must call it. Returns false if a
// term of the team is infinite or NaN. kWhole: all lanes have a whole chunk, so `count` need not be checked.
// These checks are a third of the instructions.
template <bool kWhole, bool kWeighted, int kAtOnce, typename OfTeam, typename T, typename Id>
__device__ __forceinline__ bool add_chunk(const Chunk<kAtOnce, Quad<T, Id>>& chunk, int count,
                                          FixedRow<OfTeam>& row) {
  float term[kAtOnce][4];
  float most = 0;
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = chunk.quad[u].value(i);
      const float product = kWeighted ? value * chunk.weight[u] : value;
      term[u][i] = kWhole || u < count ? product : 0.0f;
      most = greater_magnitude(most, term[u][i]);
    }
  }
  const unsigned most_of_team = OfTeam::max_of(__float_as_uint(most));
  if (most_of_team >= kInfinity) return false;
  row.rescale_for(most_of_team);
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (!kWhole && u >= count) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) row.add(chunk.quad[u].id(i), term[u][i]);
  }
  return true;
}

// Does the same as add_chunk for packed entries. It compares bounds of quads instead of terms. It always
// checks `count`, because separate code for whole chunks would need registers that other warps use.
template <bool kWeighted, int kAtOnce, typename OfTeam>
__device__ __forceinline__ bool add_packed_chunk(const Chunk<kAtOnce, PackedQuad>& chunk, int count,
                                                 FixedRow<OfTeam>& row) {
  unsigned most = 0;
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const float power = chunk.quad[u].power();
    unsigned bound = __float_as_uint(power);
    // Twice the power bounds the entries. A nonzero bound that underflows must not become zero.
    if (kWeighted) bound = __float_as_uint(fabsf(2 * power * chunk.weight[u])) | (power != 0);
    if (u < count) most = max(most, bound);
  }
  if (__any_sync(kFullWarp, most >= (row.empty ? 1 : row.limit))) {
    const unsigned most_of_team = OfTeam::max_of(most);
    if (most_of_team >= kInfinity) return false;
    row.rescale_for(most_of_team);
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (u < count) row.add(chunk.quad[u], kWeighted ? chunk.weight[u] : 1.0f);
  }
  return true;
}

// Adds the terms of a group to the row. Returns false if fixed point cannot represent the sums: a term is
// infinite or NaN, or some terms are not 0 but all are below 2^kMinExponent. The groups of a warp have from
// `shortest` to `longest` edges. 2^lanes_log lanes share a source.
template <int kAtOnce, typename T, typename Rows, bool kWeighted, typename OfTeam>
__device__ __forceinline__ bool sum_fixed(const SsdArgs& args, const RowSlice& slice, int shortest,
                                          int longest, int lanes_log, FixedRow<OfTeam>& row) {
  // Number of lanes per source, and number of sources that the team handles at once.
  const int lanes = 1 << lanes_log, step_log = 31 - __clz(OfTeam::kLanes) - lanes_log, step = 1 << step_log;
  const int nth = OfTeam::lane() >> lanes_log, lane_of_source = OfTeam::lane() & (lanes - 1);
  const int quads = static_cast<int>((args.k + 3) / 4);
  const int per_chunk = kAtOnce * step;

  const int* sources = args.a.col + slice.begin + nth;
  const int last = slice.length - 1 - nth;  // the group's last edge, counted from `sources`

  // Beyond the group's last edge, lanes load the quad of source 0 and a weight of another edge. So there are
  // no branches, and all loads are in flight at once.
  const auto load_sources = [&](int first, unsigned (&source)[kAtOnce]) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      source[u] = first + u * step <= last ? __ldg(sources + first + u * step) : 0;
    }
  };
  const auto load_chunk = [&](int first, const Rows& rows, const unsigned (&source)[kAtOnce],
                              Chunk<kAtOnce, typename Rows::Entries>& chunk) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      chunk.quad[u] = rows.load(source[u]);
      if constexpr (kWeighted) {
        const int entry = max(min(first + u * step, last), -nth);
        chunk.weight[u] = weight_of<T>(args, slice.begin + nth + entry, source[u]);
      }
    }
  };

  bool fits = true;
  // If there are more quads per source than lanes, a lane handles several quads, one after another.
  for (int quad0 = 0; quad0 < quads; quad0 += lanes) {
    const int quad = quad0 + lane_of_source;
    const int end = quad < quads ? last : -1;  // -1: this lane has no quad of the sources
    const Rows rows(args, min(quad, quads - 1));
    unsigned source[kAtOnce];
    Chunk<kAtOnce, typename Rows::Entries> next;
    load_sources(0, source);
    if (longest > 0) load_chunk(0, rows, source, next);
    if (per_chunk < longest) load_sources(per_chunk, source);
    // Quads are loaded one chunk ahead of the additions, and sources two chunks ahead, because the address
    // of a quad depends on the source.
    for (int first = 0; first < longest; first += per_chunk) {
      const Chunk<kAtOnce, typename Rows::Entries> chunk = next;
      if (first + per_chunk < longest) {
        load_chunk(first + per_chunk, rows, source, next);
        load_sources(first + 2 * per_chunk, source);
      }
      const int count = (end - first + step) >> step_log;  // number of this lane's quads that it adds
      bool added;
      if constexpr (Rows::kPacked) {
        added = add_packed_chunk<kWeighted>(chunk, count, row);
      } else {
        const bool whole = first + per_chunk <= shortest && quad0 + lanes <= quads;
        added = whole ? add_chunk<true, kWeighted>(chunk, kAtOnce, row)
                      : add_chunk<false, kWeighted>(chunk, count, row);
      }
      if (!added) {
        if (OfTeam::kLanes == kWarp) return false;
        fits = false;  // the other teams of the warp continue
      }
    }
    if (Rows::kPacked) break;  // packed sources have at most 32 kept entries, so there is no other quad
  }
  return fits && (row.empty || row.exponent > kMinExponent);
}

// Handles one group per warp. kAtOnce: number of quads in a lane's chunk. kBlocks: number of blocks per
// multiprocessor for which registers must suffice. With one quad, there are registers for more blocks, which
// is faster if a warp handles many sources at once, that is, if few entries are kept. kInPieces: some groups
// have more than kPieceEntries edges.
template <int kAtOnce, int kBlocks, typename T, typename Id, typename Rows, bool kWeighted, bool kInPieces>
__global__ void __launch_bounds__(kThreads, kBlocks) ssd_kernel(const SsdArgs args, int lanes_log) {
  extern __shared__ int4 shared[];
  launch_dependents();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (group >= args.num_long) return;
  const auto load_group = [&] {
    // Loaded again for every piece, because keeping the slice makes the compiler spill more.
    if constexpr (kInPieces) asm volatile("" : "+l"(group));
    return load_slice(args.groups, group);
  };
  const int vectors = static_cast<int>((args.width + 3) / 4);
  int4* buffer = shared + warp * vectors;
  const auto clear = [&](int4* row) {
#pragma unroll 1
    for (int i = lane; i < vectors; i += kWarp) row[i] = int4{0, 0, 0, 0};
    __syncwarp();
  };
  // Sums a piece in the buffer. Returns the unit of the sums, or 0 if the sums are floats.
  const auto sum_piece = [&](const RowSlice& piece) {
    clear(buffer);
    FixedRow<Team<1>> row(reinterpret_cast<int*>(buffer), vectors);
    const bool fixed =
        sum_fixed<kAtOnce, T, Rows, kWeighted>(args, piece, piece.length, piece.length, lanes_log, row);
    const float unit = fixed ? row.unit() : 0.0f;
    __syncwarp();
    if (!fixed) {
      clear(buffer);
      sum_plainly<T, Id>(args, piece, 0, static_cast<int>(args.width), reinterpret_cast<float*>(buffer));
    }
    return unit;
  };
  if constexpr (!kInPieces) {
    const RowSlice slice = load_group();
    const float unit = sum_piece(slice);
    store_row<T>(args, slice, buffer, unit);
  } else {
    int4* totals = buffer + kWarps * vectors;
    auto* total = reinterpret_cast<float*>(totals);
    for (int done = 0;; done += kPieceEntries) {
      RowSlice piece = load_group();
      if (done == 0 && piece.length > kPieceEntries) clear(totals);
      piece.begin += done;
      piece.length = min(piece.length - done, kPieceEntries);
      const float unit = sum_piece(piece);
      const RowSlice slice = load_group();
      const bool one_piece = slice.length <= kPieceEntries;
      if (!one_piece) {
        for (int i = lane; i < 4 * vectors; i += kWarp) {
          const int sum = reinterpret_cast<const int*>(buffer)[i];
          total[i] += unit != 0 ? static_cast<float>(sum) * unit : __int_as_float(sum);
        }
        __syncwarp();
      }
      if (done + kPieceEntries >= slice.length) {
        return store_row<T>(args, slice, one_piece ? buffer : totals, one_piece ? unit : 0.0f);
      }
    }
  }
}

// ssd_kernel handles the first num_long groups; ssd_middle_kernel or ssd_short_kernel handles the others.
// These kernels run at the same time as ssd_kernel, because they need none of its results, and fill the GPU
// when few blocks of ssd_kernel are left. The next kernel in the stream must wait for both, so their last
// block, which has no groups, waits for ssd_kernel.
__device__ __forceinline__ bool waited_as_last_block() {
  if (blockIdx.x + 1 < gridDim.x) return false;
  wait_for_kernel_before();
  return true;
}

// Handles groups of up to 31 edges: a warp handles kTeams groups, each with its own buffer. So four groups
// share the costs that every group has. With weights, the compiler would spill registers for eight blocks per
// multiprocessor.
template <typename T, typename Id, typename Rows, bool kWeighted>
__global__ void __launch_bounds__(kThreads, kWeighted ? 7 : 0)
    ssd_middle_kernel(const SsdArgs args, int lanes_log) {
  extern __shared__ int4 shared[];
  launch_dependents();
  if (waited_as_last_block()) return;
  using OfTeam = Team<kTeams>;
  const int nth = static_cast<int>(threadIdx.x) / OfTeam::kLanes;
  const std::int64_t group = args.num_long + static_cast<std::int64_t>(blockIdx.x) * (kWarps * kTeams) + nth;
  RowSlice slice = load_slice(args.groups, group);
  if (slice.length == 0) slice.begin = 0;  // an empty row may begin after the last entry
  const int longest = static_cast<int>(__reduce_max_sync(kFullWarp, static_cast<unsigned>(slice.length)));
  const int shortest = static_cast<int>(__reduce_min_sync(kFullWarp, static_cast<unsigned>(slice.length)));
  const int vectors = static_cast<int>((args.width + 3) / 4);
  int4* buffer = shared + nth * vectors;
  const auto clear = [&] {
#pragma unroll 1
    for (int i = OfTeam::lane(); i < vectors; i += OfTeam::kLanes) buffer[i] = int4{0, 0, 0, 0};
    OfTeam::sync();
  };
  clear();
  FixedRow<OfTeam> row(reinterpret_cast<int*>(buffer), vectors);
  const bool fixed = sum_fixed<2, T, Rows, kWeighted>(args, slice, shortest, longest, lanes_log, row);
  if (group >= args.groups.num_slices) return;
  OfTeam::sync();
  if (!fixed) {
    clear();
    auto* sums = reinterpret_cast<float*>(buffer);
    sum_plainly<T, Id, OfTeam>(args, slice, 0, static_cast<int>(args.width), sums);
  }
  store_row<T, OfTeam>(args, slice, buffer, fixed ? row.unit() : 0.0f);
}

// Handles groups of at most kShortGroupEntries edges: a warp handles kShortGroups of them at once, so that
// loads of one group are in flight while another is added. It sums floats, one source at a time, because for
// one or two sources fixed point costs more than it saves.
template <typename T, typename Id, int kPerLane, bool kWeighted>
__global__ void __launch_bounds__(kThreads) ssd_short_kernel(const SsdArgs args) {
  extern __shared__ int4 shared[];
  launch_dependents();
  if (waited_as_last_block()) return;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t group0 =
      args.num_long + (static_cast<std::int64_t>(blockIdx.x) * kWarps + warp) * kShortGroups;
  const int groups =
      static_cast<int>(min(args.groups.num_slices - group0, static_cast<std::int64_t>(kShortGroups)));
  if (groups <= 0) return;
  const int vectors = static_cast<int>((args.width + 3) / 4);
  int4* buffer = shared + warp * vectors;
  auto* sums = reinterpret_cast<float*>(buffer);
  const auto clear = [&] {
#pragma unroll 1
    for (int i = lane; i < vectors; i += kWarp) buffer[i] = int4{0, 0, 0, 0};
    __syncwarp();
  };

  // The edges of the warp's groups form a list. Lane g has group g and the position in the list at which the
  // group ends. Lane e loads source and weight of the e-th edge of the list.
  RowSlice slice{0, 0, 0};
  if (lane < groups) slice = load_slice(args.groups, group0 + lane);
  int end = slice.length;
#pragma unroll
  for (int step = 1; step < kShortGroups; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, end, step);
    if (lane >= step) end += before;
  }
  const int total = __shfl_sync(kFullWarp, end, kShortGroups - 1);
  const std::int64_t shift = slice.begin - (end - slice.length);
  std::int64_t entry = -1;
#pragma unroll
  for (int g = 0; g < kShortGroups; ++g) {
    const std::int64_t shift_of_group = __shfl_sync(kFullWarp, shift, g);
    const int end_of_group = __shfl_sync(kFullWarp, end, g);
    if (entry < 0 && lane < end_of_group) entry = shift_of_group + lane;
  }
  const unsigned source_of_lane = entry < 0 ? 0 : static_cast<unsigned>(__ldg(args.a.col + entry));
  float weight_of_lane = 1;
  if (kWeighted && entry >= 0) weight_of_lane = weight_of<T>(args, entry, source_of_lane);

  int group = 0, end_of_group = __shfl_sync(kFullWarp, end, 0);
  // Stores the sums of all groups that end at position `at` of the list, and clears the buffer after each.
  const auto finish_groups = [&](int at) {
    while (group < groups && at == end_of_group) {
      RowSlice finished;
      finished.target = __shfl_sync(kFullWarp, slice.target, group);
      store_row<T>(args, finished, buffer, 0.0f);
      __syncwarp();
      clear();
      ++group;
      end_of_group = __shfl_sync(kFullWarp, end, min(group, kShortGroups - 1));
    }
  };

  clear();
  for (int first = 0; first < total; first += kShortAhead) {
    T value[kShortAhead][kPerLane];
    Id id[kShortAhead][kPerLane];
#pragma unroll
    for (int u = 0; u < kShortAhead; ++u) {
      const unsigned source = __shfl_sync(kFullWarp, source_of_lane, first + u);
      const std::uint64_t at = std::uint64_t{source} * static_cast<unsigned>(args.k);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int place = lane + i * kWarp;
        const bool inside = first + u < total && place < args.k;
        value[u][i] = inside ? static_cast<const T*>(args.values)[at + place] : narrow<T>(0.0f);
        id[u][i] = inside ? static_cast<const Id*>(args.ids)[at + place] : Id{0};
      }
    }
#pragma unroll
    for (int u = 0; u < kShortAhead; ++u) {
      if (first + u >= total) break;
      finish_groups(first + u);
      const float weight = kWeighted ? __shfl_sync(kFullWarp, weight_of_lane, first + u) : 1.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (lane + i * kWarp < args.k) sums[id[u][i]] += weight * widen(value[u][i]);
      }
      __syncwarp();
    }
  }
  finish_groups(total);
}

// Supports any width and dtype: a warp adds all terms of a group for one tile of features after another.
// kInPieces: pieces are summed in the first half of the buffer, and their sums are added in the second half.
template <typename T, typename Id, bool kInPieces>
__global__ void __launch_bounds__(kThreads) ssd_plain_kernel(const SsdArgs args) {
  constexpr int kTile = kInPieces ? kPlainFeatures / 2 : kPlainFeatures;
  __shared__ Acc<T> buffers[kWarps][kPlainFeatures];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (group >= args.groups.num_slices) return;
  const RowSlice slice = load_slice(args.groups, group);
  Acc<T>* buffer = buffers[warp];
  Acc<T>* total = kInPieces ? buffer + kTile : buffer;
  for (std::int64_t feature0 = 0; feature0 < args.width; feature0 += kTile) {
    const int features = static_cast<int>(min(args.width - feature0, static_cast<std::int64_t>(kTile)));
    for (int i = lane; i < features; i += kWarp) total[i] = 0;
    __syncwarp();
    if constexpr (kInPieces) {
      RowSlice piece = slice;
      for (int left = slice.length; left > 0; left -= kPieceEntries) {
        piece.length = min(left, kPieceEntries);
        for (int i = lane; i < features; i += kWarp) buffer[i] = 0;
        __syncwarp();
        sum_plainly<T, Id>(args, piece, feature0, features, buffer);
        for (int i = lane; i < features; i += kWarp) total[i] += buffer[i];
        __syncwarp();
        piece.begin += kPieceEntries;
      }
    } else {
      sum_plainly<T, Id>(args, slice, feature0, features, buffer);
    }
    for (int i = lane; i < features; i += kWarp) {
      const Acc<T> sum[1] = {total[i]};
      store_sums<T, 1>(args, slice, feature0 + i, sum);
    }
    __syncwarp();
  }
}

// kOneForAll: groups of any length run the kernel with kInPieces, so that the other one is not compiled.
template <int kAtOnce, int kBlocks, typename T, typename Id, typename Rows, bool kWeighted,
          bool kOneForAll = false>
void launch_long(const SsdArgs& args, cudaStream_t stream) {
  if (args.num_long == 0) return;
  int lanes_log = 0;
  while (lanes_log < 5 && (4 << lanes_log) < args.k) ++lanes_log;
  const auto buffers = static_cast<std::size_t>((args.width + 3) / 4 * 16 * kWarps);
  const unsigned blocks = ceil_div(args.num_long, kWarps);
  if constexpr (!kOneForAll) {
    if (args.longest_group <= kPieceEntries) {
      ssd_kernel<kAtOnce, kBlocks, T, Id, Rows, kWeighted, false>
          <<<blocks, kThreads, buffers, stream>>>(args, lanes_log);
      return;
    }
  }
  ssd_kernel<kAtOnce, kBlocks, T, Id, Rows, kWeighted, true>
      <<<blocks, kThreads, 2 * buffers, stream>>>(args, lanes_log);
}

template <typename T, typename Id, bool kWeighted>
void launch_short(const SsdArgs& args, cudaStream_t stream) {
  const std::int64_t groups = args.groups.num_slices - args.num_long;
  if (groups == 0) return;
  const auto buffers = static_cast<std::size_t>((args.width + 3) / 4 * 16 * kWarps);
  const dim3 blocks(ceil_div(groups, kWarps * kShortGroups) + 1);
  const auto kernel =
      args.k <= kWarp ? ssd_short_kernel<T, Id, 1, kWeighted> : ssd_short_kernel<T, Id, 2, kWeighted>;
  launch_dependent(kernel, args.num_long > 0, blocks, dim3(kThreads), buffers, stream, args);
}

template <typename T, typename Id, typename Rows, bool kWeighted>
void launch_middle(const SsdArgs& args, cudaStream_t stream) {
  const std::int64_t groups = args.groups.num_slices - args.num_long;
  if (groups == 0) return;
  int lanes_log = 0;
  while ((2 << lanes_log) <= Team<kTeams>::kLanes && (4 << lanes_log) < args.k) ++lanes_log;
  const auto buffers = static_cast<std::size_t>((args.width + 3) / 4 * 16 * kWarps * kTeams);
  launch_dependent(ssd_middle_kernel<T, Id, Rows, kWeighted>, args.num_long > 0,
                   dim3(ceil_div(groups, kWarps * kTeams) + 1), dim3(kThreads), buffers, stream, args,
                   lanes_log);
}

template <typename T, typename Id, bool kWeighted>
void launch_in_shared_memory(SsdArgs args, cudaStream_t stream) {
  const auto aligned = [](const void* address, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  const bool vectors =
      args.k % 4 == 0 && aligned(args.values, 4 * sizeof(T)) && aligned(args.ids, 4 * sizeof(Id));
  // Groups share warps only if ids have 8 bits (at most 256 features) and the kernel supports k and the
  // alignment. Wider rows are rare and large.
  const bool shared_warps = sizeof(Id) == 1 && (args.few_entries ? args.k <= 2 * kWarp : vectors);
  if (!shared_warps) args.num_long = args.groups.num_slices;
  if constexpr (sizeof(Id) == 1) {
    if (vectors && args.packed != nullptr) {
      using Rows = QuadOfPackedRows;
      const std::int64_t num_quads = args.a.num_cols * args.k / 4;
      pack_kernel<T><<<ceil_div(num_quads, kThreads), kThreads, 0, stream>>>(args, num_quads);
      using Dtypes = std::conditional_t<kWeighted, T, AnyDtype>;
      const bool long_rows = args.a.num_edges >= kManyPerRow * args.a.num_rows;
      long_rows ? launch_long<4, kWeighted ? 6 : 8, Dtypes, Id, Rows, kWeighted>(args, stream)
                : launch_long<2, kWeighted ? 9 : 12, Dtypes, Id, Rows, kWeighted>(args, stream);
      args.few_entries ? launch_short<T, Id, kWeighted>(args, stream)
                       : launch_middle<Dtypes, Id, Rows, kWeighted>(args, stream);
      return;
    }
  }
  using Rows = QuadOfRows<T, Id, true>;
  if (vectors) {
    if (sizeof(Id) == 1 && args.k <= 16) {
      launch_long<1, kWeighted ? 8 : 12, T, std::uint8_t, QuadOfRows<T, std::uint8_t, true>, kWeighted>(
          args, stream);
    } else {
      launch_long<2, kWeighted ? 7 : 10, T, Id, Rows, kWeighted>(args, stream);
    }
  } else {
    // A k that is not a multiple of four is rare, and so are unaligned addresses. All of these calls share
    // one weighted kernel, in which calls without weights use weight 1.
    launch_long<2, 6, T, Id, QuadOfRows<T, Id, false>, true, true>(args, stream);
  }
  if constexpr (sizeof(Id) == 1) {
    args.few_entries ? launch_short<T, Id, kWeighted>(args, stream)
                     : launch_middle<T, Id, Rows, kWeighted>(args, stream);
  }
}

template <typename T, typename Id>
void launch(const SsdArgs& args, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    if (args.width <= kSharedFeatures) {
      const bool weighted = args.value.data != nullptr || args.scale_src != nullptr;
      weighted ? launch_in_shared_memory<T, Id, true>(args, stream)
               : launch_in_shared_memory<T, Id, false>(args, stream);
      return;
    }
  }
  const unsigned blocks = ceil_div(args.groups.num_slices, kWarps);
  const auto kernel =
      args.longest_group > kPieceEntries ? ssd_plain_kernel<T, Id, true> : ssd_plain_kernel<T, Id, false>;
  kernel<<<blocks, kThreads, 0, stream>>>(args);
}

}  // namespace ssd_detail

int ssd(const SsdArgs& args, void* stream) {
  using namespace ssd_detail;
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
