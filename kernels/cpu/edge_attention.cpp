// Attention with edge features on the CPU, forward and backward: rows over threads, one entry at a time, sums
// in the accumulation type. Formulas and passes are those of the CUDA kernels (edge_attention.cu and
// edge_attention_backward.cu).
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "fastsparse/cpu_attention.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

std::int64_t work(const CsrView& a, const EdgeAttentionInput& input) {
  return a.num_edges * input.heads * (input.head_width + input.edge_width);
}

// Loops over features are functions: compilers know of parameters alone that they lie apart from the others.
template <typename A>
FASTSPARSE_INLINE void add_scaled(A by, const A* from, A* __restrict to, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) to[f] += by * from[f];
}
template <typename A>
FASTSPARSE_INLINE A dot(const A* left, const A* right, std::int64_t width) {
  A sum = 0;
  for (std::int64_t f = 0; f < width; ++f) sum += left[f] * right[f];
  return sum;
}
template <typename A>
FASTSPARSE_INLINE void scale(A factor, A* numbers, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) numbers[f] *= factor;
}

template <typename A>
FASTSPARSE_INLINE A keep_factor(const EdgeAttentionInput& input, std::int64_t row, std::int64_t col,
                                std::int64_t head) {
  if (input.dropout.threshold == 0) return A{1};
  return dropout_factor(input.dropout, static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(col),
                        static_cast<std::uint32_t>(head)) > 0
             ? static_cast<A>(input.keep_scale)
             : A{0};
}

// What one row and one entry of it bring, in the type of sums, and the scores of the entry.
template <typename A>
struct Pair {
  const EdgeAttentionInput& input;
  const std::int64_t heads = input.heads, head_width = input.head_width, edge_width = input.edge_width;
  const std::int64_t width = heads * head_width;
  std::vector<A> q, q_edge, z, k_room, edge_room;
  const A *k = nullptr, *edge = nullptr;

  explicit Pair(const EdgeAttentionInput& of)
      : input(of),
        q(width),
        q_edge(of.gatv2 ? 0 : heads * edge_width),
        z(of.gatv2 ? width : 0),
        k_room(width),
        edge_room(edge_width) {}

  FASTSPARSE_INLINE void set_row(std::int64_t row) {
    widen_row(input.q, input.dtype, row, width, q.data());
    if (input.gatv2) return;
    scale(static_cast<A>(input.scale), q.data(), width);
    widen_row({input.q_edge, heads * edge_width}, input.dtype, row, heads * edge_width, q_edge.data());
    scale(static_cast<A>(input.scale), q_edge.data(), heads * edge_width);
  }

  FASTSPARSE_INLINE void set_edge(std::int64_t position) {
    edge = read_row({input.edge, edge_width}, input.dtype, position, edge_width, edge_room.data());
  }

  FASTSPARSE_INLINE void set_entry(std::int64_t col, std::int64_t position) {
    k = read_row(input.k, input.dtype, col, width, k_room.data());
    set_edge(position);
    if (!input.gatv2) return;
    std::copy(q.begin(), q.end(), z.begin());
    add_scaled(A{1}, k, z.data(), width);
    for (std::int64_t a = 0; a < edge_width; ++a) {
      add_scaled(edge[a], static_cast<const A*>(input.weight) + a * width, z.data(), width);
    }
  }

  FASTSPARSE_INLINE A activated(std::int64_t f) const {
    return z[f] > 0 ? z[f] : static_cast<A>(input.scale) * z[f];
  }

  FASTSPARSE_INLINE A score(std::int64_t head, std::int64_t position) const {
    const std::int64_t first = head * head_width;
    if (input.gatv2) {
      A sum = 0;
      const A* att = static_cast<const A*>(input.att);
      for (std::int64_t f = first; f < first + head_width; ++f) sum += att[f] * activated(f);
      return sum;
    }
    A sum = dot(q.data() + first, k + first, head_width) + dot(&q_edge[head * edge_width], edge, edge_width);
    if (input.bias.data != nullptr) {
      sum += number_at<A>(input.bias.data, input.bias.dtype, position * heads + head);
    }
    return sum;
  }
};

