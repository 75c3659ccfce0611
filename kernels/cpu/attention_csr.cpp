// Attention on the CPU, forward: scores, online softmax (Milakov and Gimelshein, 2018) and weighted sum, row
// by row, in blocks of 64 entries. The gather of keys and values bounds the time: num_edges * heads *
// (head_width + value_width) elements.
#include <vector>

#include "fastsparse/cpu_attention.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

template <typename A>
FASTSPARSE_INLINE void scale(const Sum<A>& sum, A factor, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) {
    sum.total[f] *= factor;
    sum.compensation[f] *= factor;
  }
}

template <typename A>
FASTSPARSE_INLINE void attend_rows(const AttentionCsrArgs& args, const std::vector<A>& weight,
                                   std::int64_t row_begin, std::int64_t row_end) {
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const std::int64_t heads = args.heads, value_width = args.value_width, width = heads * value_width;
  Edges<A> edges(args, weight);
  std::vector<A> left(score_columns(args)), maximum(heads);
  Sums<A> out(width), out_edge(edges.of_left.size());
  std::vector<double> sum(heads);
  A* lse = static_cast<A*>(args.lse);
  const std::int64_t last = args.a.rowptr[row_end];
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    widen_row(args.dst, score_dtype(args), row, left.size(), left.data());
    if (edges.in_scores) edges.map(left, edges.of_left);
    out.clear();
    out_edge.clear();
    std::fill(maximum.begin(), maximum.end(), -kInfinity);
    std::fill(sum.begin(), sum.end(), 0.0);
    const std::int64_t end = args.a.rowptr[row + 1];
    for (std::int64_t entry = args.a.rowptr[row]; entry < end; entry += kBlock) {
      const Block block = block_at(args.a, entry, end, last);
      const int lanes = padded<A>(block.count);
      edges.load(args, args.a, block, args.src);
      for (std::int64_t head = 0; head < heads; ++head) {
        Scores<A> scores;
        block_scores<A>(args, args.a, block, head, left.data(), args.src, edges, scores);
        for (int i = block.count; i < lanes; ++i) scores.score[i] = -kInfinity;
        const A block_highest = largest<A>(scores.score, lanes);
        // If a score is NaN, the maximum becomes NaN and remains NaN.
        const bool is_higher = block_highest > maximum[head] || block_highest != block_highest;
        const A highest = is_higher ? block_highest : maximum[head];
        // Masked entries (score -inf) are summed with weight 0, so infinite values give NaN, as on CUDA.
        const A reference = highest == -kInfinity ? A{0} : highest;
        for (int i = 0; i < lanes; ++i) scores.score[i] = exponential(scores.score[i] - reference);
        const Sum<A> of_head = out.from(head * value_width);
        const Sum<A> of_edges = out_edge.from(edges.in_values ? head * edges.stride : 0);
        if (highest != maximum[head]) {
          if (sum[head] != 0) {
            const A rescale = std::exp(maximum[head] - highest);
            sum[head] *= rescale;
            scale(of_head, rescale, value_width);
            if (edges.in_values) scale(of_edges, rescale, edges.width);
          }
          maximum[head] = highest;
        }
        sum[head] += sum_of(scores.score, lanes);
        if (args.dropout.threshold != 0) {
          for (int i = 0; i < block.count; ++i) {
            scores.score[i] *= keep_factor<A>(args, row, block.col[i], head);
          }
        }
        const Gather v = gather(args.v, args.dtype, head * value_width, block);
        accumulate(Term::kFeatures, scores.score, {}, v, value_width, of_head);
        if (edges.in_values) edges.add_sums(scores.score, lanes, of_edges);
      }
    }
    for (std::int64_t head = 0; head < heads; ++head) {
      const bool empty = maximum[head] == -kInfinity;
      const A inverse = empty ? A{0} : static_cast<A>(1 / sum[head]);
      const std::int64_t first = head * value_width;
      if (edges.in_values) edges.add_mapped(&out_edge.total[head * edges.stride], first, out.from(first));
      narrow_row(out.total.data() + first, inverse, value_width, args.out, args.dtype, row * width + first);
      lse[row * heads + head] = empty ? -kInfinity : static_cast<A>(maximum[head] + std::log(sum[head]));
    }
  }
}

}  // namespace

void attention_csr(const AttentionCsrArgs& args, int threads) {
  const std::int64_t step = rows_per_task(args, args.a.num_rows);
  with_sum_type(args.dtype, [&](auto type) {
    using A = decltype(type);
    const std::vector<A> weight = transposed_weight<A>(args);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (work(args) > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += step) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        attend_rows<A>(args, weight, row, std::min(row + step, args.a.num_rows));
      });
    }
  });
}

}  // namespace fastsparse::cpu
