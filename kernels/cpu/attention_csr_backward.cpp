// Attention on the CPU, backward, with the scores recomputed as in FlashAttention-2: with p = exp(score -
// lse), dp_ij = <dO_i, v_j> and ds_ij = p_ij (dropout_ij dp_ij - <dO_i, O_i>),
//   the pass over rows sums d(dst) and writes d(bias), the pass over columns sums d(src) and dV.
// Nothing is scattered: no atomics, and sums in a fixed order.
#include <vector>

#include "fastsparse/cpu_attention.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

template <typename A>
struct Scratch {
  A* delta;     // (num_rows, heads) <dO_i, O_i>
  A* grad_att;  // (tasks, heads * head_width)
};

// A block's weights and gradients of its scores, from the scores.
template <typename A>
struct Gradients {
  A weight[kBlock];  // p, times the dropout factor
  A score[kBlock];   // ds; of additive attention ds times the slope
};

// grad[i] = p (factor dp - delta) in place of dp; weight[i] = factor p. All of kBlock numbers are computed.
template <typename A>
FASTSPARSE_INLINE void block_gradients(AttentionScore kind, const Scores<A>& scores, const A* lse,
                                       const A* delta, const A* factor, Gradients<A>& out) {
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  constexpr int kWidth = kVectorWidth<A>;
  for (int i = 0; i < kBlock; i += kWidth) {
    Vector<A> p, l, d, m, dp;
    load_vector<A>(scores.score + i, p);
    load_vector<A>(lse + i, l);
    load_vector<A>(delta + i, d);
    load_vector<A>(factor + i, m);
    load_vector<A>(out.score + i, dp);
    p -= l;
    exponential(p);
    p = l == -kInfinity ? Vector<A>{} : p;  // nothing but masked entries
    dp = p * (m * dp - d);
    p *= m;
    if (kind == AttentionScore::kAdditive) {
      Vector<A> slope;
      load_vector<A>(scores.slope + i, slope);
      dp *= slope;
    }
    std::memcpy(out.weight + i, &p, sizeof p);
    std::memcpy(out.score + i, &dp, sizeof dp);
  }
}

// Adds what the entries of a block give to the gradient of `left`, up to a constant factor.
template <typename T>
FASTSPARSE_INLINE void add_score_gradients(const AttentionCsrArgs& args, const Acc<T>* grad,
                                           const Block& block, std::int64_t head,
                                           const std::vector<Acc<T>>& left, const DenseView& right,
                                           std::vector<Acc<T>>& total, std::vector<Acc<T>>& compensation) {
  using A = Acc<T>;
  if (args.kind == AttentionScore::kAdditive) {
    A sum = 0;
    for (int i = 0; i < block.count; ++i) sum += grad[i];
    add_compensated(sum, total[head], compensation[head]);
    return;
  }
  const std::int64_t first = head * args.head_width;
  const Hidden<A> hidden{left.data() + first, nullptr, static_cast<A>(args.scale)};
  const Sum<A> sum{total.data() + first, compensation.data() + first};
  const auto rows = gather<T>(right, first, block);
  if (args.kind == AttentionScore::kGatv2) {
    accumulate<T, Term::kSlope>(grad, hidden, rows, args.head_width, sum);
  } else {
    accumulate<T, Term::kFeatures>(grad, hidden, rows, args.head_width, sum);
  }
}

template <typename T, typename A>
FASTSPARSE_INLINE void write_row(const std::vector<A>& total, A scale, void* to, std::int64_t row) {
  T* out = static_cast<T*>(to) + row * static_cast<std::int64_t>(total.size());
  for (std::size_t f = 0; f < total.size(); ++f) narrow(total[f] * scale, out + f);
}

// Writes the gradient of a row of dst or src.
template <typename T>
FASTSPARSE_INLINE void write_score_row(const AttentionCsrArgs& args, const std::vector<Acc<T>>& total,
                                       void* to, std::int64_t row) {
  using A = Acc<T>;
  if (args.kind == AttentionScore::kAdditive) {
    write_row<A>(total, A{1}, to, row);
  } else {
    const A scale = args.kind == AttentionScore::kDotProduct ? static_cast<A>(args.scale) : A{1};
    write_row<T>(total, scale, to, row);
  }
}

