// Attention on the CPU, backward. As in FlashAttention-2, the scores are recomputed. With p_ij = exp(score_ij
// - lse_i), dp_ij = <dO_i, v_j> and ds_ij = p_ij (dropout_ij dp_ij - <dO_i, O_i>), the pass over rows sums
// d(dst), and the pass over columns sums d(src) and dV.
// With a bias or edge features (docs/dev/edge_features.md), the pass over rows also computes their gradients.
// It stores dropout_ij p_ij and ds_ij, so that the pass over columns need not recompute them. There are no
// atomics, and sums have a fixed order.
#include <utility>
#include <vector>

#include "fastsparse/attention_gradients.h"
#include "fastsparse/cpu_attention.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

// Numbers of a row and head that the pass over rows stores for the pass over columns. They are summed in
// float64. The recomputed weights are divided by their sum, because the rounding error of lse is large for
// large scores. <dO_i, O_i> is recomputed for the same reason. So ds is exactly 0, as in the unfused
// operators, if one entry has all the weight or if all entries are equal. Otherwise, ds would be a rounding
// error, multiplied by features that may be large.
template <typename A>
struct RowState {
  A delta;
  A inverse_sum;
};

template <typename A>
struct Scratch {
  GradientStrides strides;
  RowState<A>* rows;             // (num_rows, heads)
  A* grad_att;                   // (tasks, heads * head_width)
  A* grad_weight;                // (tasks, edge_width, heads * head_width)
  const std::vector<A>& weight;  // W transposed
  std::int64_t rows_of_task;
};

// Numbers for the entries of a block, for one head. They are padded with 0 to whole vectors.
template <typename A>
struct Terms {
  A weight[kBlock];  // first p; then p times the dropout factor
  A factor[kBlock];  // dropout factor
  A grad[kBlock];    // first dp; then ds (for additive attention, times the slope)
  A slope[kBlock];
  A lse[kBlock];
};

// Computes weights (before the division by the row's sum), dp and slopes. `left` is a row of dst, and `value`
// a row of dO. In the transposed structure, they are rows of src and v. The rows of `right` and `values` are
// gathered.
template <typename A>
FASTSPARSE_INLINE void recompute(const AttentionCsrArgs& args, const CsrView& a, const Block& block,
                                 std::int64_t head, const std::vector<A>& left, const DenseView& right,
                                 const std::vector<A>& value, const DenseView& values, const Edges<A>& edges,
                                 Terms<A>& terms) {
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  Scores<A> scores;
  block_scores<A>(args, a, block, head, left.data(), right, edges, scores);
  const int lanes = padded<A>(block.count);
  const std::int64_t first = head * args.value_width;
  products({value.data() + first, nullptr, 0}, gather(values, args.dtype, first, block), args.value_width,
           terms.grad);
  if (edges.in_values) edges.add_products(&edges.of_value[head * edges.stride], lanes, terms.grad);
  for (int i = 0; i < block.count; ++i)
    terms.slope[i] = args.kind == AttentionScore::kAdditive ? scores.slope[i] : A{1};
  for (int i = block.count; i < lanes; ++i) {
    scores.score[i] = terms.lse[i] = -kInfinity;
    terms.grad[i] = terms.factor[i] = terms.slope[i] = 0;
  }
  for (int i = 0; i < lanes; ++i) {
    const A p = exponential(scores.score[i] - terms.lse[i]);
    terms.weight[i] =
        terms.lse[i] == -kInfinity ? 0 : p;  // padding, or a row in which all entries are masked
  }
}

// Normalises the weights and applies dropout to them; computes ds from dp. `delta` is <dO_i, O_i>, and
// `inverse_sum` is 1 / (sum of the row's weights).
template <typename A>
FASTSPARSE_INLINE void finish(const A* delta, const A* inverse_sum, int count, Terms<A>& terms) {
  for (int i = 0; i < count; ++i) {
    const A p = terms.weight[i] * inverse_sum[i];
    terms.weight[i] = p * terms.factor[i];
    terms.grad[i] = p * (terms.factor[i] * terms.grad[i] - delta[i]) * terms.slope[i];
  }
}

