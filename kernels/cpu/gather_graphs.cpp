// Batches of graphs on the CPU: one copy per graph and tensor. Time is bounded by reading and writing all
// tensors once.
#include "fastsparse/gather_graphs.h"

#include <algorithm>
#include <cstring>

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kBytesWorthThreads = std::int64_t{1} << 20;

template <typename Index>
void add(const void* from, void* to, std::int64_t count, std::int64_t added) {
  const auto* numbers = static_cast<const Index*>(from);
  auto* sums = static_cast<Index*>(to);
  for (std::int64_t k = 0; k < count; ++k) sums[k] = static_cast<Index>(numbers[k] + added);
}

void add_slices(const void* from, void* to, std::int64_t rows, std::int64_t entry, std::int64_t row) {
  const auto* slices = static_cast<const RowSlice*>(from);
  auto* moved = static_cast<RowSlice*>(to);
  for (std::int64_t k = 0; k < rows; ++k) {
    moved[k] = {slices[k].begin + entry, slices[k].length, static_cast<std::int32_t>(slices[k].target + row)};
  }
}

void gather(const GatherGraphsArgs& args, const GraphField& field, std::int64_t graph) {
  const std::int64_t* first = first_in_batch(args, field.rows);
  auto* numbers = static_cast<std::int64_t*>(field.to);
  if (field.kind == GraphFieldKind::kFirst) {
    numbers[graph] = first[graph];
    if (graph + 1 == args.num_graphs) numbers[graph + 1] = first[graph + 1];
    return;
  }
  const std::int64_t begin = first[graph], rows = first[graph + 1] - begin;
  if (field.kind == GraphFieldKind::kGraph) {
    std::fill_n(numbers + begin, rows, graph);
    return;
  }
  const std::int64_t source = first_in_dataset(args, field.rows)[graph], bytes = rows * field.row_bytes;
  for (std::int64_t outer = 0; outer < field.outer; ++outer) {
    const auto* from =
        static_cast<const char*>(field.from) + (outer * field.from_rows + source) * field.row_bytes;
    auto* to = static_cast<char*>(field.to) + (outer * field.to_rows + begin) * field.row_bytes;
    if (field.kind == GraphFieldKind::kCopy) {
      std::memcpy(to, from, bytes);
      continue;
    }
    const std::int64_t* added = first_in_batch(args, field.added[outer == 1]);
    switch (field.kind) {
      case GraphFieldKind::kAddInt32:
        add<std::int32_t>(from, to, bytes / 4, added[graph]);
        break;
      case GraphFieldKind::kSlices:
        add_slices(from, to, rows, added[graph], begin);
        break;
      case GraphFieldKind::kRowPointer:
        if (graph + 1 == args.num_graphs) numbers[field.to_rows] = added[graph + 1];
        [[fallthrough]];
      default:
        add<std::int64_t>(from, to, bytes / 8, added[graph]);
    }
  }
}

}  // namespace

void gather_graphs(const GatherGraphsArgs& args, int threads) {
  std::int64_t bytes = 0;
  for (int k = 0; k < args.num_fields; ++k) {
    bytes += args.field[k].outer * args.field[k].to_rows * args.field[k].row_bytes;
  }
#pragma omp parallel for schedule(guided) num_threads(threads) if (threads > 1 && bytes >= kBytesWorthThreads)
  for (std::int64_t graph = 0; graph < args.num_graphs; ++graph) {
    for (int k = 0; k < args.num_fields; ++k) gather(args, args.field[k], graph);
  }
}

}  // namespace fastsparse::cpu
