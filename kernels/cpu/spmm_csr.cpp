// SpMM from CSR on the CPU: one row at a time, with accumulators in registers, and rows of x prefetched. The
// gather of x bounds the time: num_edges * width * sizeof(T) bytes.
#include <algorithm>

#include "fastsparse/cpu_pages.h"
#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr int kTileVectors = 8;  // accumulators held in registers
constexpr std::int64_t kEntriesPerSum =
    32;  // number of entries after which the sum is added to a compensated total
constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 16;  // products below which waking threads costs more than it saves
constexpr std::int64_t kNearBytes =
    1 << 19;  // up to this number of bytes, x stays in a cache and is not prefetched

template <typename T>
FASTSPARSE_INLINE Acc<T> weight_of(const SpmmArgs& args, std::int64_t entry, std::int64_t head) {
  Acc<T> weight = 1;
  if (args.value.data != nullptr) {
    weight = edge_value<T>(args.value, args.dtype, edge_position(args.a, entry) * args.value.heads + head);
  }
  if (args.scale_src != nullptr) weight *= static_cast<const Acc<T>*>(args.scale_src)[args.a.col[entry]];
  return weight;
}

// Returns the edge values if they are in the order of the entries and if there are no other weights;
// otherwise null.
template <typename T>
FASTSPARSE_INLINE const T* plain_weights(const SpmmArgs& args) {
  const bool is_plain = args.value.dtype == args.dtype && args.value.heads == 1 &&
                        args.a.edge_id == nullptr && args.scale_src == nullptr;
  return is_plain ? static_cast<const T*>(args.value.data) : nullptr;
}

// The weight of a row's own features (`SpmmArgs::loop`).
template <typename T>
FASTSPARSE_INLINE Acc<T> loop_of(const SpmmArgs& args, std::int64_t row) {
  if (args.loop == nullptr) return 0;
  const Acc<T> loop = *static_cast<const Acc<T>*>(args.loop);
  return args.scale_src == nullptr ? loop : loop * static_cast<const Acc<T>*>(args.scale_src)[row];
}

// Loads an edge's values for consecutive features, if every feature has its own value.
template <typename T>
FASTSPARSE_INLINE void load_values(const SpmmArgs& args, std::int64_t index, Vector<Acc<T>>& to) {
  if (args.value.dtype == args.dtype) {
    load_vector<T>(static_cast<const T*>(args.value.data) + index, to);
  } else {
    load_vector<Acc<T>>(static_cast<const Acc<T>*>(args.value.data) + index, to);
  }
}

// Accumulates the kVectors vectors of features that begin at f, for one row. kByFeature: heads have one
// feature each, so every feature has its own value.
template <typename T, int kVectors, bool kByFeature = false>
FASTSPARSE_INLINE void accumulate_tile(const SpmmArgs& args, std::int64_t row, std::int64_t head,
                                       std::int64_t f) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  const T* x = static_cast<const T*>(args.x.data) + f;
  const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
  const bool weighted = args.value.data != nullptr || args.scale_src != nullptr;
  const T* weights = plain_weights<T>(args);
  const bool is_near = args.a.num_cols * args.x.stride * static_cast<std::int64_t>(sizeof(T)) <= kNearBytes;
  const std::int64_t prefetched = is_near ? 0 : args.a.num_edges;
  Vector<A> total[kVectors] = {}, compensation[kVectors] = {};
  for (std::int64_t block = begin; block < end; block += kEntriesPerSum) {
    const std::int64_t block_end = std::min(block + kEntriesPerSum, end);
    Vector<A> sum[kVectors] = {};
    for (std::int64_t entry = block; entry < block_end; ++entry) {
      if (entry + kPrefetchEntries < prefetched) {  // also prefetches for later rows
        const T* next = x + args.a.col[entry + kPrefetchEntries] * args.x.stride;
        prefetch(next, kVectors * kWidth * static_cast<int>(sizeof(T)));
      }
      const T* source = x + args.a.col[entry] * args.x.stride;
      if constexpr (kByFeature) {
        const std::int64_t first = edge_position(args.a, entry) * args.width + f;
        const A scale =
            args.scale_src != nullptr ? static_cast<const A*>(args.scale_src)[args.a.col[entry]] : A{1};
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          Vector<A> features, values;
          load_vector<T>(source + v * kWidth, features);
          load_values<T>(args, first + v * kWidth, values);
          sum[v] += features * (values * scale);
        }
      } else {
        A weight = 1;
        if (weights != nullptr) {
          weight = widen(weights[entry]);
        } else if (weighted) {
          weight = weight_of<T>(args, entry, head);
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          Vector<A> features;
          load_vector<T>(source + v * kWidth, features);
          sum[v] += features * weight;
        }
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) add_compensated(sum[v], total[v], compensation[v]);
  }
  const A scale = args.scale_dst != nullptr ? static_cast<const A*>(args.scale_dst)[row] : A{1};
  const T* bias = static_cast<const T*>(args.bias);
  const T* own = static_cast<const T*>(args.x.data) + row * args.x.stride + f;
  const A loop = loop_of<T>(args, row);
  T* out = static_cast<T*>(args.out) + row * args.width + f;
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    if (args.loop != nullptr) {
      Vector<A> features;
      load_vector<T>(own + v * kWidth, features);
      total[v] += features * loop;
    }
    Vector<A> shift = {};
    if (bias != nullptr) load_vector<T>(bias + f + v * kWidth, shift);
    Vector<A> sum = total[v] * scale + shift;
    if (args.relu) rectify_lanes(sum);
    store_vector<T>(sum, out + v * kWidth);
  }
}

