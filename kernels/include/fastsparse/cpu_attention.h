// Shared code of the passes of attention on the CPU. Entries are processed in blocks, so that scores and
// weights of a block stay in the L1 cache. Products are computed with vectors.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "fastsparse/cpu_simd.h"

namespace fastsparse::cpu {

constexpr int kBlock = 64;  // number of entries per block
constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 15;  // products below which waking threads costs more than it saves

// Rounds a number of entries up to whole vectors. Elements beyond the end of a block are computed but not
// used.
template <typename A>
FASTSPARSE_INLINE int padded(int count) {
  return (count + kVectorWidth<A> - 1) / kVectorWidth<A> * kVectorWidth<A>;
}

// The functions below are plain loops over the elements of a block, because the compiler vectorizes them,
// including comparisons, for the machine's vector width.

// exp with a relative error of 1e-7, for arguments from -87 to 88. The result is 0 below -87, and infinite
// from 88.4 on.
FASTSPARSE_INLINE float exponential(float x) {
  constexpr float kRound = 0x1.8p23f, kMin = -87;
  const float clamped = x < kMin ? kMin : x;
  const float shifted = clamped * 0x1.715476p0f + kRound;  // log2(e); the low bits are an integer
  const float whole = shifted - kRound;
  const float rest = (clamped - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;  // ln 2 in two terms
  // 1 + r + r^2 p(r), fitted to 3e-9 for |r| <= ln(2) / 2.
  float power = rest * 0x1.6a235p-10f + 0x1.123a6cp-7f;
  power = power * rest + 0x1.5558f4p-5f;
  power = power * rest + 0x1.55549p-3f;
  power = power * rest + 0x1.fffffcp-2f;
  power = power * (rest * rest) + rest + 1.0f;
  std::uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < kMin ? 0 : power * scale;
}
FASTSPARSE_INLINE double exponential(double x) { return std::exp(x); }

// Largest of `count` numbers, where `count` is a multiple of the vector width; NaN if any number is NaN.
template <typename A>
FASTSPARSE_INLINE A largest(const A* numbers, int count) {
  A most[kVectorWidth<A>];
  std::memcpy(most, numbers, sizeof most);
  for (int i = kVectorWidth<A>; i < count; i += kVectorWidth<A>) {
    for (int lane = 0; lane < kVectorWidth<A>; ++lane) {
      const A next = numbers[i + lane];
      most[lane] = next > most[lane] || next != next ? next : most[lane];
    }
  }
  A result = most[0];
  for (int i = 1; i < kVectorWidth<A>; ++i) {
    result = most[i] > result || most[i] != most[i] ? most[i] : result;
  }
  return result;
}

// Sum of `count` numbers, where `count` is a multiple of the vector width.
template <typename A>
FASTSPARSE_INLINE A sum_of(const A* numbers, int count) {
  Vector<A> sum = {}, next;
  for (int i = 0; i < count; i += kVectorWidth<A>) {
    load_vector<A>(numbers + i, next);
    sum += next;
  }
  return sum_lanes<A, kVectorWidth<A>>(sum);
}

// <left, right> in float64; `count` is a multiple of the vector width.
template <typename A>
FASTSPARSE_INLINE double precise_product(const A* left, const A* right, int count) {
  constexpr int kLanes = kVectorWidth<double>;
  Vector<double> sum = {};
  for (int i = 0; i < count; i += kLanes) {
    Lanes<A, kLanes> l, r;
    std::memcpy(&l, left + i, sizeof l);
    std::memcpy(&r, right + i, sizeof r);
    sum += __builtin_convertvector(l, Vector<double>) * __builtin_convertvector(r, Vector<double>);
  }
  return sum_lanes<double, kLanes>(sum);
}

// ---------------------------------------------------------------- products with the rows of a block

// Some consecutive entries of one row.
struct Block {
  std::int64_t entry;
  const std::int32_t* col;
  int count;
  int readable;  // number of entries from col[0] on whose rows may be prefetched
};

// The block that begins at `entry`, in a row that ends before entry `end`. Entries before `last` may be
// prefetched.
FASTSPARSE_INLINE Block block_at(const CsrView& a, std::int64_t entry, std::int64_t end, std::int64_t last) {
  return {entry, a.col + entry, static_cast<int>(std::min<std::int64_t>(kBlock, end - entry)),
          static_cast<int>(std::min<std::int64_t>(kBlock + kPrefetchEntries, last - entry))};
}

// The rows of a matrix that the entries of a block gather, from feature `first` on.
struct Gather {
  DenseView matrix;
  Dtype dtype;
  std::int64_t first;
  const std::int32_t* col;
  int count;
  int readable;
};

FASTSPARSE_INLINE Gather gather(const DenseView& matrix, Dtype dtype, std::int64_t first,
                                const Block& block) {
  return {matrix, dtype, first, block.col, block.count, block.readable};
}

// The same rows without prefetching, for a second read.
FASTSPARSE_INLINE Gather again(Gather rows) {
  rows.readable = 0;
  return rows;
}

// Up to kBlock consecutive rows of a contiguous matrix in the accumulation type, from feature `first` on.
inline constexpr auto kInOrder = [] {
  std::array<std::int32_t, kBlock> order{};
  for (int i = 0; i < kBlock; ++i) order[i] = i;
  return order;
}();
template <typename A>
FASTSPARSE_INLINE Gather rows_of(const A* matrix, std::int64_t stride, std::int64_t first, int count) {
  return {{matrix, stride}, kDtypeOf<A>, first, kInOrder.data(), count, 0};
}

// The terms of GATv2's hidden layer of one edge, att * leaky_relu(left + right): left, att and the slope.
template <typename A>
struct Hidden {
  const A* left;
  const A* att;
  A slope;
};

// The vector that an entry adds to a sum over entries, before it is multiplied by the entry's weight.
enum class Term {
  kFeatures,  // right
  kSlope,     // leaky_relu'(left + right)
};

// A sum to which blocks of entries are added with Kahan's addition, so that rounding errors grow with kBlock
// and not with the degree of a row.
template <typename A>
struct Sum {
  A* total;
  A* compensation;
};

// Allocates the arrays of a Sum.
template <typename A>
struct Sums {
  std::vector<A> total, compensation;

  explicit Sums(std::int64_t width) : total(width), compensation(width) {}
  FASTSPARSE_INLINE void clear() {
    std::fill(total.begin(), total.end(), A{0});
    std::fill(compensation.begin(), compensation.end(), A{0});
  }
  FASTSPARSE_INLINE Sum<A> from(std::int64_t first) {
    return {total.data() + first, compensation.data() + first};
  }
};

// These functions are in attention_blocks.cpp, compiled once for all passes.

// product[e] = <left, right_e>, or with `att` <att, leaky_relu(left + right_e)>.
void products(const Hidden<float>& hidden, const Gather& right, std::int64_t width, float* product);
void products(const Hidden<double>& hidden, const Gather& right, std::int64_t width, double* product);

// sum += sum over the entries of weight[e] * term(left, right_e).
void accumulate(Term term, const float* weight, const Hidden<float>& hidden, const Gather& right,
                std::int64_t width, const Sum<float>& sum);
void accumulate(Term term, const double* weight, const Hidden<double>& hidden, const Gather& right,
                std::int64_t width, const Sum<double>& sum);

// rows[e] = right_e + W a_e, (entries, width), from edge features in the layout of `Edges::columns`, and W
// transposed, (edge_width, width).
void project(const Gather& right, const float* columns, std::int64_t edge_width, const float* weight,
             std::int64_t width, float* rows);
void project(const Gather& right, const double* columns, std::int64_t edge_width, const double* weight,
             std::int64_t width, double* rows);

// Gradients of the hidden layer, from those of the scores, d_e: slopes += sum of d_e * leaky_relu'(z_e) and
// outputs += sum of d_e * leaky_relu(z_e), with z_e = left + right_e; rows[e] = d_e * att * leaky_relu'(z_e).
template <typename A>
struct HiddenGradients {
  Sum<A> slopes, outputs;
  A* rows;  // null: not computed
  std::int64_t stride;
};
void differentiate_hidden(const float* weight, const Hidden<float>& hidden, const Gather& right,
                          std::int64_t width, const HiddenGradients<float>& to);
void differentiate_hidden(const double* weight, const Hidden<double>& hidden, const Gather& right,
                          std::int64_t width, const HiddenGradients<double>& to);

// load_columns loads the edge features of a block in the layout of `Edges::columns`. store_columns stores a
// gradient in that layout to (num_values, edge_width).
void load_columns(const AttentionCsrArgs& args, const CsrView& a, const Block& block, float* columns);
void load_columns(const AttentionCsrArgs& args, const CsrView& a, const Block& block, double* columns);
void store_columns(const AttentionCsrArgs& args, const CsrView& a, const Block& block, const float* columns,
                   void* to);
void store_columns(const AttentionCsrArgs& args, const CsrView& a, const Block& block, const double* columns,
                   void* to);

// Converts a row of a matrix of `dtype` to the accumulation type.
void widen_row(const DenseView& matrix, Dtype dtype, std::int64_t row, std::int64_t width, float* to);
void widen_row(const DenseView& matrix, Dtype dtype, std::int64_t row, std::int64_t width, double* to);

// Writes numbers times `scale` to an array of `dtype`, beginning at element `first`.
void narrow_row(const float* from, float scale, std::int64_t width, void* to, Dtype dtype,
                std::int64_t first);
void narrow_row(const double* from, double scale, std::int64_t width, void* to, Dtype dtype,
                std::int64_t first);

// Returns a row in the accumulation type: the row itself if it has that type, otherwise a copy in
// `workspace`. So kernels that process row by row need no version for 16-bit features.
template <typename A>
FASTSPARSE_INLINE const A* read_row(const DenseView& matrix, Dtype dtype, std::int64_t row,
                                    std::int64_t width, A* workspace) {
  if (dtype == kDtypeOf<A>) return static_cast<const A*>(matrix.data) + row * matrix.stride;
  widen_row(matrix, dtype, row, width, workspace);
  return workspace;
}

// Writes a row to a contiguous array, beginning at element `first`.
template <typename A>
FASTSPARSE_INLINE void write_row(const A* from, std::int64_t width, void* to, Dtype dtype,
                                 std::int64_t first) {
  if (dtype == kDtypeOf<A>) {
    std::copy(from, from + width, static_cast<A*>(to) + first);
  } else {
    narrow_row(from, A{1}, width, to, dtype, first);
  }
}

// ---------------------------------------------------------------- features of edges

// W transposed, (edge_width, heads * value_width), in the accumulation type; empty without edge features.
template <typename A>
std::vector<A> transposed_weight(const AttentionCsrArgs& args) {
  const std::int64_t rows = args.edge_width > 0 ? args.heads * args.value_width : 0;
  std::vector<A> row(args.edge_width), transposed(rows * args.edge_width);
  for (std::int64_t f = 0; f < rows; ++f) {
    widen_row(args.weight, args.dtype, f, args.edge_width, row.data());
    for (std::int64_t a = 0; a < args.edge_width; ++a) transposed[a * rows + f] = row[a];
  }
  return transposed;
}

// The edge features that a pass reads. For dot products, W is multiplied per node instead of per edge: <q_h,
// W_h a> = <W_h^T q_h, a>, and the sum over edges of W_h a is W_h times the sum of a. Additive attention
// needs only the second identity. GATv2 multiplies the features of each block by W.
template <typename A>
struct Edges {
  const std::int64_t width;   // width of the edge features; 0: there are none
  const std::int64_t stride;  // the width rounded up to whole vectors
  const std::int64_t head_width;
  const std::int64_t row_width;  // width of all heads
  const bool in_values;          // whether W a is added to the values: true except for GATv2
  const bool in_scores;          // whether W a is added to the keys: true for dot products
  const A* const weight;         // W transposed, (width, row_width)
  std::vector<A> columns;   // (width, kBlock): one feature of all entries per row, 0 beyond the block's end
  std::vector<A> rows;      // GATv2: (kBlock, row_width), gathered rows plus W a
  std::vector<A> of_left;   // dot products: (heads, stride), W_h^T times the row of dst
  std::vector<A> of_value;  // backward: (heads, stride), W_h^T times the row of dO

  Edges(const AttentionCsrArgs& args, const std::vector<A>& weight)
      : width(args.edge_width),
        stride((width + kVectorWidth<A> - 1) / kVectorWidth<A> * kVectorWidth<A>),
        head_width(args.value_width),
        row_width(args.heads * head_width),
        in_values(width > 0 && args.kind != AttentionScore::kGatv2),
        in_scores(width > 0 && args.kind == AttentionScore::kDotProduct),
        weight(weight.data()),
        columns(width * kBlock),
        rows(width > 0 && !in_values ? kBlock * row_width : 0),
        of_left(in_values ? args.heads * stride : 0),
        of_value(of_left.size()) {}

  FASTSPARSE_INLINE void load(const AttentionCsrArgs& args, const CsrView& a, const Block& block,
                              const DenseView& right) {
    if (width == 0) return;
    load_columns(args, a, block, columns.data());
    if (in_values) return;
    project(gather(right, args.dtype, 0, block), columns.data(), width, weight, row_width, rows.data());
  }

  // Computes to_h = W_h^T row_h for every head.
  FASTSPARSE_INLINE void map(const std::vector<A>& row, std::vector<A>& to) const {
    if (!in_values) return;
    for (std::int64_t first = 0, place = 0; first < row_width; first += head_width, place += stride) {
      for (std::int64_t a = 0; a < width; a += kBlock) {
        const int count = static_cast<int>(std::min<std::int64_t>(kBlock, width - a));
        products({row.data() + first, nullptr, 0}, rows_of(weight + a * row_width, row_width, first, count),
                 head_width, to.data() + place + a);
      }
    }
  }

  // sum += W_h of_edges, for the head whose features begin at `first`.
  FASTSPARSE_INLINE void add_mapped(const A* of_edges, std::int64_t first, const Sum<A>& sum) const {
    for (std::int64_t a = 0; a < width; a += kBlock) {
      const int count = static_cast<int>(std::min<std::int64_t>(kBlock, width - a));
      accumulate(Term::kFeatures, of_edges + a, {}, rows_of(weight + a * row_width, row_width, first, count),
                 head_width, sum);
    }
  }

  // to[e] += <of_edges, a_e>.
  FASTSPARSE_INLINE void add_products(const A* of_edges, int lanes, A* to) const {
    for (int i = 0; i < lanes; i += kVectorWidth<A>) {
      Vector<A> sum, column;
      load_vector<A>(to + i, sum);
      for (std::int64_t a = 0; a < width; ++a) {
        load_vector<A>(columns.data() + a * kBlock + i, column);
        sum += of_edges[a] * column;
      }
      store_vector<A>(sum, to + i);
    }
  }

  // sum += sum over the entries of weight[e] * a_e.
  FASTSPARSE_INLINE void add_sums(const A* weight_of, int lanes, const Sum<A>& sum) const {
    for (std::int64_t a = 0; a < width; ++a) {
      Vector<A> total = {}, factor, column;
      for (int i = 0; i < lanes; i += kVectorWidth<A>) {
        load_vector<A>(weight_of + i, factor);
        load_vector<A>(columns.data() + a * kBlock + i, column);
        total += factor * column;
      }
      add_compensated(sum_lanes<A, kVectorWidth<A>>(total), sum.total[a], sum.compensation[a]);
    }
  }
};

// ---------------------------------------------------------------- scores

inline std::int64_t work(const AttentionCsrArgs& args) {
  return args.a.num_edges * args.heads * (args.head_width + args.value_width + args.edge_width);
}

// Number of rows, or columns, per task. With edge features, every task allocates sums, so there are fewer
// tasks.
inline std::int64_t rows_per_task(const AttentionCsrArgs& args, std::int64_t rows) {
  constexpr std::int64_t kMostTasks = 128;
  if (args.edge_width == 0) return kRowsPerTask;
  return (rows / kMostTasks / kRowsPerTask + 1) * kRowsPerTask;
}

// The dtype of dst and src.
inline Dtype score_dtype(const AttentionCsrArgs& args) {
  if (args.kind != AttentionScore::kAdditive) return args.dtype;
  return args.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
}

// Number of columns of dst and src.
inline std::int64_t score_columns(const AttentionCsrArgs& args) {
  return args.kind == AttentionScore::kAdditive ? args.heads : args.heads * args.head_width;
}

// The dropout factor of a weight; row and column are numbered as in the caller's structure.
template <typename A>
FASTSPARSE_INLINE A keep_factor(const AttentionCsrArgs& args, std::int64_t row, std::int64_t col,
                                std::int64_t head) {
  return dropout_factor(args.dropout, row, col, head) > 0 ? static_cast<A>(args.keep_scale) : A{0};
}

template <typename A>
struct Scores {
  A score[kBlock];
  A slope[kBlock];  // d(score) / d(argument of the leaky ReLU), for additive scores
};

// The rows of `right` that the scores of one head gather for the entries of a block.
template <typename A>
FASTSPARSE_INLINE Gather score_rows(const AttentionCsrArgs& args, const Block& block, std::int64_t head,
                                    const DenseView& right, const Edges<A>& edges) {
  const std::int64_t first = head * args.head_width;
  if (edges.rows.empty()) return gather(right, args.dtype, first, block);
  return rows_of(edges.rows.data(), edges.row_width, first, block.count);
}

// Scores of one head between the row `left` and the rows of `right` that a block gathers. In the pass over
// rows, `left` is a destination and the gathered rows are its sources. In the pass over columns, which calls
// this only without edge features, `left` is a source and the gathered rows are its destinations.
template <typename A>
FASTSPARSE_INLINE void block_scores(const AttentionCsrArgs& args, const CsrView& a, const Block& block,
                                    std::int64_t head, const A* left, const DenseView& right,
                                    const Edges<A>& edges, Scores<A>& scores) {
  const auto slope = static_cast<A>(args.scale);
  const std::int64_t first = head * args.head_width;
  if (args.kind == AttentionScore::kAdditive) {
    const A* ends = static_cast<const A*>(right.data) + head;
    for (int i = 0; i < block.count; ++i) {
      scores.score[i] = left[head] + ends[block.col[i] * right.stride];
    }
  } else {
    const A* att = args.kind == AttentionScore::kGatv2 ? static_cast<const A*>(args.att) + first : nullptr;
    products({left + first, att, slope}, score_rows(args, block, head, right, edges), args.head_width,
             scores.score);
    if (edges.in_scores) {
      edges.add_products(edges.of_left.data() + head * edges.stride, padded<A>(block.count), scores.score);
    }
    if (att == nullptr) {
      for (int i = 0; i < block.count; ++i) scores.score[i] *= slope;
    }
  }
  if (args.bias.data != nullptr) {
    for (int i = 0; i < block.count; ++i) {
      const std::int64_t at = edge_position(a, block.entry + i) * args.heads + head;
      scores.score[i] += number_at<A>(args.bias.data, args.bias.dtype, at);
    }
  }
  if (args.kind == AttentionScore::kAdditive) {
    for (int i = 0; i < block.count; ++i) {
      scores.slope[i] = scores.score[i] > 0 ? A{1} : slope;
      scores.score[i] *= scores.slope[i];
    }
  }
}

}  // namespace fastsparse::cpu
