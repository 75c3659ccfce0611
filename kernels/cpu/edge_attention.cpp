// Attention with edge features on the CPU, forward and backward: rows over threads, one entry at a time, sums
// in the accumulation type. Formulas and passes are those of the CUDA kernels (edge_attention.cu and
// edge_attention_backward.cu).
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kSerialWork = 1 << 15;  // products below which waking threads costs more than it saves
constexpr std::int64_t kRowsPerTask = 64;

std::int64_t work(const CsrView& a, const EdgeAttentionInput& input) {
  return a.num_edges * input.heads * (input.head_width + input.edge_width);
}

template <typename T>
const T* row_of(const DenseView& x, std::int64_t row) {
  return static_cast<const T*>(x.data) + row * x.stride;
}

template <typename T, typename A>
void widen_row(const T* from, std::vector<A>& to, A factor = A{1}) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<A>(widen(from[i])) * factor;
}

template <typename T, typename A>
void narrow_row(const std::vector<A>& from, T* to, A factor = A{1}) {
  for (std::size_t i = 0; i < from.size(); ++i) narrow(static_cast<Acc<T>>(from[i] * factor), to + i);
}

template <typename A>
A keep_factor(const EdgeAttentionInput& input, std::int64_t row, std::int64_t col, std::int64_t head) {
  if (input.dropout.threshold == 0) return A{1};
  return dropout_factor(input.dropout, static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(col),
                        static_cast<std::uint32_t>(head)) > 0
             ? static_cast<A>(input.keep_scale)
             : A{0};
}

template <typename T>
Acc<T> bias_of(const EdgeAttentionInput& input, std::int64_t position, std::int64_t head) {
  if (input.bias.data == nullptr) return 0;
  const std::int64_t at = position * input.heads + head;
  return input.bias.dtype == input.dtype ? widen(static_cast<const T*>(input.bias.data)[at])
                                         : static_cast<const Acc<T>*>(input.bias.data)[at];
}

// What one row and one entry of it bring, widened, and the scores of the entry.
template <typename T>
struct Pair {
  using A = Acc<T>;
  const EdgeAttentionInput& input;
  std::int64_t heads = input.heads, head_width = input.head_width, edge_width = input.edge_width;
  std::vector<A> q, q_edge, k, edge, z;

  explicit Pair(const EdgeAttentionInput& of)
      : input(of),
        q(heads * head_width),
        q_edge(of.gatv2 ? 0 : heads * edge_width),
        k(q.size()),
        edge(edge_width),
        z(of.gatv2 ? q.size() : 0) {}

  void set_row(std::int64_t row) {
    const A factor = input.gatv2 ? A{1} : static_cast<A>(input.scale);
    widen_row(row_of<T>(input.q, row), q, factor);
    if (!input.gatv2)
      widen_row(static_cast<const T*>(input.q_edge) + row * heads * edge_width, q_edge, factor);
  }

  void set_entry(std::int64_t col, std::int64_t position) {
    widen_row(row_of<T>(input.k, col), k);
    widen_row(static_cast<const T*>(input.edge) + position * edge_width, edge);
    if (!input.gatv2) return;
    for (std::size_t f = 0; f < z.size(); ++f) z[f] = q[f] + k[f];
    for (std::int64_t a = 0; a < edge_width; ++a) {
      const A* weight = static_cast<const A*>(input.weight) + a * static_cast<std::int64_t>(z.size());
      for (std::size_t f = 0; f < z.size(); ++f) z[f] += weight[f] * edge[a];
    }
  }

  A activated(std::int64_t f) const { return z[f] > 0 ? z[f] : static_cast<A>(input.scale) * z[f]; }

  A score(std::int64_t head, std::int64_t position) const {
    A sum = 0;
    const std::int64_t first = head * head_width;
    if (input.gatv2) {
      const A* att = static_cast<const A*>(input.att);
      for (std::int64_t f = first; f < first + head_width; ++f) sum += att[f] * activated(f);
      return sum;
    }
    for (std::int64_t f = first; f < first + head_width; ++f) sum += q[f] * k[f];
    for (std::int64_t a = 0; a < edge_width; ++a) sum += q_edge[head * edge_width + a] * edge[a];
    return sum + bias_of<T>(input, position, head);
  }
};

template <typename T>
void attend(const EdgeAttentionArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  using A = Acc<T>;
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const EdgeAttentionInput& input = args.input;
  const std::int64_t heads = input.heads, head_width = input.head_width, edge_width = input.edge_width;
  Pair<T> pair(input);
  std::vector<A> score, v(heads * head_width), out(v.size()), out_edge(pair.q_edge.size());
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
      widen_row(row_of<T>(input.v, args.a.col[begin + i]), v);
      if (!input.gatv2) {
        widen_row(static_cast<const T*>(input.edge) + edge_position(args.a, begin + i) * edge_width,
                  pair.edge);
      }
      for (std::int64_t head = 0; head < heads; ++head) {
        const A weight = score[i * heads + head];
        for (std::int64_t f = head * head_width; f < (head + 1) * head_width; ++f) out[f] += weight * v[f];
        if (input.gatv2) continue;
        for (std::int64_t a = 0; a < edge_width; ++a) {
          out_edge[head * edge_width + a] += weight * pair.edge[a];
        }
      }
    }
    narrow_row(out, static_cast<T*>(args.out) + row * heads * head_width);
    if (!input.gatv2) narrow_row(out_edge, static_cast<T*>(args.out_edge) + row * heads * edge_width);
  }
}

