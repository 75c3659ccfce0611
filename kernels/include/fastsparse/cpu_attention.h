// What the passes of attention on the CPU share: entries are taken in blocks, scores and weights of a block
// stay in the L1 cache, and products run over vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "fastsparse/cpu_simd.h"

namespace fastsparse::cpu {

constexpr int kBlock = 64;            // entries
constexpr int kPrefetchEntries = 16;  // entries between a prefetch and its use
constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 15;  // products below which waking threads costs more than it saves

// The entries of a block in whole vectors: numbers beyond its end are computed and left out.
template <typename A>
FASTSPARSE_INLINE int padded(int count) {
  return (count + kVectorWidth<A> - 1) / kVectorWidth<A> * kVectorWidth<A>;
}

// Loops over the numbers of a block are plain ones: the compiler turns them into vectors of whatever width
// the machine has, comparisons included.

// exp, to 1e-7 of its value, for arguments where it neither overflows nor matters that it underflows to 0.
FASTSPARSE_INLINE float exponential(float x) {
  constexpr float kRound = 0x1.8p23f, kLeast = -87;
  const float clamped = x < kLeast ? kLeast : x;
  const float shifted = clamped * 0x1.715476p0f + kRound;  // log2(e): whole numbers in the low bits
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
  return x < kLeast ? 0 : power * scale;
}
FASTSPARSE_INLINE double exponential(double x) { return std::exp(x); }

// Largest of `count` numbers, whole vectors of them; NaN if there is one.
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

// Sum of `count` numbers, whole vectors of them.
template <typename A>
FASTSPARSE_INLINE A sum_of(const A* numbers, int count) {
  Vector<A> sum = {}, next;
  for (int i = 0; i < count; i += kVectorWidth<A>) {
    load_vector<A>(numbers + i, next);
    sum += next;
  }
  return sum_lanes<A, kVectorWidth<A>>(sum);
}

// ---------------------------------------------------------------- products with the rows of a block

// Consecutive entries of one row.
struct Block {
  std::int64_t entry;
  const std::int32_t* col;
  int count;
  int readable;  // entries from col on whose rows may be prefetched
};

// The block from `entry` on in a row that ends at `end`; entries up to `last` may be prefetched.
FASTSPARSE_INLINE Block block_at(const CsrView& a, std::int64_t entry, std::int64_t end, std::int64_t last) {
  return {entry, a.col + entry, static_cast<int>(std::min<std::int64_t>(kBlock, end - entry)),
          static_cast<int>(std::min<std::int64_t>(kBlock + kPrefetchEntries, last - entry))};
}

// The rows of a matrix that the entries of a block name, from feature `first` on.
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

// The same rows once more: they are in a cache already.
FASTSPARSE_INLINE Gather gather_again(const DenseView& matrix, Dtype dtype, std::int64_t first,
                                      const Block& block) {
  return {matrix, dtype, first, block.col, block.count, 0};
}

// GATv2's hidden layer of one edge: leaky_relu(left + right), times a factor per feature.
template <typename A>
struct Hidden {
  const A* left;
  const A* att;
  A slope;
};

// What an entry adds to a sum over entries, before its weight.
enum class Term {
  kFeatures,  // right
  kHidden,    // leaky_relu(left + right)
  kSlope,     // the derivative of that
};

// A sum that takes one block of entries after the other with Kahan's addition: rounding errors then grow with
// kBlock and not with the degree of a row.
template <typename A>
struct Sum {
  A* total;
  A* compensation;
};

// In attention_blocks.cpp, compiled once for all passes.

// product[e] = <left, right_e>, or with `att` <att, leaky_relu(left + right_e)>.
void products(const Hidden<float>& hidden, const Gather& right, std::int64_t width, float* product);
void products(const Hidden<double>& hidden, const Gather& right, std::int64_t width, double* product);

// sum += sum over the entries of weight[e] * term(left, right_e).
void accumulate(Term term, const float* weight, const Hidden<float>& hidden, const Gather& right,
                std::int64_t width, const Sum<float>& sum);
void accumulate(Term term, const double* weight, const Hidden<double>& hidden, const Gather& right,
                std::int64_t width, const Sum<double>& sum);

// A row of a matrix of `dtype` in the type of sums.
void widen_row(const DenseView& matrix, Dtype dtype, std::int64_t row, std::int64_t width, float* to);
void widen_row(const DenseView& matrix, Dtype dtype, std::int64_t row, std::int64_t width, double* to);

// Writes numbers times `scale` from element `first` of an array of `dtype` on.
void narrow_row(const float* from, float scale, std::int64_t width, void* to, Dtype dtype,
                std::int64_t first);
void narrow_row(const double* from, double scale, std::int64_t width, void* to, Dtype dtype,
                std::int64_t first);

// A row in the type of sums: where it lies if it has that type, else in `room`. Kernels that work row by row
// need no version for 16-bit numbers then.
template <typename A>
FASTSPARSE_INLINE const A* read_row(const DenseView& matrix, Dtype dtype, std::int64_t row,
                                    std::int64_t width, A* room) {
  if (dtype == kDtypeOf<A>) return static_cast<const A*>(matrix.data) + row * matrix.stride;
  widen_row(matrix, dtype, row, width, room);
  return room;
}

// Writes a row of a contiguous array from element `first` on.
template <typename A>
FASTSPARSE_INLINE void write_row(const A* from, std::int64_t width, void* to, Dtype dtype,
                                 std::int64_t first) {
  if (dtype == kDtypeOf<A>) {
    std::copy(from, from + width, static_cast<A*>(to) + first);
  } else {
    narrow_row(from, A{1}, width, to, dtype, first);
  }
}

// ---------------------------------------------------------------- scores

inline std::int64_t work(const AttentionCsrArgs& args) {
  return args.a.num_edges * args.heads * (args.head_width + args.value_width);
}

// The dtype of dst and src.
inline Dtype score_dtype(const AttentionCsrArgs& args) {
  if (args.kind != AttentionScore::kAdditive) return args.dtype;
  return args.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
}

// Columns of dst and src.
inline std::int64_t score_columns(const AttentionCsrArgs& args) {
  return args.kind == AttentionScore::kAdditive ? args.heads : args.heads * args.head_width;
}

// What dropout multiplies a weight by; row and column of the caller's structure.
template <typename A>
FASTSPARSE_INLINE A keep_factor(const AttentionCsrArgs& args, std::int64_t row, std::int64_t col,
                                std::int64_t head) {
  return dropout_factor(args.dropout, row, col, head) > 0 ? static_cast<A>(args.keep_scale) : A{0};
}

template <typename A>
struct Scores {
  A score[kBlock];
  A slope[kBlock];  // d(score) / d(sum) of additive scores
};

// Scores of one head between the row `left` and the entries of a block, whose rows of `right` are gathered:
// the destination and its sources, or in the transposed structure the source and its destinations.
template <typename A>
FASTSPARSE_INLINE void block_scores(const AttentionCsrArgs& args, const CsrView& a, const Block& block,
                                    std::int64_t head, const A* left, const DenseView& right,
                                    Scores<A>& scores) {
  const auto slope = static_cast<A>(args.scale);
  const std::int64_t first = head * args.head_width;
  if (args.kind == AttentionScore::kAdditive) {
    const A* ends = static_cast<const A*>(right.data) + head;
    for (int i = 0; i < block.count; ++i) {
      scores.score[i] = left[head] + ends[block.col[i] * right.stride];
    }
  } else {
    const A* att = args.kind == AttentionScore::kGatv2 ? static_cast<const A*>(args.att) + first : nullptr;
    products({left + first, att, slope}, gather(right, args.dtype, first, block), args.head_width,
             scores.score);
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
