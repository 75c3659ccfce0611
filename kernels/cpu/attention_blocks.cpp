// What attention on the CPU does with the features of a block's rows: products with them and weighted sums of
// them, over 64-byte vectors, or halves of them where heads are narrow. Compiled once for every type and
// instruction set, and called from both passes.
#include <algorithm>
#include <type_traits>

#include "fastsparse/cpu_attention.h"

namespace fastsparse::cpu {
namespace {

template <typename A>
using HalfVector = Lanes<A, kVectorWidth<A> / 2>;

// Turns `a` into the sums of its lanes 0 and 1, 2 and 3, ..., then of those of `b`.
FASTSPARSE_INLINE void add_neighbours(HalfVector<float>& a, const HalfVector<float>& b) {
#ifdef __clang__
  a = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
      __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  using Index = Lanes<std::int32_t, 8>;
  a = __builtin_shuffle(a, b, Index{0, 2, 4, 6, 8, 10, 12, 14}) +
      __builtin_shuffle(a, b, Index{1, 3, 5, 7, 9, 11, 13, 15});
#endif
}
FASTSPARSE_INLINE void add_neighbours(HalfVector<double>& a, const HalfVector<double>& b) {
#ifdef __clang__
  a = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#else
  using Index = Lanes<std::int64_t, 4>;
  a = __builtin_shuffle(a, b, Index{0, 2, 4, 6}) + __builtin_shuffle(a, b, Index{1, 3, 5, 7});
#endif
}

// The rows of a `Gather`, in their type.
template <typename T>
struct Rows {
  const T* base;
  std::int64_t stride;
  const std::int32_t* col;
  int count;
  int readable;

  explicit Rows(const Gather& gather)
      : base(static_cast<const T*>(gather.matrix.data) + gather.first),
        stride(gather.matrix.stride),
        col(gather.col),
        count(gather.count),
        readable(gather.readable) {}

