// Inner loops of attention on the CPU, with SIMD vectors: products with the gathered rows of a block of
// entries, and weighted sums of these rows. They are compiled once for every type, and both passes call them.
#include <algorithm>
#include <type_traits>

#include "fastsparse/cpu_attention.h"

namespace fastsparse::cpu {
namespace {

#ifdef __clang__
#define FASTSPARSE_SHUFFLE(Int, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FASTSPARSE_SHUFFLE(Int, a, b, ...) \
  __builtin_shuffle(a, b, Lanes<Int, sizeof(a) / sizeof(Int)>{__VA_ARGS__})
#endif

// Writes the sums of neighbouring lanes of `a` and `b` to `a`. Each half of the vectors is processed
// separately, because AVX2's shuffles do not cross halves. With `halves`: adds the two halves of `a`, and the
// two halves of `b`.
FASTSPARSE_INLINE void add_neighbours(Vector<float>& a, const Vector<float>& b, bool halves) {
  a = halves ? FASTSPARSE_SHUFFLE(std::int32_t, a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                   FASTSPARSE_SHUFFLE(std::int32_t, a, b, 4, 5, 6, 7, 12, 13, 14, 15)
             : FASTSPARSE_SHUFFLE(std::int32_t, a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
                   FASTSPARSE_SHUFFLE(std::int32_t, a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
FASTSPARSE_INLINE void add_neighbours(Vector<double>& a, const Vector<double>& b, bool halves) {
  a = halves ? FASTSPARSE_SHUFFLE(std::int64_t, a, b, 0, 1, 4, 5) +
                   FASTSPARSE_SHUFFLE(std::int64_t, a, b, 2, 3, 6, 7)
             : FASTSPARSE_SHUFFLE(std::int64_t, a, b, 0, 4, 2, 6) +
                   FASTSPARSE_SHUFFLE(std::int64_t, a, b, 1, 5, 3, 7);
}

// The rows of a `Gather` as pointers to T.
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
    cpu::prefetch(row(entry + kPrefetchEntries) + first, width * static_cast<std::int64_t>(sizeof(T)));
  }
};

// z = leaky_relu(z). V: a number or a vector of numbers. The sign of a zero does not matter: z * slope is 0,
// too.
template <typename V, typename A>
FASTSPARSE_INLINE void leaky_relu(V& z, A slope) {
  if constexpr (std::is_arithmetic_v<V>) {
    z = z > 0 ? z : z * slope;
  } else {
    const V scaled = z * slope;
    replace(z, reinterpret_cast<BitsOf<V>>(z) >> (8 * sizeof(A) - 1), scaled);
  }
}

// Sets the lanes before `first` to 0. The last vector of a head ends where the head ends, so that nothing is
// read beyond it. Its lanes that overlap the previous vector are set to 0, so that they count once.
template <typename A>
FASTSPARSE_INLINE void clear_lanes(std::int64_t first, Vector<A>& lanes) {
  using Mask = BitsOf<Vector<A>>;
  static constexpr struct {
    Mask none = {}, all = ~Mask{};
  } kMasks;
  Mask mask;
  std::memcpy(&mask, reinterpret_cast<const A*>(&kMasks.all) - first, sizeof mask);
  lanes = reinterpret_cast<Vector<A>>(reinterpret_cast<Mask>(lanes) & mask);
}

// Multiplies the vector of features that begins at `f`, without summing the products.
template <typename T, bool kHidden>
FASTSPARSE_INLINE void multiply(const Hidden<Acc<T>>& hidden, const T* right, std::int64_t f,
                                Vector<Acc<T>>& product) {
  using A = Acc<T>;
  Vector<A> l;
  load_vector<A>(hidden.left + f, l);
  load_vector<T>(right + f, product);
  if constexpr (kHidden) {
    Vector<A> att;
    load_vector<A>(hidden.att + f, att);
    product += l;
    leaky_relu(product, hidden.slope);
    product *= att;
  } else {
    product *= l;
  }
}

// Products with the features of one row, summed into one vector; there is at least one vector of features.
template <typename T, bool kHidden>
FASTSPARSE_INLINE void row_products(const Hidden<Acc<T>>& hidden, const T* row, std::int64_t width,
                                    Vector<Acc<T>>& result) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  Vector<A> sum = {}, other_sum = {}, product;  // two sums, because an addition waits for the previous one
  std::int64_t f = 0;
  for (; f + 2 * kWidth <= width; f += 2 * kWidth) {
    multiply<T, kHidden>(hidden, row, f, product);
    sum += product;
    multiply<T, kHidden>(hidden, row, f + kWidth, product);
    other_sum += product;
  }
  if (f + kWidth <= width) {
    multiply<T, kHidden>(hidden, row, f, product);
    sum += product;
    f += kWidth;
  }
  if (f < width) {
    multiply<T, kHidden>(hidden, row, width - kWidth, product);
    clear_lanes<A>(f - (width - kWidth), product);
    sum += product;
  }
  result = sum + other_sum;
}

// Processes one row per lane at a time. Neighbouring lanes are added, so that two vectors become one, until
// one vector has the sums of all rows.
template <typename T, bool kHidden>
FASTSPARSE_INLINE void wide_products(const Hidden<Acc<T>>& hidden, const Rows<T>& right, std::int64_t width,
                                     Acc<T>* product) {
  using A = Acc<T>;
  constexpr int kRows = kVectorWidth<A>;
  for (int first = 0; first < right.count; first += kRows) {
    const int count = std::min(kRows, right.count - first);
    Vector<A> part[kRows];
    for (int i = 0; i < count; ++i) {
      right.prefetch(first + i, 0, width);
      row_products<T, kHidden>(hidden, right.row(first + i), width, part[i]);
    }
    for (int i = count; i < kRows; ++i) part[i] = Vector<A>{};
#pragma GCC unroll 4
    for (int left = kRows / 2; left > 0; left /= 2) {
#pragma GCC unroll 4
      for (int i = 0; i < left; ++i) {
        add_neighbours(part[2 * i], part[2 * i + 1], left == 1);
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
  if (width >= kVectorWidth<A>) return wide_products<T, kHidden>(hidden, right, width, product);
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

// Replaces `right` by its term of the sum.
template <Term kTerm, typename V, typename A>
FASTSPARSE_INLINE void make_term(const V& left, A slope, V& right) {
  if constexpr (kTerm == Term::kSlope) {
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

// Adds a block's sums to `sum`, for the vector of features that begins at `f`. The first `skip` features of
// the vector are left out, because the previous vector included them.
template <typename V, typename A>
FASTSPARSE_INLINE void add_block(V& block, std::int64_t f, std::int64_t skip, const Sum<A>& sum) {
  V total, compensation;
  load_vector<A>(sum.total + f, total);
  load_vector<A>(sum.compensation + f, compensation);
  if (skip > 0) clear_lanes<A>(skip, block);
  add_compensated(block, total, compensation);
  store_vector<A>(total, sum.total + f);
  store_vector<A>(compensation, sum.compensation + f);
}

// Accumulates the kVectors vectors of features that begin at `f`. Their first `skip` features are left out,
// because the previous vector included them.
template <typename T, Term kTerm, int kVectors>
FASTSPARSE_INLINE void accumulate_tile(const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                       const Rows<T>& right, std::int64_t f, std::int64_t skip,
                                       const Sum<Acc<T>>& sum) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  Vector<A> block[kVectors] = {}, left[kVectors] = {};
  if constexpr (kTerm != Term::kFeatures) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) load_vector<A>(hidden.left + f + v * kWidth, left[v]);
  }
  for (int entry = 0; entry < right.count; ++entry) {
    right.prefetch(entry, f, kVectors * kWidth);
    const T* row = right.row(entry) + f;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vector<A> features;
      load_vector<T>(row + v * kWidth, features);
      make_term<kTerm>(left[v], hidden.slope, features);
      block[v] += weight[entry] * features;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) add_block(block[v], f + v * kWidth, skip, sum);
}

// sum += sum over the entries of weight[e] * term(left, right_e).
template <typename T, Term kTerm>
FASTSPARSE_INLINE void accumulate_term(const Acc<T>* weight, const Hidden<Acc<T>>& hidden,
                                       const Rows<T>& right, std::int64_t width, const Sum<Acc<T>>& sum) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  if (width >= kWidth) {
    std::int64_t f = 0;
    for (; f + 8 * kWidth <= width; f += 8 * kWidth) {
      accumulate_tile<T, kTerm, 8>(weight, hidden, right, f, 0, sum);
    }
    for (; f + 2 * kWidth <= width; f += 2 * kWidth) {
      accumulate_tile<T, kTerm, 2>(weight, hidden, right, f, 0, sum);
    }
    for (; f < width; f += kWidth) {
      const std::int64_t at = std::min(f, width - kWidth);
      accumulate_tile<T, kTerm, 1>(weight, hidden, right, at, f - at, sum);
    }
    return;
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
    case Term::kSlope:
      return accumulate_term<T, Term::kSlope>(weight, hidden, Rows<T>(right), width, sum);
  }
}

// Computes gathered rows plus W a, for the kEntries rows from `entry` on and the kVectors vectors of features
// at `f`.
template <typename T, int kEntries, int kVectors>
FASTSPARSE_INLINE void project_tile(const Rows<T>& right, int entry, std::int64_t f, const Acc<T>* columns,
                                    std::int64_t edge_width, const Acc<T>* weight, std::int64_t width,
                                    Acc<T>* rows) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  Vector<A> sum[kEntries][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kEntries; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) load_vector<T>(right.row(entry + i) + f + v * kWidth, sum[i][v]);
  }
  for (std::int64_t a = 0; a < edge_width; ++a) {
    Vector<A> of_weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) load_vector<A>(weight + a * width + f + v * kWidth, of_weight[v]);
#pragma GCC unroll 4
    for (int i = 0; i < kEntries; ++i) {
      const A feature = columns[a * kBlock + entry + i];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] += feature * of_weight[v];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kEntries; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      store_vector<A>(sum[i][v], rows + (entry + i) * width + f + v * kWidth);
  }
}

template <typename T, int kEntries>
FASTSPARSE_INLINE void project_entries(const Rows<T>& right, int entry, const Acc<T>* columns,
                                       std::int64_t edge_width, const Acc<T>* weight, std::int64_t width,
                                       Acc<T>* rows) {
  constexpr int kWidth = kVectorWidth<Acc<T>>;
  for (int i = entry; i < entry + kEntries; ++i) right.prefetch(i, 0, width);
  std::int64_t f = 0;
  for (; f + 2 * kWidth <= width; f += 2 * kWidth) {
    project_tile<T, kEntries, 2>(right, entry, f, columns, edge_width, weight, width, rows);
  }
  for (; f < width; f += kWidth) {  // the last vector ends with the row, as in other products
    f = std::min(f, width - kWidth);
    project_tile<T, kEntries, 1>(right, entry, f, columns, edge_width, weight, width, rows);
  }
}

template <typename T>
FASTSPARSE_INLINE void project_block(const Rows<T>& right, const Acc<T>* columns, std::int64_t edge_width,
                                     const Acc<T>* weight, std::int64_t width, Acc<T>* rows) {
  int entry = 0;
  if (width >= kVectorWidth<Acc<T>>) {
    for (; entry + 4 <= right.count; entry += 4) {
      project_entries<T, 4>(right, entry, columns, edge_width, weight, width, rows);
    }
    for (; entry < right.count; ++entry) {
      project_entries<T, 1>(right, entry, columns, edge_width, weight, width, rows);
    }
  }
  for (; entry < right.count; ++entry) {
    for (std::int64_t f = 0; f < width; ++f) {
      Acc<T> sum = widen(right.row(entry)[f]);
      for (std::int64_t a = 0; a < edge_width; ++a)
        sum += columns[a * kBlock + entry] * weight[a * width + f];
      rows[entry * width + f] = sum;
    }
  }
}

// Adds the gradients for the kVectors vectors of features that begin at `f`. Their first `skip` features are
// left out, because the previous vector included them.
template <typename T, int kVectors>
FASTSPARSE_INLINE void hidden_tile(const Acc<T>* weight, const Hidden<Acc<T>>& hidden, const Rows<T>& right,
                                   std::int64_t f, std::int64_t skip, const HiddenGradients<Acc<T>>& to) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  Vector<A> slopes[kVectors] = {}, outputs[kVectors] = {}, left[kVectors], att[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    load_vector<A>(hidden.left + f + v * kWidth, left[v]);
    load_vector<A>(hidden.att + f + v * kWidth, att[v]);
  }
  for (int entry = 0; entry < right.count; ++entry) {
    const T* row = right.row(entry) + f;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Vector<A> input, slope;
      load_vector<T>(row + v * kWidth, slope);
      input = slope + left[v];
      make_term<Term::kSlope>(left[v], hidden.slope, slope);
      slope *= weight[entry];
      slopes[v] += slope;
      outputs[v] += slope * input;
      if (to.rows != nullptr) store_vector<A>(slope * att[v], to.rows + entry * to.stride + f + v * kWidth);
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    add_block(slopes[v], f + v * kWidth, skip, to.slopes);
    add_block(outputs[v], f + v * kWidth, skip, to.outputs);
  }
}

template <typename T>
FASTSPARSE_INLINE void hidden_block(const Acc<T>* weight, const Hidden<Acc<T>>& hidden, const Rows<T>& right,
                                    std::int64_t width, const HiddenGradients<Acc<T>>& to) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  if (width >= kWidth) {
    std::int64_t f = 0;
    for (; f + 2 * kWidth <= width; f += 2 * kWidth) hidden_tile<T, 2>(weight, hidden, right, f, 0, to);
    for (; f < width; f += kWidth) {
      const std::int64_t at = std::min(f, width - kWidth);
      hidden_tile<T, 1>(weight, hidden, right, at, f - at, to);
    }
    return;
  }
  for (std::int64_t f = 0; f < width; ++f) {
    A slopes = 0, outputs = 0;
    for (int entry = 0; entry < right.count; ++entry) {
      A slope = widen(right.row(entry)[f]);
      const A input = slope + hidden.left[f];
      make_term<Term::kSlope>(hidden.left[f], hidden.slope, slope);
      slope *= weight[entry];
      slopes += slope;
      outputs += slope * input;
      if (to.rows != nullptr) to.rows[entry * to.stride + f] = slope * hidden.att[f];
    }
    add_compensated(slopes, to.slopes.total[f], to.slopes.compensation[f]);
    add_compensated(outputs, to.outputs.total[f], to.outputs.compensation[f]);
  }
}