// Adds the contributions of a block's entries to the gradient of the row `left`, without its constant factor.
template <typename A>
FASTSPARSE_INLINE void add_score_gradients(const AttentionCsrArgs& args, const A* grad, const Gather& rows,
                                           std::int64_t head, const std::vector<A>& left, Sums<A>& sums) {
  if (args.kind == AttentionScore::kAdditive) {
    add_compensated(sum_of<A>(grad, padded<A>(rows.count)), sums.total[head], sums.compensation[head]);
    return;
  }
  const std::int64_t first = head * args.head_width;
  const Hidden<A> hidden{left.data() + first, nullptr, static_cast<A>(args.scale)};
  const Term term = args.kind == AttentionScore::kGatv2 ? Term::kSlope : Term::kFeatures;
  accumulate(term, grad, hidden, rows, args.head_width, sums.from(first));
}

// Writes the gradient of a row of dst or src.
template <typename A>
FASTSPARSE_INLINE void write_score_row(const AttentionCsrArgs& args, const std::vector<A>& total, void* to,
                                       std::int64_t first) {
  const A scale = args.kind == AttentionScore::kDotProduct ? static_cast<A>(args.scale) : A{1};
  narrow_row(total.data(), scale, static_cast<std::int64_t>(total.size()), to, score_dtype(args), first);
}

// Stores weights and ds of a block for the pass over columns.
template <typename A>
FASTSPARSE_INLINE void write_work(const AttentionCsrBackwardArgs& args, const Block& block, std::int64_t head,
                                  const Terms<A>& terms) {
  for (int i = 0; i < block.count; ++i) {
    const std::int64_t at = edge_position(args.forward.a, block.entry + i) * args.forward.heads + head;
    static_cast<A*>(args.work)[2 * at] = terms.weight[i];
    static_cast<A*>(args.work)[2 * at + 1] = terms.grad[i];
  }
}

// Reads weights and ds of a block of the transposed structure, which the pass over rows stored.
template <typename A>
FASTSPARSE_INLINE void read_work(const AttentionCsrBackwardArgs& args, const Block& block, std::int64_t head,
                                 Terms<A>& terms) {
  for (int i = 0; i < block.count; ++i) {
    const std::int64_t at = edge_position(args.a_t, block.entry + i) * args.forward.heads + head;
    terms.weight[i] = static_cast<const A*>(args.work)[2 * at];
    terms.grad[i] = static_cast<const A*>(args.work)[2 * at + 1];
  }
  std::fill(terms.grad + block.count, terms.grad + padded<A>(block.count), A{0});
}

// Gradients that the pass over rows computes only for edge features: the gradients of the features and of W
// and, for dot products, a term of the gradient of dst.
template <typename A>
struct EdgeGradients {
  const AttentionCsrBackwardArgs& args;
  const AttentionCsrArgs& forward = args.forward;
  Edges<A>& edges;
  const A scale = static_cast<A>(forward.scale);
  Sums<A> of_scores, of_values;  // except for GATv2: (heads, stride), sums over a row of ds a and of w a
  // The sums of_scores (times the scale) and of_values of up to kRowsPerTask rows, (heads, edge_width,
  // kRowsPerTask).
  std::vector<A> score_sums, value_sums;
  std::int32_t kept[kRowsPerTask];  // the rows to which score_sums and value_sums belong
  int num_kept = 0;
  std::vector<A> columns;  // gradients of a block's edge features, in the layout of Edges::columns
  std::vector<A> rows;     // GATv2: (kBlock, heads * head_width), gradients of Edges::rows
  Sums<A> weight;          // (edge_width, heads * head_width)

  EdgeGradients(const AttentionCsrBackwardArgs& of, Edges<A>& with)
      : args(of),
        edges(with),
        of_scores(edges.of_left.size()),
        of_values(of_scores.total.size()),
        score_sums(edges.in_values ? forward.heads * edges.width * kRowsPerTask : 0),
        value_sums(score_sums.size()),
        columns(edges.columns.size()),
        rows(args.grad_weight != nullptr || args.grad_edge != nullptr ? edges.rows.size() : 0),
        weight(args.grad_weight != nullptr ? edges.width * edges.row_width : 0) {}

  FASTSPARSE_INLINE void begin_row() {
    of_scores.clear();
    of_values.clear();
  }

