// Sampled dense-dense product from CSR on the CPU: one dot product per entry and head, written to the edge's
// position in the caller's order.
#include <algorithm>

#include "fastsparse/cpu_pages.h"
#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 16;  // products below which waking threads costs more than it saves

template <typename T>
FASTSPARSE_INLINE Acc<T> dot(const T* left, const T* right, std::int64_t width) {
  using A = Acc<T>;
  constexpr int kWidth = kVectorWidth<A>;
  Vector<A> sum = {}, other_sum = {};  // two sums, because an addition waits for the previous one
  Vector<A> l, r;
  std::int64_t f = 0;
  for (; f + 2 * kWidth <= width; f += 2 * kWidth) {
    load_vector<T>(left + f, l);
    load_vector<T>(right + f, r);
    sum += l * r;
    load_vector<T>(left + f + kWidth, l);
    load_vector<T>(right + f + kWidth, r);
    other_sum += l * r;
  }
  if (f + kWidth <= width) {
    load_vector<T>(left + f, l);
    load_vector<T>(right + f, r);
    sum += l * r;
    f += kWidth;
  }
  sum += other_sum;
  A total = sum_lanes<A, kWidth>(sum);
  for (; f < width; ++f) total += widen(left[f]) * widen(right[f]);
  return total;
}

// Computes the products if each head has one feature.
template <typename T, typename Out>
FASTSPARSE_INLINE void multiply(const T* left, const T* right, Acc<T> scale, std::int64_t width, Out* out) {
  for (std::int64_t f = 0; f < width; ++f) narrow(scale * (widen(left[f]) * widen(right[f])), out + f);
}

template <typename T>
FASTSPARSE_INLINE void sample_rows(const SddmmArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  using A = Acc<T>;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const T* left = static_cast<const T*>(args.x_dst.data) + row * args.x_dst.stride;
    const A row_scale = args.scale_dst != nullptr ? static_cast<const A*>(args.scale_dst)[row] : A{1};
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t col = args.a.col[entry];
      const T* right = static_cast<const T*>(args.x_src.data) + col * args.x_src.stride;
      const A scale =
          args.scale_src != nullptr ? row_scale * static_cast<const A*>(args.scale_src)[col] : row_scale;
      const std::int64_t position = edge_position(args.a, entry) * args.heads;
      if (args.head_width == 1) {
        if (args.out_dtype == args.dtype) {
          multiply(left, right, scale, args.heads, static_cast<T*>(args.out) + position);
        } else {
          multiply(left, right, scale, args.heads, static_cast<A*>(args.out) + position);
        }
        continue;
      }
      for (std::int64_t head = 0; head < args.heads; ++head) {
        const A value =
            scale * dot(left + head * args.head_width, right + head * args.head_width, args.head_width);
        if (args.out_dtype == args.dtype) {
          narrow(value, static_cast<T*>(args.out) + position + head);
        } else {
          static_cast<A*>(args.out)[position + head] = value;
        }
      }
    }
  }
}

}  // namespace

void sddmm_csr(const SddmmArgs& args, int threads) {
  prefer_huge_pages(args.out, args.a.num_edges * args.heads * size_of(args.out_dtype));
  with_type(args.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) \
    num_threads(threads) if (args.a.num_edges * args.heads * args.head_width > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      for_this_machine([&]() FASTSPARSE_INLINED {
        sample_rows<decltype(type)>(args, row, std::min(row + kRowsPerTask, args.a.num_rows));
      });
    }
  });
}

}  // namespace fastsparse::cpu
