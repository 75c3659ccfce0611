// Reductions of segments of rows on the CPU: sum, mean, maximum, minimum, product, variance, standard
// deviation. A thread processes its segments one by one, and all features of a row at a time. Rows are read
// at the entries' positions. Among equal extrema, the first entry is chosen; NaN is an extremum, as in
// PyTorch.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "fastsparse/cpu_pages.h"
#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kEntriesPerSum =
    32;                          // number of entries after which the sum is added to a compensated total
constexpr int kTileVectors = 8;  // accumulators that a sum holds in registers
constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 16;  // elements below which waking threads costs more than it saves

template <typename T>
FASTSPARSE_INLINE const T* row_of_entry(const SegmentReduceArgs& args, std::int64_t entry) {
  return static_cast<const T*>(args.x.data) + edge_position(args.a, entry) * args.x.stride;
}

// Prefetches `count` features, from f on, of the entry kPrefetchEntries later, also in a later segment. If
// rows are in the order of the entries, the hardware prefetches them.
template <typename T>
FASTSPARSE_INLINE void prefetch_ahead(const SegmentReduceArgs& args, std::int64_t entry, std::int64_t f,
                                      std::int64_t count) {
  if (args.a.edge_id == nullptr || entry + kPrefetchEntries >= args.a.num_edges) return;
  prefetch(row_of_entry<T>(args, entry + kPrefetchEntries) + f, count * static_cast<int>(sizeof(T)));
}

// Workspace for the state of every feature of a segment.
template <typename A>
struct Workspace {
  explicit Workspace(std::int64_t width)
      : first(width), second(width), offset(width), wide_first(width), wide_second(width) {}
  std::vector<A> first, second;
  std::vector<std::int32_t> offset;
  std::vector<double> wide_first, wide_second;
};

// Sums the kVectors * kLanes features that begin at f over a segment, in registers.
template <typename T, int kLanes, int kVectors>
FASTSPARSE_INLINE void sum_tile(const SegmentReduceArgs& args, std::int64_t row, std::int64_t f) {
  using A = Acc<T>;
  using V = Lanes<A, kLanes>;
  const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
  V sum[kVectors], total[kVectors] = {}, compensation[kVectors] = {};
  for (std::int64_t block = begin; block < end; block += kEntriesPerSum) {
    const std::int64_t block_end = std::min(block + kEntriesPerSum, end);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = V{};
    for (std::int64_t entry = block; entry < block_end; ++entry) {
      prefetch_ahead<T>(args, entry, f, kVectors * kLanes);
      const T* x = row_of_entry<T>(args, entry) + f;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        V features;
        load_lanes<T, kLanes>(x + v * kLanes, features);
        sum[v] += features;
      }
    }
    if (end - begin <= kEntriesPerSum) {  // there is only one block, and its sum is the total
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) total[v] = sum[v];
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) add_compensated(sum[v], total[v], compensation[v]);
    }
  }
  if (args.reduction == Reduction::kMean) {
    const A count = static_cast<A>(std::max<std::int64_t>(end - begin, 1));
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) total[v] /= count;
  }
  T* out = static_cast<T*>(args.out) + row * args.width + f;
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store_lanes<T, kLanes>(total[v], out + v * kLanes);
}

template <typename T>
FASTSPARSE_INLINE void sum_feature(const SegmentReduceArgs& args, std::int64_t row, std::int64_t f) {
  using A = Acc<T>;
  const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
  A total = 0, compensation = 0;
  for (std::int64_t block = begin; block < end; block += kEntriesPerSum) {
    const std::int64_t block_end = std::min(block + kEntriesPerSum, end);
    A sum = 0;
    for (std::int64_t entry = block; entry < block_end; ++entry) {
      sum += widen(row_of_entry<T>(args, entry)[f]);
    }
    add_compensated(sum, total, compensation);
  }
  if (args.reduction == Reduction::kMean) total /= static_cast<A>(std::max<std::int64_t>(end - begin, 1));
  narrow(total, static_cast<T*>(args.out) + row * args.width + f);
}

template <typename T>
FASTSPARSE_INLINE void sum_segment(const SegmentReduceArgs& args, std::int64_t row) {
  constexpr int kWidth = kVectorWidth<Acc<T>>;
  const std::int64_t width = args.width;
  std::int64_t f = 0;
  for (; f + kTileVectors * kWidth <= width; f += kTileVectors * kWidth) {
    sum_tile<T, kWidth, kTileVectors>(args, row, f);
  }
  for (; f + 2 * kWidth <= width; f += 2 * kWidth) sum_tile<T, kWidth, 2>(args, row, f);
  for (; f + kWidth / 2 <= width; f += kWidth / 2) sum_tile<T, kWidth / 2, 1>(args, row, f);
  for (; f < width; ++f) sum_feature<T>(args, row, f);
}

