// Inspection and sort of few edges in one call: arguments of kernels/c*/inspect.c*.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse {

// Additional facts about the edges that `sort_edges` sorts, for the host.
enum SortFact : int {
  kIsSorted = kNumEdgeFacts,  // not 0: the edges were sorted
  kNumSlices,
  kNumSlots,
  kNumSplitRows,
  kNumSortFacts,
};

// Largest number of edges, and of rows, for which one 64-bit word can count entries, slices, slots and split
// rows.
constexpr std::int64_t kFewEdges = std::int64_t{1} << 17;
// Largest number of entries in a row: the sort compares each entry with all others of its row.
constexpr std::int64_t kMostCompared = 1024;
// Largest number of thread blocks of a launch.
constexpr int kMostSortBlocks = 256;

// Inspects few edges, and sorts them by row, then by column; equal edges keep their order. CUDA sorts them in
// one launch, if no row has more than kMostCompared entries. After the sort, rowptr, col_out, inv_degree and
// slices describe the sorted edges. Edges are not sorted if stay_in_order is true. Rows of more than
// `longest` entries are cut into several slices.
struct SortEdgesArgs {
  InspectArgs found;        // up to kFewEdges edges and rows, given as rows without edge_id; `facts` has
                            // kNumSortFacts numbers
  std::int64_t num_cols;    // up to 2^31 - 1
  std::int64_t longest;     // at least 32
  std::int32_t* order;      // (num_edges) position of each sorted edge in the input
  float* inv_sqrt_degree;   // (num_rows) 1 / sqrt(degree + 1)
  std::int64_t* split_ptr;  // (num_edges / longest + 1), as in RowSplitView; CUDA only
  std::uint64_t* sums;      // (kMostSortBlocks), scratch; CUDA only
  std::int32_t* split_row;  // (num_edges / longest), as in RowSplitView; CUDA only
  std::int32_t* scratch;    // (num_rows + num_edges); CUDA only
};

// Addresses of the workspace of `sort_edges` on CUDA, in one allocation, which begins with the slices.
struct SortWorkspace {
  char *split_ptr, *sums, *facts, *split_row, *scratch, *end;

  SortWorkspace(char* begin, std::int64_t num_edges, std::int64_t num_rows, std::int64_t longest) {
    const std::int64_t most_cut = num_edges / longest;
    split_ptr = begin + (num_rows + most_cut) * sizeof(RowSlice);
    sums = split_ptr + (most_cut + 1) * sizeof(std::int64_t);
    facts = sums + kMostSortBlocks * sizeof(std::uint64_t);
    split_row = facts + kNumSortFacts * sizeof(std::int64_t);
    scratch = split_row + most_cut * sizeof(std::int32_t);
    end = scratch + (num_rows + num_edges) * sizeof(std::int32_t);
  }
};

// True if edges may stay in their order, that is, if rows ascend. If the structure may equal its transpose,
// columns must ascend, too, because only then can the structure and its transpose share their arrays.
FASTSPARSE_HOST_DEVICE bool stay_in_order(const InspectArgs& args) {
  const bool may_be_symmetric = args.square && args.facts[kChecksum] == 0;
  return args.facts[kRowsDescend] == 0 && !(may_be_symmetric && args.facts[kColsDescend] != 0);
}

}  // namespace fastsparse