template <typename T>
FASTSPARSE_INLINE void differentiate_rows(const AttentionCsrBackwardArgs& args,
                                          const Scratch<Acc<T>>& scratch, std::int64_t row_begin,
                                          std::int64_t row_end) {
  using A = Acc<T>;
  const AttentionCsrArgs& forward = args.forward;
  const std::int64_t heads = forward.heads, value_width = forward.value_width,
                     head_width = forward.head_width;
  const auto slope = static_cast<A>(forward.scale);
  const auto* att = static_cast<const A*>(forward.att);
  std::vector<A> left(score_columns(forward)), grad(heads * value_width), total(left.size()),
      compensation(left.size());
  std::vector<A> att_total(forward.kind == AttentionScore::kGatv2 ? left.size() : 0),
      att_compensation(att_total.size());
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    load_score_row<T>(forward, forward.dst, row, left);
    load_row<T>(args.grad, row, grad);
    std::fill(total.begin(), total.end(), A{0});
    std::fill(compensation.begin(), compensation.end(), A{0});
    const T* out = static_cast<const T*>(forward.out) + row * heads * value_width;
    A* row_delta = scratch.delta + row * heads;
    for (std::int64_t head = 0; head < heads; ++head) {
      A sum = 0;
      for (std::int64_t f = head * value_width; f < (head + 1) * value_width; ++f)
        sum += grad[f] * widen(out[f]);
      row_delta[head] = sum;
    }
    const A* row_lse = static_cast<const A*>(forward.lse) + row * heads;
    const std::int64_t end = forward.a.rowptr[row + 1];
    for (std::int64_t entry = forward.a.rowptr[row]; entry < end; entry += kBlock) {
      const Block block = block_at(forward.a, entry, end);
      for (std::int64_t head = 0; head < heads; ++head) {
        Scores<A> scores{};
        Gradients<A> gradients{};
        A lse[kBlock], delta[kBlock], factor[kBlock] = {};
        block_scores<T>(forward, forward.a, block, head, left.data(), forward.src, scores);
        const auto v = gather<T>(forward.v, head * value_width, block);
        products<T, false>({grad.data() + head * value_width, nullptr, 0}, v, value_width, gradients.score);
        std::fill(lse, lse + kBlock, row_lse[head]);
        std::fill(delta, delta + kBlock, row_delta[head]);
        for (int i = 0; i < block.count; ++i) factor[i] = keep_factor<A>(forward, row, block.col[i], head);
        block_gradients(forward.kind, scores, lse, delta, factor, gradients);
        if (args.grad_bias != nullptr) {
          for (int i = 0; i < block.count; ++i) {
            const std::int64_t at = edge_position(forward.a, block.entry + i) * heads + head;
            if (forward.bias.dtype == forward.dtype) {
              narrow(gradients.score[i], static_cast<T*>(args.grad_bias) + at);
            } else {
              static_cast<A*>(args.grad_bias)[at] = gradients.score[i];
            }
          }
        }
        const std::int64_t first = head * head_width;
        add_score_gradients<T>(forward, gradients.score, block, head, left, forward.src, total, compensation);
        if (forward.kind == AttentionScore::kGatv2) {
          accumulate<T, Term::kHidden>(gradients.score, {left.data() + first, nullptr, slope},
                                       gather<T>(forward.src, first, block), head_width,
                                       {att_total.data() + first, att_compensation.data() + first});
        }
      }
    }
    if (forward.kind == AttentionScore::kGatv2) {
      for (std::size_t f = 0; f < total.size(); ++f) total[f] *= att[f];
    }
    write_score_row<T>(forward, total, args.grad_dst, row);
  }
  if (forward.kind == AttentionScore::kGatv2) {
    write_row<A>(att_total, A{1}, scratch.grad_att, row_begin / kRowsPerTask);
  }
}

template <typename T>
FASTSPARSE_INLINE void differentiate_columns(const AttentionCsrBackwardArgs& args,
                                             const Scratch<Acc<T>>& scratch, std::int64_t col_begin,
                                             std::int64_t col_end) {
  using A = Acc<T>;
  const AttentionCsrArgs& forward = args.forward;
  const std::int64_t heads = forward.heads, value_width = forward.value_width;
  const auto* att = static_cast<const A*>(forward.att);
  std::vector<A> left(score_columns(forward)), total(left.size()), compensation(left.size());
  std::vector<A> value(heads * value_width), value_total(value.size()), value_compensation(value.size());
  for (std::int64_t col = col_begin; col < col_end; ++col) {
    load_score_row<T>(forward, forward.src, col, left);
    load_row<T>(forward.v, col, value);
    for (auto* sum : {&total, &compensation, &value_total, &value_compensation}) {
      std::fill(sum->begin(), sum->end(), A{0});
    }
    const std::int64_t end = args.a_t.rowptr[col + 1];
    for (std::int64_t entry = args.a_t.rowptr[col]; entry < end; entry += kBlock) {
      const Block block = block_at(args.a_t, entry, end);
      for (std::int64_t head = 0; head < heads; ++head) {
        Scores<A> scores{};
        Gradients<A> gradients{};
        A lse[kBlock] = {}, delta[kBlock] = {}, factor[kBlock] = {};
        block_scores<T>(forward, args.a_t, block, head, left.data(), forward.dst, scores);
        const auto grad = gather<T>(args.grad, head * value_width, block);
        products<T, false>({value.data() + head * value_width, nullptr, 0}, grad, value_width,
                           gradients.score);
        for (int i = 0; i < block.count; ++i) {
          const std::int64_t at = block.col[i] * heads + head;
          lse[i] = static_cast<const A*>(forward.lse)[at];
          delta[i] = scratch.delta[at];
          factor[i] = keep_factor<A>(forward, block.col[i], col, head);
        }
        block_gradients(forward.kind, scores, lse, delta, factor, gradients);
        accumulate<T, Term::kFeatures>(
            gradients.weight, {}, grad, value_width,
            {value_total.data() + head * value_width, value_compensation.data() + head * value_width});
        add_score_gradients<T>(forward, gradients.score, block, head, left, forward.dst, total, compensation);
      }
    }
    if (forward.kind == AttentionScore::kGatv2) {
      for (std::size_t f = 0; f < total.size(); ++f) total[f] = total[f] * att[f] + value_total[f];
    } else {
      write_row<T>(value_total, A{1}, args.grad_v, col);
    }
    write_score_row<T>(forward, total, args.grad_src, col);
  }
}