template <typename T>
FASTSPARSE_INLINE void extremum_of_segment(const SegmentReduceArgs& args, std::int64_t row,
                                           Workspace<Acc<T>>& workspace) {
  using A = Acc<T>;
  const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1], width = args.width;
  const A sign = args.reduction == Reduction::kMin ? A{-1} : A{1};  // min(v) = -max(-v)
  A* best = workspace.first.data();
  std::int32_t* chosen =
      workspace.offset.data();  // as wide as float32, so that vectors of both have equally many lanes
  // The first entry is chosen unless a later one is greater, also if all entries are -infinity.
  std::fill(best, best + width, -std::numeric_limits<A>::infinity());
  std::fill(chosen, chosen + width, 0);
  for (std::int64_t entry = begin; entry < end; ++entry) {
    prefetch_ahead<T>(args, entry, 0, width);
    const T* x = row_of_entry<T>(args, entry);
    const auto offset = static_cast<std::int32_t>(entry - begin);
    for (std::int64_t f = 0; f < width; ++f) {
      const A candidate = sign * widen(x[f]), so_far = best[f];
      const bool better = (candidate > so_far) | ((candidate != candidate) & (so_far == so_far));
      best[f] = better ? candidate : so_far;
      chosen[f] = better ? offset : chosen[f];
    }
  }
  T* out = static_cast<T*>(args.out) + row * width;
  auto* position = static_cast<std::int64_t*>(args.extra) + row * width;
  if (begin == end) {
    for (std::int64_t f = 0; f < width; ++f) narrow(A{0}, out + f);
    std::fill(position, position + width, args.a.num_edges);
    return;
  }
  for (std::int64_t f = 0; f < width; ++f) narrow(sign * best[f], out + f);
  if (args.a.edge_id == nullptr) {
    for (std::int64_t f = 0; f < width; ++f) position[f] = begin + chosen[f];
  } else {
    for (std::int64_t f = 0; f < width; ++f) position[f] = edge_position(args.a, begin + chosen[f]);
  }
}

template <typename T>
FASTSPARSE_INLINE void multiply_segment(const SegmentReduceArgs& args, std::int64_t row,
                                        Workspace<Acc<T>>& workspace) {
  using A = Acc<T>;
  const std::int64_t width = args.width;
  A* product = workspace.first.data();
  std::fill(product, product + width, A{1});
  for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
    const T* x = row_of_entry<T>(args, entry);
    for (std::int64_t f = 0; f < width; ++f) product[f] *= widen(x[f]);
  }
  T* out = static_cast<T*>(args.out) + row * width;
  for (std::int64_t f = 0; f < width; ++f) narrow(product[f], out + f);
}

// Computes the mean and the sum of squared deviations of a block of entries by Welford's method. Blocks are
// merged with Chan's formula.
template <typename T>
FASTSPARSE_INLINE void moments_of_segment(const SegmentReduceArgs& args, std::int64_t row,
                                          Workspace<Acc<T>>& workspace) {
  using A = Acc<T>;
  const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1], width = args.width;
  A *mean = workspace.first.data(), *squares = workspace.second.data();
  double *total_mean = workspace.wide_first.data(), *total_squares = workspace.wide_second.data();
  std::fill(total_mean, total_mean + width, 0.0);
  std::fill(total_squares, total_squares + width, 0.0);
  for (std::int64_t block = begin; block < end; block += kEntriesPerSum) {
    const std::int64_t block_end = std::min(block + kEntriesPerSum, end);
    std::fill(mean, mean + width, A{0});
    std::fill(squares, squares + width, A{0});
    for (std::int64_t entry = block; entry < block_end; ++entry) {
      const T* x = row_of_entry<T>(args, entry);
      const auto count = static_cast<A>(entry - block + 1);
      for (std::int64_t f = 0; f < width; ++f) {
        const A value = widen(x[f]), deviation = value - mean[f];
        mean[f] += deviation / count;
        squares[f] += deviation * (value - mean[f]);
      }
    }
    const double before = block - begin, share = static_cast<double>(block_end - block) / (block_end - begin);
    for (std::int64_t f = 0; f < width; ++f) {
      const double difference = mean[f] - total_mean[f];
      total_mean[f] += difference * share;
      total_squares[f] += squares[f] + difference * difference * before * share;
    }
  }
  const double count = std::max<std::int64_t>(end - begin, 1);
  T* out = static_cast<T*>(args.out) + row * width;
  A* mean_out = static_cast<A*>(args.extra) + row * width;
  for (std::int64_t f = 0; f < width; ++f) {
    const double variance = total_squares[f] / count;
    mean_out[f] = static_cast<A>(total_mean[f]);
    narrow(static_cast<A>(args.reduction == Reduction::kDeviation ? std::sqrt(variance) : variance), out + f);
  }
}

template <typename T>
FASTSPARSE_INLINE void reduce_rows(const SegmentReduceArgs& args, std::int64_t row_begin,
                                   std::int64_t row_end) {
  Workspace<Acc<T>> workspace(args.width);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    switch (args.reduction) {
      case Reduction::kSum:
      case Reduction::kMean:
        sum_segment<T>(args, row);
        break;
      case Reduction::kMax:
      case Reduction::kMin:
        extremum_of_segment<T>(args, row, workspace);
        break;
      case Reduction::kProduct:
        multiply_segment<T>(args, row, workspace);
        break;
      case Reduction::kVariance:
      case Reduction::kDeviation:
        moments_of_segment<T>(args, row, workspace);
        break;
    }
  }
}

}  // namespace

void segment_reduce(const SegmentReduceArgs& args, int threads) {
  const std::int64_t size = args.a.num_rows * args.width;
  prefer_huge_pages(args.out, size * size_of(args.dtype));
  if (args.reduction == Reduction::kMax || args.reduction == Reduction::kMin) {
    prefer_huge_pages(args.extra, size * static_cast<std::int64_t>(sizeof(std::int64_t)));
  }
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
