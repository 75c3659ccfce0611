// Several aggregations of messages at once on the CPU, forward and backward: rows are divided among threads,
// and features are processed in vectors. Formulas are the same as in the CUDA kernels (multi_aggregate.cu and
// multi_aggregate_backward.cu). Unlike on CUDA, the column pass recomputes the messages and compares them
// with the row's maximum and minimum, instead of reading marks.
#include <algorithm>
#include <cmath>
#include <vector>

#include "fastsparse/cpu_attention.h"
#include "fastsparse/cpu_pages.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr int kBlockEntries = 8;  // squared deviations of this number of entries are computed from their mean

std::int64_t work(const CsrView& a, const MultiAggregateInput& input) {
  return a.num_edges * (input.width + (input.weight != nullptr ? input.width * input.edge_width : 0));
}

// Each loop over features is a function of its own, because compilers rely on __restrict only for parameters
// of functions.
template <typename A>
FASTSPARSE_INLINE void set_sum(const A* left, const A* right, A* __restrict to, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) to[f] = left[f] + right[f];
}
template <typename A>
FASTSPARSE_INLINE void add_scaled(A by, const A* from, A* __restrict to, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) to[f] += by * from[f];
}

// Computes x_j + e_ij of an entry and, with the destination's row (zeros without x_dst), its message.
template <typename A>
struct Messages {
  const MultiAggregateInput& input;
  const std::int64_t width = input.width;
  std::vector<A> workspace, edge_workspace, dst_workspace, rounded;
  const A* dst;

  explicit Messages(const MultiAggregateInput& of)
      : input(of),
        workspace(width),
        edge_workspace(of.edge_width),
        dst_workspace(width),
        rounded(width),
        dst(dst_workspace.data()) {}

  FASTSPARSE_INLINE void set_row(std::int64_t row) {
    if (input.x_dst.data != nullptr)
      dst = read_row(input.x_dst, input.dtype, row, width, dst_workspace.data());
  }

  FASTSPARSE_INLINE const A* features(std::int64_t position) {
    return read_row({input.edge, input.edge_width}, input.dtype, position, input.edge_width,
                    edge_workspace.data());
  }

  // Prefetches the edge's row of the entry kPrefetchEntries later, also beyond the end of this row. Also
  // prefetches that entry's row in `written`, a result of the same shape, if it is not null.
  FASTSPARSE_INLINE void prefetch_ahead(const CsrView& a, std::int64_t entry, void* written = nullptr) const {
    if (entry + kPrefetchEntries >= a.num_edges) return;
    const std::int64_t next = edge_position(a, entry + kPrefetchEntries), item = size_of(input.dtype);
    const auto* edge = static_cast<const char*>(input.edge);
    const std::int64_t bytes = input.edge_width * item;
    if (edge != nullptr) prefetch(edge + next * bytes, bytes);
    if (written != nullptr) prefetch<1>(static_cast<const char*>(written) + next * bytes, bytes);
  }

  FASTSPARSE_INLINE void without_destination(std::int64_t col, std::int64_t position, A* out) {
    const A* x = read_row(input.x_src, input.dtype, col, width, workspace.data());
    if (input.edge != nullptr && input.weight == nullptr) return set_sum(x, features(position), out, width);
    std::copy_n(x, width, out);
    if (input.edge == nullptr) return;
    const A* edge = features(position);
    for (std::int64_t k = 0; k < input.edge_width; ++k) {
      add_scaled(edge[k], static_cast<const A*>(input.weight) + k * width, out, width);
    }
  }

  FASTSPARSE_INLINE void whole(const A* without, A* out) {
    set_sum(without, dst, out, width);
    if (input.dtype == kDtypeOf<A>) return;
    narrow_row(out, A{1}, width, rounded.data(), input.dtype, 0);
    widen_row({rounded.data(), 0}, input.dtype, 0, width, out);
  }
};

