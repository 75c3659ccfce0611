// Attention on the CPU, backward, with the scores recomputed as in FlashAttention-2: with p = exp(score -
// lse), dp_ij = <dO_i, v_j> and ds_ij = p_ij (dropout_ij dp_ij - <dO_i, O_i>),
//   the pass over rows sums d(dst) and writes d(bias), the pass over columns sums d(src) and dV.
// Nothing is scattered: no atomics, and sums in a fixed order.
#include <vector>

#include "fastsparse/attention_gradients.h"
#include "fastsparse/cpu_attention.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

// What the pass over rows leaves to the pass over columns. The sum of a row's weights, as they are
// recomputed, makes up for the rounding of lse, which is coarse where scores are large; <dO_i, O_i> is summed
// again for the same reason.
template <typename A>
struct RowState {
  A delta;
  A inverse_sum;
};

template <typename A>
struct Scratch {
  GradientStrides strides;
  RowState<A>* rows;  // (num_rows, heads)
  A* grad_att;        // (tasks, heads * head_width)
};

// Numbers of the entries of a block, for one head; those beyond its end, up to a whole vector, are 0.
template <typename A>
struct Terms {
  A weight[kBlock];  // p; then p times the dropout factor
  A factor[kBlock];  // of dropout
  A grad[kBlock];    // dp; then ds, of additive attention times the slope
  A slope[kBlock];
  A lse[kBlock];
};

// Fills in weights, up to the sum of each row, dp and slopes. `left` and `value` are the row's own, of dst
// and dO, or in the transposed structure of src and v; `right` and `values` are gathered.
template <typename A>
FASTSPARSE_INLINE void recompute(const AttentionCsrArgs& args, const CsrView& a, const Block& block,
                                 std::int64_t head, const std::vector<A>& left, const DenseView& right,
                                 const std::vector<A>& value, const DenseView& values, Terms<A>& terms) {
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  Scores<A> scores;
  block_scores<A>(args, a, block, head, left.data(), right, scores);
  const int lanes = padded<A>(block.count);
  const std::int64_t first = head * args.value_width;
  products({value.data() + first, nullptr, 0}, gather(values, args.dtype, first, block), args.value_width,
           terms.grad);
  for (int i = 0; i < block.count; ++i)
    terms.slope[i] = args.kind == AttentionScore::kAdditive ? scores.slope[i] : A{1};
  for (int i = block.count; i < lanes; ++i) {
    scores.score[i] = terms.lse[i] = -kInfinity;
    terms.grad[i] = terms.factor[i] = terms.slope[i] = 0;
  }
  for (int i = 0; i < lanes; ++i) {
    const A p = exponential(scores.score[i] - terms.lse[i]);
    terms.weight[i] = terms.lse[i] == -kInfinity ? 0 : p;  // beyond the end, or nothing but masked entries
  }
}

// Turns weights into normalised ones with dropout, and dp into ds, for row states `delta` and `inverse_sum`.
template <typename A>
FASTSPARSE_INLINE void finish(const A* delta, const A* inverse_sum, int count, Terms<A>& terms) {
  for (int i = 0; i < count; ++i) {
    const A p = terms.weight[i] * inverse_sum[i];
    terms.weight[i] = p * terms.factor[i];
    terms.grad[i] = p * (terms.factor[i] * terms.grad[i] - delta[i]) * terms.slope[i];
  }
}

// Adds what the entries of a block give to the gradient of `left`, up to a constant factor.
template <typename A>
FASTSPARSE_INLINE void add_score_gradients(const AttentionCsrArgs& args, const A* grad, const Block& block,
                                           std::int64_t head, const std::vector<A>& left,
                                           const DenseView& right, std::vector<A>& total,
                                           std::vector<A>& compensation) {
  if (args.kind == AttentionScore::kAdditive) {
    add_compensated(sum_of<A>(grad, padded<A>(block.count)), total[head], compensation[head]);
    return;
  }
  const std::int64_t first = head * args.head_width;
  const Hidden<A> hidden{left.data() + first, nullptr, static_cast<A>(args.scale)};
  const Sum<A> sum{total.data() + first, compensation.data() + first};
  const Term term = args.kind == AttentionScore::kGatv2 ? Term::kSlope : Term::kFeatures;
  accumulate(term, grad, hidden, gather_again(right, args.dtype, first, block), args.head_width, sum);
}

// Writes the gradient of a row of dst or src.
template <typename A>
FASTSPARSE_INLINE void write_score_row(const AttentionCsrArgs& args, const std::vector<A>& total, void* to,
                                       std::int64_t first) {
  const A scale = args.kind == AttentionScore::kDotProduct ? static_cast<A>(args.scale) : A{1};
  narrow_row(total.data(), scale, static_cast<std::int64_t>(total.size()), to, score_dtype(args), first);
}