  // Adds the terms of one head of a block. Heads must be added in order.
  FASTSPARSE_INLINE void add_head(const Block& block, std::int64_t head, const Terms<A>& terms) {
    if (!edges.in_values) return;
    const int lanes = padded<A>(block.count);
    const std::int64_t place = head * edges.stride;
    if (edges.in_scores) edges.add_sums(terms.grad, lanes, of_scores.from(place));
    edges.add_sums(terms.weight, lanes, of_values.from(place));
    if (args.grad_edge == nullptr) return;
    for (std::int64_t a = 0; a < edges.width; ++a) {
      const A of_left = scale * edges.of_left[place + a], of_value = edges.of_value[place + a];
      A* column = columns.data() + a * kBlock;
      for (int i = 0; i < lanes; ++i) {
        const A before = head > 0 ? column[i] : A{0};
        column[i] = before + (of_left * terms.grad[i] + of_value * terms.weight[i]);
      }
    }
  }

  FASTSPARSE_INLINE void end_block(const Block& block) {
    const Gather of_rows = rows_of(rows.data(), edges.row_width, 0, block.count);
    for (std::int64_t a = 0; !rows.empty() && a < edges.width; ++a) {
      if (args.grad_weight != nullptr) {
        accumulate(Term::kFeatures, edges.columns.data() + a * kBlock, {}, of_rows, edges.row_width,
                   weight.from(a * edges.row_width));
      }
      if (args.grad_edge == nullptr) continue;
      products({edges.weight + a * edges.row_width, nullptr, 0}, of_rows, edges.row_width,
               columns.data() + a * kBlock);
    }
    if (args.grad_edge != nullptr) {
      store_columns(forward, forward.a, block, columns.data(), args.grad_edge);
    }
  }

  // Stores the sums of a row. Rows without entries are skipped, because their dst may be NaN and must not
  // affect dW.
  FASTSPARSE_INLINE void end_row(std::int64_t row, Sums<A>& grad_dst) {
    for (std::int64_t head = 0; head < forward.heads; ++head) {
      const std::int64_t place = head * edges.stride, first = head * edges.head_width;
      if (edges.in_scores) edges.add_mapped(&of_scores.total[place], first, grad_dst.from(first));
      for (std::int64_t a = 0; a < edges.width; ++a) {
        const std::int64_t at = (head * edges.width + a) * kRowsPerTask + num_kept;
        score_sums[at] = scale * of_scores.total[place + a];
        value_sums[at] = of_values.total[place + a];
      }
    }
    kept[num_kept++] = static_cast<std::int32_t>(row);
  }

  // dW_h += sum over the stored rows of dO_h (w a)^T and, for dot products, dst_h (scale ds a)^T.
  FASTSPARSE_INLINE void add_rows() {
    const int count = std::exchange(num_kept, 0);
    if (args.grad_weight == nullptr || count == 0) return;
    for (std::int64_t head = 0; head < forward.heads; ++head) {
      const std::int64_t first = head * edges.head_width;
      const Gather dst{forward.dst, forward.dtype, first, kept, count, 0};
      const Gather grad{args.grad, forward.dtype, first, kept, count, 0};
      for (std::int64_t a = 0; a < edges.width; ++a) {
        const std::int64_t at = (head * edges.width + a) * kRowsPerTask;
        const Sum<A> sum = weight.from(a * edges.row_width + first);
        if (edges.in_scores) accumulate(Term::kFeatures, &score_sums[at], {}, dst, edges.head_width, sum);
        accumulate(Term::kFeatures, &value_sums[at], {}, grad, edges.head_width, sum);
      }
    }
  }
};

