// Row grouping on the CPU: signatures of rows, comparison of neighbours in sorted orders, links to cluster
// roots.
#include "fastsparse/group_rows.h"

#include <algorithm>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialRows = 1 << 10;  // for fewer rows, waking threads costs more than it saves

FASTSPARSE_INLINE void sign_rows(const RowSignaturesArgs& args, std::int64_t row_begin,
                                 std::int64_t row_end) {
  const ColumnHash hash = column_hash(args.column_bits);
  std::uint32_t least[kHashes];
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (int h = 0; h < kHashes; ++h) least[h] = hash.most();
    for (std::int64_t entry = args.rowptr[row]; entry < args.rowptr[row + 1]; ++entry) {
      for (int h = 0; h < kHashes; ++h) {
        least[h] = std::min(least[h], hash(args.col[entry], kHashFactors.first[h], kHashFactors.second[h]));
      }
    }
    for (int h = 0; h < kHashes; ++h) {
      args.signature[row * kHashes + h] = static_cast<std::uint8_t>(least[h]);
    }
    for (int band = 0; band < args.num_bands; ++band) {
      args.keys[band * args.num_rows + row] = sort_key(least[band], least[band + 1], args.column_bits);
    }
  }
}

}  // namespace

void row_signatures(const RowSignaturesArgs& args, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (args.num_rows > kSerialRows)
  for (std::int64_t row = 0; row < args.num_rows; row += kRowsPerTask) {
    for_this_machine(
        [&]() FASTSPARSE_INLINED { sign_rows(args, row, std::min(row + kRowsPerTask, args.num_rows)); });
  }
}

void similar_rows(const SimilarRowsArgs& args, int threads) {
  const auto* signature = reinterpret_cast<const Signature*>(args.signature);
  for (std::int64_t band = 0; band < args.num_bands; ++band) {
    const std::int64_t first = band * args.num_rows;
    const auto row_at = [&](std::int64_t place) { return args.order[first + place] - first; };
#pragma omp parallel for schedule(static) num_threads(threads) if (args.num_rows > kSerialRows)
    for (std::int64_t place = 0; place < args.num_rows; ++place) {
      const std::int64_t row =
          row_at(place);  // different in every place of a band, so threads do not write to the same row
      for (const std::int64_t neighbour : {place - 1, place + 1}) {
        if (neighbour < 0 || neighbour >= args.num_rows) continue;
        const std::int64_t other = row_at(neighbour);
        args.best[row] = std::max(args.best[row], similarity(signature[row], signature[other], other));
      }
    }
  }
}

void link_rows(const LinkRowsArgs& args, int threads) {
  const RowLinks links{args.rowptr, args.best};
  std::int64_t linked = 0, near = 0;
#pragma omp parallel for schedule(static) num_threads(threads) \
    reduction(+ : linked, near) if (args.num_rows > kSerialRows)
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    args.root[row] = static_cast<std::int32_t>(links.root(row));
    linked += links.is_linked(row);
    near += links.is_near(row);
  }
  args.counts[0] = linked;
  args.counts[1] = near;
}

}  // namespace fastsparse::cpu