// Sums of the entries of a row that were added so far. Squared deviations are relative to the mean, which
// avoids cancellation (Chan et al., Updating formulae and a pairwise algorithm for computing sample
// variances, 1979).
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

  // Adds one message to the sums of its block and to the extrema.
  static FASTSPARSE_INLINE void add_one(const A* m, bool first, A* __restrict total, A* __restrict most,
                                        A* __restrict most_ties, A* __restrict least,
                                        A* __restrict least_ties, std::int64_t width) {
    for (std::int64_t f = 0; f < width; ++f) {
      total[f] += m[f];
      const bool higher = first | (m[f] > most[f]) | (m[f] != m[f]);
      most_ties[f] = higher ? A{1} : most_ties[f] + (m[f] == most[f] ? A{1} : A{0});
      most[f] = higher ? m[f] : most[f];
      const bool lower = first | (m[f] < least[f]) | (m[f] != m[f]);
      least_ties[f] = lower ? A{1} : least_ties[f] + (m[f] == least[f] ? A{1} : A{0});
      least[f] = lower ? m[f] : least[f];
    }
  }
  // Merges a block's sums with the sums so far, including the term of the difference of their means.
  static FASTSPARSE_INLINE void merge(const A* block, A of_entries, A of_count, A both, A* __restrict total,
                                      A* __restrict squared, std::int64_t width) {
    for (std::int64_t f = 0; f < width; ++f) {
      const A shift = block[f] * of_entries - total[f] * of_count;
      squared[f] += shift * shift * both;
      total[f] += block[f];
    }
  }
  static FASTSPARSE_INLINE void add_squares(const A* m, const A* block, A of_entries, A* __restrict squared,
                                            std::int64_t width) {
    for (std::int64_t f = 0; f < width; ++f) {
      const A deviation = m[f] - block[f] * of_entries;
      squared[f] += deviation * deviation;
    }
  }

  FASTSPARSE_INLINE void add(const A* messages, int entries) {
    std::fill(of_block.begin(), of_block.end(), A{0});
    for (int u = 0; u < entries; ++u) {
      add_one(messages + u * width, count == 0 && u == 0, of_block.data(), high.data(), high_ties.data(),
              low.data(), low_ties.data(), width);
    }
    const A of_entries = A{1} / entries, of_count = count > 0 ? A{1} / count : A{0};
    const A both = static_cast<A>(count) * entries / static_cast<A>(count + entries);
    merge(of_block.data(), of_entries, of_count, both, sum.data(), squares.data(), width);
    for (int u = 0; u < entries; ++u) {
      add_squares(messages + u * width, of_block.data(), of_entries, squares.data(), width);
    }
    count += entries;
  }
};

// The results of one aggregation in a row are stored in pieces, one per group of features. Calls f(position
// of a piece, its first feature, its width) for each piece.
template <typename F>
FASTSPARSE_INLINE void for_pieces(const MultiAggregateInput& input, std::int64_t row, int slot, const F& f) {
  for (std::int64_t first = 0; first < input.width; first += input.group_width) {
    f(input.place(row, slot, first), first, std::min(input.group_width, input.width - first));
  }
}

template <typename A>
FASTSPARSE_INLINE void aggregate_rows(const MultiAggregateArgs& args, std::int64_t row_begin,
                                      std::int64_t row_end) {
  const MultiAggregateInput& input = args.input;
  const std::int64_t width = input.width;
  Messages<A> messages(input);
  Aggregates<A> of_row(width);
  std::vector<A> block(kBlockEntries * width), without(width), mean(width), variance(width), deviation(width);
  const A* results[kNumAggregations] = {of_row.sum.data(),  mean.data(),     of_row.low.data(),
                                        of_row.high.data(), variance.data(), deviation.data()};
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
    messages.set_row(row);
    of_row.clear();
    for (std::int64_t first = begin; first < end; first += kBlockEntries) {
      const int entries = static_cast<int>(std::min<std::int64_t>(kBlockEntries, end - first));
      for (int u = 0; u < entries; ++u) {
        messages.prefetch_ahead(args.a, first + u);
        messages.without_destination(args.a.col[first + u], edge_position(args.a, first + u), without.data());
        messages.whole(without.data(), block.data() + u * width);
      }
      of_row.add(block.data(), entries);
    }
    const A inverse = end > begin ? A{1} / static_cast<A>(end - begin) : A{0};
    for (std::int64_t f = 0; f < width; ++f) mean[f] = of_row.sum[f] * inverse;
    for (std::int64_t f = 0; f < width; ++f) {
      variance[f] = of_row.low[f] == of_row.high[f] ? A{0} : of_row.squares[f] * inverse;
      deviation[f] = variance[f] <= static_cast<A>(input.min_variance) ? A{0} : std::sqrt(variance[f]);
    }
    for (int k = 0; k < kNumAggregations; ++k) {
      if (input.slot[k] < 0) continue;
      for_pieces(input, row, input.slot[k], [&](std::int64_t to, std::int64_t first, std::int64_t count) {
        write_row(results[k] + first, count, args.out, input.dtype, to);
      });
    }
    if (args.mean != nullptr) std::copy(mean.begin(), mean.end(), static_cast<A*>(args.mean) + row * width);
    if (args.ties != nullptr) {
      A* ties = static_cast<A*>(args.ties) + row * 2 * width;
      std::copy(of_row.high_ties.begin(), of_row.high_ties.end(), ties);
      std::copy(of_row.low_ties.begin(), of_row.low_ties.end(), ties + width);
    }
  }
}

