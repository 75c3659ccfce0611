// Several aggregations of messages at once on the CPU, forward and backward: rows over threads, vectors over
// features. Formulas are those of the CUDA kernels (multi_aggregate.cu and multi_aggregate_backward.cu), but
// the column pass recomputes the messages and compares them with the row's maximum and minimum.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 15;  // products below which waking threads costs more than it saves
constexpr int kBlock = 8;  // entries whose squared deviations are summed around their own mean

std::int64_t work(const CsrView& a, const MultiAggregateInput& input) {
  return a.num_edges * (input.width + (input.weight != nullptr ? input.width * input.edge_width : 0));
}

// x_j + e_ij of an entry and, with the destination's row (zeros where there is none), its message.
template <typename T>
struct Messages {
  using A = Acc<T>;
  const MultiAggregateInput& input;
  std::vector<A> dst;

  explicit FASTSPARSE_INLINE Messages(const MultiAggregateInput& of) : input(of), dst(of.width) {}

  FASTSPARSE_INLINE void set_row(std::int64_t row) {
    if (input.x_dst.data == nullptr) return;
    const T* from = static_cast<const T*>(input.x_dst.data) + row * input.x_dst.stride;
    for (std::int64_t f = 0; f < input.width; ++f) dst[f] = widen(from[f]);
  }

  FASTSPARSE_INLINE void without_destination(std::int64_t col, std::int64_t position, A* out) const {
    const std::int64_t width = input.width;
    const T* from = static_cast<const T*>(input.x_src.data) + col * input.x_src.stride;
    for (std::int64_t f = 0; f < width; ++f) out[f] = widen(from[f]);
    if (input.edge == nullptr) return;
    const T* edge = static_cast<const T*>(input.edge) + position * input.edge_width;
    if (input.weight == nullptr) {
      for (std::int64_t f = 0; f < width; ++f) out[f] += widen(edge[f]);
      return;
    }
    for (std::int64_t k = 0; k < input.edge_width; ++k) {
      const A feature = widen(edge[k]);
      const A* weight = static_cast<const A*>(input.weight) + k * width;
      for (std::int64_t f = 0; f < width; ++f) out[f] += feature * weight[f];
    }
  }

  FASTSPARSE_INLINE void whole(const A* without, A* out) const {
    for (std::int64_t f = 0; f < input.width; ++f) {
      A message = without[f] + dst[f];
      if constexpr (!std::is_same_v<T, A>) {
        T rounded;
        narrow(message, &rounded);
        message = widen(rounded);
      }
      out[f] = message;
    }
  }
};

// A row's sums so far. Squared deviations are those from the mean (Chan et al., Updating formulae and a
// pairwise algorithm for computing sample variances, 1979): nothing cancels.
template <typename A>
struct Aggregates {
  std::int64_t width, count = 0;
  std::vector<A> sum, squares, high, low, high_ties, low_ties, of_block;

  explicit FASTSPARSE_INLINE Aggregates(std::int64_t of)
      : width(of), sum(of), squares(of), high(of), low(of), high_ties(of), low_ties(of), of_block(of) {}

  FASTSPARSE_INLINE void clear() {
    count = 0;
    for (auto* part : {&sum, &squares, &high, &low, &high_ties, &low_ties}) {
      std::fill(part->begin(), part->end(), A{0});
    }
  }

