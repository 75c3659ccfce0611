// What the passes of attention on the CPU share: entries are taken in blocks, scores and weights of a block
// stay in the L1 cache, and products run over 64-byte vectors, then over halves and quarters of them (small
// heads).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "fastsparse/cpu_simd.h"

namespace fastsparse::cpu {

constexpr int kBlock = 64;           // entries
constexpr int kPrefetchEntries = 8;  // entries between a prefetch and its use
constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 15;  // products below which waking threads costs more than it saves

template <typename A, int kLanes>
struct LanesOf {
  typedef A type __attribute__((vector_size(kLanes * sizeof(A))));
};
template <typename A, int kLanes>
using Lanes = typename LanesOf<A, kLanes>::type;

template <typename T, int kLanes>
FASTSPARSE_INLINE void load_lanes(const T* from, Lanes<Acc<T>, kLanes>& to) {
  if constexpr (sizeof(T) == sizeof(Acc<T>)) {
    std::memcpy(&to, from, sizeof to);
  } else {
    Acc<T> lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = widen(from[i]);
    std::memcpy(&to, lanes, sizeof to);
  }
}

template <typename A, int kLanes>
FASTSPARSE_INLINE A sum_lanes(const Lanes<A, kLanes>& v) {
  if constexpr (kLanes == 2) {
    return v[0] + v[1];
  } else {
    Lanes<A, kLanes / 2> half[2];
    std::memcpy(half, &v, sizeof v);
    return sum_lanes<A, kLanes / 2>(half[0] + half[1]);
  }
}

// Rows of a matrix, one for every entry of a block: base + col[e] * stride.
template <typename T>
struct Gather {
  const T* base;
  std::int64_t stride;
  const std::int32_t* col;
  int count;
  int readable;  // entries from col on whose rows may be prefetched

  FASTSPARSE_INLINE const T* row(int entry) const { return base + col[entry] * stride; }
  FASTSPARSE_INLINE void prefetch(int entry, std::int64_t width) const {
    if (entry + kPrefetchEntries >= readable) return;
    const auto* next = reinterpret_cast<const char*>(row(entry + kPrefetchEntries));
    for (std::int64_t byte = 0; byte < width * static_cast<std::int64_t>(sizeof(T)); byte += 64) {
      __builtin_prefetch(next + byte);
    }
  }
};

// GATv2's hidden layer of one edge: leaky_relu(left + right), times a factor per feature.
template <typename A>
struct Hidden {
  const A* left;
  const A* att;
  A slope;
};

template <typename V, typename A>
FASTSPARSE_INLINE void leaky_relu(V& z, A slope) {
  z = z > 0 ? z : z * slope;
}

// Adds the products of features [f, f + kLanes) to sum.
template <typename T, bool kHidden, int kLanes>
FASTSPARSE_INLINE void add_products(const Hidden<Acc<T>>& hidden, const T* right, std::int64_t f,
                                    Lanes<Acc<T>, kLanes>& sum) {
  using A = Acc<T>;
  Lanes<A, kLanes> l, r;
  load_lanes<A, kLanes>(hidden.left + f, l);
  load_lanes<T, kLanes>(right + f, r);
  if constexpr (kHidden) {
    Lanes<A, kLanes> att;
    load_lanes<A, kLanes>(hidden.att + f, att);
    r += l;
    leaky_relu(r, hidden.slope);
    sum += att * r;
  } else {
    sum += l * r;
  }
}

// product[e] = <left, right_e>, or <att, leaky_relu(left + right_e)> if kHidden.
template <typename T, bool kHidden>
FASTSPARSE_INLINE void products(const Hidden<Acc<T>>& hidden, const Gather<T>& right, std::int64_t width,
                                Acc<T>* product) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  for (int entry = 0; entry < right.count; ++entry) {
    right.prefetch(entry, width);
    const T* row = right.row(entry);
    std::int64_t f = 0;
    A total = 0;
    if (width >= kWidth) {
      Lanes<A, kWidth> even = {}, odd = {};
      for (; f + 2 * kWidth <= width; f += 2 * kWidth) {
        add_products<T, kHidden, kWidth>(hidden, row, f, even);
        add_products<T, kHidden, kWidth>(hidden, row, f + kWidth, odd);
      }
      if (f + kWidth <= width) {
        add_products<T, kHidden, kWidth>(hidden, row, f, even);
        f += kWidth;
      }
      total = sum_lanes<A, kWidth>(even + odd);
    }
    if (f + kWidth / 2 <= width) {
      Lanes<A, kWidth / 2> sum = {};
      add_products<T, kHidden, kWidth / 2>(hidden, row, f, sum);
      f += kWidth / 2;
      total += sum_lanes<A, kWidth / 2>(sum);
    }
    for (; f < width; ++f) {
      if constexpr (kHidden) {
        A z = hidden.left[f] + widen(row[f]);
        leaky_relu(z, hidden.slope);
        total += hidden.att[f] * z;
      } else {
        total += hidden.left[f] * widen(row[f]);
      }
    }
    product[entry] = total;
  }
}

