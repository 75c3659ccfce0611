// The transposed product from the untransposed structure, on the CPU. Every thread searches all entries for
// those in its range of columns. So only one thread writes a column, and it sums the column in the order of
// entries. Results do not depend on the number of threads.
#include <algorithm>
#include <type_traits>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kSerialWork = 1 << 16;  // products below which waking threads costs more than it saves

template <typename T>
FASTSPARSE_INLINE void add_rows(const SpmmTransposedArgs& args, std::int64_t col_begin,
                                std::int64_t col_end) {
  const T* x = static_cast<const T*>(args.x.data);
  const std::int64_t empty = std::max(col_begin, args.num_given);
  if (empty < col_end) std::fill(args.sum + empty * args.width, args.sum + col_end * args.width, 0.0f);
  for (std::int64_t row = 0; row < args.a.num_rows; ++row) {
    const T* source = x + row * args.x.stride;
    const float scale = args.scale_dst != nullptr ? args.scale_dst[row] : 1.0f;
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t col = args.a.col[entry];
      if (col < col_begin || col >= col_end) continue;
      float weight = scale;
      if (args.value.data != nullptr) {
        weight *= edge_value<T>(args.value, args.dtype, edge_position(args.a, entry));
      }
      if (args.scale_src != nullptr) weight *= args.scale_src[col];
      float* sum = args.sum + col * args.width;
      std::int64_t f = 0;
      for (; f + kVectorWidth<float> <= args.width; f += kVectorWidth<float>) {
        Vector<float> features, total;
        load_vector<T>(source + f, features);
        std::memcpy(&total, sum + f, sizeof total);
        total += weight * features;
        std::memcpy(sum + f, &total, sizeof total);
      }
      for (; f < args.width; ++f) sum[f] += weight * widen(source[f]);
    }
  }
}

}  // namespace

void spmm_csr_transposed(const SpmmTransposedArgs& args, int threads) {
  const std::int64_t parts = args.a.num_edges * args.width > kSerialWork ? threads : 1;
  with_type(args.dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), double>) {
#pragma omp parallel for schedule(static) num_threads(threads) if (parts > 1)
      for (std::int64_t part = 0; part < parts; ++part) {
        const std::int64_t begin = args.a.num_cols * part / parts, end = args.a.num_cols * (part + 1) / parts;
        for_this_machine([&]() FASTSPARSE_INLINED { add_rows<decltype(type)>(args, begin, end); });
      }
    }
  });
}

}  // namespace fastsparse::cpu