template <typename A>
FASTSPARSE_INLINE void differentiate_rows(const AttentionCsrBackwardArgs& args, const Scratch<A>& scratch,
                                          std::int64_t row_begin, std::int64_t row_end) {
  const AttentionCsrArgs& forward = args.forward;
  const std::int64_t heads = forward.heads;
  const auto slope = static_cast<A>(forward.scale);
  const auto* att = static_cast<const A*>(forward.att);
  std::vector<A> left(score_columns(forward)), grad(heads * forward.value_width), total(left.size()),
      compensation(left.size());
  std::vector<Terms<A>> terms(heads);
  std::vector<RowState<double>> sums(heads);
  std::vector<A> att_total(forward.kind == AttentionScore::kGatv2 ? left.size() : 0),
      att_compensation(att_total.size());
  const std::int64_t last = forward.a.rowptr[row_end];
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    widen_row(forward.dst, score_dtype(forward), row, left.size(), left.data());
    widen_row(args.grad, forward.dtype, row, grad.size(), grad.data());
    std::fill(total.begin(), total.end(), A{0});
    std::fill(compensation.begin(), compensation.end(), A{0});
    const A* lse = static_cast<const A*>(forward.lse) + row * heads;
    const std::int64_t begin = forward.a.rowptr[row], end = forward.a.rowptr[row + 1];
    std::fill(sums.begin(), sums.end(), RowState<double>{0, 0});
    // Twice over the row: its sums, then its gradients. The only block of a short row is still there.
    for (const bool summing : {true, false}) {
      for (std::int64_t entry = begin; entry < end; entry += kBlock) {
        const Block block = block_at(forward.a, entry, end, last);
        const int lanes = padded<A>(block.count);
        for (std::int64_t head = 0; head < heads; ++head) {
          if (summing || end - begin > kBlock) {
            std::fill(terms[head].lse, terms[head].lse + block.count, lse[head]);
            for (int i = 0; i < block.count; ++i) {
              terms[head].factor[i] = keep_factor<A>(forward, row, block.col[i], head);
            }
            recompute<A>(forward, forward.a, block, head, left, forward.src, grad, forward.v, terms[head]);
          }
          if (summing) {
            A share[kBlock] = {};
            for (int i = 0; i < lanes; ++i) {
              share[i] = terms[head].weight[i] * terms[head].factor[i] * terms[head].grad[i];
            }
            sums[head].delta += sum_of<A>(share, lanes);
            sums[head].inverse_sum += sum_of<A>(terms[head].weight, lanes);
            continue;
          }
          const double inverse_sum = sums[head].inverse_sum != 0 ? 1 / sums[head].inverse_sum : 0;
          const RowState<A> state{static_cast<A>(sums[head].delta * inverse_sum),
                                  static_cast<A>(inverse_sum)};
          scratch.rows[row * heads + head] = state;
          A delta[kBlock], inverse[kBlock];
          std::fill(delta, delta + lanes, state.delta);
          std::fill(inverse, inverse + lanes, state.inverse_sum);
          finish(delta, inverse, lanes, terms[head]);
          const A* gradient = terms[head].grad;
          if (args.grad_bias != nullptr) {
            for (int i = 0; i < block.count; ++i) {
              const std::int64_t at = edge_position(forward.a, block.entry + i) * heads + head;
              set_number(args.grad_bias, forward.bias.dtype, at, gradient[i]);
            }
          }
          add_score_gradients<A>(forward, gradient, block, head, left, forward.src, total, compensation);
          if (forward.kind == AttentionScore::kGatv2) {
            const std::int64_t first = head * forward.head_width;
            accumulate(Term::kHidden, gradient, {left.data() + first, nullptr, slope},
                       gather_again(forward.src, forward.dtype, first, block), forward.head_width,
                       {att_total.data() + first, att_compensation.data() + first});
          }
        }
      }
    }
    if (forward.kind == AttentionScore::kGatv2) {
      for (std::size_t f = 0; f < total.size(); ++f) total[f] *= att[f];
    }
    write_score_row(forward, total, args.grad_dst, row * scratch.strides.dst);
  }
  if (forward.kind == AttentionScore::kGatv2) {
    const std::int64_t task = row_begin / kRowsPerTask;
    std::copy(att_total.begin(), att_total.end(), scratch.grad_att + task * left.size());
  }
}