// What an entry adds to a sum over entries, before its weight.
enum class Term {
  kFeatures,  // right
  kHidden,    // leaky_relu(left + right)
  kSlope,     // the derivative of that
};

// Turns `right` into its term.
template <Term kTerm, typename V, typename A>
FASTSPARSE_INLINE void make_term(const V& left, A slope, V& right) {
  if constexpr (kTerm == Term::kHidden) {
    right += left;
    leaky_relu(right, slope);
  } else if constexpr (kTerm == Term::kSlope) {
    const V one = V{} + A{1};
    right = left + right > 0 ? one : one * slope;
  }
}

// A sum that takes one block of entries after the other with Kahan's addition: rounding errors then grow with
// kBlock and not with the degree of a row.
template <typename A>
struct Sum {
  A* total;
  A* compensation;
};

template <typename V>
FASTSPARSE_INLINE void add_compensated(const V& term, V& total, V& compensation) {
  const V corrected = term - compensation;
  const V next = total + corrected;
  compensation = (next - total) - corrected;
  total = next;
}

template <typename T, Term kTerm, int kVectors, int kLanes>
FASTSPARSE_INLINE void accumulate_tile(const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                       const Gather<T>& right, std::int64_t f, const Sum<Acc<T>>& sum) {
  using A = Acc<T>;
  using V = Lanes<A, kLanes>;
  V block[kVectors] = {}, left[kVectors] = {};
  if constexpr (kTerm != Term::kFeatures) {
    for (int v = 0; v < kVectors; ++v) load_lanes<A, kLanes>(hidden.left + f + v * kLanes, left[v]);
  }
  for (int entry = 0; entry < right.count; ++entry) {
    const T* row = right.row(entry) + f;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      V features;
      load_lanes<T, kLanes>(row + v * kLanes, features);
      make_term<kTerm>(left[v], hidden.slope, features);
      block[v] += weight[entry] * features;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    V total, compensation;
    load_lanes<A, kLanes>(sum.total + f + v * kLanes, total);
    load_lanes<A, kLanes>(sum.compensation + f + v * kLanes, compensation);
    add_compensated(block[v], total, compensation);
    std::memcpy(sum.total + f + v * kLanes, &total, sizeof total);
    std::memcpy(sum.compensation + f + v * kLanes, &compensation, sizeof compensation);
  }
}

// sum += sum over the entries of weight[e] * term(left, right_e).
template <typename T, Term kTerm>
FASTSPARSE_INLINE void accumulate(const Acc<T>* weight, const Hidden<Acc<T>>& hidden, const Gather<T>& right,
                                  std::int64_t width, const Sum<Acc<T>>& sum) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  std::int64_t f = 0;
  for (; f + 4 * kWidth <= width; f += 4 * kWidth) {
    accumulate_tile<T, kTerm, 4, kWidth>(weight, hidden, right, f, sum);
  }
  for (; f + kWidth <= width; f += kWidth)
    accumulate_tile<T, kTerm, 1, kWidth>(weight, hidden, right, f, sum);
  if (f + kWidth / 2 <= width) {
    accumulate_tile<T, kTerm, 1, kWidth / 2>(weight, hidden, right, f, sum);
    f += kWidth / 2;
  }
  for (; f < width; ++f) {
    A block = 0;
    for (int entry = 0; entry < right.count; ++entry) {
      A features = widen(right.row(entry)[f]);
      make_term<kTerm>(kTerm == Term::kFeatures ? A{0} : hidden.left[f], hidden.slope, features);
      block += weight[entry] * features;
    }
    add_compensated(block, sum.total[f], sum.compensation[f]);
  }
}