// Rows of A: their gradients, pairs {w, dS} and signs of their entries, one row of the sums over all entries.
template <typename T>
void differentiate_rows(const EdgeAttentionBackwardArgs& args, std::int64_t part, std::int64_t row_begin,
                        std::int64_t row_end) {
  using A = Acc<T>;
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const EdgeAttentionInput& input = args.input;
  const std::int64_t heads = input.heads, head_width = input.head_width, edge_width = input.edge_width;
  const std::int64_t width = heads * head_width;
  const A* att = static_cast<const A*>(input.att);
  A* grad_att = static_cast<A*>(args.grad_att) + part * width;
  A* grad_weight =
      args.grad_weight == nullptr ? nullptr : static_cast<A*>(args.grad_weight) + part * edge_width * width;
  if (input.gatv2) {
    std::fill(grad_att, grad_att + width, A{0});
    if (grad_weight != nullptr) std::fill(grad_weight, grad_weight + edge_width * width, A{0});
  }
  Pair<T> pair(input);
  const std::size_t edges_wide = pair.q_edge.size();
  std::vector<A> v(width), grad(width), out(width), grad_q(width), delta(heads);
  std::vector<A> grad_edge(edges_wide), grad_q_edge(edges_wide), grad_features(edge_width);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    pair.set_row(row);
    widen_row(row_of<T>(args.grad, row), grad);
    widen_row(row_of<T>(args.out, row), out);
    if (!input.gatv2) widen_row(static_cast<const T*>(args.grad_edge) + row * heads * edge_width, grad_edge);
    std::fill(grad_q.begin(), grad_q.end(), A{0});
    std::fill(grad_q_edge.begin(), grad_q_edge.end(), A{0});
    for (std::int64_t head = 0; head < heads; ++head) {
      delta[head] = 0;
      for (std::int64_t f = head * head_width; f < (head + 1) * head_width; ++f)
        delta[head] += grad[f] * out[f];
    }
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t col = args.a.col[entry], position = edge_position(args.a, entry);
      pair.set_entry(col, position);
      widen_row(row_of<T>(input.v, col), v);
      std::fill(grad_features.begin(), grad_features.end(), A{0});
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t first = head * head_width, of_head = position * heads + head;
        const A lse = static_cast<const A*>(args.lse)[row * heads + head];
        const A p = lse == -kInfinity ? A{0} : std::exp(pair.score(head, position) - lse);
        const A weight = p * keep_factor<A>(input, row, col, head);
        A grad_weight_of_p = 0;
        for (std::int64_t f = first; f < first + head_width; ++f) grad_weight_of_p += grad[f] * v[f];
        if (!input.gatv2) {
          for (std::int64_t a = 0; a < edge_width; ++a) {
            grad_weight_of_p += grad_edge[head * edge_width + a] * pair.edge[a];
          }
        }
        const A grad_score = weight * grad_weight_of_p - p * delta[head];
        A* numbers = static_cast<A*>(args.work) + 2 * of_head;
        numbers[0] = weight;
        numbers[1] = grad_score;
        if (!input.gatv2) {
          for (std::int64_t f = first; f < first + head_width; ++f) grad_q[f] += grad_score * pair.k[f];
          for (std::int64_t a = 0; a < edge_width; ++a) {
            const std::int64_t at = head * edge_width + a;
            grad_q_edge[at] += grad_score * pair.edge[a];
            grad_features[a] += grad_score * pair.q_edge[at] + weight * grad_edge[at];
          }
          continue;
        }
        std::uint8_t* positive = args.positive + of_head * args.sign_bytes;
        std::fill(positive, positive + args.sign_bytes, std::uint8_t{0});
        for (std::int64_t f = first; f < first + head_width; ++f) {
          const bool is_positive = pair.z[f] > 0;
          if (is_positive) positive[(f - first) / 8] |= static_cast<std::uint8_t>(1u << (f - first) % 8);
          grad_att[f] += grad_score * pair.activated(f);
          const A grad_z = grad_score * att[f] * (is_positive ? A{1} : static_cast<A>(input.scale));
          grad_q[f] += grad_z;
          for (std::int64_t a = 0; a < edge_width; ++a) {
            if (grad_weight != nullptr) grad_weight[a * width + f] += grad_z * pair.edge[a];
            grad_features[a] += grad_z * static_cast<const A*>(input.weight)[a * width + f];
          }
        }
      }
      if (args.grad_features != nullptr) {
        std::copy(grad_features.begin(), grad_features.end(),
                  static_cast<A*>(args.grad_features) + position * edge_width);
      }
    }
    const A factor = input.gatv2 ? A{1} : static_cast<A>(input.scale);
    narrow_row(grad_q, static_cast<T*>(args.grad_q) + row * width, factor);
    if (!input.gatv2) {
      narrow_row(grad_q_edge, static_cast<T*>(args.grad_q_edge) + row * heads * edge_width, factor);
    }
  }
}

