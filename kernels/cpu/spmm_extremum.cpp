// Maximum and minimum aggregation from CSR on the CPU. Ties go to the first entry of the row; NaN wins, as in
// torch.
#include <algorithm>
#include <limits>
#include <vector>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"
#include "fastsparse/spmm_extremum.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 16;  // products below which waking threads costs more than it saves

template <typename T>
FASTSPARSE_INLINE void reduce_rows(const SpmmExtremumArgs& args, std::int64_t row_begin,
                                   std::int64_t row_end) {
  using A = Acc<T>;
  const std::int64_t heads = args.value.data != nullptr ? args.value.heads : 1;
  const std::int64_t head_width = args.width / heads;
  const A sign = args.minimum ? A{-1} : A{1};  // min(v) = -max(-v)
  std::vector<A> best(args.width);
  A* most = best.data();
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t begin = args.a.rowptr[row], end = args.a.rowptr[row + 1];
    std::int32_t* arg = args.arg + row * args.width;
    // The first entry, unless a later one is greater: also where all are the least of all numbers.
    std::fill(best.begin(), best.end(), -std::numeric_limits<A>::infinity());
    std::fill(arg, arg + args.width,
              begin == end ? kNoEdge : static_cast<std::int32_t>(edge_position(args.a, begin)));
    for (std::int64_t entry = begin; entry < end; ++entry) {
      const T* source = static_cast<const T*>(args.x.data) + args.a.col[entry] * args.x.stride;
      const std::int64_t edge = edge_position(args.a, entry);
      const auto position = static_cast<std::int32_t>(edge);
      for (std::int64_t head = 0; head < heads; ++head) {
        A weight = sign;
        if (args.value.data != nullptr) {
          weight *= edge_value<T>(args.value, args.dtype, edge * heads + head);
        }
        for (std::int64_t f = head * head_width; f < (head + 1) * head_width; ++f) {
          const A candidate = weight * widen(source[f]), so_far = most[f];
          const bool better = (candidate > so_far) | ((candidate != candidate) & (so_far == so_far));
          most[f] = better ? candidate : so_far;
          arg[f] = better ? position : arg[f];
        }
      }
    }
    T* out = static_cast<T*>(args.out) + row * args.width;
    for (std::int64_t f = 0; f < args.width; ++f) narrow(begin == end ? A{0} : sign * best[f], out + f);
  }
}

FASTSPARSE_MULTIVERSION void rows(double, const SpmmExtremumArgs& args, std::int64_t begin,
                                  std::int64_t end) {
  reduce_rows<double>(args, begin, end);
}
FASTSPARSE_MULTIVERSION void rows(float, const SpmmExtremumArgs& args, std::int64_t begin, std::int64_t end) {
  reduce_rows<float>(args, begin, end);
}
FASTSPARSE_MULTIVERSION void rows(Half, const SpmmExtremumArgs& args, std::int64_t begin, std::int64_t end) {
  reduce_rows<Half>(args, begin, end);
}
FASTSPARSE_MULTIVERSION void rows(BFloat16, const SpmmExtremumArgs& args, std::int64_t begin,
                                  std::int64_t end) {
  reduce_rows<BFloat16>(args, begin, end);
}

}  // namespace

void spmm_extremum(const SpmmExtremumArgs& args, int threads) {
  with_type(args.dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) \
    num_threads(threads) if (args.a.num_edges * args.width > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      rows(type, args, row, std::min(row + kRowsPerTask, args.a.num_rows));
    }
  });
}

}  // namespace fastsparse::cpu