// exp, to 1e-7 of its value, for arguments where it neither overflows nor matters that it underflows to 0.
FASTSPARSE_INLINE void exponential(Vector<float>& x) {
  typedef std::uint32_t Bits __attribute__((vector_size(64)));
  constexpr float kRound = 0x1.8p23f;
  const Vector<float> least = Vector<float>{} - 87.0f;
  const Vector<float> clamped = x < least ? least : x;
  const Vector<float> shifted = clamped * 0x1.715476p0f + kRound;  // log2(e): whole numbers in the low bits
  const Vector<float> whole = shifted - kRound;
  const Vector<float> rest = (clamped - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;  // ln 2 in two terms
  // 1 + r + r^2 p(r), fitted to 3e-9 for |r| <= ln(2) / 2.
  Vector<float> power = rest * 0x1.6a235p-10f + 0x1.123a6cp-7f;
  power = power * rest + 0x1.5558f4p-5f;
  power = power * rest + 0x1.55549p-3f;
  power = power * rest + 0x1.fffffcp-2f;
  power = power * (rest * rest) + rest + 1.0f;
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  Vector<float> scale;
  std::memcpy(&scale, &bits, sizeof scale);
  x = x < least ? Vector<float>{} : power * scale;
}
FASTSPARSE_INLINE void exponential(Vector<double>& x) {
  for (int i = 0; i < kVectorWidth<double>; ++i) x[i] = std::exp(x[i]);
}

// Largest of kBlock numbers; NaN if there is one.
template <typename A>
FASTSPARSE_INLINE A largest(const A* numbers) {
  Vector<A> most, next;
  load_vector<A>(numbers, most);
  for (int i = kVectorWidth<A>; i < kBlock; i += kVectorWidth<A>) {
    load_vector<A>(numbers + i, next);
    most = (next > most) | (next != next) ? next : most;
  }
  A result = most[0];
  for (int i = 1; i < kVectorWidth<A>; ++i) {
    result = most[i] > result || most[i] != most[i] ? most[i] : result;
  }
  return result;
}

// ---------------------------------------------------------------- scores

inline std::int64_t work(const AttentionCsrArgs& args) {
  return args.a.num_edges * args.heads * (args.head_width + args.value_width);
}

// Consecutive entries of one row.
struct Block {
  std::int64_t entry;
  const std::int32_t* col;
  int count;
  int readable;
};

FASTSPARSE_INLINE Block block_at(const CsrView& a, std::int64_t entry, std::int64_t end) {
  return {entry, a.col + entry, static_cast<int>(std::min<std::int64_t>(kBlock, end - entry)),
          static_cast<int>(std::min<std::int64_t>(kBlock + kPrefetchEntries, end - entry))};
}

template <typename T>
FASTSPARSE_INLINE Gather<T> gather(const DenseView& matrix, std::int64_t feature, const Block& block) {
  return {static_cast<const T*>(matrix.data) + feature, matrix.stride, block.col, block.count,
          block.readable};
}

// Columns of dst and src.
inline std::int64_t score_columns(const AttentionCsrArgs& args) {
  return args.kind == AttentionScore::kAdditive ? args.heads : args.heads * args.head_width;
}

template <typename T>
FASTSPARSE_INLINE void load_row(const DenseView& matrix, std::int64_t row, std::vector<Acc<T>>& to) {
  const T* from = static_cast<const T*>(matrix.data) + row * matrix.stride;
  for (std::size_t f = 0; f < to.size(); ++f) to[f] = widen(from[f]);
}

// A row of dst or src.
template <typename T>
FASTSPARSE_INLINE void load_score_row(const AttentionCsrArgs& args, const DenseView& matrix, std::int64_t row,
                                      std::vector<Acc<T>>& to) {
  args.kind == AttentionScore::kAdditive ? load_row<Acc<T>>(matrix, row, to) : load_row<T>(matrix, row, to);
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
template <typename T>
FASTSPARSE_INLINE void block_scores(const AttentionCsrArgs& args, const CsrView& a, const Block& block,
                                    std::int64_t head, const Acc<T>* left, const DenseView& right,
                                    Scores<Acc<T>>& scores) {
  using A = Acc<T>;
  const auto slope = static_cast<A>(args.scale);
  const std::int64_t first = head * args.head_width;
  if (args.kind == AttentionScore::kAdditive) {
    const auto ends = gather<A>(right, head, block);
    for (int i = 0; i < block.count; ++i) scores.score[i] = left[head] + *ends.row(i);
  } else if (args.kind == AttentionScore::kDotProduct) {
    products<T, false>({left + first, nullptr, 0}, gather<T>(right, first, block), args.head_width,
                       scores.score);
    for (int i = 0; i < block.count; ++i) scores.score[i] *= slope;
  } else {
    const Hidden<A> hidden{left + first, static_cast<const A*>(args.att) + first, slope};
    products<T, true>(hidden, gather<T>(right, first, block), args.head_width, scores.score);
  }
  if (args.bias.data != nullptr) {
    for (int i = 0; i < block.count; ++i) {
      const std::int64_t at = edge_position(a, block.entry + i) * args.heads + head;
      scores.score[i] += edge_value<T>(args.bias, args.dtype, at);
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