  FASTSPARSE_INLINE const T* row(int entry) const { return base + col[entry] * stride; }
  FASTSPARSE_INLINE void prefetch(int entry, std::int64_t first, std::int64_t width) const {
    if (entry + kPrefetchEntries >= readable) return;
    const auto* next = reinterpret_cast<const char*>(row(entry + kPrefetchEntries) + first);
    for (std::int64_t byte = 0; byte < width * static_cast<std::int64_t>(sizeof(T)); byte += 64) {
      __builtin_prefetch(next + byte);
    }
  }
};

// V: a number or a vector of them. z * slope is z where z is 0, whose sign does not matter then.
template <typename V, typename A>
FASTSPARSE_INLINE void leaky_relu(V& z, A slope) {
  if constexpr (std::is_arithmetic_v<V>) {
    z = z > 0 ? z : z * slope;
  } else {
    const V scaled = z * slope;
    replace(z, reinterpret_cast<BitsOf<V>>(z) >> (8 * sizeof(A) - 1), scaled);
  }
}

// Sets the lanes before `first` to 0. The last vector of a head ends with it, so that nothing is read beyond
// it and no feature is left over; lanes that an earlier vector had count once.
template <typename A, int kLanes>
FASTSPARSE_INLINE void clear_lanes(std::int64_t first, Lanes<A, kLanes>& lanes) {
  using Mask = BitsOf<Lanes<A, kLanes>>;
  static constexpr struct {
    Mask none = {}, all = ~Mask{};
  } kMasks;
  Mask mask;
  std::memcpy(&mask, reinterpret_cast<const A*>(&kMasks.all) - first, sizeof mask);
  lanes = reinterpret_cast<Lanes<A, kLanes>>(reinterpret_cast<Mask>(lanes) & mask);
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
    multiply<T, kHidden, kLanes>(hidden, row, width - kLanes, product);
    clear_lanes<A, kLanes>(f - (width - kLanes), product);
    sum += product;
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
FASTSPARSE_INLINE void wide_products(const Hidden<Acc<T>>& hidden, const Rows<T>& right, std::int64_t width,
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
FASTSPARSE_INLINE void block_products(const Hidden<Acc<T>>& hidden, const Rows<T>& right, std::int64_t width,
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

// Turns `right` into its term.
template <Term kTerm, typename V, typename A>
FASTSPARSE_INLINE void make_term(const V& left, A slope, V& right) {
  if constexpr (kTerm == Term::kHidden) {
    right += left;
    leaky_relu(right, slope);
  } else if constexpr (kTerm == Term::kSlope) {
    right += left;
    if constexpr (std::is_arithmetic_v<V>) {
      right = right > 0 ? A{1} : slope;
    } else {
      const V opposite = V{} - right;  // negative where the sum is positive, and +0 where it is 0
      const auto positive = reinterpret_cast<BitsOf<V>>(opposite) >> (8 * sizeof(A) - 1);
      right = V{} + slope;
      replace(right, positive, V{} + A{1});
    }
  }
}

// Features [f, f + kVectors * kLanes), of which the first `skip` are summed already.
template <typename T, Term kTerm, int kVectors, int kLanes>
FASTSPARSE_INLINE void accumulate_tile(const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                       const Rows<T>& right, std::int64_t f, std::int64_t skip,
                                       const Sum<Acc<T>>& sum) {
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
    if (skip > 0) clear_lanes<A, kLanes>(skip, block[v]);
    add_compensated(block[v], total, compensation);
    std::memcpy(sum.total + f + v * kLanes, &total, sizeof total);
    std::memcpy(sum.compensation + f + v * kLanes, &compensation, sizeof compensation);
  }
}

// The features from `first` on, one vector of them after the other; width >= kLanes.
template <typename T, Term kTerm, int kLanes>
FASTSPARSE_INLINE void accumulate_tiles(const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                        const Rows<T>& right, std::int64_t first, std::int64_t width,
                                        const Sum<Acc<T>>& sum) {
  for (std::int64_t f = first; f < width; f += kLanes) {
    const std::int64_t at = std::min(f, width - kLanes);
    accumulate_tile<T, kTerm, 1, kLanes>(weight, hidden, right, at, f - at, sum);
  }
}

// sum += sum over the entries of weight[e] * term(left, right_e).
template <typename T, Term kTerm>
FASTSPARSE_INLINE void accumulate_term(const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                       const Rows<T>& right, std::int64_t width, const Sum<Acc<T>>& sum) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  if (width >= kWidth) {
    const std::int64_t tiled = width / (4 * kWidth) * (4 * kWidth);
    for (std::int64_t f = 0; f < tiled; f += 4 * kWidth) {
      accumulate_tile<T, kTerm, 4, kWidth>(weight, hidden, right, f, 0, sum);
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

template <typename T>
FASTSPARSE_INLINE void block_products(const Hidden<Acc<T>>& hidden, const Gather& right, std::int64_t width,
                                      Acc<T>* product) {
  if (hidden.att != nullptr) {
    block_products<T, true>(hidden, Rows<T>(right), width, product);
  } else {
    block_products<T, false>(hidden, Rows<T>(right), width, product);
  }
}

template <typename T>
FASTSPARSE_INLINE void accumulate_block(Term term, const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                        const Gather& right, std::int64_t width, const Sum<Acc<T>>& sum) {
  switch (term) {
    case Term::kFeatures:
      return accumulate_term<T, Term::kFeatures>(weight, hidden, Rows<T>(right), width, sum);
    case Term::kHidden:
      return accumulate_term<T, Term::kHidden>(weight, hidden, Rows<T>(right), width, sum);
    case Term::kSlope:
      return accumulate_term<T, Term::kSlope>(weight, hidden, Rows<T>(right), width, sum);
  }
}

template <typename T>
FASTSPARSE_INLINE void widen_all(const T* from, std::int64_t count, Acc<T>* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

template <typename T>
FASTSPARSE_INLINE void narrow_all(const Acc<T>* from, Acc<T> scale, std::int64_t count, T* to) {
  for (std::int64_t i = 0; i < count; ++i) narrow(from[i] * scale, to + i);
}

}  // namespace

// Plain functions, an overload for each type of sums: the compiler multi-versions functions, not templates.
FASTSPARSE_MULTIVERSION void products(const Hidden<double>& hidden, const Gather& right, std::int64_t width,
                                      double* product) {
  block_products<double>(hidden, right, width, product);
}
FASTSPARSE_MULTIVERSION void products(const Hidden<float>& hidden, const Gather& right, std::int64_t width,
                                      float* product) {
  if (right.dtype == Dtype::kFloat32) return block_products<float>(hidden, right, width, product);
  if (right.dtype == Dtype::kFloat16) return block_products<Half>(hidden, right, width, product);
  block_products<BFloat16>(hidden, right, width, product);
}

FASTSPARSE_MULTIVERSION void accumulate(Term term, const double* weight, const Hidden<double>& hidden,
                                        const Gather& right, std::int64_t width, const Sum<double>& sum) {
  accumulate_block<double>(term, weight, hidden, right, width, sum);
}
FASTSPARSE_MULTIVERSION void accumulate(Term term, const float* weight, const Hidden<float>& hidden,
                                        const Gather& right, std::int64_t width, const Sum<float>& sum) {
  if (right.dtype == Dtype::kFloat32) {
    return accumulate_block<float>(term, weight, hidden, right, width, sum);
  }
  if (right.dtype == Dtype::kFloat16) {
    return accumulate_block<Half>(term, weight, hidden, right, width, sum);
  }
  accumulate_block<BFloat16>(term, weight, hidden, right, width, sum);
}

FASTSPARSE_MULTIVERSION void widen_row(const DenseView& matrix, Dtype, std::int64_t row, std::int64_t width,
                                       double* to) {
  widen_all(static_cast<const double*>(matrix.data) + row * matrix.stride, width, to);
}
FASTSPARSE_MULTIVERSION void widen_row(const DenseView& matrix, Dtype dtype, std::int64_t row,
                                       std::int64_t width, float* to) {
  const std::int64_t first = row * matrix.stride;
  if (dtype == Dtype::kFloat32) return widen_all(static_cast<const float*>(matrix.data) + first, width, to);
  if (dtype == Dtype::kFloat16) return widen_all(static_cast<const Half*>(matrix.data) + first, width, to);
  widen_all(static_cast<const BFloat16*>(matrix.data) + first, width, to);
}

FASTSPARSE_MULTIVERSION void narrow_row(const double* from, double scale, std::int64_t width, void* to, Dtype,
                                        std::int64_t first) {
  narrow_all(from, scale, width, static_cast<double*>(to) + first);
}
FASTSPARSE_MULTIVERSION void narrow_row(const float* from, float scale, std::int64_t width, void* to,
                                        Dtype dtype, std::int64_t first) {
  if (dtype == Dtype::kFloat32) return narrow_all(from, scale, width, static_cast<float*>(to) + first);
  if (dtype == Dtype::kFloat16) return narrow_all(from, scale, width, static_cast<Half*>(to) + first);
  narrow_all(from, scale, width, static_cast<BFloat16*>(to) + first);
}

}  // namespace fastsparse::cpu
