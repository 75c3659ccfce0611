// What the passes of attention on the CPU share: entries are taken in blocks, scores and weights of a block
// stay in the L1 cache, and products run over 64-byte vectors, or halves of them where heads are narrow.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "fastsparse/cpu_simd.h"

namespace fastsparse::cpu {

constexpr int kBlock = 64;            // entries
constexpr int kPrefetchEntries = 16;  // entries between a prefetch and its use
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

template <typename A>
using HalfVector = Lanes<A, kVectorWidth<A> / 2>;
template <typename A>
using LaneIndex = std::conditional_t<sizeof(A) == 4, std::int32_t, std::int64_t>;
template <typename A, int kLanes>
using LaneMask = Lanes<LaneIndex<A>, kLanes>;

// Turns `a` into the sums of its lanes 0 and 1, 2 and 3, ..., then of those of `b`.
FASTSPARSE_INLINE void add_neighbours(HalfVector<float>& a, const HalfVector<float>& b) {
#ifdef __clang__
  a = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
      __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  using Index = LaneMask<float, 8>;
  a = __builtin_shuffle(a, b, Index{0, 2, 4, 6, 8, 10, 12, 14}) +
      __builtin_shuffle(a, b, Index{1, 3, 5, 7, 9, 11, 13, 15});
#endif
}
FASTSPARSE_INLINE void add_neighbours(HalfVector<double>& a, const HalfVector<double>& b) {
#ifdef __clang__
  a = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#else
  using Index = LaneMask<double, 4>;
  a = __builtin_shuffle(a, b, Index{0, 2, 4, 6}) + __builtin_shuffle(a, b, Index{1, 3, 5, 7});
#endif
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
  FASTSPARSE_INLINE void prefetch(int entry, std::int64_t first, std::int64_t width) const {
    if (entry + kPrefetchEntries >= readable) return;
    const auto* next = reinterpret_cast<const char*>(row(entry + kPrefetchEntries) + first);
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

// The entries of a block in whole vectors: numbers beyond its end are computed and left out.
template <typename A>
FASTSPARSE_INLINE int padded(int count) {
  return (count + kVectorWidth<A> - 1) / kVectorWidth<A> * kVectorWidth<A>;
}

// Lanes from `first` on. The last vector of a head ends with it, so that nothing is read beyond it and no
// feature is left over; lanes that an earlier vector had count once.
template <typename A, int kLanes>
FASTSPARSE_INLINE void lanes_from(std::int64_t first, LaneMask<A, kLanes>& lanes) {
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  lanes = lanes >= static_cast<LaneIndex<A>>(first);
}

// Products of features [f, f + kLanes).
template <typename T, bool kHidden, int kLanes>
FASTSPARSE_INLINE void multiply(const Hidden<Acc<T>>& hidden, const T* right, std::int64_t f,
                                Lanes<Acc<T>, kLanes>& product) {
  using A = Acc<T>;
  Lanes<A, kLanes> l;
  load_lanes<A, kLanes>(hidden.left + f, l);
  load_lanes<T, kLanes>(right + f, product);
  if constexpr (kHidden) {
    Lanes<A, kLanes> att;
    load_lanes<A, kLanes>(hidden.att + f, att);
    product += l;
    leaky_relu(product, hidden.slope);
    product *= att;
  } else {
    product *= l;
  }
}

// Products with the features of one row, summed up to half a vector; width >= kLanes.
template <typename T, bool kHidden, int kLanes>
FASTSPARSE_INLINE void row_products(const Hidden<Acc<T>>& hidden, const T* row, std::int64_t width,
                                    HalfVector<Acc<T>>& part) {
  using A = Acc<T>;
  Lanes<A, kLanes> sum = {}, product;
  std::int64_t f = 0;
  for (; f + kLanes <= width; f += kLanes) {
    multiply<T, kHidden, kLanes>(hidden, row, f, product);
    sum += product;
  }
  if (f < width) {
    LaneMask<A, kLanes> fresh;
    lanes_from<A, kLanes>(f - (width - kLanes), fresh);
    multiply<T, kHidden, kLanes>(hidden, row, width - kLanes, product);
    sum += fresh ? product : Lanes<A, kLanes>{};
  }
  if constexpr (kLanes == kVectorWidth<A>) {
    HalfVector<A> half[2];
    std::memcpy(half, &sum, sizeof sum);
    part = half[0] + half[1];
  } else {
    part = sum;
  }
}

// As many rows as half a vector has lanes at a time: their sums then come out of adding neighbouring lanes,
// which puts two vectors into one, a few times over.
template <typename T, bool kHidden, int kLanes>
FASTSPARSE_INLINE void wide_products(const Hidden<Acc<T>>& hidden, const Gather<T>& right, std::int64_t width,
                                     Acc<T>* product) {
  using A = Acc<T>;
  constexpr int kRows = kVectorWidth<A> / 2;
  for (int first = 0; first < right.count; first += kRows) {
    const int count = std::min(kRows, right.count - first);
    HalfVector<A> part[kRows] = {};
    for (int i = 0; i < count; ++i) {
      right.prefetch(first + i, 0, width);
      row_products<T, kHidden, kLanes>(hidden, right.row(first + i), width, part[i]);
    }
#pragma GCC unroll 4
    for (int left = kRows / 2; left > 0; left /= 2) {
#pragma GCC unroll 4
      for (int i = 0; i < left; ++i) {
        add_neighbours(part[2 * i], part[2 * i + 1]);
        part[i] = part[2 * i];
      }
    }
    std::memcpy(product + first, part, sizeof part[0]);
  }
}

// product[e] = <left, right_e>, or <att, leaky_relu(left + right_e)> if kHidden.
template <typename T, bool kHidden>
FASTSPARSE_INLINE void products(const Hidden<Acc<T>>& hidden, const Gather<T>& right, std::int64_t width,
                                Acc<T>* product) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  if (width >= kWidth) return wide_products<T, kHidden, kWidth>(hidden, right, width, product);
  if (width >= kWidth / 2) return wide_products<T, kHidden, kWidth / 2>(hidden, right, width, product);
  for (int entry = 0; entry < right.count; ++entry) {
    right.prefetch(entry, 0, width);
    const T* row = right.row(entry);
    A total = 0;
    for (std::int64_t f = 0; f < width; ++f) {
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

template <typename T, Term kTerm, int kVectors, int kLanes>
FASTSPARSE_INLINE void accumulate_tile(const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                       const Gather<T>& right, std::int64_t f,
                                       const LaneMask<Acc<T>, kLanes>& fresh, const Sum<Acc<T>>& sum) {
  using A = Acc<T>;
  using V = Lanes<A, kLanes>;
  V block[kVectors] = {}, left[kVectors] = {};
  if constexpr (kTerm != Term::kFeatures) {
    for (int v = 0; v < kVectors; ++v) load_lanes<A, kLanes>(hidden.left + f + v * kLanes, left[v]);
  }
  for (int entry = 0; entry < right.count; ++entry) {
    right.prefetch(entry, f, kVectors * kLanes);
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
    add_compensated(fresh ? block[v] : V{}, total, compensation);
    std::memcpy(sum.total + f + v * kLanes, &total, sizeof total);
    std::memcpy(sum.compensation + f + v * kLanes, &compensation, sizeof compensation);
  }
}

// The features from `first` on, one vector of them after the other; width >= kLanes.
template <typename T, Term kTerm, int kLanes>
FASTSPARSE_INLINE void accumulate_tiles(const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                        const Gather<T>& right, std::int64_t first, std::int64_t width,
                                        const Sum<Acc<T>>& sum) {
  for (std::int64_t f = first; f < width; f += kLanes) {
    const std::int64_t at = std::min(f, width - kLanes);
    LaneMask<Acc<T>, kLanes> fresh;
    lanes_from<Acc<T>, kLanes>(f - at, fresh);
    accumulate_tile<T, kTerm, 1, kLanes>(weight, hidden, right, at, fresh, sum);
  }
}

// sum += sum over the entries of weight[e] * term(left, right_e).
template <typename T, Term kTerm>
FASTSPARSE_INLINE void accumulate(const Acc<T>* weight, const Hidden<Acc<T>>& hidden, const Gather<T>& right,
                                  std::int64_t width, const Sum<Acc<T>>& sum) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  if (width >= kWidth) {
    const std::int64_t tiled = width / (4 * kWidth) * (4 * kWidth);
    for (std::int64_t f = 0; f < tiled; f += 4 * kWidth) {
      accumulate_tile<T, kTerm, 4, kWidth>(weight, hidden, right, f, LaneMask<A, kWidth>{} == 0, sum);
    }
    return accumulate_tiles<T, kTerm, kWidth>(weight, hidden, right, tiled, width, sum);
  }
  if (width >= kWidth / 2) {
    return accumulate_tiles<T, kTerm, kWidth / 2>(weight, hidden, right, 0, width, sum);
  }
  for (std::int64_t f = 0; f < width; ++f) {
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

// Largest of `count` numbers, whole vectors of them; NaN if there is one.
template <typename A>
FASTSPARSE_INLINE A largest(const A* numbers, int count) {
  Vector<A> most, next;
  load_vector<A>(numbers, most);
  for (int i = kVectorWidth<A>; i < count; i += kVectorWidth<A>) {
    load_vector<A>(numbers + i, next);
    most = (next > most) | (next != next) ? next : most;
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

// The block from `entry` on in a row that ends at `end`; entries up to `last` may be prefetched.
FASTSPARSE_INLINE Block block_at(const CsrView& a, std::int64_t entry, std::int64_t end, std::int64_t last) {
  return {entry, a.col + entry, static_cast<int>(std::min<std::int64_t>(kBlock, end - entry)),
          static_cast<int>(std::min<std::int64_t>(kBlock + kPrefetchEntries, last - entry))};
}

template <typename T>
FASTSPARSE_INLINE Gather<T> gather(const DenseView& matrix, std::int64_t feature, const Block& block) {
  return {static_cast<const T*>(matrix.data) + feature, matrix.stride, block.col, block.count,
          block.readable};
}

// The same rows once more: they are in a cache already.
template <typename T>
FASTSPARSE_INLINE Gather<T> gather_again(const DenseView& matrix, std::int64_t feature, const Block& block) {
  return {static_cast<const T*>(matrix.data) + feature, matrix.stride, block.col, block.count, 0};
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
