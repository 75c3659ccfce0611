// MaxK: the k largest entries of every row, exactly, on CUDA cores.
//
// One warp per row; the row is read once and stays in registers, 4 consecutive columns of every 128 to a
// lane, so that ranks by column follow from one scan over the lanes. The threshold is found by counting: each
// step counts the entries that are not below a pivot, and ends the search when they are k. Pivots come from
// interpolation between counts, starting at the threshold of the row before, which rows of one layer nearly
// share: 4.2 steps on average for 256 normal entries and k = 32 (12 if a row's scale is far from the
// others'). Where interpolation fails, bisection on the bits of the pivot, an integer that orders as the
// value does, ends after at most as many steps as the type has bits, at the k-th entry itself; then entries
// equal to it are kept in column order as long as there is room. Comparisons "not below" make NaN the
// largest.
//
// Instructions per row and warp, 256 float32, k = 32 (counted in the machine code for sm_90): 46 per step, 16
// of them to compare, 32 to fetch, 85 to place and 50 to write the result and move on: 350 in all, which 132
// SMs at 1.98 GHz issue for 200,000 rows in 67 us. The memory floor is num_rows * (width * sizeof(T) + k *
// (sizeof(T) + id)) bytes, 55 us at 4.3 TB/s. Rows wider than 1024, and all of float64, are read again in
// every step, from the L1 or L2 cache.

#include <algorithm>
#include <type_traits>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVec = 4;               // consecutive columns of a lane
constexpr int kChunk = kWarp * kVec;  // columns of the warp
constexpr int kInterpolations = 12;   // steps before bisection on the bits
constexpr int kHalvings = 6;          // of those, steps before interpolation gives way to the middle

// Integers that order as the values of type T do, -0 just below +0. Not for NaN.
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

// kChunks * 128 columns: those of this lane.
template <typename T, int kChunks>
using Panel = T[kChunks][kVec];

// Reads this lane's part of a panel: `from` and `left` are the address of its first column and the number of
// columns from there to the row's end. Beyond that there is -infinity, which is never kept because ties go to
// lower columns.
template <typename T, int kChunks, bool kAligned>
__device__ __forceinline__ void load_panel(const T* from, int left, Panel<T, kChunks>& panel) {
  constexpr int kLoad = sizeof(T) == 8 ? 2 : kVec;  // elements per load
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int first = chunk * kChunk;
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

// A row in registers, kPanels panels.
template <typename T, int kChunks, int kPanels>
struct Row {
  using A = Acc<T>;
  A panels[kPanels][kChunks][kVec];

  template <typename F>
  __device__ __forceinline__ void for_each_panel(F&& f) const {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) f(p * kChunks * kChunk, panels[p]);
  }
};

// A row that is read again whenever it is looked at.
template <typename T, int kChunks>
struct Row<T, kChunks, 0> {
  using A = Acc<T>;
  const T* data;
  int width;
  int lane;

  template <typename F>
  __device__ __forceinline__ void for_each_panel(F&& f) const {
    for (int begin = 0; begin < width; begin += kChunks * kChunk) {
      Panel<T, kChunks> raw;
      const int column = begin + lane * kVec;
      load_panel<T, kChunks, false>(data + column, width - column, raw);
      Panel<A, kChunks> panel;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) panel[chunk][j] = widen(raw[chunk][j]);
      }
      f(begin, panel);
    }
  }
};

// Adds `one` unless x < pivot. The compiler takes three instructions for what is a comparison and an
// addition.
__device__ __forceinline__ void add_unless_below(float x, float pivot, unsigned one, unsigned& found) {
  asm("{ .reg .pred p; setp.geu.f32 p, %1, %2; @p add.u32 %0, %0, %3; }"
      : "+r"(found)
      : "f"(x), "f"(pivot), "r"(one));
}
__device__ __forceinline__ void add_unless_below(double x, double pivot, unsigned one, unsigned& found) {
  found += x < pivot ? 0 : one;
}

// Entries of the row that are not below the pivot, NaN among them.
template <int kChunks, typename R>
__device__ __forceinline__ int count_from(const R& row, typename R::A pivot) {
  unsigned found = 0;
  row.for_each_panel([&](int, const Panel<typename R::A, kChunks>& panel) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) add_unless_below(panel[chunk][j], pivot, 1, found);
    }
  });
  return static_cast<int>(__reduce_add_sync(kFullWarp, found));
}