// Gradient of a row's messages: dm = base + slope (x_j + e_ij) + [m = high] high_share + [m = low] low_share.
template <typename A>
struct RowGradient {
  const MultiAggregateBackwardArgs& args;
  const std::int64_t width = args.input.width;
  std::vector<A> of_results[kNumAggregations], out, grad_dst;

  explicit RowGradient(const MultiAggregateBackwardArgs& of) : args(of), out(width), grad_dst(width) {
    for (auto& of_one : of_results) of_one.resize(width);  // an aggregation that is not requested has zeros
  }

  // Reads the results of one aggregation in a row, or the gradients of these results.
  FASTSPARSE_INLINE void read(const void* results, std::int64_t row, int aggregation, A* to) const {
    const MultiAggregateInput& input = args.input;
    if (input.slot[aggregation] < 0) return;
    for_pieces(input, row, input.slot[aggregation],
               [&](std::int64_t from, std::int64_t first, std::int64_t count) {
                 const A* piece = read_row({results, 1}, input.dtype, from, count, to + first);
                 if (piece != to + first) std::copy_n(piece, count, to + first);
               });
  }

  FASTSPARSE_INLINE void prepare(std::int64_t row, std::int64_t count, const A* dst) {
    for (int k = 0; k < kNumAggregations; ++k) read(args.grad, row, k, of_results[k].data());
    const A *of_sum = of_results[0].data(), *of_mean = of_results[1].data(), *of_low = of_results[2].data(),
            *of_high = of_results[3].data();
    const A inverse = count > 0 ? A{1} / static_cast<A>(count) : A{0};
    A* base = static_cast<A*>(args.base) + row * width;
    for (std::int64_t f = 0; f < width; ++f) base[f] = of_sum[f] + of_mean[f] * inverse;
    if (args.slope != nullptr) {
      read(args.out, row, 5, out.data());
      A* slope = static_cast<A*>(args.slope) + row * width;
      const A* mean = static_cast<const A*>(args.mean) + row * width;
      for (std::int64_t f = 0; f < width; ++f) {
        A of_variance = of_results[4][f];
        if (out[f] != A{0}) of_variance += of_results[5][f] / (2 * out[f]);
        slope[f] = 2 * inverse * of_variance;
        base[f] -= slope[f] * (mean[f] - dst[f]);
      }
    }
    if (args.share != nullptr) {
      const A* ties = static_cast<const A*>(args.ties) + row * 2 * width;
      A* share = static_cast<A*>(args.share) + row * 2 * width;
      for (std::int64_t f = 0; f < width; ++f) {
        share[f] = count > 0 ? of_high[f] / ties[f] : A{0};
        share[width + f] = count > 0 ? of_low[f] / ties[width + f] : A{0};
      }
    }
    if (args.grad_dst == nullptr) return;
    for (std::int64_t f = 0; f < width; ++f) {
      grad_dst[f] =
          count > 0 ? of_sum[f] * static_cast<A>(count) + of_mean[f] + of_low[f] + of_high[f] : A{0};
    }
    write_row(grad_dst.data(), width, args.grad_dst, args.input.dtype, row * width);
  }

  static FASTSPARSE_INLINE void add_sloped(const A* base, const A* slope, const A* without,
                                           A* __restrict grad, std::int64_t width) {
    for (std::int64_t f = 0; f < width; ++f) grad[f] = base[f] + slope[f] * without[f];
  }
  static FASTSPARSE_INLINE void add_share(const A* share, const A* message, const A* extremum,
                                          A* __restrict grad, std::int64_t width) {
    for (std::int64_t f = 0; f < width; ++f) grad[f] += message[f] == extremum[f] ? share[f] : A{0};
  }

