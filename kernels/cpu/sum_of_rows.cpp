// Sums of the columns of a matrix on the CPU, in float64: 64 columns at a time, 64 rows at a time, whose sums
// are added up in turn. For few rows, where what PyTorch does around a sum takes longer than the sum. Bound
// by reading: num_rows * width * sizeof(T) bytes.
#include "fastsparse/sum_of_rows.h"

#include <algorithm>

#include "fastsparse/cpu_simd.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kTile = 64;  // columns, and rows

template <typename T>
FASTSPARSE_INLINE void sum_tile(const SumOfRowsArgs& args, std::int64_t column, std::int64_t width,
                                double* total) {
  const T* rows = static_cast<const T*>(args.rows) + column;
  for (std::int64_t begin = 0; begin < args.num_rows; begin += kTile) {
    double sum[kTile] = {};
    for (std::int64_t row = begin; row < std::min(begin + kTile, args.num_rows); ++row) {
      for (std::int64_t f = 0; f < width; ++f) sum[f] += widen(rows[row * args.row_stride + f]);
    }
    for (std::int64_t f = 0; f < width; ++f) total[f] += sum[f];
  }
}

// One plain function per type: the compiler multi-versions functions, not templates.
FASTSPARSE_MULTIVERSION void tile(double, const SumOfRowsArgs& args, std::int64_t column, std::int64_t width,
                                  double* total) {
  sum_tile<double>(args, column, width, total);
}
FASTSPARSE_MULTIVERSION void tile(float, const SumOfRowsArgs& args, std::int64_t column, std::int64_t width,
                                  double* total) {
  sum_tile<float>(args, column, width, total);
}
FASTSPARSE_MULTIVERSION void tile(Half, const SumOfRowsArgs& args, std::int64_t column, std::int64_t width,
                                  double* total) {
  sum_tile<Half>(args, column, width, total);
}
FASTSPARSE_MULTIVERSION void tile(BFloat16, const SumOfRowsArgs& args, std::int64_t column,
                                  std::int64_t width, double* total) {
  sum_tile<BFloat16>(args, column, width, total);
}

}  // namespace

void sum_of_rows(const SumOfRowsArgs& args, int /*threads*/) {
  for (std::int64_t column = 0; column < args.width; column += kTile) {
    const std::int64_t width = std::min(kTile, args.width - column);
    double total[kTile] = {};
    with_type(args.dtype, [&](auto type) { tile(type, args, column, width, total); });
    with_type(args.out_dtype, [&](auto type) {
      using T = decltype(type);
      T* out = static_cast<T*>(args.out) + column;
      for (std::int64_t f = 0; f < width; ++f) narrow(static_cast<Acc<T>>(total[f]), out + f);
    });
  }
}

}  // namespace fastsparse::cpu