template <typename T>
void load_all(const AttentionCsrArgs& args, const CsrView& a, const Block& block, Acc<T>* columns) {
  const T* rows[kBlock];
  for (int i = 0; i < block.count; ++i) {
    rows[i] = static_cast<const T*>(args.edge.data) + edge_position(a, block.entry + i) * args.edge.stride;
  }
  for (std::int64_t f = 0; f < args.edge_width; ++f, columns += kBlock) {
    for (int i = 0; i < block.count; ++i) columns[i] = widen(rows[i][f]);
    std::fill(columns + block.count, columns + padded<Acc<T>>(block.count), Acc<T>{0});
  }
}

template <typename T>
void store_all(const AttentionCsrArgs& args, const CsrView& a, const Block& block, const Acc<T>* columns,
               void* to) {
  for (int i = 0; i < block.count; ++i) {
    T* row = static_cast<T*>(to) + edge_position(a, block.entry + i) * args.edge_width;
    for (std::int64_t f = 0; f < args.edge_width; ++f) narrow(columns[f * kBlock + i], row + f);
  }
}

template <typename T>
void widen_all(const DenseView& matrix, std::int64_t row, std::int64_t count, Acc<T>* to) {
  const T* from = static_cast<const T*>(matrix.data) + row * matrix.stride;
  for_this_machine([&]() FASTSPARSE_INLINED {
    constexpr int kWidth = kVectorWidth<Acc<T>>;
    std::int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
      Vector<Acc<T>> lanes;
      load_vector<T>(from + i, lanes);
      store_vector<Acc<T>>(lanes, to + i);
    }
    for (; i < count; ++i) to[i] = widen(from[i]);
  });
}

