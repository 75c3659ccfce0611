// Checks edges or compressed rows on the CPU. If edges are sorted, the same call also writes the arrays of
// their structure.
#include <algorithm>
#include <cmath>

#include "fastsparse/edge_checksum.h"
#include "fastsparse/launchers.h"
#include "fastsparse/sort_edges.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kSerialEdges = 1 << 15;  // for fewer edges, waking threads costs more than it saves

// An index as an unsigned number; a negative index becomes larger than all valid indices.
template <typename Index>
std::uint64_t as_unsigned(Index index) {
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(index));
}

template <typename Id>
std::uint64_t greatest(const void* ids, std::int64_t count) {
  const auto* id = static_cast<const Id*>(ids);
  std::uint64_t most = 0;
  for (std::int64_t k = 0; k < count; ++k) most = std::max(most, as_unsigned(id[k]));
  return most;
}

template <typename Index>
void inspect_edges(const InspectArgs& args, int threads) {
  const auto* row = static_cast<const Index*>(args.row);
  const auto* col = static_cast<const Index*>(args.col);
  std::uint64_t most_row = 0, most_col = 0, checksum = 0;
  bool rows_descend = false, cols_descend = false, loops = false;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(max : most_row, most_col) \
    reduction(+ : checksum)                                                                        \
    reduction(|| : rows_descend, cols_descend, loops) if (args.num_edges > kSerialEdges)
  for (std::int64_t e = 0; e < args.num_edges; ++e) {
    most_col = std::max(most_col, as_unsigned(col[e]));
    if (args.col_out != nullptr) args.col_out[e] = static_cast<std::int32_t>(col[e]);
    if (row == nullptr) continue;
    most_row = std::max(most_row, as_unsigned(row[e]));
    if (args.square) {
      checksum += edge_checksum(as_unsigned(row[e]), as_unsigned(col[e]));
      loops = loops || row[e] == col[e];
    }
    if (e > 0) {
      rows_descend = rows_descend || row[e] < row[e - 1];
      cols_descend = cols_descend || (row[e] == row[e - 1] && col[e] < col[e - 1]);
    }
  }
  args.facts[kMostRow] = static_cast<std::int64_t>(most_row);
  args.facts[kMostCol] = static_cast<std::int64_t>(most_col);
  args.facts[kRowsDescend] = rows_descend;
  args.facts[kColsDescend] = cols_descend;
  args.facts[kChecksum] = static_cast<std::int64_t>(checksum);
  args.facts[kLoops] = loops;
  if (row == nullptr || rows_descend || most_row >= as_unsigned(args.num_rows)) return;
  std::int64_t next = 0;  // the first row whose pointer has not been written
  for (std::int64_t e = 0; e < args.num_edges; ++e) {
    while (next <= row[e]) args.rowptr[next++] = e;
  }
  while (next <= args.num_rows) args.rowptr[next++] = args.num_edges;
}

}  // namespace

void inspect(const InspectArgs& args, int threads) {
  std::fill_n(args.facts, static_cast<int>(kNumEdgeFacts), 0);
  args.index_is_64bit ? inspect_edges<std::int64_t>(args, threads)
                      : inspect_edges<std::int32_t>(args, threads);
  if (args.edge_id != nullptr) {
    args.facts[kMostEdgeId] = static_cast<std::int64_t>(
        args.edge_id_is_64bit ? greatest<std::int64_t>(args.edge_id, args.num_edges)
                              : greatest<std::int32_t>(args.edge_id, args.num_edges));
  }
  // The code above did not write row pointers if there are no edges, or if indices are out of range.
  const bool has_rows =
      args.row == nullptr ||
      (args.facts[kRowsDescend] == 0 && as_unsigned(args.facts[kMostRow]) < as_unsigned(args.num_rows));
  if (!has_rows) {
    if (args.num_edges == 0) std::fill_n(args.rowptr, args.num_rows + 1, 0);
    return;
  }
  args.facts[kFirstEntry] = args.rowptr[0];
  args.facts[kLastEntry] = args.rowptr[args.num_rows];
  for (std::int64_t r = 0; r < args.num_rows; ++r) {
    const std::int64_t degree = args.rowptr[r + 1] - args.rowptr[r];
    if (degree < 0) args.facts[kRowsDescend] = 1;
    if (degree == 0) args.facts[kEmptyRows] = 1;
    args.facts[kMostEntries] = std::max(args.facts[kMostEntries], degree);
    args.inv_degree[r] = degree > 0 ? 1.0f / static_cast<float>(degree) : 0.0f;
  }
}

void sort_edges(const SortEdgesArgs& args, int threads) {
  const InspectArgs& found = args.found;
  inspect(found, threads);
  found.facts[kIsSorted] = 0;
  const auto fits = [&](EdgeFact fact, std::int64_t count) {
    return as_unsigned(found.facts[fact]) < as_unsigned(count);
  };
  if (!fits(kMostRow, found.num_rows) || !fits(kMostCol, args.num_cols)) return;
  if (!stay_in_order(found)) {
    compress({found.row, found.col, found.index_is_64bit, found.num_edges, found.num_rows, args.num_cols,
              true, found.rowptr, found.col_out, args.order, false});
    std::int64_t of_rows[kNumEdgeFacts];
    InspectArgs sorted = found;
    sorted.row = nullptr;
    sorted.num_edges = 0;  // only row pointers are checked
    sorted.facts = of_rows;
    inspect(sorted, threads);
    for (const EdgeFact fact : {kEmptyRows, kMostEntries}) found.facts[fact] = of_rows[fact];
    found.facts[kIsSorted] = 1;
  }
  for (std::int64_t r = 0; r < found.num_rows; ++r) {
    args.inv_sqrt_degree[r] = 1.0f / std::sqrt(static_cast<float>(found.rowptr[r + 1] - found.rowptr[r] + 1));
  }
}

}  // namespace fastsparse::cpu
