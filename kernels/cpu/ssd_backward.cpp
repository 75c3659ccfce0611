// Backward pass of the product with sparse features on the CPU: the gradient of the kept values is computed
// row by row of the transposed structure, and the gradient of the edge values entry by entry. Sums are in
// float64.
#include <algorithm>
#include <vector>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 16;  // products below which waking threads costs more than it saves

template <typename T, typename Id>
void gather_rows(const SsdBackwardArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  using A = Acc<T>;
  const T* grad = static_cast<const T*>(args.grad.data);
  const std::int64_t k = args.ids.k;
  std::vector<double> sum(k);
  for (std::int64_t source = row_begin; source < row_end; ++source) {
    const Id* ids = static_cast<const Id*>(args.ids.data) + source * k;
    std::fill(sum.begin(), sum.end(), 0.0);
    for (std::int64_t entry = args.a_t.rowptr[source]; entry < args.a_t.rowptr[source + 1]; ++entry) {
      const std::int64_t row = args.a_t.col[entry];
      double weight = 1;
      if (args.value.data != nullptr) {
        weight = edge_value<T>(args.value, args.dtype, edge_position(args.a_t, entry));
      }
      if (args.scale_dst != nullptr) weight *= static_cast<const A*>(args.scale_dst)[row];
      const T* from = grad + row * args.grad.stride;
      for (std::int64_t c = 0; c < k; ++c) sum[c] += weight * widen(from[ids[c]]);
    }
    const double scale = args.scale_src != nullptr ? static_cast<const A*>(args.scale_src)[source] : A{1};
    T* out = static_cast<T*>(args.out) + source * k;
    for (std::int64_t c = 0; c < k; ++c) narrow(static_cast<A>(scale * sum[c]), out + c);
  }
}

template <typename T, typename Id>
void sample_rows(const SsdValueGradArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  using A = Acc<T>;
  const std::int64_t k = args.ids.k;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride;
    const double row_scale = args.scale_dst != nullptr ? static_cast<const A*>(args.scale_dst)[row] : A{1};
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t source = args.a.col[entry];
      const Id* ids = static_cast<const Id*>(args.ids.data) + source * k;
      const T* kept = static_cast<const T*>(args.kept) + source * k;
      double sum = 0;
      for (std::int64_t c = 0; c < k; ++c) sum += static_cast<double>(widen(grad[ids[c]])) * widen(kept[c]);
      if (args.scale_src != nullptr) sum *= static_cast<const A*>(args.scale_src)[source];
      static_cast<A*>(args.out)[edge_position(args.a, entry)] = static_cast<A>(sum * row_scale);
    }
  }
}

// Calls rows(value, id, begin, end) for tasks of consecutive rows. `value` and `id` have the C++ types of the
// dtype and of the column ids.
template <typename Rows>
void in_parallel(Dtype dtype, bool ids_are_16bit, std::int64_t num_rows, std::int64_t work, int threads,
                 const Rows& rows) {
  with_type(dtype, [&](auto type) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (work > kSerialWork)
    for (std::int64_t row = 0; row < num_rows; row += kRowsPerTask) {
      const std::int64_t end = std::min(row + kRowsPerTask, num_rows);
      ids_are_16bit ? rows(type, std::uint16_t{}, row, end) : rows(type, std::uint8_t{}, row, end);
    }
  });
}

}  // namespace

void ssd_backward(const SsdBackwardArgs& args, int threads) {
  in_parallel(args.dtype, args.ids.is_16bit, args.a_t.num_rows, args.a_t.num_edges * args.ids.k, threads,
              [&](auto type, auto id, std::int64_t begin, std::int64_t end) {
                gather_rows<decltype(type), decltype(id)>(args, begin, end);
              });
}

void ssd_value_grad(const SsdValueGradArgs& args, int threads) {
  in_parallel(args.dtype, args.ids.is_16bit, args.a.num_rows, args.a.num_edges * args.ids.k, threads,
              [&](auto type, auto id, std::int64_t begin, std::int64_t end) {
                sample_rows<decltype(type), decltype(id)>(args, begin, end);
              });
}

}  // namespace fastsparse::cpu