template <typename T>
void narrow_all(const Acc<T>* from, Acc<T> scale, std::int64_t count, T* to) {
  for_this_machine([&]() FASTSPARSE_INLINED {
    constexpr int kWidth = kVectorWidth<Acc<T>>;
    std::int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
      Vector<Acc<T>> lanes;
      load_vector<Acc<T>>(from + i, lanes);
      store_vector<T>(lanes * scale, to + i);
    }
    for (; i < count; ++i) narrow(from[i] * scale, to + i);
  });
}

}  // namespace

void products(const Hidden<double>& hidden, const Gather& right, std::int64_t width, double* product) {
  for_this_machine([&]() FASTSPARSE_INLINED { block_products<double>(hidden, right, width, product); });
}
void products(const Hidden<float>& hidden, const Gather& right, std::int64_t width, float* product) {
  with_float_type(right.dtype, [&](auto type) {
    for_this_machine(
        [&]() FASTSPARSE_INLINED { block_products<decltype(type)>(hidden, right, width, product); });
  });
}

void accumulate(Term term, const double* weight, const Hidden<double>& hidden, const Gather& right,
                std::int64_t width, const Sum<double>& sum) {
  for_this_machine(
      [&]() FASTSPARSE_INLINED { accumulate_block<double>(term, weight, hidden, right, width, sum); });
}
void accumulate(Term term, const float* weight, const Hidden<float>& hidden, const Gather& right,
                std::int64_t width, const Sum<float>& sum) {
  with_float_type(right.dtype, [&](auto type) {
    for_this_machine([&]() FASTSPARSE_INLINED {
      accumulate_block<decltype(type)>(term, weight, hidden, right, width, sum);
    });
  });
}

