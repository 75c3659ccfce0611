// Gradients of spmm_extremum.cpp. The gradient of every result goes to the source and to the value of the
// chosen edge.
//
// - Gradients of sources: every thread takes a block of features, and processes all rows in order. So threads
//   do not add to the same numbers, and the order of a sum depends only on the structure. For rows of few
//   entries, all entries are compared with the chosen positions, in whole vectors. For longer rows, every
//   feature looks up its source.
// - Gradients of values: every task takes a block of rows, because an edge belongs to one row.
// Memory traffic: num_rows * width * (4 + sizeof(T)) bytes are read, and num_rows * width numbers are added
// to random rows.
#include <algorithm>
#include <cstring>

#include "fastsparse/cpu_pages.h"
#include "fastsparse/cpu_simd.h"
#include "fastsparse/spmm_extremum.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kFewEntries = 16;  // in rows with more entries, every feature looks up its source
constexpr std::int64_t kFeaturesPerLine = 16;
constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 16;  // terms below which waking threads costs more than it saves

template <typename T>
FASTSPARSE_INLINE void add_row(const SpmmExtremumBackwardArgs& args, std::int64_t row, std::int64_t first,
                               std::int64_t last) {
  const std::int64_t heads = args.value.data != nullptr ? args.value.heads : 1;
  const std::int64_t head_width = args.width / heads;
  const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride;
  const std::int32_t* arg = args.arg + row * args.width;
  auto* grad_x = static_cast<Acc<T>*>(args.grad_x);
  for (std::int64_t f = first; f < last; ++f) {
    const std::int64_t edge = static_cast<std::uint32_t>(arg[f]);
    Acc<T> term = widen(grad[f]);
    if (args.value.data != nullptr) {
      term *= edge_value<T>(args.value, args.dtype, edge * heads + f / head_width);
    }
    grad_x[args.source[edge] * args.width + f] += term;
  }
}

// Handles edges without values, or with one value for all features.
template <typename T>
FASTSPARSE_INLINE void add_entries(const SpmmExtremumBackwardArgs& args, std::int64_t row, std::int64_t first,
                                   std::int64_t last) {
  using A = Acc<T>;
  constexpr int kLanes =
      16 / static_cast<int>(sizeof(A));  // 16 bytes: every machine can compare vectors of this width
  using V = Lanes<A, kLanes>;
  const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride;
  const std::int32_t* arg = args.arg + row * args.width;
  auto* grad_x = static_cast<A*>(args.grad_x);
  for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
    if (entry + kPrefetchEntries < args.a.num_edges) {  // also prefetches for later rows
      const A* next = grad_x + args.a.col[entry + kPrefetchEntries] * args.width;
      prefetch<1>(next + first, (last - first) * static_cast<std::int64_t>(sizeof(A)));
    }
    const std::int64_t edge = edge_position(args.a, entry);
    const auto position = static_cast<std::int32_t>(edge);
    const A weight = args.value.data != nullptr ? edge_value<T>(args.value, args.dtype, edge) : A{1};
    A* sum = grad_x + args.a.col[entry] * args.width;
    std::int64_t f = first;
    for (; f + kLanes <= last; f += kLanes) {
      V term, total;
      Lanes<std::int32_t, kLanes> chosen;
      load_lanes<T, kLanes>(grad + f, term);
      std::memcpy(&chosen, arg + f, sizeof chosen);
      std::memcpy(&total, sum + f, sizeof total);
      const BitsOf<V> here = __builtin_convertvector(chosen, BitsOf<V>) == position;
      term *= weight;
      total += reinterpret_cast<V>(reinterpret_cast<BitsOf<V>>(term) & here);
      std::memcpy(sum + f, &total, sizeof total);
    }
    for (; f < last; ++f) {
      const A term = weight * widen(grad[f]);
      sum[f] += arg[f] == position ? term : A{0};
    }
  }
}

template <typename T>
FASTSPARSE_INLINE void add_to_sources(const SpmmExtremumBackwardArgs& args, std::int64_t first,
                                      std::int64_t last) {
  auto* grad_x = static_cast<Acc<T>*>(args.grad_x);
  if (last - first == args.width) {
    std::fill(grad_x, grad_x + args.a.num_cols * args.width, Acc<T>{0});
  }
  for (std::int64_t col = 0; col < args.a.num_cols && last - first != args.width; ++col) {
    std::fill(grad_x + col * args.width + first, grad_x + col * args.width + last, Acc<T>{0});
  }
  const bool by_entry = args.value.data == nullptr || args.value.heads == 1;
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const std::int64_t entries = args.a.rowptr[row + 1] - args.a.rowptr[row];
    if (entries == 0) continue;
    if (by_entry && entries <= kFewEntries) {
      add_entries<T>(args, row, first, last);
    } else {
      add_row<T>(args, row, first, last);
    }
  }
}

template <typename T>
void add_to_values(const SpmmExtremumBackwardArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  const std::int64_t head_width = args.width / args.value.heads;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride;
    const std::int32_t* arg = args.arg + row * args.width;
    for (std::int64_t f = 0; f < args.width; ++f) {
      if (arg[f] == kNoEdge) continue;
      const std::int64_t edge = static_cast<std::uint32_t>(arg[f]);
      Acc<T> term = widen(grad[f]);
      if (args.x.data != nullptr) {
        term *= widen(static_cast<const T*>(args.x.data)[args.source[edge] * args.x.stride + f]);
      }
      static_cast<Acc<T>*>(args.grad_value)[edge * args.value.heads + f / head_width] += term;
    }
  }
}

}  // namespace

void spmm_extremum_backward(const SpmmExtremumBackwardArgs& args, int threads) {
  const bool many = args.num_rows * args.width > kSerialWork;
  const std::int64_t parts = many ? threads : 1;
  const std::int64_t lines = (args.width + kFeaturesPerLine - 1) / kFeaturesPerLine;
  const std::int64_t step = (lines + parts - 1) / parts * kFeaturesPerLine;
  prefer_huge_pages(args.grad_x, args.a.num_cols * args.width * (args.dtype == Dtype::kFloat64 ? 8 : 4));
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static) num_threads(threads) if (parts > 1)
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t first = std::min(part * step, args.width), last = std::min(first + step, args.width);
      for_this_machine([&]() FASTSPARSE_INLINED { add_to_sources<T>(args, first, last); });
    }
    if (args.grad_value == nullptr) return;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (many)
    for (std::int64_t row = 0; row < args.num_rows; row += kRowsPerTask) {
      add_to_values<T>(args, row, std::min(row + kRowsPerTask, args.num_rows));
    }
  });
}

}  // namespace fastsparse::cpu
