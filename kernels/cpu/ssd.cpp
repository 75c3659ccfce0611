// A sparse structure times sparse rows on the CPU: for each row, the k kept entries of each of its neighbours
// are added to one dense row of float64, which stays in the L1 cache. The scattered additions bound the time:
// num_edges * k.
#include <algorithm>
#include <vector>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1
                                     << 15;  // additions below which waking threads costs more than it saves

template <typename T>
double weight_of(const SsdArgs& args, std::int64_t entry) {
  double weight = 1;
  if (args.value.data != nullptr) {
    weight = edge_value<T>(args.value, args.dtype, edge_position(args.a, entry));
  }
  if (args.scale_src != nullptr) weight *= static_cast<const Acc<T>*>(args.scale_src)[args.a.col[entry]];
  return weight;
}

template <typename T, typename Id>
void multiply_row(const SsdArgs& args, std::int64_t row, std::vector<double>& sum) {
  const std::int64_t k = args.k, end = args.a.rowptr[row + 1];
  std::fill(sum.begin(), sum.end(), 0.0);
  for (std::int64_t entry = args.a.rowptr[row]; entry < end; ++entry) {
    const std::int64_t ahead = std::min(entry + kPrefetchEntries, end - 1);
    __builtin_prefetch(static_cast<const T*>(args.values) + args.a.col[ahead] * k);
    __builtin_prefetch(static_cast<const Id*>(args.ids) + args.a.col[ahead] * k);
    const T* values = static_cast<const T*>(args.values) + args.a.col[entry] * k;
    const Id* ids = static_cast<const Id*>(args.ids) + args.a.col[entry] * k;
    const double weight = weight_of<T>(args, entry);
    for (std::int64_t c = 0; c < k; ++c) sum[ids[c]] += weight * widen(values[c]);
  }
  const double scale = args.scale_dst != nullptr ? static_cast<const Acc<T>*>(args.scale_dst)[row] : 1;
  const T* bias = static_cast<const T*>(args.bias);
  T* out = static_cast<T*>(args.out) + row * args.width;
  for (std::int64_t f = 0; f < args.width; ++f) {
    narrow(static_cast<Acc<T>>(sum[f] * scale + (bias != nullptr ? widen(bias[f]) : 0)), out + f);
  }
}

template <typename T, typename Id>
void multiply(const SsdArgs& args, int threads) {
#pragma omp parallel num_threads(threads) if (args.a.num_edges * args.k > kSerialWork)
  {
    std::vector<double> sum(args.width);
#pragma omp for schedule(dynamic)
    for (std::int64_t first = 0; first < args.a.num_rows; first += kRowsPerTask) {
      const std::int64_t end = std::min(first + kRowsPerTask, args.a.num_rows);
      for (std::int64_t row = first; row < end; ++row) multiply_row<T, Id>(args, row, sum);
    }
  }
}

}  // namespace

void ssd(const SsdArgs& args, int threads) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    args.width <= 256 ? multiply<T, std::uint8_t>(args, threads) : multiply<T, std::uint16_t>(args, threads);
  });
}

}  // namespace fastsparse::cpu