template <typename A>
FASTSPARSE_INLINE void attend(const EdgeAttentionArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const EdgeAttentionInput& input = args.input;
  const std::int64_t heads = input.heads, head_width = input.head_width, edge_width = input.edge_width;
  const std::int64_t width = heads * head_width;
  Pair<A> pair(input);
  std::vector<A> score, v_room(width), out(width), out_edge(pair.q_edge.size());
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t begin = args.a.rowptr[row], count = args.a.rowptr[row + 1] - begin;
    pair.set_row(row);
    score.resize(count * heads);
    std::fill(out.begin(), out.end(), A{0});
    std::fill(out_edge.begin(), out_edge.end(), A{0});
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t position = edge_position(args.a, begin + i);
      pair.set_entry(args.a.col[begin + i], position);
      for (std::int64_t head = 0; head < heads; ++head) score[i * heads + head] = pair.score(head, position);
    }
    for (std::int64_t head = 0; head < heads; ++head) {
      A highest = -kInfinity;
      for (std::int64_t i = 0; i < count; ++i) {
        const A s = score[i * heads + head];
        highest = s > highest || s != s ? s : highest;  // NaN stays
      }
      double sum = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        A& s = score[i * heads + head];
        s = highest == -kInfinity ? A{0} : std::exp(s - highest);
        sum += s;
      }
      const A inverse = sum == 0 ? A{0} : static_cast<A>(1 / sum);
      for (std::int64_t i = 0; i < count; ++i) {
        score[i * heads + head] *= inverse * keep_factor<A>(input, row, args.a.col[begin + i], head);
      }
      static_cast<A*>(args.lse)[row * heads + head] =
          sum == 0 ? -kInfinity : static_cast<A>(highest + std::log(sum));
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const A* v = read_row(input.v, input.dtype, args.a.col[begin + i], width, v_room.data());
      if (!input.gatv2) pair.set_edge(edge_position(args.a, begin + i));
      for (std::int64_t head = 0; head < heads; ++head) {
        const A weight = score[i * heads + head];
        add_scaled(weight, v + head * head_width, out.data() + head * head_width, head_width);
        if (!input.gatv2) add_scaled(weight, pair.edge, &out_edge[head * edge_width], edge_width);
      }
    }
    write_row(out.data(), width, args.out, input.dtype, row * width);
    if (!input.gatv2) {
      write_row(out_edge.data(), heads * edge_width, args.out_edge, input.dtype, row * heads * edge_width);
    }
  }
}

// What one entry and head of GATv2 adds to the gradients, without W's and the edge's: those of what the leaky
// ReLU made, of what it saw, and the signs of that.
template <typename A>
FASTSPARSE_INLINE void differentiate_hidden(const A* z, const A* att, A grad_score, A slope,
                                            A* __restrict grad_att, A* __restrict grad_z,
                                            std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) {
    const bool positive = z[f] > 0;
    grad_att[f] += grad_score * (positive ? z[f] : slope * z[f]);
    grad_z[f] = grad_score * att[f] * (positive ? A{1} : slope);
  }
}

