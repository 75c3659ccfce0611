// Maximum and minimum aggregation from CSR on the CPU. Among equal extrema, the first entry of the row is
// chosen; NaN is an extremum, as in PyTorch.
#include <algorithm>
#include <cstring>
#include <limits>

#include "fastsparse/cpu_pages.h"
#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"
#include "fastsparse/spmm_extremum.h"

namespace fastsparse::cpu {
namespace {

constexpr int kTileVectors =
    4;  // vectors of results in registers, and the same number of vectors of positions
constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 16;  // products below which waking threads costs more than it saves

// Reduces the kVectors * kLanes features that begin at f, for one row, in registers. The features belong to
// one head or, with kOwnValues, each has its own value.
template <typename T, int kLanes, int kVectors, bool kOwnValues>
FASTSPARSE_INLINE void reduce_tile(const SpmmExtremumArgs& args, std::int64_t row, std::int64_t head,
                                   std::int64_t f) {
  using A = Acc<T>;
  using V = Lanes<A, kLanes>;
  using Bits = BitsOf<V>;
  const std::int64_t heads = args.value.data != nullptr ? args.value.heads : 1;
  const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
  const A sign = args.minimum ? A{-1} : A{1};  // min(v) = -max(-v)
  // The first entry is chosen unless a later one is greater, also if all entries are -infinity.
  V best[kVectors];
  V chosen[kVectors];  // positions, stored as the bits of A
  const auto first = begin == end ? kNoEdge : static_cast<std::int32_t>(edge_position(args.a, begin));
  const V lowest = V{} - std::numeric_limits<A>::infinity();
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    best[v] = lowest;
    chosen[v] = reinterpret_cast<V>(Bits{} + first);
  }
  const T* x = static_cast<const T*>(args.x.data) + f;
  for (std::int64_t entry = begin; entry < end; ++entry) {
    if (kVectors == kTileVectors &&
        entry + kPrefetchEntries < args.a.num_edges) {  // also prefetches for later rows
      const T* next = x + args.a.col[entry + kPrefetchEntries] * args.x.stride;
      prefetch(next, kVectors * kLanes * static_cast<int>(sizeof(T)));
    }
    const T* source = x + args.a.col[entry] * args.x.stride;
    const std::int64_t edge = edge_position(args.a, entry);
    const Bits position = Bits{} + static_cast<std::int32_t>(edge);
    A weight = sign, addend = A{-0.0};  // adding -0 changes no number, not even +0
    if (!kOwnValues && args.value.data != nullptr) {
      (args.adds ? addend : weight) = sign * edge_value<T>(args.value, args.dtype, edge * heads + head);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      V candidate;
      load_lanes<T, kLanes>(source + v * kLanes, candidate);
      if constexpr (kOwnValues) {
        V value;
        load_lanes<T, kLanes>(static_cast<const T*>(args.value.data) + edge * heads + f + v * kLanes, value);
        candidate = (args.adds ? candidate + value : candidate * value) * sign;
      } else {
        candidate = candidate * weight + addend;
      }
      const V so_far = best[v];
      const Bits better = (candidate > so_far) | ((candidate != candidate) & (so_far == so_far));
      replace(best[v], better, candidate);
      replace(chosen[v], better, reinterpret_cast<V>(position));
    }
  }
  T* out = static_cast<T*>(args.out) + row * args.width + f;
  std::int32_t* arg = args.arg + row * args.width + f;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const V result = begin == end ? V{} : V(sign * best[v]);
    store_lanes<T, kLanes>(result, out + v * kLanes);
    for (int i = 0; i < kLanes; ++i)
      arg[v * kLanes + i] = static_cast<std::int32_t>(reinterpret_cast<Bits>(chosen[v])[i]);
  }
}

template <typename T, bool kOwnValues>
FASTSPARSE_INLINE void reduce_rows(const SpmmExtremumArgs& args, std::int64_t row_begin,
                                   std::int64_t row_end) {
  constexpr int kLanes = kVectorWidth<Acc<T>>;
  const std::int64_t heads = args.value.data != nullptr && !kOwnValues ? args.value.heads : 1;
  const std::int64_t head_width = args.width / heads;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (std::int64_t head = 0; head < heads; ++head) {
      std::int64_t f = head * head_width;
      const std::int64_t end = f + head_width;
      for (; f + kTileVectors * kLanes <= end; f += kTileVectors * kLanes) {
        reduce_tile<T, kLanes, kTileVectors, kOwnValues>(args, row, head, f);
      }
      for (; f + kLanes <= end; f += kLanes) reduce_tile<T, kLanes, 1, kOwnValues>(args, row, head, f);
      for (; f + kLanes / 2 <= end; f += kLanes / 2) {
        reduce_tile<T, kLanes / 2, 1, kOwnValues>(args, row, head, f);
      }
      for (; f < end; ++f) reduce_tile<T, 1, 1, kOwnValues>(args, row, head, f);
    }
  }
}

template <typename T>
FASTSPARSE_INLINE void reduce_rows(const SpmmExtremumArgs& args, std::int64_t begin, std::int64_t end) {
  if (args.value.data != nullptr && args.value.heads == args.width && args.value.dtype == args.dtype) {
    reduce_rows<T, true>(args, begin, end);
  } else {
    reduce_rows<T, false>(args, begin, end);
  }
}

}  // namespace

void spmm_extremum(const SpmmExtremumArgs& args, int threads) {
  const std::int64_t size = args.a.num_rows * args.width;
  prefer_huge_pages(args.out, size * size_of(args.dtype));
  prefer_huge_pages(args.arg, size * static_cast<std::int64_t>(sizeof(std::int32_t)));
  with_type(args.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) \
    num_threads(threads) if (args.a.num_edges * args.width > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        reduce_rows<decltype(type)>(args, row, std::min(row + kRowsPerTask, args.a.num_rows));
      });
    }
  });
}

}  // namespace fastsparse::cpu