// Entries of the row that are above the threshold, NaN among them.
template <int kChunks, typename R>
__device__ __forceinline__ int count_above(const R& row, typename R::A threshold) {
  unsigned found = 0;
  row.for_each_panel([&](int, const Panel<typename R::A, kChunks>& panel) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) found += panel[chunk][j] <= threshold ? 0 : 1;
    }
  });
  return static_cast<int>(__reduce_add_sync(kFullWarp, found));
}

// What a warp knows from the rows before: their thresholds and the distance between entries there, both
// smoothed.
template <typename A>
struct Guess {
  A threshold;
  A gap;  // 0: nothing is known
};

// A guess from the smallest and the largest entry.
template <typename T, int kChunks, typename R>
__device__ Guess<Acc<T>> guess_from_range(const R& row, int width, int k) {
  using A = Acc<T>;
  A lowest = INFINITY, highest = -INFINITY;
  row.for_each_panel([&](int, const Panel<A, kChunks>& panel) {
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
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    highest = max(highest, __shfl_xor_sync(kFullWarp, highest, offset));
    lowest = min(lowest, __shfl_xor_sync(kFullWarp, lowest, offset));
  }
  const A range = highest - lowest, share = static_cast<A>(k) / static_cast<A>(width);
  return {highest - range * (share + A(0.1)), range * 2 / static_cast<A>(width)};
}

// a / b for pivots, which may be inexact, and b of an ordinary size.
__device__ __forceinline__ float quotient(float a, float b) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(b));
  return a * b;
}
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

template <typename A>
struct Threshold {
  A value;
  bool exact;  // exactly k entries are not below it; else it is the k-th largest entry, one of several
};

template <typename T, int kChunks, typename R>
__device__ __forceinline__ Threshold<Acc<T>> find_threshold(const R& row, int width, int k,
                                                            Guess<Acc<T>>& guess) {
  using A = Acc<T>;
  using Key = typename Order<T>::Key;
  if (guess.gap == A{0}) guess = guess_from_range<T, kChunks>(row, width, k);

  // Not fewer than k entries are not below `low`, fewer than k not below `high` (NaN aside, while it is
  // infinite).
  A low = -INFINITY, high = INFINITY;
  A excess = 0, lack = 0;  // by how many; 0: not counted yet
  A pivot = guess.threshold, gap = guess.gap;
#pragma unroll 1
  for (int step = 0; step < kInterpolations; ++step) {
    pivot = widen(narrow<T>(pivot));
    if (!(low < pivot && pivot < high)) break;
    const int found = count_from<kChunks>(row, pivot);
    const A surplus = static_cast<A>(found - k);
    if (found == k) {
      guess.threshold += (pivot - guess.threshold) / 2;
      const A distance = quotient(high - low, excess + lack);
      if (distance < static_cast<A>(INFINITY)) guess.gap += (distance - guess.gap) / 8;
      return {pivot, true};
    }
    // Without branches: all lanes do the same, which the compiler does not know.
    const bool above = found > k;
    low = above ? pivot : low;
    excess = above ? surplus : excess;
    high = above ? high : pivot;
    lack = above ? lack : -surplus;
    if (step >= kHalvings) excess = lack;
    const A outside = pivot + surplus * gap;
    const A inside =
        low + (high - low) * quotient(excess, excess + lack);  // not finite while one of them is not
    pivot = abs(inside) < static_cast<A>(INFINITY) ? inside : outside;
    gap *= 2;
  }

  guess.gap = 0;
  Key lowest = Order<T>::key(low), highest = Order<T>::key(high);
  if (high == INFINITY) ++highest;  // infinity itself may be the k-th entry
#pragma unroll 1
  while (highest - lowest > 1) {
    const auto middle = static_cast<Key>(lowest + (highest - lowest) / 2);
    pivot = Order<T>::value(middle);
    const int found = count_from<kChunks>(row, pivot);
    if (found == k) return {pivot, true};
    (found > k ? lowest : highest) = middle;
  }
  return {Order<T>::value(lowest), false};
}

// Numbers of a lane's entries in each of up to 4 chunks, a byte each, summed over the lanes before this one,
// and over all.
struct Places {
  unsigned before;
  unsigned total;