// One plain function per pass and type: the compiler multi-versions functions, not templates.
FASTSPARSE_MULTIVERSION void rows(double, const AttentionCsrBackwardArgs& args,
                                  const Scratch<double>& scratch, std::int64_t begin, std::int64_t end) {
  differentiate_rows<double>(args, scratch, begin, end);
}
FASTSPARSE_MULTIVERSION void columns(double, const AttentionCsrBackwardArgs& args,
                                     const Scratch<double>& scratch, std::int64_t begin, std::int64_t end) {
  differentiate_columns<double>(args, scratch, begin, end);
}
FASTSPARSE_MULTIVERSION void rows(float, const AttentionCsrBackwardArgs& args, const Scratch<float>& scratch,
                                  std::int64_t begin, std::int64_t end) {
  differentiate_rows<float>(args, scratch, begin, end);
}
FASTSPARSE_MULTIVERSION void columns(float, const AttentionCsrBackwardArgs& args,
                                     const Scratch<float>& scratch, std::int64_t begin, std::int64_t end) {
  differentiate_columns<float>(args, scratch, begin, end);
}
FASTSPARSE_MULTIVERSION void rows(Half, const AttentionCsrBackwardArgs& args, const Scratch<float>& scratch,
                                  std::int64_t begin, std::int64_t end) {
  differentiate_rows<Half>(args, scratch, begin, end);
}
FASTSPARSE_MULTIVERSION void columns(Half, const AttentionCsrBackwardArgs& args,
                                     const Scratch<float>& scratch, std::int64_t begin, std::int64_t end) {
  differentiate_columns<Half>(args, scratch, begin, end);
}
FASTSPARSE_MULTIVERSION void rows(BFloat16, const AttentionCsrBackwardArgs& args,
                                  const Scratch<float>& scratch, std::int64_t begin, std::int64_t end) {
  differentiate_rows<BFloat16>(args, scratch, begin, end);
}
FASTSPARSE_MULTIVERSION void columns(BFloat16, const AttentionCsrBackwardArgs& args,
                                     const Scratch<float>& scratch, std::int64_t begin, std::int64_t end) {
  differentiate_columns<BFloat16>(args, scratch, begin, end);
}

}  // namespace

void attention_csr_backward(const AttentionCsrBackwardArgs& args, int threads) {
  with_type(args.forward.dtype, [&](auto type) {
    using A = Acc<decltype(type)>;
    const AttentionCsrArgs& forward = args.forward;
    const std::int64_t num_rows = forward.a.num_rows, num_cols = forward.a.num_cols;
    const std::int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
    const std::int64_t att_width = args.grad_att != nullptr ? forward.heads * forward.head_width : 0;
    std::vector<A> delta(num_rows * forward.heads), grad_att(tasks * att_width);
    const Scratch<A> scratch{delta.data(), grad_att.data()};
    const bool parallel = work(forward) > kSerialWork;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (parallel)
    for (std::int64_t row = 0; row < num_rows; row += kRowsPerTask) {
      rows(type, args, scratch, row, std::min(row + kRowsPerTask, num_rows));
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (parallel)
    for (std::int64_t col = 0; col < num_cols; col += kRowsPerTask) {
      columns(type, args, scratch, col, std::min(col + kRowsPerTask, num_cols));
    }
    for (std::int64_t f = 0; f < att_width; ++f) {
      double sum = 0;
      for (std::int64_t task = 0; task < tasks; ++task) sum += grad_att[task * att_width + f];
      static_cast<A*>(args.grad_att)[f] = static_cast<A>(sum);
    }
  });
}

}  // namespace fastsparse::cpu