template <typename T>
void differentiate_columns(const EdgeAttentionBackwardArgs& args, std::int64_t begin, std::int64_t end) {
  using A = Acc<T>;
  const EdgeAttentionInput& input = args.input;
  const std::int64_t heads = input.heads, head_width = input.head_width, width = heads * head_width;
  const A slope = static_cast<A>(input.scale);
  std::vector<A> q(width), grad(width), grad_k(width), grad_v(width);
  for (std::int64_t source = begin; source < end; ++source) {
    std::fill(grad_k.begin(), grad_k.end(), A{0});
    std::fill(grad_v.begin(), grad_v.end(), A{0});
    for (std::int64_t entry = args.a_t.rowptr[source]; entry < args.a_t.rowptr[source + 1]; ++entry) {
      const std::int64_t row = args.a_t.col[entry], position = edge_position(args.a_t, entry);
      if (!input.gatv2) widen_row(row_of<T>(input.q, row), q);
      widen_row(row_of<T>(args.grad, row), grad);
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t first = head * head_width, of_head = position * heads + head;
        const A* numbers = static_cast<const A*>(args.work) + 2 * of_head;
        for (std::int64_t f = first; f < first + head_width; ++f) {
          grad_v[f] += numbers[0] * grad[f];
          if (!input.gatv2) {
            grad_k[f] += numbers[1] * q[f];
          } else {
            const bool positive =
                args.positive[of_head * args.sign_bytes + (f - first) / 8] >> (f - first) % 8 & 1;
            grad_v[f] += numbers[1] * static_cast<const A*>(input.att)[f] * (positive ? A{1} : slope);
          }
        }
      }
    }
    T* to = static_cast<T*>(args.grad_k) + source * width;
    if (input.gatv2) {
      narrow_row(grad_v, to);
    } else {
      narrow_row(grad_k, to, slope);
      narrow_row(grad_v, static_cast<T*>(args.grad_v) + source * width);
    }
  }
}

// The columns' gradients without the transposed structure: whoever takes a range of columns looks through all
// entries for them, so that sums are taken in entry order whatever the number of threads.
template <typename T>
void scatter_columns(const EdgeAttentionBackwardArgs& args, std::int64_t col_begin, std::int64_t col_end) {
  using A = Acc<T>;
  const EdgeAttentionInput& input = args.input;
  const std::int64_t heads = input.heads, head_width = input.head_width, width = heads * head_width;
  std::vector<A> q(width), grad(width);
  for (std::int64_t row = 0; row < args.a.num_rows; ++row) {
    widen_row(row_of<T>(input.q, row), q, static_cast<A>(input.scale));
    widen_row(row_of<T>(args.grad, row), grad);
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t col = args.a.col[entry];
      if (col < col_begin || col >= col_end) continue;
      const A* numbers = static_cast<const A*>(args.work) + 2 * edge_position(args.a, entry) * heads;
      A* sum_k = static_cast<A*>(args.sum_k) + col * width;
      A* sum_v = static_cast<A*>(args.sum_v) + col * width;
      for (std::int64_t f = 0; f < width; ++f) {
        const A* of_head = numbers + f / head_width * 2;
        sum_v[f] += of_head[0] * grad[f];
        sum_k[f] += of_head[1] * q[f];
      }
    }
  }
}

}  // namespace

void edge_attention(const EdgeAttentionArgs& args, int threads) {
  with_type(args.input.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      attend<decltype(type)>(args, row, std::min(row + kRowsPerTask, args.a.num_rows));
    }
  });
}

void edge_attention_backward(const EdgeAttentionBackwardArgs& args, int threads) {
  const std::int64_t rows = args.a.num_rows, parts = args.att_rows;
  const std::int64_t ranges = args.sum_k != nullptr ? threads : 0;
  const std::int64_t columns = args.sum_k != nullptr ? 0 : args.a_t.num_rows;
  with_type(args.input.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    {
#pragma omp for schedule(dynamic)
      for (std::int64_t part = 0; part < parts; ++part) {
        differentiate_rows<T>(args, part, rows * part / parts, rows * (part + 1) / parts);
      }
#pragma omp for schedule(dynamic)
      for (std::int64_t source = 0; source < columns; source += kRowsPerTask) {
        differentiate_columns<T>(args, source, std::min(source + kRowsPerTask, columns));
      }
#pragma omp for schedule(static)
      for (std::int64_t range = 0; range < ranges; ++range) {
        const std::int64_t cols = args.a.num_cols;
        scatter_columns<T>(args, cols * range / ranges, cols * (range + 1) / ranges);
      }
    }
  });
}

}  // namespace fastsparse::cpu
