// Gradients of spmm_extremum.cpp. Every result has one term, which goes to the source, and the value, of the
// edge that was chosen, so that rows are passed once and edges not at all.
//
// - Of sources: tasks are blocks of features, each over all rows in their order: no two threads add to the
//   same number, and the order of a sum depends on nothing but the structure.
// - Of values: tasks are blocks of rows, since an edge belongs to one row.
// Bytes: num_rows * width * (4 + sizeof(T)) read, as many numbers added at random places of the sources.
#include <algorithm>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/spmm_extremum.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kFeaturesPerTask = 32;
constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 16;  // terms below which waking threads costs more than it saves

template <typename T>
void add_to_sources(const SpmmExtremumBackwardArgs& args, std::int64_t first, std::int64_t last) {
  const bool weighted = args.value.data != nullptr;
  const std::int64_t head_width = weighted ? args.width / args.value.heads : 1;
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride;
    const std::int32_t* arg = args.arg + row * args.width;
    for (std::int64_t f = first; f < last; ++f) {
      if (arg[f] == kNoEdge) continue;
      const std::int64_t edge = static_cast<std::uint32_t>(arg[f]);
      Acc<T> term = widen(grad[f]);
      if (weighted) {
        term *= edge_value<T>(args.value, args.dtype, edge * args.value.heads + f / head_width);
      }
      static_cast<Acc<T>*>(args.grad_x)[args.source[edge] * args.width + f] += term;
    }
  }
}

template <typename T>
void add_to_values(const SpmmExtremumBackwardArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  const std::int64_t head_width = args.width / args.value.heads;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride;
    const std::int32_t* arg = args.arg + row * args.width;
    for (std::int64_t f = 0; f < args.width; ++f) {
      if (arg[f] == kNoEdge) continue;
      const std::int64_t edge = static_cast<std::uint32_t>(arg[f]);
      const T* x = static_cast<const T*>(args.x.data) + args.source[edge] * args.x.stride;
      static_cast<Acc<T>*>(args.grad_value)[edge * args.value.heads + f / head_width] +=
          widen(grad[f]) * widen(x[f]);
    }
  }
}

}  // namespace

void spmm_extremum_backward(const SpmmExtremumBackwardArgs& args, int threads) {
  const bool many = args.num_rows * args.width > kSerialWork;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (many)
    for (std::int64_t first = 0; first < args.width; first += kFeaturesPerTask) {
      add_to_sources<T>(args, first, std::min(first + kFeaturesPerTask, args.width));
    }
    if (args.grad_value == nullptr) return;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (many)
    for (std::int64_t row = 0; row < args.num_rows; row += kRowsPerTask) {
      add_to_values<T>(args, row, std::min(row + kRowsPerTask, args.num_rows));
    }
  });
}

}  // namespace fastsparse::cpu