  explicit __device__ Places(unsigned counts) {
    unsigned sum = counts;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      // The shuffle says itself whether there is a lane to add: five predicates less to keep.
      asm volatile(
          "{ .reg .pred p; .reg .u32 other; shfl.sync.up.b32 other|p, %0, %1, 0, 0xffffffff;"
          "  @p add.u32 %0, %0, other; }"
          : "+r"(sum)
          : "r"(offset));
    }
    before = sum - counts;
    total = __shfl_sync(kFullWarp, sum, kWarp - 1);
  }

  static __device__ unsigned byte(unsigned packed, int chunk) { return packed >> (8 * chunk) & 0xffu; }
};

// Sets bit 4 * chunk + j of the result where `wanted` holds.
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

// The numbers of set bits of every chunk, a byte each.
template <int kChunks>
__device__ __forceinline__ unsigned counts_of(unsigned bits) {
  unsigned counts = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    counts |= static_cast<unsigned>(__popc(bits >> (kVec * chunk) & 0xfu)) << (8 * chunk);
  }
  return counts;
}

// The first `room` of the set bits of all lanes, in the order of columns; takes them from `room`.
template <int kChunks>
__device__ unsigned first_bits(unsigned bits, int& room) {
  const Places places(counts_of<kChunks>(bits));
  unsigned kept = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    int left = room - static_cast<int>(Places::byte(places.before, chunk));
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const unsigned bit = bits & 1u << (kVec * chunk + j);
      if (bit != 0 && left-- > 0) kept |= bit;
    }
    room = max(room - static_cast<int>(Places::byte(places.total, chunk)), 0);
  }
  return kept;
}

// Where kept entries go: straight to the result,
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

// or to shared memory, in pairs of value and column, so that the warp writes them coalesced.
struct Staged {
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
  // Predicated: a branch around each store would cost more than the store.
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
__device__ __forceinline__ void write_from(const R& row, typename R::A threshold, int lane,
                                           const Sink& sink) {
  unsigned position = 0;
  row.for_each_panel([&](int begin, const Panel<typename R::A, kChunks>& panel) {
    unsigned counts = 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) add_unless_below(panel[chunk][j], threshold, 1u << (8 * chunk), counts);
    }
    const Places places(counts);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Sink to = sink;
      to.move(position + Places::byte(places.before, chunk));
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        to.put_unless_below(threshold, panel[chunk][j], begin + chunk * kChunk + lane * kVec + j);
      }
      position += Places::byte(places.total, chunk);
    }
  });
}

// Writes the entries above the threshold, and of those equal to it as many as there is room for, in the order
// of columns. Where the entries that are NaN would fill a row, they are those equal to it.
template <int kChunks, typename R, typename Sink>
__device__ void write_tied(const R& row, typename R::A threshold, int k, int lane, const Sink& sink) {
  using A = typename R::A;
  int room = k - count_above<kChunks>(row, threshold);
  const bool only_nan = room <= 0;
  if (only_nan) room = k;
  unsigned position = 0;
  row.for_each_panel([&](int begin, const Panel<A, kChunks>& panel) {
    unsigned kept = only_nan ? 0 : bits_of<kChunks>(panel, [&](A x) { return !(x <= threshold); });
    const unsigned equal = bits_of<kChunks>(panel, [&](A x) { return only_nan ? x != x : x == threshold; });
    kept |= first_bits<kChunks>(equal, room);
    const Places places(counts_of<kChunks>(kept));
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Sink to = sink;
      to.move(position + Places::byte(places.before, chunk));
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        to.put_if((kept >> (kVec * chunk + j) & 1u) != 0, panel[chunk][j],
                  begin + chunk * kChunk + lane * kVec + j);
      }
      position += Places::byte(places.total, chunk);
    }
  });
}

template <int kChunks, typename R, typename Sink>
__device__ __forceinline__ void write_kept(const R& row, Threshold<typename R::A> threshold, int k, int lane,
                                           const Sink& sink) {
  if (threshold.exact) {
    write_from<kChunks>(row, threshold.value, lane, sink);
  } else {
    write_tied<kChunks>(row, threshold.value, k, lane, sink);
  }
}

// Blocks that an SM holds, for registers of a row of this many values per lane and of the next row.
constexpr int blocks_per_sm(int values) { return values <= 8 ? 8 : values <= 16 ? 6 : 4; }