  FASTSPARSE_INLINE void add(const A* messages, int entries) {
    std::fill(of_block.begin(), of_block.end(), A{0});
    for (int u = 0; u < entries; ++u) {
      const A* m = messages + u * width;
      const bool first = count == 0 && u == 0;
      for (std::int64_t f = 0; f < width; ++f) {
        of_block[f] += m[f];
        const bool higher = first | (m[f] > high[f]) | (m[f] != m[f]);
        high_ties[f] = higher ? A{1} : high_ties[f] + (m[f] == high[f] ? A{1} : A{0});
        high[f] = higher ? m[f] : high[f];
        const bool lower = first | (m[f] < low[f]) | (m[f] != m[f]);
        low_ties[f] = lower ? A{1} : low_ties[f] + (m[f] == low[f] ? A{1} : A{0});
        low[f] = lower ? m[f] : low[f];
      }
    }
    const A of_entries = A{1} / entries, of_count = count > 0 ? A{1} / count : A{0};
    const A both = static_cast<A>(count) * entries / static_cast<A>(count + entries);
    for (std::int64_t f = 0; f < width; ++f) {
      const A shift = of_block[f] * of_entries - sum[f] * of_count;
      squares[f] += shift * shift * both;
      sum[f] += of_block[f];
    }
    for (int u = 0; u < entries; ++u) {
      const A* m = messages + u * width;
      for (std::int64_t f = 0; f < width; ++f) {
        const A deviation = m[f] - of_block[f] * of_entries;
        squares[f] += deviation * deviation;
      }
    }
    count += entries;
  }
};

template <typename T>
FASTSPARSE_INLINE void aggregate_rows(const MultiAggregateArgs& args, std::int64_t row_begin,
                                      std::int64_t row_end) {
  using A = Acc<T>;
  const MultiAggregateInput& input = args.input;
  const std::int64_t width = input.width;
  const auto* slot = input.slot;
  Messages<T> messages(input);
  Aggregates<A> of_row(width);
  std::vector<A> block(kBlock * width), without(width);
  auto* out = static_cast<T*>(args.out);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
    messages.set_row(row);
    of_row.clear();
    for (std::int64_t first = begin; first < end; first += kBlock) {
      const int entries = static_cast<int>(std::min<std::int64_t>(kBlock, end - first));
      for (int u = 0; u < entries; ++u) {
        messages.without_destination(args.a.col[first + u], edge_position(args.a, first + u), without.data());
        messages.whole(without.data(), block.data() + u * width);
      }
      of_row.add(block.data(), entries);
    }
    const A inverse = end > begin ? A{1} / static_cast<A>(end - begin) : A{0};
    for (std::int64_t f = 0; f < width; ++f) {
      const A mean = of_row.sum[f] * inverse;
      const A variance = of_row.low[f] == of_row.high[f] ? A{0} : of_row.squares[f] * inverse;
      const A deviation = variance <= static_cast<A>(input.min_variance) ? A{0} : std::sqrt(variance);
      const A result[kNumAggregations] = {of_row.sum[f],  mean,     of_row.low[f],
                                          of_row.high[f], variance, deviation};
      for (int k = 0; k < kNumAggregations; ++k) {
        if (slot[k] >= 0) narrow(result[k], out + input.place(row, slot[k], f));
      }
      if (args.mean != nullptr) static_cast<A*>(args.mean)[row * width + f] = mean;
    }
    if (args.ties != nullptr) {
      A* ties = static_cast<A*>(args.ties) + row * 2 * width;
      std::copy(of_row.high_ties.begin(), of_row.high_ties.end(), ties);
      std::copy(of_row.low_ties.begin(), of_row.low_ties.end(), ties + width);
    }
  }
}

// What a row's messages get: dm = base + slope (x_j + e_ij) + [m = high] high_share + [m = low] low_share.
template <typename T>
struct RowGradient {
  using A = Acc<T>;
  const MultiAggregateBackwardArgs& args;
  std::int64_t width = args.input.width;

  FASTSPARSE_INLINE A number(const void* results, std::int64_t row, int aggregation, std::int64_t f) const {
    const int slot = args.input.slot[aggregation];
    return slot < 0 ? A{0} : A{widen(static_cast<const T*>(results)[args.input.place(row, slot, f)])};
  }