void project(const Gather& right, const double* columns, std::int64_t edge_width, const double* weight,
             std::int64_t width, double* rows) {
  for_this_machine([&]() FASTSPARSE_INLINED {
    project_block(Rows<double>(right), columns, edge_width, weight, width, rows);
  });
}
void project(const Gather& right, const float* columns, std::int64_t edge_width, const float* weight,
             std::int64_t width, float* rows) {
  with_float_type(right.dtype, [&](auto type) {
    for_this_machine([&]() FASTSPARSE_INLINED {
      project_block(Rows<decltype(type)>(right), columns, edge_width, weight, width, rows);
    });
  });
}

void differentiate_hidden(const double* weight, const Hidden<double>& hidden, const Gather& right,
                          std::int64_t width, const HiddenGradients<double>& to) {
  for_this_machine([&]()
                       FASTSPARSE_INLINED { hidden_block(weight, hidden, Rows<double>(right), width, to); });
}
void differentiate_hidden(const float* weight, const Hidden<float>& hidden, const Gather& right,
                          std::int64_t width, const HiddenGradients<float>& to) {
  with_float_type(right.dtype, [&](auto type) {
    for_this_machine(
        [&]() FASTSPARSE_INLINED { hidden_block(weight, hidden, Rows<decltype(type)>(right), width, to); });
  });
}

