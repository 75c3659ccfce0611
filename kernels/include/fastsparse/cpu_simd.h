// Portable SIMD for the CPU kernels: 64-byte vectors of the compiler's vector extension, lowered to whatever
// the machine has. FASTSPARSE_MULTIVERSION compiles a function for AVX-512, AVX2 and the baseline; the loader
// picks one, so that one binary runs everywhere without -march=native.
#pragma once

#include <cstdint>
#include <cstring>

#include "fastsparse/views.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FASTSPARSE_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FASTSPARSE_MULTIVERSION
#endif
#define FASTSPARSE_INLINE inline __attribute__((always_inline))

namespace fastsparse::cpu {

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
  bits |= (v.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN keep their exponent
  bits |= sign;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// max(v, 0), and NaN where v is NaN.
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
    // Subnormal: adding 0.5 lets the float unit do the rounding at the half's last place.
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

// 64 bytes of accumulators.
template <typename A>
struct VectorOf;
template <>
struct VectorOf<float> {
  using type = float __attribute__((vector_size(64)));
};
template <>
struct VectorOf<double> {
  using type = double __attribute__((vector_size(64)));
};
template <typename A>
using Vector = typename VectorOf<A>::type;
template <typename A>
inline constexpr int kVectorWidth = 64 / static_cast<int>(sizeof(A));

template <typename T>
FASTSPARSE_INLINE void load_vector(const T* from, Vector<Acc<T>>& to) {
  Acc<T> lanes[kVectorWidth<Acc<T>>];
  for (int i = 0; i < kVectorWidth<Acc<T>>; ++i) lanes[i] = widen(from[i]);
  std::memcpy(&to, lanes, sizeof to);
}
template <>
FASTSPARSE_INLINE void load_vector<float>(const float* from, Vector<float>& to) {
  std::memcpy(&to, from, sizeof to);
}
template <>
FASTSPARSE_INLINE void load_vector<double>(const double* from, Vector<double>& to) {
  std::memcpy(&to, from, sizeof to);
}

// Kahan's addition: rounding errors do not grow with the number of terms. V: a number or a vector of them.
template <typename V>
FASTSPARSE_INLINE void add_compensated(const V& term, V& total, V& compensation) {
  const V corrected = term - compensation;
  const V next = total + corrected;
  compensation = (next - total) - corrected;
  // Of an infinite total it would be NaN, and so would the total be with the next term.
  compensation = compensation == compensation ? compensation : V{};
  total = next;
}

template <typename T>
FASTSPARSE_INLINE Acc<T> edge_value(const EdgeValueView& value, Dtype features, std::int64_t index) {
  if (value.dtype == features) return widen(static_cast<const T*>(value.data)[index]);
  return static_cast<const Acc<T>*>(value.data)[index];
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

}  // namespace fastsparse::cpu