template <typename T>
FASTSPARSE_INLINE void accumulate_feature(const SpmmArgs& args, std::int64_t row, std::int64_t head,
                                          std::int64_t f) {
  using A = Acc<T>;
  const T* x = static_cast<const T*>(args.x.data) + f;
  const std::int64_t end = args.a.rowptr[row + 1];
  A total = 0, compensation = 0;
  for (std::int64_t block = args.a.rowptr[row]; block < end; block += kEntriesPerSum) {
    A sum = 0;
    for (std::int64_t entry = block; entry < std::min(block + kEntriesPerSum, end); ++entry) {
      sum += weight_of<T>(args, entry, head) * widen(x[args.a.col[entry] * args.x.stride]);
    }
    add_compensated(sum, total, compensation);
  }
  if (args.loop != nullptr) total += loop_of<T>(args, row) * widen(x[row * args.x.stride]);
  if (args.scale_dst != nullptr) total *= static_cast<const A*>(args.scale_dst)[row];
  if (args.bias != nullptr) total += widen(static_cast<const T*>(args.bias)[f]);
  if (args.relu) total = rectify(total);
  narrow(total, static_cast<T*>(args.out) + row * args.width + f);
}

template <typename T>
FASTSPARSE_INLINE void multiply_rows(const SpmmArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  constexpr int kWidth = kVectorWidth<Acc<T>>;
  const std::int64_t heads = args.value.data != nullptr ? args.value.heads : 1;
  const std::int64_t head_width = args.width / heads;
  if (heads == args.width && heads >= kWidth) {
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      std::int64_t f = 0;
      for (; f + kTileVectors * kWidth <= heads; f += kTileVectors * kWidth) {
        accumulate_tile<T, kTileVectors, true>(args, row, f, f);
      }
      for (; f + kWidth <= heads; f += kWidth) accumulate_tile<T, 1, true>(args, row, f, f);
      for (; f < heads; ++f) accumulate_feature<T>(args, row, f, f);
    }
    return;
  }
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (std::int64_t head = 0; head < heads; ++head) {
      std::int64_t f = head * head_width;
      const std::int64_t end = f + head_width;
      for (; f + kTileVectors * kWidth <= end; f += kTileVectors * kWidth) {
        accumulate_tile<T, kTileVectors>(args, row, head, f);
      }
      if (f + 4 * kWidth <= end) {
        accumulate_tile<T, 4>(args, row, head, f);
        f += 4 * kWidth;
      }
      for (; f + 2 * kWidth <= end; f += 2 * kWidth) accumulate_tile<T, 2>(args, row, head, f);
      if (f + kWidth <= end) {
        accumulate_tile<T, 1>(args, row, head, f);
        f += kWidth;
      }
      if (f < end && head_width >= kWidth) {  // the last vector overlaps the previous one
        accumulate_tile<T, 1>(args, row, head, end - kWidth);
        f = end;
      }
      for (; f < end; ++f) accumulate_feature<T>(args, row, head, f);
    }
  }
}

}  // namespace

void spmm_csr(const SpmmArgs& args, int threads) {
  prefer_huge_pages(args.out, args.a.num_rows * args.width * size_of(args.dtype));
  with_type(args.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) \
    num_threads(threads) if (args.a.num_edges * args.width > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        multiply_rows<decltype(type)>(args, row, std::min(row + kRowsPerTask, args.a.num_rows));
      });
    }
  });
}

}  // namespace fastsparse::cpu
