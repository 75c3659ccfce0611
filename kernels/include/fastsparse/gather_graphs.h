// Gathers a batch of graphs from tensors that store all graphs of a dataset, one after another. One call
// gathers all tensors of a batch. A graph's rows are contiguous, so the batch needs one copy per graph and
// tensor.
//
// Rows of one kind (nodes, edges, ...) share a pointer: graph g of the dataset has rows
// pointer[g] .. pointer[g + 1]. `plan_graphs` turns the pointers into the table of a batch, which has two
// rows of num_graphs + 1 numbers for every pointer:
//
//   first   where each graph's rows begin in the batch, then their number
//   source  where they begin in the dataset
#pragma once

#include <cstdint>

#include "fastsparse/views.h"

namespace fastsparse {

constexpr int kMostGathered = 40;

enum class GraphFieldKind : int {
  kCopy = 0,
  kAddInt64 = 1,  // numbers of rows of another kind: adds the number in the batch of the graph's first row of
                  // that kind
  kAddInt32 = 2,
  kGraph = 3,       // the number of the graph to which a row belongs, int64; the dataset has no tensor for it
  kFirst = 4,       // the pointer of the batch, int64; the dataset has no tensor for it
  kRowPointer = 5,  // the same as kAddInt64; after the last row, it writes the total number of entries
  kSlices = 6,  // (first entry, number of entries, row) of every row, which are the `RowSlice`s of uncut rows
};

// A tensor of the dataset and the corresponding tensor of the batch.
struct GraphField {
  const void* from;
  void* to;
  std::int64_t outer;      // product of the sizes of the dimensions before the dimension of the rows
  std::int64_t row_bytes;  // bytes of a row, for one index of the dimensions before it
  std::int64_t from_rows;
  std::int64_t to_rows;
  int rows;      // index of the pointer to which the rows belong
  int added[2];  // pointers whose `first` is added, for index 0 and 1 of the dimension before the rows
  GraphFieldKind kind;
};
FASTSPARSE_ARGUMENTS(GraphField, FIELDS(from, outer, row_bytes, from_rows, rows), AS(added, added[0]),
                     AS(added_second, added[1]), FIELDS(kind));

struct GatherGraphsArgs {
  const std::int64_t* table;
  std::int64_t num_graphs;  // number of graphs in the batch
  int num_fields;
  GraphField field[kMostGathered];
};

FASTSPARSE_HOST_DEVICE const std::int64_t* first_in_batch(const GatherGraphsArgs& args, int pointer) {
  return args.table + 2 * pointer * (args.num_graphs + 1);
}

FASTSPARSE_HOST_DEVICE const std::int64_t* first_in_dataset(const GatherGraphsArgs& args, int pointer) {
  return first_in_batch(args, pointer) + args.num_graphs + 1;
}

}  // namespace fastsparse