void load_columns(const AttentionCsrArgs& args, const CsrView& a, const Block& block, double* columns) {
  load_all<double>(args, a, block, columns);
}
void load_columns(const AttentionCsrArgs& args, const CsrView& a, const Block& block, float* columns) {
  with_float_type(args.dtype, [&](auto type) { load_all<decltype(type)>(args, a, block, columns); });
}
void store_columns(const AttentionCsrArgs& args, const CsrView& a, const Block& block, const double* columns,
                   void* to) {
  store_all<double>(args, a, block, columns, to);
}
void store_columns(const AttentionCsrArgs& args, const CsrView& a, const Block& block, const float* columns,
                   void* to) {
  with_float_type(args.dtype, [&](auto type) { store_all<decltype(type)>(args, a, block, columns, to); });
}

void widen_row(const DenseView& matrix, Dtype, std::int64_t row, std::int64_t width, double* to) {
  widen_all<double>(matrix, row, width, to);
}
void widen_row(const DenseView& matrix, Dtype dtype, std::int64_t row, std::int64_t width, float* to) {
  with_float_type(dtype, [&](auto type) { widen_all<decltype(type)>(matrix, row, width, to); });
}

void narrow_row(const double* from, double scale, std::int64_t width, void* to, Dtype, std::int64_t first) {
  narrow_all(from, scale, width, static_cast<double*>(to) + first);
}
void narrow_row(const float* from, float scale, std::int64_t width, void* to, Dtype dtype,
                std::int64_t first) {
  with_float_type(
      dtype, [&](auto type) { narrow_all(from, scale, width, static_cast<decltype(type)*>(to) + first); });
}

}  // namespace fastsparse::cpu