template <typename T, typename Id, int kChunks, int kPanels, bool kAligned>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kChunks * kVec * kPanels))
    held_kernel(const MaxkArgs args) {
  extern __shared__ Staged shared[];  // (kWarps, k)
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int k = static_cast<int>(args.k), left = static_cast<int>(args.width) - lane * kVec;
  const Staged* staged = shared + warp * k;
  const Stage stage{static_cast<unsigned>(__cvta_generic_to_shared(staged))};
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kWarps;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  const T* ahead = static_cast<const T*>(args.x.data) + row * args.x.stride + lane * kVec;
  T* values = static_cast<T*>(args.values) + row * k;
  Id* ids = static_cast<Id*>(args.ids) + row * k;
  const std::int64_t ahead_step = step * args.x.stride, out_step = step * k;
  Guess<Acc<T>> guess{0, 0};
  T next[kPanels][kChunks][kVec];
  const auto fetch = [&] {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const int begin = p * kChunks * kChunk;
      load_panel<T, kChunks, kAligned>(ahead + begin, left - begin, next[p]);
    }
    ahead += ahead_step;
  };
  int rows = row < args.num_rows ? static_cast<int>((args.num_rows - row + step - 1) / step) : 0;
  if (rows > 0) fetch();
#pragma unroll 1
  for (; rows > 0; --rows) {
    Row<T, kChunks, kPanels> held;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) held.panels[p][chunk][j] = widen(next[p][chunk][j]);
      }
    }
    if (rows > 1) fetch();
    const auto threshold = find_threshold<T, kChunks>(held, static_cast<int>(args.width), k, guess);
    write_kept<kChunks>(held, threshold, k, lane, stage);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < k; i += kWarp) {
      const Staged entry = staged[i];
      values[i] = narrow<T>(entry.value);
      ids[i] = static_cast<Id>(entry.column);
    }
    __syncwarp();
    values += out_step;
    ids += out_step;
  }
}

template <typename T, typename Id>
__global__ void __launch_bounds__(kThreads) streamed_kernel(const MaxkArgs args) {
  constexpr int kChunks = 4;
  const int lane = threadIdx.x % kWarp;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (index >= args.num_rows) return;
  const int width = static_cast<int>(args.width), k = static_cast<int>(args.k);
  const Row<T, kChunks, 0> row{static_cast<const T*>(args.x.data) + index * args.x.stride, width, lane};
  Guess<Acc<T>> guess{0, 0};
  const auto threshold = find_threshold<T, kChunks>(row, width, k, guess);
  const Result<T, Id> result{static_cast<T*>(args.values) + index * args.k,
                             static_cast<Id*>(args.ids) + index * args.k};
  write_kept<kChunks>(row, threshold, k, lane, result);
}

template <typename T, typename Id, int kChunks, int kPanels>
void launch_held(const MaxkArgs& args, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  const unsigned resident =
      static_cast<unsigned>(num_sms) * blocks_per_sm(kChunks * kVec * kPanels);  // each takes several rows
  const std::size_t shared = kWarps * static_cast<std::size_t>(args.k) * sizeof(Staged);
  const unsigned grid = std::min(ceil_div(args.num_rows, kWarps), resident);
  constexpr std::size_t kAlignment = kVec * sizeof(T);
  const bool aligned = args.width % kVec == 0 && args.x.stride * sizeof(T) % kAlignment == 0 &&
                       reinterpret_cast<std::uintptr_t>(args.x.data) % kAlignment == 0;
  if (aligned) {
    held_kernel<T, Id, kChunks, kPanels, true><<<grid, kThreads, shared, stream>>>(args);
  } else {
    held_kernel<T, Id, kChunks, kPanels, false><<<grid, kThreads, shared, stream>>>(args);
  }
}

template <typename T, typename Id>
void launch_streamed(const MaxkArgs& args, cudaStream_t stream) {
  streamed_kernel<T, Id><<<ceil_div(args.num_rows, kWarps), kThreads, 0, stream>>>(args);
}

template <typename T>
void launch(const MaxkArgs& args, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, double>) {
    args.width <= 256 ? launch_streamed<T, std::uint8_t>(args, stream)
                      : launch_streamed<T, std::uint16_t>(args, stream);
  } else if (args.width <= kChunk) {
    launch_held<T, std::uint8_t, 1, 1>(args, stream);
  } else if (args.width <= 2 * kChunk) {
    launch_held<T, std::uint8_t, 2, 1>(args, stream);
  } else if (args.width <= 4 * kChunk) {
    launch_held<T, std::uint16_t, 4, 1>(args, stream);
  } else if (args.width <= 8 * kChunk) {
    launch_held<T, std::uint16_t, 4, 2>(args, stream);
  } else {
    launch_streamed<T, std::uint16_t>(args, stream);
  }
}

}  // namespace

int maxk(const MaxkArgs& args, void* stream) {
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