  FASTSPARSE_INLINE void prepare(std::int64_t row, std::int64_t count, const std::vector<A>& dst) const {
    const A inverse = count > 0 ? A{1} / static_cast<A>(count) : A{0};
    for (std::int64_t f = 0; f < width; ++f) {
      const std::int64_t at = row * width + f;
      const A of_sum = number(args.grad, row, 0, f), of_mean = number(args.grad, row, 1, f);
      const A of_low = number(args.grad, row, 2, f), of_high = number(args.grad, row, 3, f);
      A base = of_sum + of_mean * inverse;
      if (args.slope != nullptr) {
        const A deviation = number(args.out, row, 5, f);
        A of_variance = number(args.grad, row, 4, f);
        if (deviation != A{0}) of_variance += number(args.grad, row, 5, f) / (2 * deviation);
        const A slope = 2 * inverse * of_variance;
        static_cast<A*>(args.slope)[at] = slope;
        base -= slope * (static_cast<const A*>(args.mean)[at] - dst[f]);
      }
      static_cast<A*>(args.base)[at] = base;
      if (args.share != nullptr) {
        const A* ties = static_cast<const A*>(args.ties) + row * 2 * width + f;
        A* share = static_cast<A*>(args.share) + row * 2 * width + f;
        share[0] = count > 0 ? of_high / ties[0] : A{0};
        share[width] = count > 0 ? of_low / ties[width] : A{0};
      }
      if (args.grad_dst != nullptr) {
        narrow(count > 0 ? of_sum * static_cast<A>(count) + of_mean + of_low + of_high : A{0},
               static_cast<T*>(args.grad_dst) + at);
      }
    }
  }

  FASTSPARSE_INLINE void of_message(std::int64_t row, const A* without, const A* message, A* grad) const {
    const A* base = static_cast<const A*>(args.base) + row * width;
    for (std::int64_t f = 0; f < width; ++f) grad[f] = base[f];
    if (args.slope != nullptr) {
      const A* slope = static_cast<const A*>(args.slope) + row * width;
      for (std::int64_t f = 0; f < width; ++f) grad[f] += slope[f] * without[f];
    }
    if (args.share == nullptr) return;
    const A* share = static_cast<const A*>(args.share) + row * 2 * width;
    for (const int aggregation : {3, 2}) {
      if (args.input.slot[aggregation] >= 0) {
        for (std::int64_t f = 0; f < width; ++f) {
          grad[f] += message[f] == number(args.out, row, aggregation, f) ? share[f] : A{0};
        }
      }
      share += width;
    }
  }
};

template <typename T>
FASTSPARSE_INLINE void differentiate_rows(const MultiAggregateBackwardArgs& args, std::int64_t part) {
  using A = Acc<T>;
  const MultiAggregateInput& input = args.input;
  const std::int64_t width = input.width, edge_width = input.edge_width;
  Messages<T> messages(input);
  const RowGradient<T> gradient{args};
  std::vector<A> without(width), message(width), grad(width);
  A* of_weight = static_cast<A*>(args.grad_weight);
  if (of_weight != nullptr) {
    of_weight += part * edge_width * width;
    std::fill(of_weight, of_weight + edge_width * width, A{0});
  }
  const auto* weight = static_cast<const A*>(input.weight);
  const std::int64_t last = (part + 1) * args.a.num_rows / args.weight_parts;
  for (std::int64_t row = part * args.a.num_rows / args.weight_parts; row < last; ++row) {
    const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
    messages.set_row(row);
    gradient.prepare(row, end - begin, messages.dst);
    if (args.grad_edge == nullptr && of_weight == nullptr) continue;
    for (std::int64_t entry = begin; entry < end; ++entry) {
      const std::int64_t position = edge_position(args.a, entry);
      messages.without_destination(args.a.col[entry], position, without.data());
      messages.whole(without.data(), message.data());
      gradient.of_message(row, without.data(), message.data(), grad.data());
      if (weight == nullptr) {
        T* to = static_cast<T*>(args.grad_edge) + position * width;
        for (std::int64_t f = 0; f < width; ++f) narrow(grad[f], to + f);
        continue;
      }
      for (std::int64_t k = 0; k < edge_width; ++k) {
        if (args.grad_edge != nullptr) {
          A total = 0;
          for (std::int64_t f = 0; f < width; ++f) total += weight[k * width + f] * grad[f];
          static_cast<A*>(args.grad_edge)[position * edge_width + k] = total;
        }
        if (of_weight != nullptr) {
          const A feature = widen(static_cast<const T*>(input.edge)[position * edge_width + k]);
          for (std::int64_t f = 0; f < width; ++f) of_weight[k * width + f] += feature * grad[f];
        }
      }
    }
  }
}

