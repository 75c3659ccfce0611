// MaxK: exactly the k largest entries of every row, on CUDA cores. For 16-bit numbers up to 1024 columns, see
// maxk_16_bits.cu.
//
// A team of 8, 16 or 32 lanes handles a row. The row is read once and stays in registers: of every chunk of
// 32, 64 or 128 columns, every lane has 4 consecutive ones. Up to four chunks are a panel, and one scan over
// the lanes gives the position of every kept entry of a panel.
//
// To find the threshold, each step counts the entries that are not below a pivot. The search ends when this
// number is k. Because all comparisons are "not below", NaN counts as the largest number.
//   - The first pivot is a smoothed threshold of the team's earlier rows, because rows of a layer have
//     similar thresholds. The next pivots are interpolated between the counts at the ends of the interval.
//     After six steps, the pivot is the middle of the interval. For 256 normally distributed entries and k =
//     32 this takes 4.2 steps on average, 12 if the scale of a row differs much from the others', and
//     somewhat more until all teams of a warp are done.
//   - After 12 steps, bisection over the bits of the pivot finds the k-th entry in at most as many steps as
//     the type has bits. The bits are read as an integer that orders as the values do. Of the entries that
//     equal the k-th one, those in the lowest columns are kept.
//
// Instructions per warp for four rows of 256 float32 and k = 32, counted in the machine code for sm_90: 107
// per step (64 of them comparisons), 110 to load, 229 to place and 20 to write the result. With one row per
// warp: 46 per step and 167 for the rest, for one row. The memory floor is num_rows * (width * sizeof(T) + k
// * (sizeof(T) + id)) bytes, 55 us at 4.3 TB/s for 200,000 rows. Rows wider than 1024, and all rows of
// float64, are read again in every step, from the L1 or L2 cache.

#include <algorithm>
#include <type_traits>

#include "fastsparse/bit_matrix.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/maxk_16_bits.cuh"

namespace fastsparse::cuda {
namespace maxk_detail {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVec = 4;              // number of consecutive columns of a lane
constexpr int kMostChunks = 4;       // chunks per panel: the counts of these chunks share a register
constexpr int kInterpolations = 12;  // number of steps before bisection over the bits
constexpr int kHalvings = 6;  // first step from which on the pivot is the middle of the interval instead of
                              // interpolated

// Lanes that share a row: a warp, or an aligned part of it. All teams of a warp run the same number of steps.
template <int kLanes>
struct Team {
  static constexpr int kRows = kWarp / kLanes;  // rows per warp
  static constexpr int kChunk = kLanes * kVec;  // columns that the team reads at once

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  // Sums over the team. The sum must be at most 0xffff.
  static __device__ __forceinline__ int sum(unsigned v) {
    if constexpr (kLanes == kWarp) {
      return static_cast<int>(__reduce_add_sync(kFullWarp, v));
    } else if constexpr (kLanes == kWarp / 2) {
      const unsigned half = threadIdx.x & kLanes;  // 0 or 16: each team uses one half of the bits
      return static_cast<int>(__reduce_add_sync(kFullWarp, v << half) >> half & 0xffffu);
    } else {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullWarp, v, offset);
      return static_cast<int>(v);
    }
  }
};

// Integers that have the order of the values of type T, with -0 just below +0. NaN is not supported.
template <typename T>
struct Order {
  using Key = std::conditional_t<sizeof(T) == 8, std::uint64_t,
                                 std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
  static constexpr Key kSign = static_cast<Key>(Key{1} << (8 * sizeof(Key) - 1));

  static __device__ Key key(Acc<T> value) {
    const T narrowed = narrow<T>(value);
    Key bits;
    memcpy(&bits, &narrowed, sizeof bits);
    return static_cast<Key>((bits & kSign) != 0 ? ~bits : bits | kSign);
  }

