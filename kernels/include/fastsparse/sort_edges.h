// Few edges looked at and sorted at once: views and launchers of kernels/c*/inspect.c*.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse {

// What `inspect` finds of edges, which are also sorted by row, then column, those of one place in their
// order: on CUDA in one launch and only if no row has more than `most_entries`. Then rowptr, col_out,
// inv_degree and slices are those of the sorted edges. Edges that may stay as they are do.
struct SortEdgesArgs {
  InspectArgs found;  // with rows, without edge_id; sizes up to 2^31 - 1
  std::int64_t num_cols;
  std::int64_t most_entries;
  std::int32_t* order;    // (num_edges) position of each sorted edge in the input
  std::int32_t* scratch;  // (num_rows + num_edges + kMostSortBlocks); CUDA only
};

// Blocks that sort few edges, at most.
constexpr int kMostSortBlocks = 256;

// Whether edges may stay in their order: rows ascend, and where the structure may equal its transpose, which
// only sorted columns let it share, columns too.
FASTSPARSE_HOST_DEVICE bool stay_in_order(const InspectArgs& args) {
  const bool may_be_symmetric = args.square && args.facts[kChecksum] == 0;
  return args.facts[kRowsDescend] == 0 && !(may_be_symmetric && args.facts[kColsDescend] != 0);
}

namespace cpu {

void sort_edges(const SortEdgesArgs& args, int threads);

}  // namespace cpu

namespace cuda {

int sort_edges(const SortEdgesArgs& args, void* stream);

}  // namespace cuda

}  // namespace fastsparse