template <typename A>
FASTSPARSE_INLINE void differentiate_rows(const AttentionCsrBackwardArgs& args, const Scratch<A>& scratch,
                                          std::int64_t row_begin, std::int64_t row_end) {
  const AttentionCsrArgs& forward = args.forward;
  const std::int64_t heads = forward.heads;
  const auto slope = static_cast<A>(forward.scale);
  const auto* att = static_cast<const A*>(forward.att);
  std::vector<A> left(score_columns(forward)), grad(heads * forward.value_width);
  std::vector<Terms<A>> terms(heads);
  std::vector<RowState<double>> sums(heads);
  Sums<A> grad_dst(left.size()), grad_att(forward.kind == AttentionScore::kGatv2 ? left.size() : 0);
  Edges<A> edges(forward, scratch.weight);
  EdgeGradients<A> edge_gradients{args, edges};
  const std::int64_t last = forward.a.rowptr[row_end];
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    widen_row(forward.dst, score_dtype(forward), row, left.size(), left.data());
    widen_row(args.grad, forward.dtype, row, grad.size(), grad.data());
    grad_dst.clear();
    if (edges.in_scores) edges.map(left, edges.of_left);
    edges.map(grad, edges.of_value);
    edge_gradients.begin_row();
    const A* lse = static_cast<const A*>(forward.lse) + row * heads;
    const std::int64_t begin = forward.a.rowptr[row], end = forward.a.rowptr[row + 1];
    std::fill(sums.begin(), sums.end(), RowState<double>{0, 0});
    // Processes the row twice: first its sums, then its gradients. If the row has only one block, the second
    // time reuses the numbers of the first.
    for (const bool summing : {true, false}) {
      for (std::int64_t entry = begin; entry < end; entry += kBlock) {
        const Block block = block_at(forward.a, entry, end, last);
        const int lanes = padded<A>(block.count);
        const bool computes = summing || end - begin > kBlock;
        if (computes) edges.load(forward, forward.a, block, forward.src);
        for (std::int64_t head = 0; head < heads; ++head) {
          if (computes) {
            std::fill(terms[head].lse, terms[head].lse + block.count, lse[head]);
            for (int i = 0; i < block.count; ++i) {
              terms[head].factor[i] = keep_factor<A>(forward, row, block.col[i], head);
            }
            recompute<A>(forward, forward.a, block, head, left, forward.src, grad, forward.v, edges,
                         terms[head]);
          }
          if (summing) {
            A dropped[kBlock], one[kBlock];
            for (int i = 0; i < lanes; ++i) {
              dropped[i] = terms[head].factor[i] * terms[head].grad[i];
              one[i] = 1;
            }
            sums[head].delta += precise_product(terms[head].weight, dropped, lanes);
            sums[head].inverse_sum += precise_product(terms[head].weight, one, lanes);
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
          if (args.work != nullptr) write_work(args, block, head, terms[head]);
          const Gather rows = again(score_rows(forward, block, head, forward.src, edges));
          if (forward.kind == AttentionScore::kGatv2) {
            const std::int64_t first = head * forward.head_width;
            A* of_rows = edge_gradients.rows.empty() ? nullptr : edge_gradients.rows.data() + first;
            differentiate_hidden(gradient, {left.data() + first, att + first, slope}, rows,
                                 forward.head_width,
                                 {grad_dst.from(first), grad_att.from(first), of_rows, edges.row_width});
          } else {
            add_score_gradients<A>(forward, gradient, rows, head, left, grad_dst);
          }
          if (edges.width > 0) edge_gradients.add_head(block, head, terms[head]);
        }
        if (!summing && edges.width > 0) edge_gradients.end_block(block);
      }
    }
    if (edges.in_values) {
      if (begin < end) edge_gradients.end_row(row, grad_dst);
      if (edge_gradients.num_kept == kRowsPerTask || row + 1 == row_end) edge_gradients.add_rows();
    }
    if (forward.kind == AttentionScore::kGatv2) {
      for (std::size_t f = 0; f < left.size(); ++f) grad_dst.total[f] *= att[f];
    }
    write_score_row(forward, grad_dst.total, args.grad_dst, row * scratch.strides.dst);
  }
  const std::int64_t task = row_begin / scratch.rows_of_task;
  const auto write = [task](const Sums<A>& sums_of_task, A* to) {
    std::copy(sums_of_task.total.begin(), sums_of_task.total.end(), to + task * sums_of_task.total.size());
  };
  write(grad_att, scratch.grad_att);
  write(edge_gradients.weight, scratch.grad_weight);
}