  static __device__ Acc<T> value(Key key) {
    const auto bits = static_cast<Key>((key & kSign) != 0 ? key ^ kSign : ~key);
    T narrowed;
    memcpy(&narrowed, &bits, sizeof bits);
    return widen(narrowed);
  }
};

// The columns of one lane: kVec columns of each of kChunks chunks.
template <typename T, int kChunks>
using Panel = T[kChunks][kVec];

// Reads this lane's part of a panel. `from` is the address of the lane's first column, and `left` the number
// of columns from there to the row's end. Columns beyond the end get -infinity. They are never kept, because
// among equal entries, those in lower columns are kept.
template <typename T, int kLanes, int kChunks, bool kAligned>
__device__ __forceinline__ void load_panel(const T* from, int left, Panel<T, kChunks>& panel) {
  constexpr int kLoad = sizeof(T) == 8 ? 2 : kVec;  // elements per load
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int first = chunk * Team<kLanes>::kChunk;
#pragma unroll
    for (int j = 0; j < kVec; ++j) panel[chunk][j] = narrow<T>(-INFINITY);
    if constexpr (kAligned) {
      if (first < left) {
#pragma unroll
        for (int j = 0; j < kVec; j += kLoad) {
          const auto pack = load_pack<T, kLoad>(from + first + j);
          memcpy(panel[chunk] + j, &pack, sizeof pack);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (first + j < left) panel[chunk][j] = from[first + j];
      }
    }
  }
}

// A row in registers, as kPanels panels.
template <typename T, int kLanes, int kChunks, int kPanels>
struct Row {
  using A = Acc<T>;
  using OfTeam = Team<kLanes>;
  static constexpr int kHeld = kPanels;
  A panels[kPanels][kChunks][kVec];

  template <typename F>
  __device__ __forceinline__ void for_each_panel(F&& f) const {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) f(p, p * kChunks * OfTeam::kChunk, panels[p]);
  }
};

// A row that is read from memory again in every pass.
template <typename T, int kLanes, int kChunks>
struct Row<T, kLanes, kChunks, 0> {
  using A = Acc<T>;
  using OfTeam = Team<kLanes>;
  static constexpr int kHeld = 0;
  const T* data;
  int width;

  template <typename F>
  __device__ __forceinline__ void for_each_panel(F&& f) const {
    for (int begin = 0; begin < width; begin += kChunks * OfTeam::kChunk) {
      Panel<T, kChunks> raw;
      const int column = begin + OfTeam::lane() * kVec;
      load_panel<T, kLanes, kChunks, false>(data + column, width - column, raw);
      Panel<A, kChunks> panel;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) panel[chunk][j] = widen(raw[chunk][j]);
      }
      f(0, begin, panel);
    }
  }
};

// Adds `one` to `found` unless x < pivot, in two instructions. The compiler would use three.
__device__ __forceinline__ void add_unless_below(float x, float pivot, unsigned one, unsigned& found) {
  asm("{ .reg .pred p; setp.geu.f32 p, %1, %2; @p add.u32 %0, %0, %3; }"
      : "+r"(found)
      : "f"(x), "f"(pivot), "r"(one));
}
__device__ __forceinline__ void add_unless_below(double x, double pivot, unsigned one, unsigned& found) {
  found += x < pivot ? 0 : one;
}

// Numbers of a lane's entries that a search counts: one word per panel, with one byte per chunk.
template <int kPanels>
struct Counts {
  unsigned packed[kPanels > 0 ? kPanels : 1];  // not used for rows that are not in registers
};

// Counts a lane's entries in each chunk that are not below the pivot, including NaN.
template <int kChunks, typename A>
__device__ __forceinline__ unsigned counts_from(const Panel<A, kChunks>& panel, A pivot) {
  unsigned counts = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) add_unless_below(panel[chunk][j], pivot, 1u << (8 * chunk), counts);
  }
  return counts;
}

