// Copies a batch into memory with spare capacity on the CPU, one tensor after another.
#include "fastsparse/place_batch.h"

#include <cstring>

namespace fastsparse::cpu {
namespace {

void mark(const HopRows& rows, bool* mask, float* ends) {
  for (int hop = 0; hop < rows.num_hops; ++hop) ends[hop] = static_cast<float>(rows.end[hop]);
  for (std::int64_t place = 0; place < all_places(rows); ++place) mask[place] = placed(rows, place).is_given;
}

template <typename Index>
void place_edges(const PlaceBatchArgs& args) {
  for (std::int64_t place = 0; place < all_places(args.edges); ++place) place_edge<Index>(args, place);
}

void place_rows(const PlacedRows& tensor, const HopRows& rows) {
  const auto* from = static_cast<const char*>(tensor.from);
  auto* to = static_cast<char*>(tensor.to);
  for (std::int64_t place = 0; place < tensor.num_rows; ++place, to += tensor.row_bytes) {
    if (tensor.is_empty) {
      std::memset(to, 0, tensor.row_bytes);
    } else {
      std::memcpy(to, from + placed(rows, place).row * tensor.row_bytes, tensor.row_bytes);
    }
  }
}

}  // namespace

void place_batch(const PlaceBatchArgs& args, int) {
  mark(args.nodes, args.node_mask, args.node_ends);
  mark(args.edges, args.edge_mask, args.edge_ends);
  if (args.edge_index_out != nullptr) {
    args.edge_index_is_64bit ? place_edges<std::int64_t>(args) : place_edges<std::int32_t>(args);
  }
  for (int k = 0; k < args.num_tensors; ++k) {
    place_rows(args.tensor[k], args.tensor[k].is_of_edges ? args.edges : args.nodes);
  }
}

}  // namespace fastsparse::cpu