// Rows of A: their gradients, pairs {w, dS} and signs of their entries, one row of the sums over all entries.
template <typename A>
FASTSPARSE_INLINE void differentiate_rows(const EdgeAttentionBackwardArgs& args, std::int64_t part,
                                          std::int64_t row_begin, std::int64_t row_end) {
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const EdgeAttentionInput& input = args.input;
  const std::int64_t heads = input.heads, head_width = input.head_width, edge_width = input.edge_width;
  const std::int64_t width = heads * head_width, edges_wide = input.gatv2 ? 0 : heads * edge_width;
  const A* att = static_cast<const A*>(input.att);
  A* grad_att = static_cast<A*>(args.grad_att) + part * width;
  A* grad_weight =
      args.grad_weight == nullptr ? nullptr : static_cast<A*>(args.grad_weight) + part * edge_width * width;
  if (input.gatv2) {
    std::fill(grad_att, grad_att + width, A{0});
    if (grad_weight != nullptr) std::fill(grad_weight, grad_weight + edge_width * width, A{0});
  }
  Pair<A> pair(input);
  std::vector<A> v_room(width), grad(width), out(width), grad_q(width), delta(heads), grad_z(width);
  std::vector<A> grad_edge(edges_wide), grad_q_edge(edges_wide), grad_features(edge_width);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    pair.set_row(row);
    widen_row(args.grad, input.dtype, row, width, grad.data());
    widen_row(args.out, input.dtype, row, width, out.data());
    if (!input.gatv2) widen_row({args.grad_edge, edges_wide}, input.dtype, row, edges_wide, grad_edge.data());
    std::fill(grad_q.begin(), grad_q.end(), A{0});
    std::fill(grad_q_edge.begin(), grad_q_edge.end(), A{0});
    for (std::int64_t head = 0; head < heads; ++head) {
      delta[head] = dot(&grad[head * head_width], &out[head * head_width], head_width);
    }
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t col = args.a.col[entry], position = edge_position(args.a, entry);
      pair.set_entry(col, position);
      const A* v = read_row(input.v, input.dtype, col, width, v_room.data());
      std::fill(grad_features.begin(), grad_features.end(), A{0});
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t first = head * head_width, of_head = position * heads + head;
        const A lse = static_cast<const A*>(args.lse)[row * heads + head];
        const A p = lse == -kInfinity ? A{0} : std::exp(pair.score(head, position) - lse);
        const A weight = p * keep_factor<A>(input, row, col, head);
        A grad_weight_of_p = dot(&grad[first], v + first, head_width);
        if (!input.gatv2) grad_weight_of_p += dot(&grad_edge[head * edge_width], pair.edge, edge_width);
        const A grad_score = weight * grad_weight_of_p - p * delta[head];
        A* numbers = static_cast<A*>(args.work) + 2 * of_head;
        numbers[0] = weight;
        numbers[1] = grad_score;
        if (!input.gatv2) {
          const std::int64_t at = head * edge_width;
          add_scaled(grad_score, pair.k + first, &grad_q[first], head_width);
          add_scaled(grad_score, pair.edge, &grad_q_edge[at], edge_width);
          add_scaled<A>(grad_score, &pair.q_edge[at], grad_features.data(), edge_width);
          add_scaled<A>(weight, &grad_edge[at], grad_features.data(), edge_width);
          continue;
        }
        std::uint8_t* positive = args.positive + of_head * args.sign_bytes;
        std::fill(positive, positive + args.sign_bytes, std::uint8_t{0});
        for (std::int64_t f = 0; f < head_width; ++f) {
          positive[f / 8] |= static_cast<std::uint8_t>((pair.z[first + f] > 0 ? 1u : 0u) << f % 8);
        }
        differentiate_hidden(&pair.z[first], att + first, grad_score, static_cast<A>(input.scale),
                             grad_att + first, &grad_z[first], head_width);
      }
      if (input.gatv2) {
        add_scaled<A>(A{1}, grad_z.data(), grad_q.data(), width);
        for (std::int64_t a = 0; a < edge_width; ++a) {
          if (grad_weight != nullptr) {
            add_scaled<A>(pair.edge[a], grad_z.data(), grad_weight + a * width, width);
          }
          grad_features[a] = dot<A>(grad_z.data(), static_cast<const A*>(input.weight) + a * width, width);
        }
      }
      if (args.grad_features != nullptr) {
        std::copy(grad_features.begin(), grad_features.end(),
                  static_cast<A*>(args.grad_features) + position * edge_width);
      }
    }
    const A factor = input.gatv2 ? A{1} : static_cast<A>(input.scale);
    narrow_row(grad_q.data(), factor, width, args.grad_q, input.dtype, row * width);
    if (!input.gatv2) {
      narrow_row(grad_q_edge.data(), factor, edges_wide, args.grad_q_edge, input.dtype, row * edges_wide);
    }
  }
}