// Counts the row's entries that are not below the pivot, including NaN.
template <int kChunks, typename R>
__device__ __forceinline__ int count_from(const R& row, typename R::A pivot, Counts<R::kHeld>& counts) {
  unsigned found = 0;
  row.for_each_panel([&](int p, int, const Panel<typename R::A, kChunks>& panel) {
    counts.packed[p] = counts_from<kChunks>(panel, pivot);
    found = __dp4a(counts.packed[p], 0x01010101u, found);
  });
  return R::OfTeam::sum(found);
}

// Counts the row's entries that are above the threshold, including NaN.
template <int kChunks, typename R>
__device__ __forceinline__ int count_above(const R& row, typename R::A threshold) {
  unsigned found = 0;
  row.for_each_panel([&](int, int, const Panel<typename R::A, kChunks>& panel) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) found += panel[chunk][j] <= threshold ? 0 : 1;
    }
  });
  return R::OfTeam::sum(found);
}

// A team's estimate from its earlier rows: the threshold, and the distance between entries near the
// threshold, both smoothed.
template <typename A>
struct Guess {
  A threshold;
  A gap;  // 0: there is no estimate yet
};

template <typename T, int kChunks, typename R>
__device__ Guess<Acc<T>> guess_from_range(const R& row, int width, int k) {
  using A = Acc<T>;
  A lowest = INFINITY, highest = -INFINITY;
  row.for_each_panel([&](int, int, const Panel<A, kChunks>& panel) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        highest = max(highest, panel[chunk][j]);
        if (panel[chunk][j] != -INFINITY) lowest = min(lowest, panel[chunk][j]);
      }
    }
  });
#pragma unroll
  for (int offset = R::OfTeam::kChunk / kVec / 2; offset > 0; offset /= 2) {
    highest = max(highest, __shfl_xor_sync(kFullWarp, highest, offset));
    lowest = min(lowest, __shfl_xor_sync(kFullWarp, lowest, offset));
  }
  const A range = highest - lowest, share = static_cast<A>(k) / static_cast<A>(width);
  return {highest - range * (share + A(0.1)), range * 2 / static_cast<A>(width)};
}

// a / b for pivots, which need not be exact. b must be neither subnormal nor very large.
__device__ __forceinline__ float quotient(float a, float b) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(b));
  return a * b;
}
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

template <typename R>
struct Threshold {
  typename R::A value;
  bool exact;  // whether exactly k entries are not below `value`; otherwise `value` is the k-th largest
               // entry, and other entries equal it
  Counts<R::kHeld> counts;  // counts of entries that are not below the value
};