template <typename A>
FASTSPARSE_INLINE void differentiate_columns(const AttentionCsrBackwardArgs& args, const Scratch<A>& scratch,
                                             std::int64_t col_begin, std::int64_t col_end) {
  const AttentionCsrArgs& forward = args.forward;
  const std::int64_t heads = forward.heads, value_width = forward.value_width;
  const auto* att = static_cast<const A*>(forward.att);
  std::vector<A> left(score_columns(forward)), total(left.size()), compensation(left.size());
  std::vector<A> value(heads * value_width), value_total(value.size()), value_compensation(value.size());
  Terms<A> terms;
  const std::int64_t last = args.a_t.rowptr[col_end];
  for (std::int64_t col = col_begin; col < col_end; ++col) {
    widen_row(forward.src, score_dtype(forward), col, left.size(), left.data());
    widen_row(forward.v, forward.dtype, col, value.size(), value.data());
    for (auto* sum : {&total, &compensation, &value_total, &value_compensation}) {
      std::fill(sum->begin(), sum->end(), A{0});
    }
    const std::int64_t end = args.a_t.rowptr[col + 1];
    for (std::int64_t entry = args.a_t.rowptr[col]; entry < end; entry += kBlock) {
      const Block block = block_at(args.a_t, entry, end, last);
      const int lanes = padded<A>(block.count);
      for (std::int64_t head = 0; head < heads; ++head) {
        A delta[kBlock], inverse[kBlock];
        std::fill(delta + block.count, delta + lanes, A{0});
        std::fill(inverse + block.count, inverse + lanes, A{0});
        for (int i = 0; i < block.count; ++i) {
          const std::int64_t at = block.col[i] * heads + head;
          terms.lse[i] = static_cast<const A*>(forward.lse)[at];
          delta[i] = scratch.rows[at].delta;
          inverse[i] = scratch.rows[at].inverse_sum;
          terms.factor[i] = keep_factor<A>(forward, block.col[i], col, head);
        }
        recompute<A>(forward, args.a_t, block, head, left, forward.dst, value, args.grad, terms);
        finish(delta, inverse, lanes, terms);
        accumulate(Term::kFeatures, terms.weight, {},
                   gather_again(args.grad, forward.dtype, head * value_width, block), value_width,
                   {value_total.data() + head * value_width, value_compensation.data() + head * value_width});
        add_score_gradients<A>(forward, terms.grad, block, head, left, forward.dst, total, compensation);
      }
    }
    if (forward.kind == AttentionScore::kGatv2) {
      for (std::size_t f = 0; f < total.size(); ++f) total[f] = total[f] * att[f] + value_total[f];
    } else {
      const auto width = static_cast<std::int64_t>(value_total.size());
      narrow_row(value_total.data(), A{1}, width, args.grad_v, forward.dtype, col * scratch.strides.v);
    }
    write_score_row(forward, total, args.grad_src, col * scratch.strides.src);
  }
}

}  // namespace

void attention_csr_backward(const AttentionCsrBackwardArgs& args, int threads) {
  const std::int64_t columns = score_columns(args.forward);
  const GradientStrides contiguous{columns, columns, args.forward.heads * args.forward.value_width};
  attention_csr_backward(args, contiguous, threads);
}

void attention_csr_backward(const AttentionCsrBackwardArgs& args, const GradientStrides& strides,
                            int threads) {
  with_sum_type(args.forward.dtype, [&](auto type) {
    using A = decltype(type);
    const AttentionCsrArgs& forward = args.forward;
    const std::int64_t num_rows = forward.a.num_rows, num_cols = forward.a.num_cols;
    const std::int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
    const std::int64_t att_width = args.grad_att != nullptr ? forward.heads * forward.head_width : 0;
    std::vector<RowState<A>> row_states(num_rows * forward.heads);
    std::vector<A> grad_att(tasks * att_width);
    const Scratch<A> scratch{strides, row_states.data(), grad_att.data()};
    const bool parallel = work(forward) > kSerialWork;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (parallel)
    for (std::int64_t row = 0; row < num_rows; row += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        differentiate_rows<A>(args, scratch, row, std::min(row + kRowsPerTask, num_rows));
      });
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (parallel)
    for (std::int64_t col = 0; col < num_cols; col += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        differentiate_columns<A>(args, scratch, col, std::min(col + kRowsPerTask, num_cols));
      });
    }
    for (std::int64_t f = 0; f < att_width; ++f) {
      double sum = 0;
      for (std::int64_t task = 0; task < tasks; ++task) sum += grad_att[task * att_width + f];
      static_cast<A*>(args.grad_att)[f] = static_cast<A>(sum);
    }
  });
}

}  // namespace fastsparse::cpu
