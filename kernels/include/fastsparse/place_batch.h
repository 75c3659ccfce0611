// Copies all tensors of a batch into memory with spare capacity (the padded memory), where a CUDA graph reads
// them. Every hop begins at a fixed position, and its rows are followed by padding.
#pragma once

#include <cstdint>

#include "fastsparse/views.h"

namespace fastsparse {

constexpr int kMostHops = 16;
constexpr int kMostPlaced = 24;

// Ranges of rows per hop, in the padded memory and in the batch.
struct HopRows {
  int num_hops;
  std::int64_t start[kMostHops + 1];  // where a hop begins in the padded memory; then the number of all rows
  std::int64_t end[kMostHops];        // where a hop ends in the batch
};

// Rows of one tensor, for all hops or for the first hops.
struct PlacedRows {
  const void* from;
  void* to;
  std::int64_t num_rows;  // number of rows of `to`
  std::int64_t row_bytes;
  bool is_of_edges;
  bool is_empty;  // `from` has no row that padding could copy, so padding is zero
};
FASTSPARSE_ARGUMENTS(PlacedRows, FIELDS(from, to, num_rows, row_bytes, is_of_edges, is_empty));

// A batch with nodes of one type and edges of one type. A batch without edges (or without nodes) has no hops
// of that kind.
struct PlaceBatchArgs {
  HopRows nodes;
  HopRows edges;
  HopRows sources;  // the nodes that the edges connect
  HopRows targets;
  bool* node_mask;  // whether a node's position holds a row of the batch
  bool* edge_mask;
  float* node_ends;  // the ends of the hops of nodes, as float32
  float* edge_ends;
  const void* edge_index;  // (2, number of the batch's edges), nodes as numbered in the batch; null: no edges
  void* edge_index_out;    // (2, number of positions)
  const std::int64_t* padding;  // (2, number of positions): ends of padded edges
  bool edge_index_is_64bit;
  int num_tensors;
  PlacedRows tensor[kMostPlaced];
};

// The content of a position in the padded memory.
struct Placed {
  bool is_given;     // whether the position holds a row of the batch, not padding
  std::int64_t row;  // number of the row in the batch; for padding, 0
};

FASTSPARSE_HOST_DEVICE std::int64_t first_row(const HopRows& rows, int hop) {
  return hop > 0 ? rows.end[hop - 1] : 0;
}

FASTSPARSE_HOST_DEVICE std::int64_t all_places(const HopRows& rows) { return rows.start[rows.num_hops]; }

FASTSPARSE_HOST_DEVICE Placed placed(const HopRows& rows, std::int64_t place) {
  int hop = 0;
  while (hop + 1 < rows.num_hops && rows.start[hop + 1] <= place) ++hop;
  const std::int64_t row = place - rows.start[hop] + first_row(rows, hop);
  const bool is_given = row < rows.end[hop];
  return {is_given, is_given ? row : 0};
}

// The position that a row of the batch has in the padded memory.
FASTSPARSE_HOST_DEVICE std::int64_t place_of(const HopRows& rows, std::int64_t row) {
  int hop = 0;
  while (hop + 1 < rows.num_hops && rows.end[hop] <= row) ++hop;
  return row - first_row(rows, hop) + rows.start[hop];
}

// Writes both ends of the edge at a position.
template <typename Index>
FASTSPARSE_HOST_DEVICE void place_edge(const PlaceBatchArgs& args, std::int64_t place) {
  const std::int64_t places = all_places(args.edges), given = args.edges.end[args.edges.num_hops - 1];
  const auto* from = static_cast<const Index*>(args.edge_index);
  auto* to = static_cast<Index*>(args.edge_index_out);
  const Placed edge = placed(args.edges, place);
  for (int end = 0; end < 2; ++end) {
    to[end * places + place] = static_cast<Index>(
        edge.is_given ? place_of(end == 0 ? args.sources : args.targets, from[end * given + edge.row])
                      : args.padding[end * places + place]);
  }
}

}  // namespace fastsparse