// Searches for the threshold of a row. A team that has found its threshold keeps it while the warp's other
// teams continue.
template <typename T, int kChunks, typename R>
__device__ __forceinline__ Threshold<R> find_threshold(const R& row, int width, int k, Guess<Acc<T>>& guess) {
  using A = Acc<T>;
  using Key = typename Order<T>::Key;
  if (__any_sync(kFullWarp, guess.gap == A{0})) {
    const Guess<A> fresh = guess_from_range<T, kChunks>(row, width, k);
    if (guess.gap == A{0}) guess = fresh;
  }

  // At least k entries are >= `low` and fewer than k are >= `high`, where NaN counts as largest. (With NaN
  // entries, the second part does not hold while `high` is infinite.)
  A low = -INFINITY, high = INFINITY;
  // excess: number of entries >= `low`, minus k. lack: k, minus the number of entries >= `high`. 0: not
  // counted yet.
  A excess = 0, lack = 0;
  A pivot = widen(narrow<T>(guess.threshold)), gap = guess.gap;
  bool exact = false;
  Counts<R::kHeld> counts;
#pragma unroll 1
  for (int step = 0; step < kInterpolations; ++step) {
    const int found = count_from<kChunks>(row, pivot, counts);
    exact = found == k;
    const bool moving = !exact && low < pivot && pivot < high;
    if (!__any_sync(kFullWarp, moving)) break;
    // The code has no branches, because the compiler does not know that all lanes of a team take the same
    // branch.
    const A surplus = static_cast<A>(found - k);
    const bool above = moving && found > k, below = moving && found < k;
    low = above ? pivot : low;
    excess = above ? surplus : excess;
    high = below ? pivot : high;
    lack = below ? -surplus : lack;
    const A weight = step >= kHalvings ? lack : excess;
    const A outside = pivot + surplus * gap;
    const A inside =
        low + (high - low) * quotient(weight, weight + lack);  // not finite while `low` or `high` is infinite
    const A next = abs(inside) < static_cast<A>(INFINITY) ? inside : outside;
    pivot = moving ? widen(narrow<T>(next)) : pivot;
    gap *= 2;
  }
  if (exact) {
    guess.threshold += (pivot - guess.threshold) / 2;
    const A distance = quotient(high - low, excess + lack);
    if (distance < static_cast<A>(INFINITY)) guess.gap += (distance - guess.gap) / 8;
  }
  if (__all_sync(kFullWarp, exact)) return {pivot, true, counts};

  Key lowest = 0, highest = 0;
  if (!exact) {
    guess.gap = 0;
    lowest = Order<T>::key(low);
    highest = Order<T>::key(high);
    if (high == static_cast<A>(INFINITY)) ++highest;  // infinity itself may be the k-th entry
  }
#pragma unroll 1
  while (__any_sync(kFullWarp, highest - lowest > 1)) {
    const auto middle = static_cast<Key>(lowest + (highest - lowest) / 2);
    const A value = Order<T>::value(middle);
    const int found = count_from<kChunks>(row, value, counts);
    if (highest - lowest > 1) {
      if (found == k) {
        exact = true;
        pivot = value;
        highest = lowest;
      } else {
        (found > k ? lowest : highest) = middle;
      }
    }
  }
  if (!exact) pivot = Order<T>::value(lowest);
  count_from<kChunks>(row, pivot, counts);
  return {pivot, exact, counts};
}

// For each of up to 4 chunks, one byte: the number of entries in the team's lanes before this one, and in all
// lanes.
template <int kLanes>
struct Places {
  unsigned before;
  unsigned total;

  explicit __device__ Places(unsigned counts) {
    unsigned sum = counts;
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      // The predicate that the shuffle returns says whether there is a lane to add, which saves five
      // predicates.
      asm volatile(
          "{ .reg .pred p; .reg .u32 other; shfl.sync.up.b32 other|p, %0, %1, %2, 0xffffffff;"
          "  @p add.u32 %0, %0, other; }"
          : "+r"(sum)
          : "r"(offset), "n"((kWarp - kLanes) << 8));
    }
    before = sum - counts;
    total = __shfl_sync(kFullWarp, sum, kLanes - 1, kLanes);
  }

  static __device__ unsigned byte(unsigned packed, int chunk) { return packed >> (8 * chunk) & 0xffu; }
};

// Sets bit 4 * chunk + j of the result if `wanted` is true for element j of the chunk.
template <int kChunks, typename A, typename Wanted>
__device__ __forceinline__ unsigned bits_of(const Panel<A, kChunks>& panel, Wanted&& wanted) {
  unsigned bits = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) bits |= wanted(panel[chunk][j]) ? 1u << (kVec * chunk + j) : 0u;
  }
  return bits;
}

// Counts the set bits of each chunk, one byte per chunk.
template <int kChunks>
__device__ __forceinline__ unsigned counts_of(unsigned bits) {
  unsigned counts = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    counts |= static_cast<unsigned>(__popc(bits >> (kVec * chunk) & 0xfu)) << (8 * chunk);
  }
  return counts;
}