template <typename T>
FASTSPARSE_INLINE void differentiate_columns(const MultiAggregateBackwardArgs& args, std::int64_t begin,
                                             std::int64_t end) {
  using A = Acc<T>;
  const std::int64_t width = args.input.width;
  Messages<T> messages(args.input);
  const RowGradient<T> gradient{args};
  std::vector<A> without(width), message(width), grad(width), total(width);
  for (std::int64_t col = begin; col < end; ++col) {
    std::fill(total.begin(), total.end(), A{0});
    for (std::int64_t entry = args.a_t.rowptr[col]; entry < args.a_t.rowptr[col + 1]; ++entry) {
      const std::int64_t row = args.a_t.col[entry];
      messages.without_destination(col, edge_position(args.a_t, entry), without.data());
      if (args.share != nullptr) {
        messages.set_row(row);
        messages.whole(without.data(), message.data());
      }
      gradient.of_message(row, without.data(), message.data(), grad.data());
      for (std::int64_t f = 0; f < width; ++f) total[f] += grad[f];
    }
    T* to = static_cast<T*>(args.grad_src) + col * width;
    for (std::int64_t f = 0; f < width; ++f) narrow(total[f], to + f);
  }
}

// One plain function per type and pass: the compiler multi-versions functions, not templates.
#define FASTSPARSE_PASSES(T)                                                                                 \
  FASTSPARSE_MULTIVERSION void rows(T, const MultiAggregateArgs& args, std::int64_t begin,                   \
                                    std::int64_t end) {                                                      \
    aggregate_rows<T>(args, begin, end);                                                                     \
  }                                                                                                          \
  FASTSPARSE_MULTIVERSION void row_gradients(T, const MultiAggregateBackwardArgs& args, std::int64_t part) { \
    differentiate_rows<T>(args, part);                                                                       \
  }                                                                                                          \
  FASTSPARSE_MULTIVERSION void column_gradients(T, const MultiAggregateBackwardArgs& args,                   \
                                                std::int64_t begin, std::int64_t end) {                      \
    differentiate_columns<T>(args, begin, end);                                                              \
  }
FASTSPARSE_PASSES(double)
FASTSPARSE_PASSES(float)
FASTSPARSE_PASSES(Half)
FASTSPARSE_PASSES(BFloat16)
#undef FASTSPARSE_PASSES

}  // namespace

void multi_aggregate(const MultiAggregateArgs& args, int threads) {
  with_type(args.input.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      rows(type, args, row, std::min(row + kRowsPerTask, args.a.num_rows));
    }
  });
}

void multi_aggregate_backward(const MultiAggregateBackwardArgs& args, int threads) {
  const bool many = work(args.a, args.input) > kSerialWork;
  with_type(args.input.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (many)
    for (std::int64_t part = 0; part < args.weight_parts; ++part) row_gradients(type, args, part);
    if (args.grad_src == nullptr) return;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (many)
    for (std::int64_t col = 0; col < args.a_t.num_rows; col += kRowsPerTask) {
      column_gradients(type, args, col, std::min(col + kRowsPerTask, args.a_t.num_rows));
    }
  });
}

}  // namespace fastsparse::cpu