template <typename A>
FASTSPARSE_INLINE void differentiate_columns(const AttentionCsrBackwardArgs& args, const Scratch<A>& scratch,
                                             std::int64_t col_begin, std::int64_t col_end) {
  const AttentionCsrArgs& forward = args.forward;
  const std::int64_t heads = forward.heads, value_width = forward.value_width;
  const auto* att = static_cast<const A*>(forward.att);
  std::vector<A> left(score_columns(forward)), value(heads * value_width);
  Sums<A> grad_src(left.size()), grad_v(value.size());
  Edges<A> edges(forward, scratch.weight);
  Terms<A> terms;
  const std::int64_t last = args.a_t.rowptr[col_end];
  for (std::int64_t col = col_begin; col < col_end; ++col) {
    widen_row(forward.src, score_dtype(forward), col, left.size(), left.data());
    if (args.work == nullptr) widen_row(forward.v, forward.dtype, col, value.size(), value.data());
    grad_src.clear();
    grad_v.clear();
    const std::int64_t end = args.a_t.rowptr[col + 1];
    for (std::int64_t entry = args.a_t.rowptr[col]; entry < end; entry += kBlock) {
      const Block block = block_at(args.a_t, entry, end, last);
      const int lanes = padded<A>(block.count);
      if (!edges.in_values) edges.load(forward, args.a_t, block, forward.dst);
      for (std::int64_t head = 0; head < heads; ++head) {
        Gather values = gather(args.grad, forward.dtype, head * value_width, block);
        Gather rows = score_rows(forward, block, head, forward.dst, edges);
        if (args.work != nullptr) {
          read_work(args, block, head, terms);
        } else {
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
          recompute<A>(forward, args.a_t, block, head, left, forward.dst, value, args.grad, edges, terms);
          finish(delta, inverse, lanes, terms);
          values = again(values);
          rows = again(rows);
        }
        accumulate(Term::kFeatures, terms.weight, {}, values, value_width, grad_v.from(head * value_width));
        add_score_gradients<A>(forward, terms.grad, rows, head, left, grad_src);
      }
    }
    if (forward.kind == AttentionScore::kGatv2) {
      for (std::size_t f = 0; f < left.size(); ++f) {
        grad_src.total[f] = grad_src.total[f] * att[f] + grad_v.total[f];
      }
    } else {
      const auto width = static_cast<std::int64_t>(value.size());
      narrow_row(grad_v.total.data(), A{1}, width, args.grad_v, forward.dtype, col * scratch.strides.v);
    }
    write_score_row(forward, grad_src.total, args.grad_src, col * scratch.strides.src);
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
    const std::int64_t row_step = rows_per_task(forward, num_rows),
                       col_step = rows_per_task(forward, num_cols);
    const std::int64_t tasks = (num_rows + row_step - 1) / row_step;
    const std::int64_t width = forward.heads * forward.head_width;
    const std::int64_t att_width = args.grad_att != nullptr ? width : 0;
    const std::int64_t value_width = forward.heads * forward.value_width;
    const std::int64_t weight_width = args.grad_weight != nullptr ? forward.edge_width * value_width : 0;
    std::vector<RowState<A>> row_states(num_rows * forward.heads);
    std::vector<A> grad_att(tasks * att_width), grad_weight(tasks * weight_width);
    const std::vector<A> weight = transposed_weight<A>(forward);
    const Scratch<A> scratch{strides, row_states.data(), grad_att.data(), grad_weight.data(),
                             weight,  row_step};
    const auto sum_of_tasks = [tasks](const std::vector<A>& of_tasks, std::int64_t numbers, std::int64_t at) {
      double sum = 0;
      for (std::int64_t task = 0; task < tasks; ++task) sum += of_tasks[task * numbers + at];
      return static_cast<A>(sum);
    };
    const bool parallel = work(forward) > kSerialWork;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (parallel)
    for (std::int64_t row = 0; row < num_rows; row += row_step) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        differentiate_rows<A>(args, scratch, row, std::min(row + row_step, num_rows));
      });
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (parallel)
    for (std::int64_t col = 0; col < num_cols; col += col_step) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        differentiate_columns<A>(args, scratch, col, std::min(col + col_step, num_cols));
      });
    }
    for (std::int64_t f = 0; f < att_width; ++f) {
      static_cast<A*>(args.grad_att)[f] = sum_of_tasks(grad_att, att_width, f);
    }
    for (std::int64_t at = 0; at < weight_width; ++at) {
      const std::int64_t a = at / value_width, f = at % value_width;
      set_number(args.grad_weight, forward.dtype, f * forward.edge_width + a,
                 sum_of_tasks(grad_weight, weight_width, at));
    }
  });
}

}  // namespace fastsparse::cpu