// Keeps the first `remaining` set bits of the team's lanes, in the order of columns, and subtracts the number
// of these bits from `remaining`.
template <int kLanes, int kChunks>
__device__ unsigned take_first(unsigned bits, int& remaining) {
  using Packed = Places<kLanes>;
  const Packed places(counts_of<kChunks>(bits));
  unsigned kept = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    int left = remaining - static_cast<int>(Packed::byte(places.before, chunk));
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const unsigned bit = bits & 1u << (kVec * chunk + j);
      if (bit != 0 && left-- > 0) kept |= bit;
    }
    remaining = max(remaining - static_cast<int>(Packed::byte(places.total, chunk)), 0);
  }
  return kept;
}

// Writes kept entries directly to the result.
template <typename T, typename Id>
struct Result {
  T* values;
  Id* ids;

  __device__ __forceinline__ void move(unsigned count) {
    values += count;
    ids += count;
  }
  __device__ __forceinline__ void put_unless_below(Acc<T> pivot, Acc<T> value, int column) {
    put_if(!(value < pivot), value, column);
  }
  __device__ __forceinline__ void put_if(bool kept, Acc<T> value, int column) {
    if (!kept) return;
    *values++ = narrow<T>(value);
    *ids++ = static_cast<Id>(column);
  }
};

// Writes kept entries to shared memory as pairs of value and column, so that the team can store them
// coalesced.
struct alignas(8) Staged {
  float value;
  int column;
};

struct Stage {
  unsigned address;

  __device__ __forceinline__ void move(unsigned count) { address += count * sizeof(Staged); }
  __device__ __forceinline__ void put_unless_below(float pivot, float value, int column) {
    asm volatile(
        "{ .reg .pred p; setp.geu.f32 p, %2, %1; @p st.shared.f32 [%0], %2; @p st.shared.b32 [%0+4], %3;"
        "  @p add.u32 %0, %0, 8; }"
        : "+r"(address)
        : "f"(pivot), "f"(value), "r"(column)
        : "memory");
  }
  // Stores are predicated, because a branch around each store would cost more than the store.
  __device__ __forceinline__ void put_if(bool kept, float value, int column) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %1, 0; @p st.shared.f32 [%0], %2; @p st.shared.b32 [%0+4], %3;"
        "  @p add.u32 %0, %0, 8; }"
        : "+r"(address)
        : "r"(static_cast<int>(kept)), "f"(value), "r"(column)
        : "memory");
  }
};

// Writes the entries that are not below the threshold, in the order of columns.
template <int kChunks, typename R, typename Sink>
__device__ __forceinline__ void write_from(const R& row, const Threshold<R>& threshold, const Sink& sink) {
  using Packed = Places<R::OfTeam::kChunk / kVec>;
  const int first = R::OfTeam::lane() * kVec;
  unsigned position = 0;
  row.for_each_panel([&](int p, int begin, const Panel<typename R::A, kChunks>& panel) {
    const unsigned counts =
        R::kHeld > 0 ? threshold.counts.packed[p] : counts_from<kChunks>(panel, threshold.value);
    const Packed places(counts);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Sink to = sink;
      to.move(position + Packed::byte(places.before, chunk));
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        to.put_unless_below(threshold.value, panel[chunk][j], begin + chunk * R::OfTeam::kChunk + first + j);
      }
      position += Packed::byte(places.total, chunk);
    }
  });
}

// Finds the kept entries if no threshold separates exactly k entries: all entries above the threshold and, in
// the order of columns, the first entries equal to the threshold. If k or more entries are NaN, the threshold
// is NaN.
template <int kChunks, typename R>
struct Tied {
  using A = typename R::A;
  A value;
  int remaining;
  bool only_nan;

  __device__ __forceinline__ Tied(const R& row, const Threshold<R>& threshold, int k)
      : value(threshold.value), remaining(k - count_above<kChunks>(row, threshold.value)) {
    only_nan = !threshold.exact && remaining <= 0;
    if (only_nan) remaining = k;
  }

