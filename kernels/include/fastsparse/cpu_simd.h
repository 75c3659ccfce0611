// Portable SIMD for the CPU kernels, with the compiler's vector extension. `for_this_machine` compiles a
// function twice, for AVX2 and for the baseline of the architecture, and calls one of them. So one binary
// runs everywhere, without -march=native.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "fastsparse/views.h"

#define FASTSPARSE_INLINE inline __attribute__((always_inline))
// A lambda that is inlined into its caller: [&]() FASTSPARSE_INLINED { ... }
#define FASTSPARSE_INLINED __attribute__((always_inline))

namespace fastsparse::cpu {

// Distance, in entries, between a prefetch and its use. With 8, attention takes 1.5 times as long on 50,000
// nodes (4 heads of width 32), and the maximum of 128 features 1.6 times as long on 200,000 nodes.
constexpr int kPrefetchEntries = 16;

// Prefetches `bytes` of memory that will soon be read or, with kWrite, written.
template <int kWrite = 0>
FASTSPARSE_INLINE void prefetch(const void* begin, std::int64_t bytes) {
  for (std::int64_t byte = 0; byte < bytes; byte += 64) {
    __builtin_prefetch(static_cast<const char*>(begin) + byte, kWrite);
  }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// AVX-512 would gain little or nothing. Machines without AVX2 are rare, so the version for them is compiled
// with fewer optimisations, for a fast build.
template <typename Body>
__attribute__((target("avx2,fma"), noinline)) void with_avx2(const Body& body) {
  body();
}
template <typename Body>
__attribute__((optimize("O1"), noinline)) void with_baseline(const Body& body) {
  body();
}
template <typename Body>
void for_this_machine(const Body& body) {
  __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? with_avx2(body) : with_baseline(body);
}
#else
template <typename Body>
void for_this_machine(const Body& body) {
  body();
}
#endif

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <typename T>
using Acc = typename AccOf<T>::type;

// The dtype of an accumulation type.
template <typename A>
inline constexpr Dtype kDtypeOf = sizeof(A) == 8 ? Dtype::kFloat64 : Dtype::kFloat32;

FASTSPARSE_INLINE double widen(double v) { return v; }
FASTSPARSE_INLINE float widen(float v) { return v; }
FASTSPARSE_INLINE float widen(BFloat16 v) {
  const std::uint32_t bits = static_cast<std::uint32_t>(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
FASTSPARSE_INLINE float widen(Half v) {
  // Shift exponent and mantissa into place and rescale by 2^112: one multiplication also normalises
  // subnormals.
  const std::uint32_t sign = static_cast<std::uint32_t>(v.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(v.bits & 0x7fffu) << 13;
  float out;
  std::memcpy(&out, &magnitude, sizeof out);
  out *= 0x1p112f;
  std::uint32_t bits;
  std::memcpy(&bits, &out, sizeof bits);
  bits |= (v.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN
  bits |= sign;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// max(v, 0), but NaN if v is NaN.
template <typename A>
FASTSPARSE_INLINE A rectify(A v) {
  return v < A{0} ? A{0} : v;
}

FASTSPARSE_INLINE void narrow(double v, double* out) { *out = v; }
FASTSPARSE_INLINE void narrow(float v, float* out) { *out = v; }
FASTSPARSE_INLINE void narrow(float v, BFloat16* out) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits += 0x7fffu + ((bits >> 16) & 1u);  // round to nearest, ties to even
  out->bits = nan ? 0x7fc0u : static_cast<std::uint16_t>(bits >> 16);
}
FASTSPARSE_INLINE void narrow(float v, Half* out) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  std::uint16_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (bits >= 0x477ff000u) {
    half = 0x7c00u;  // rounds past 65504: infinity
  } else if (bits < 0x38800000u) {
    // Subnormal: adding 0.5 makes the float addition round at the last place of the 16-bit number.
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    half = static_cast<std::uint16_t>(bits - 0x3f000000u);
  } else {
    half = static_cast<std::uint16_t>((bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13);
  }
  out->bits = sign | half;
}

// A vector of kLanes numbers.
template <typename A, int kLanes>
struct LanesOf {
  typedef A type __attribute__((vector_size(kLanes * sizeof(A))));
};
template <typename A, int kLanes>
using Lanes = typename LanesOf<A, kLanes>::type;

// A vector of accumulators has 32 bytes, the width of AVX2. GCC keeps vectors in memory if they are wider
// than the machine's vectors.
template <typename A>
inline constexpr int kVectorWidth = 32 / static_cast<int>(sizeof(A));
template <typename A>
using Vector = Lanes<A, kVectorWidth<A>>;

// The code below selects between two results with bit masks instead of comparing vectors: if the machine
// cannot compare vectors of that width, compilers split them into single lanes.

template <typename T, int kLanes>
FASTSPARSE_INLINE void load_lanes(const T* from, Lanes<Acc<T>, kLanes>& to) {
  if constexpr (sizeof(T) == sizeof(Acc<T>)) {
    std::memcpy(&to, from, sizeof to);
  } else {
    using Bits = Lanes<std::uint32_t, kLanes>;
    Lanes<std::uint16_t, kLanes> narrow_bits;
    std::memcpy(&narrow_bits, from, sizeof narrow_bits);
    Bits bits = __builtin_convertvector(narrow_bits, Bits);
    if constexpr (std::is_same_v<T, BFloat16>) {
      bits <<= 16;
    } else {
      Bits magnitude = (bits & 0x7fffu) << 13;
      Lanes<float, kLanes> rescaled;
      std::memcpy(&rescaled, &magnitude, sizeof rescaled);
      rescaled *= 0x1p112f;
      std::memcpy(&magnitude, &rescaled, sizeof magnitude);
      const Bits not_finite = ((bits & 0x7c00u) + 0x400u) >> 15;  // 1 if all bits of the exponent are set
      bits = magnitude | ((bits & 0x8000u) << 16) | (-not_finite & 0x7f800000u);
    }
    std::memcpy(&to, &bits, sizeof to);
  }
}
template <typename T>
FASTSPARSE_INLINE void load_vector(const T* from, Vector<Acc<T>>& to) {
  load_lanes<T, kVectorWidth<Acc<T>>>(from, to);
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

// The lanes of a vector as integers.
template <typename V>
using Element = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
template <typename V>
using BitsOf = Lanes<std::conditional_t<sizeof(Element<V>) == 4, std::int32_t, std::int64_t>,
                     sizeof(V) / sizeof(Element<V>)>;

// Replaces the lanes whose mask is all ones by lanes of `from`. The mask of all other lanes must be 0.
template <typename V>
FASTSPARSE_INLINE void replace(V& lanes, const BitsOf<V>& mask, const V& from) {
  const auto bits = reinterpret_cast<BitsOf<V>>(lanes);
  lanes = reinterpret_cast<V>(bits ^ ((bits ^ reinterpret_cast<BitsOf<V>>(from)) & mask));
}

// Applies `rectify` to the lanes of a vector.
template <typename V>
FASTSPARSE_INLINE void rectify_lanes(V& lanes) {
  replace(lanes, reinterpret_cast<BitsOf<V>>(lanes < V{}), V{});
}

// Applies `narrow` to the lanes of a vector.
template <typename T, int kLanes>
FASTSPARSE_INLINE void store_lanes(const Lanes<Acc<T>, kLanes>& from, T* to) {
  if constexpr (sizeof(T) == sizeof(Acc<T>)) {
    std::memcpy(to, &from, sizeof from);
  } else {
    // A negative difference, shifted to the right, is a mask with all bits set.
    using Bits = Lanes<std::int32_t, kLanes>;
    const auto bits = reinterpret_cast<Bits>(from);
    const Bits magnitude = bits & 0x7fffffff, nan = (0x7f800000 - magnitude) >> 31;
    Bits rounded;
    if constexpr (std::is_same_v<T, BFloat16>) {
      rounded = bits + 0x7fff + ((bits >> 16) & 1);
      rounded >>= 16;
      replace(rounded, nan, Bits{} + 0x7fc0);
    } else {
      rounded = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
      const auto subnormal = reinterpret_cast<Bits>(reinterpret_cast<Lanes<float, kLanes>>(magnitude) + 0.5f);
      replace(rounded, (magnitude - 0x38800000) >> 31, subnormal - 0x3f000000);
      replace(rounded, (0x477fefff - magnitude) >> 31, Bits{} + 0x7c00);
      replace(rounded, nan, Bits{} + 0x7e00);
      rounded |= (bits >> 16) & 0x8000;
    }
    const auto narrow_bits = __builtin_convertvector(rounded, Lanes<std::uint16_t, kLanes>);
    std::memcpy(to, &narrow_bits, sizeof narrow_bits);
  }
}
template <typename T>
FASTSPARSE_INLINE void store_vector(const Vector<Acc<T>>& from, T* to) {
  store_lanes<T, kVectorWidth<Acc<T>>>(from, to);
}

// Kahan's addition of one term: rounding errors do not grow with the number of terms. V: a number or a
// vector.
template <typename V>
FASTSPARSE_INLINE void add_compensated(const V& term, V& total, V& compensation) {
  const V corrected = term - compensation;
  const V next = total + corrected;
  compensation = (next - total) - corrected;
  // If the total is infinite, the compensation would be NaN, and the next term would make the total NaN.
  if constexpr (std::is_arithmetic_v<V>) {
    compensation = compensation == compensation ? compensation : V{0};
  } else {
    using Bits = BitsOf<V>;
    constexpr int kBits = 8 * sizeof(Element<V>);
    const V infinity = V{} + std::numeric_limits<Element<V>>::infinity();
    const Bits magnitude = reinterpret_cast<Bits>(compensation) & std::numeric_limits<Element<Bits>>::max();
    replace(compensation, (reinterpret_cast<Bits>(infinity) - magnitude) >> (kBits - 1), V{});
  }
  total = next;
}

template <typename T>
FASTSPARSE_INLINE Acc<T> edge_value(const EdgeValueView& value, Dtype features, std::int64_t index) {
  if (value.dtype == features) return widen(static_cast<const T*>(value.data)[index]);
  return static_cast<const Acc<T>*>(value.data)[index];
}

// An element of an array of `dtype`; A is its accumulation type.
template <typename A>
FASTSPARSE_INLINE A number_at(const void* data, Dtype dtype, std::int64_t index) {
  if (dtype == Dtype::kFloat16) return widen(static_cast<const Half*>(data)[index]);
  if (dtype == Dtype::kBFloat16) return widen(static_cast<const BFloat16*>(data)[index]);
  return static_cast<const A*>(data)[index];
}

template <typename A>
FASTSPARSE_INLINE void set_number(void* data, Dtype dtype, std::int64_t index, A number) {
  if (dtype == Dtype::kFloat16) {
    narrow(static_cast<float>(number), static_cast<Half*>(data) + index);
  } else if (dtype == Dtype::kBFloat16) {
    narrow(static_cast<float>(number), static_cast<BFloat16*>(data) + index);
  } else {
    static_cast<A*>(data)[index] = number;
  }
}

// Calls f with a value of the C++ type behind `dtype`.
template <typename F>
void with_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat64:
      return f(double{});
    case Dtype::kFloat32:
      return f(float{});
    case Dtype::kFloat16:
      return f(Half{});
    case Dtype::kBFloat16:
      return f(BFloat16{});
  }
}

// Does the same as with_type, for dtypes whose accumulation type is float32.
template <typename F>
void with_float_type(Dtype dtype, F&& f) {
  if (dtype == Dtype::kFloat32) return f(float{});
  dtype == Dtype::kFloat16 ? f(Half{}) : f(BFloat16{});
}

// Calls f with a value of the accumulation type of `dtype`.
template <typename F>
void with_sum_type(Dtype dtype, F&& f) {
  dtype == Dtype::kFloat64 ? f(double{}) : f(float{});
}

}  // namespace fastsparse::cpu