  FASTSPARSE_INLINE void of_message(std::int64_t row, const A* without, const A* message, A* grad) {
    const A* base = static_cast<const A*>(args.base) + row * width;
    if (args.slope != nullptr) {
      add_sloped(base, static_cast<const A*>(args.slope) + row * width, without, grad, width);
    } else {
      std::copy_n(base, width, grad);
    }
    if (args.share == nullptr) return;
    const A* share = static_cast<const A*>(args.share) + row * 2 * width;
    for (const int aggregation : {3, 2}) {
      if (args.input.slot[aggregation] >= 0) {
        read(args.out, row, aggregation, out.data());
        add_share(share, message, out.data(), grad, width);
      }
      share += width;
    }
  }
};

template <typename A>
FASTSPARSE_INLINE void differentiate_rows(const MultiAggregateBackwardArgs& args, std::int64_t part) {
  const MultiAggregateInput& input = args.input;
  const std::int64_t width = input.width, edge_width = input.edge_width;
  Messages<A> messages(input);
  RowGradient<A> gradient{args};
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
      messages.prefetch_ahead(args.a, entry, weight == nullptr ? args.grad_edge : nullptr);
      messages.without_destination(args.a.col[entry], position, without.data());
      messages.whole(without.data(), message.data());
      gradient.of_message(row, without.data(), message.data(), grad.data());
      if (weight == nullptr) {
        write_row(grad.data(), width, args.grad_edge, input.dtype, position * width);
        continue;
      }
      const A* features = messages.features(position);
      for (std::int64_t k = 0; k < edge_width; ++k) {
        if (args.grad_edge != nullptr) {
          A total = 0;
          for (std::int64_t f = 0; f < width; ++f) total += weight[k * width + f] * grad[f];
          static_cast<A*>(args.grad_edge)[position * edge_width + k] = total;
        }
        if (of_weight != nullptr) add_scaled<A>(features[k], grad.data(), of_weight + k * width, width);
      }
    }
  }
}

template <typename A>
FASTSPARSE_INLINE void differentiate_columns(const MultiAggregateBackwardArgs& args, std::int64_t begin,
                                             std::int64_t end) {
  const std::int64_t width = args.input.width;
  Messages<A> messages(args.input);
  RowGradient<A> gradient{args};
  std::vector<A> without(width), message(width), grad(width), total(width);
  for (std::int64_t col = begin; col < end; ++col) {
    std::fill(total.begin(), total.end(), A{0});
    for (std::int64_t entry = args.a_t.rowptr[col]; entry < args.a_t.rowptr[col + 1]; ++entry) {
      const std::int64_t row = args.a_t.col[entry];
      messages.prefetch_ahead(args.a_t, entry);
      messages.without_destination(col, edge_position(args.a_t, entry), without.data());
      if (args.share != nullptr) {
        messages.set_row(row);
        messages.whole(without.data(), message.data());
      }
      gradient.of_message(row, without.data(), message.data(), grad.data());
      for (std::int64_t f = 0; f < width; ++f) total[f] += grad[f];
    }
    write_row(total.data(), width, args.grad_src, args.input.dtype, col * width);
  }
}

}  // namespace

void multi_aggregate(const MultiAggregateArgs& args, int threads) {
  with_sum_type(args.input.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        aggregate_rows<decltype(type)>(args, row, std::min(row + kRowsPerTask, args.a.num_rows));
      });
    }
  });
}

void multi_aggregate_backward(const MultiAggregateBackwardArgs& args, int threads) {
  const bool many = work(args.a, args.input) > kSerialWork;
  with_sum_type(args.input.dtype, [&](auto type) {
    using A = decltype(type);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (many)
    for (std::int64_t part = 0; part < args.weight_parts; ++part) {
      for_this_machine([&]() FASTSPARSE_INLINED { differentiate_rows<A>(args, part); });
    }
    if (args.grad_src == nullptr) return;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (many)
    for (std::int64_t col = 0; col < args.a_t.num_rows; col += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        differentiate_columns<A>(args, col, std::min(col + kRowsPerTask, args.a_t.num_rows));
      });
    }
  });
}

}  // namespace fastsparse::cpu