  // Returns the bits of the next panel's kept entries.
  __device__ __forceinline__ unsigned operator()(const Panel<A, kChunks>& panel) {
    const unsigned above = bits_of<kChunks>(panel, [&](A x) { return !only_nan && !(x <= value); });
    const unsigned equal = bits_of<kChunks>(panel, [&](A x) { return only_nan ? x != x : x == value; });
    return above | take_first<R::OfTeam::kChunk / kVec, kChunks>(equal, remaining);
  }
};

template <int kChunks, typename R, typename Sink>
__device__ void write_tied(const R& row, const Threshold<R>& threshold, int k, const Sink& sink) {
  using Packed = Places<R::OfTeam::kChunk / kVec>;
  const int first = R::OfTeam::lane() * kVec;
  Tied<kChunks, R> tied(row, threshold, k);
  unsigned position = 0;
  row.for_each_panel([&](int, int begin, const Panel<typename R::A, kChunks>& panel) {
    const unsigned kept = tied(panel);
    const Packed places(counts_of<kChunks>(kept));
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Sink to = sink;
      to.move(position + Packed::byte(places.before, chunk));
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        to.put_if((kept >> (kVec * chunk + j) & 1u) != 0, panel[chunk][j],
                  begin + chunk * R::OfTeam::kChunk + first + j);
      }
      position += Packed::byte(places.total, chunk);
    }
  });
}

template <int kChunks, typename R, typename Sink>
__device__ __forceinline__ void write_kept(const R& row, const Threshold<R>& threshold, int k,
                                           const Sink& sink) {
  if (__all_sync(kFullWarp, threshold.exact)) {
    write_from<kChunks>(row, threshold, sink);
  } else {
    write_tied<kChunks>(row, threshold, k, sink);
  }
}

// Writes a row's kept entries, kOut entries per lane at once.
template <int kLanes, int kOut, typename T, typename Id>
__device__ __forceinline__ void write_out(const Staged* staged, int k, T* values, Id* ids) {
#pragma unroll 1
  for (int i = Team<kLanes>::lane() * kOut; i < k; i += kLanes * kOut) {
    Pack<Staged, kOut> entries;
    if constexpr (kOut == 1) {
      entries.lane[0] = staged[i];
    } else {
#pragma unroll
      for (int j = 0; j < kOut; j += 2) {
        const auto pair = *reinterpret_cast<const int4*>(staged + i + j);
        memcpy(entries.lane + j, &pair, sizeof pair);
      }
    }
    Pack<T, kOut> value;
    Pack<Id, kOut> id;
#pragma unroll
    for (int j = 0; j < kOut; ++j) {
      value.lane[j] = narrow<T>(entries.lane[j].value);
      id.lane[j] = static_cast<Id>(entries.lane[j].column);
    }
    if constexpr (kOut == 1) {
      values[i] = value.lane[0];
      ids[i] = id.lane[0];
    } else {
      store_pack(value, values + i);
      store_pack(id, ids + i);
    }
  }
}

// Writes a panel of a dense row, with 0 for entries whose bits are not set.
template <typename T, int kLanes, int kChunks, bool kAligned>
__device__ __forceinline__ void write_panel(const Panel<Acc<T>, kChunks>& panel, unsigned kept, int left,
                                            T* to) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int first = chunk * Team<kLanes>::kChunk;
    Pack<T, kVec> pack;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      pack.lane[j] = (kept >> (kVec * chunk + j) & 1u) != 0 ? narrow<T>(panel[chunk][j]) : T(0.0f);
    }
    if constexpr (kAligned) {
      if (first < left) store_pack(pack, to + first);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (first + j < left) to[first + j] = pack.lane[j];
      }
    }
  }
}