template <typename A>
FASTSPARSE_INLINE void differentiate_columns(const EdgeAttentionBackwardArgs& args, std::int64_t begin,
                                             std::int64_t end) {
  const EdgeAttentionInput& input = args.input;
  const std::int64_t heads = input.heads, head_width = input.head_width, width = heads * head_width;
  const A slope = static_cast<A>(input.scale);
  std::vector<A> q_room(width), grad_room(width), grad_k(width), grad_v(width);
  for (std::int64_t source = begin; source < end; ++source) {
    std::fill(grad_k.begin(), grad_k.end(), A{0});
    std::fill(grad_v.begin(), grad_v.end(), A{0});
    for (std::int64_t entry = args.a_t.rowptr[source]; entry < args.a_t.rowptr[source + 1]; ++entry) {
      const std::int64_t row = args.a_t.col[entry], position = edge_position(args.a_t, entry);
      const A* q = input.gatv2 ? nullptr : read_row(input.q, input.dtype, row, width, q_room.data());
      const A* grad = read_row(args.grad, input.dtype, row, width, grad_room.data());
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t first = head * head_width, of_head = position * heads + head;
        const A* numbers = static_cast<const A*>(args.work) + 2 * of_head;
        add_scaled(numbers[0], grad + first, &grad_v[first], head_width);
        if (!input.gatv2) {
          add_scaled(numbers[1], q + first, &grad_k[first], head_width);
          continue;
        }
        for (std::int64_t f = first; f < first + head_width; ++f) {
          const bool positive =
              args.positive[of_head * args.sign_bytes + (f - first) / 8] >> (f - first) % 8 & 1;
          grad_v[f] += numbers[1] * static_cast<const A*>(input.att)[f] * (positive ? A{1} : slope);
        }
      }
    }
    if (input.gatv2) {
      write_row(grad_v.data(), width, args.grad_k, input.dtype, source * width);
    } else {
      narrow_row(grad_k.data(), slope, width, args.grad_k, input.dtype, source * width);
      write_row(grad_v.data(), width, args.grad_v, input.dtype, source * width);
    }
  }
}

// The columns' gradients without the transposed structure: whoever takes a range of columns looks through all
// entries for them, so that sums are taken in entry order whatever the number of threads.
template <typename A>
FASTSPARSE_INLINE void scatter_columns(const EdgeAttentionBackwardArgs& args, std::int64_t col_begin,
                                       std::int64_t col_end) {
  const EdgeAttentionInput& input = args.input;
  const std::int64_t heads = input.heads, head_width = input.head_width, width = heads * head_width;
  std::vector<A> q(width), grad(width);
  for (std::int64_t row = 0; row < args.a.num_rows; ++row) {
    widen_row(input.q, input.dtype, row, width, q.data());
    scale(static_cast<A>(input.scale), q.data(), width);
    widen_row(args.grad, input.dtype, row, width, grad.data());
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t col = args.a.col[entry];
      if (col < col_begin || col >= col_end) continue;
      const A* numbers = static_cast<const A*>(args.work) + 2 * edge_position(args.a, entry) * heads;
      A* sum_k = static_cast<A*>(args.sum_k) + col * width;
      A* sum_v = static_cast<A*>(args.sum_v) + col * width;
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t first = head * head_width;
        add_scaled<A>(numbers[2 * head], &grad[first], sum_v + first, head_width);
        add_scaled<A>(numbers[2 * head + 1], &q[first], sum_k + first, head_width);
      }
    }
  }
}

}  // namespace

void edge_attention(const EdgeAttentionArgs& args, int threads) {
  with_sum_type(args.input.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        attend<decltype(type)>(args, row, std::min(row + kRowsPerTask, args.a.num_rows));
      });
    }
  });
}

void edge_attention_backward(const EdgeAttentionBackwardArgs& args, int threads) {
  const std::int64_t rows = args.a.num_rows, parts = args.att_rows;
  const std::int64_t ranges = args.sum_k != nullptr ? threads : 0;
  const std::int64_t columns = args.sum_k != nullptr ? 0 : args.a_t.num_rows;
  with_sum_type(args.input.dtype, [&](auto type) {
    using A = decltype(type);
#pragma omp parallel num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    {
#pragma omp for schedule(dynamic)
      for (std::int64_t part = 0; part < parts; ++part) {
        for_this_machine([&]() FASTSPARSE_INLINED {
          differentiate_rows<A>(args, part, rows * part / parts, rows * (part + 1) / parts);
        });
      }
#pragma omp for schedule(dynamic)
      for (std::int64_t source = 0; source < columns; source += kRowsPerTask) {
        for_this_machine([&]() FASTSPARSE_INLINED {
          differentiate_columns<A>(args, source, std::min(source + kRowsPerTask, columns));
        });
      }
#pragma omp for schedule(static)
      for (std::int64_t range = 0; range < ranges; ++range) {
        const std::int64_t cols = args.a.num_cols;
        for_this_machine([&]() FASTSPARSE_INLINED {
          scatter_columns<A>(args, cols * range / ranges, cols * (range + 1) / ranges);
        });
      }
    }
  });
}

}  // namespace fastsparse::cpu