// Writes a dense row of the kept entries, and the bits of these entries. The lanes exchange the bits of
// `chunks` chunks; then lane 8 g + c has the word of the 32 columns from c * kChunk + 32 g on.
template <typename T, int kChunks, bool kAligned, typename R>
__device__ __forceinline__ void write_dense(const R& row, const Threshold<R>& threshold, const MaxkArgs& args,
                                            std::int64_t index) {
  using OfTeam = typename R::OfTeam;
  constexpr int kLanes = OfTeam::kChunk / kVec;
  const int width = static_cast<int>(args.width), num_words = (width + 31) / 32;
  const int first = OfTeam::lane() * kVec;
  T* to = static_cast<T*>(args.out) + index * width + first;
  std::uint32_t* words = args.kept + index * num_words;
  const auto write_words = [&](unsigned bits, int begin, int chunks) {
    const unsigned word = transposed_nibbles(bits);
    const int chunk = OfTeam::lane() % 8, at = begin / 32 + chunk * (kLanes / 8) + OfTeam::lane() / 8;
    if (chunk < chunks && at < num_words) words[at] = word;
  };
  const auto write = [&](auto&& bits_of_panel) {
    [[maybe_unused]] unsigned both = 0;  // bits of all panels of a row in registers
    row.for_each_panel([&](int p, int begin, const Panel<typename R::A, kChunks>& panel) {
      const unsigned bits = bits_of_panel(panel);
      write_panel<T, kLanes, kChunks, kAligned>(panel, bits, width - begin - first, to + begin);
      if constexpr (R::kHeld == 0) {
        write_words(bits, begin, kChunks);
      } else {
        both |= bits << (kVec * kChunks * p);
      }
    });
    if constexpr (R::kHeld > 0) write_words(both, 0, kChunks * R::kHeld);
  };
  using A = typename R::A;
  if (__all_sync(kFullWarp, threshold.exact)) {
    write([&](const Panel<A, kChunks>& panel) {
      return bits_of<kChunks>(panel, [&](A x) { return !(x < threshold.value); });
    });
  } else {
    write(Tied<kChunks, R>(row, threshold, static_cast<int>(args.k)));
  }
}

// Number of blocks per multiprocessor for which there are enough registers, if a lane holds `values` values
// of a row.
constexpr int blocks_per_sm(int values) { return values <= 16 ? 8 : 6; }

template <typename T, typename Id, int kLanes, int kPanels, bool kAligned>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kMostChunks * kVec * kPanels))
    held_kernel(const MaxkArgs args, bool in_quads) {
  extern __shared__ int4 shared[];  // (teams of the block, k) staged entries
  using OfTeam = Team<kLanes>;
  constexpr int kTeams = kThreads / kLanes, kPanel = kMostChunks * OfTeam::kChunk;
  const int k = static_cast<int>(args.k);
  const int column = OfTeam::lane() * kVec, left = static_cast<int>(args.width) - column;
  const Staged* staged = reinterpret_cast<const Staged*>(shared) + threadIdx.x / kLanes * k;
  const Stage stage{static_cast<unsigned>(__cvta_generic_to_shared(staged))};
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kTeams;
  Guess<Acc<T>> guess{0, 0};
  // All teams of a warp run while its first team has a row. Teams beyond the last row process the last row
  // again.
  const int nth = static_cast<int>(threadIdx.x) % kWarp / kLanes;
#pragma unroll 1
  for (std::int64_t first =
           static_cast<std::int64_t>(blockIdx.x) * kTeams + threadIdx.x / kWarp * OfTeam::kRows;
       first < args.num_rows; first += step) {
    const std::int64_t row = min(first + nth, args.num_rows - 1);
    const T* from = static_cast<const T*>(args.x.data) + row * args.x.stride + column;
    T raw[kPanels][kMostChunks][kVec];
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      load_panel<T, kLanes, kMostChunks, kAligned>(from + p * kPanel, left - p * kPanel, raw[p]);
    }
    Row<T, kLanes, kMostChunks, kPanels> held;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int chunk = 0; chunk < kMostChunks; ++chunk) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) held.panels[p][chunk][j] = widen(raw[p][chunk][j]);
      }
    }
    const auto threshold = find_threshold<T, kMostChunks>(held, static_cast<int>(args.width), k, guess);
    if (args.out != nullptr) {
      write_dense<T, kMostChunks, kAligned>(held, threshold, args, row);
      continue;
    }
    write_kept<kMostChunks>(held, threshold, k, stage);
    __syncwarp();
    T* values = static_cast<T*>(args.values) + row * k;
    Id* ids = static_cast<Id*>(args.ids) + row * k;
    in_quads ? write_out<kLanes, 4>(staged, k, values, ids) : write_out<kLanes, 1>(staged, k, values, ids);
    __syncwarp();
  }
}

template <typename T, typename Id>
__global__ void __launch_bounds__(kThreads) streamed_kernel(const MaxkArgs args) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (index >= args.num_rows) return;
  const int width = static_cast<int>(args.width), k = static_cast<int>(args.k);
  const Row<T, kWarp, kMostChunks, 0> row{static_cast<const T*>(args.x.data) + index * args.x.stride, width};
  Guess<Acc<T>> guess{0, 0};
  const auto threshold = find_threshold<T, kMostChunks>(row, width, k, guess);
  if (args.out != nullptr) {
    write_dense<T, kMostChunks, false>(row, threshold, args, index);
    return;
  }
  const Result<T, Id> result{static_cast<T*>(args.values) + index * args.k,
                             static_cast<Id*>(args.ids) + index * args.k};
  write_kept<kMostChunks>(row, threshold, k, result);
}

template <typename T, typename Id, int kLanes, int kPanels>
void launch_held(const MaxkArgs& args, cudaStream_t stream) {
  constexpr int kTeams = kThreads / kLanes;
  int device = 0, num_sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  const unsigned resident = static_cast<unsigned>(num_sms) *
                            blocks_per_sm(kMostChunks * kVec * kPanels);  // a team handles several rows
  const bool dense = args.out != nullptr;
  const std::size_t shared = dense ? 0 : kTeams * static_cast<std::size_t>(args.k) * sizeof(Staged);
  const unsigned grid = std::min(ceil_div(args.num_rows, kTeams), resident);
  const auto divides = [](std::size_t bytes, const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  constexpr std::size_t kAlignment = kVec * sizeof(T);
  const bool aligned = args.width % kVec == 0 && args.x.stride * sizeof(T) % kAlignment == 0 &&
                       divides(kAlignment, args.x.data) && divides(kAlignment, args.out);
  const bool in_quads =
      args.k % 4 == 0 && divides(4 * sizeof(T), args.values) && divides(4 * sizeof(Id), args.ids);
  if (aligned) {
    held_kernel<T, Id, kLanes, kPanels, true><<<grid, kThreads, shared, stream>>>(args, in_quads);
  } else {
    held_kernel<T, Id, kLanes, kPanels, false><<<grid, kThreads, shared, stream>>>(args, in_quads);
  }
}

template <typename T, typename Id>
void launch_streamed(const MaxkArgs& args, cudaStream_t stream) {
  streamed_kernel<T, Id><<<ceil_div(args.num_rows, kWarps), kThreads, 0, stream>>>(args);
}

template <typename T>
void launch(const MaxkArgs& args, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, float>) {
    if (args.width <= 128) return launch_held<T, std::uint8_t, 8, 1>(args, stream);
    if (args.width <= 256) return launch_held<T, std::uint8_t, 8, 2>(args, stream);
    if (args.width <= 512) return launch_held<T, std::uint16_t, 16, 2>(args, stream);
    if (args.width <= 1024) return launch_held<T, std::uint16_t, 32, 2>(args, stream);
  } else if constexpr (sizeof(T) == 2) {
    if (args.width <= kMost16BitColumns) return maxk_16_bits<T>(args, stream);
  } else if (args.width <= 256) {
    return launch_streamed<T, std::uint8_t>(args, stream);
  }
  launch_streamed<T, std::uint16_t>(args, stream);
}

}  // namespace maxk_detail

int maxk(const MaxkArgs& args, void* stream) {
  using namespace maxk_detail;
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
