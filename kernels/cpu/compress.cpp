// COO -> compressed rows on the CPU: a least-significant-digit radix sort. Every 16 bits of the minor index
// take one counting pass, and the major index takes one.
#include <algorithm>
#include <utility>
#include <vector>

#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr int kDigitBits = 16;

// Returns the positions of the edges in the stable order of their minor indices.
template <typename Index, typename Id>
std::vector<Id> sort_by_minor(const Index* minor, std::int64_t num_edges, std::int64_t num_minor) {
  const std::int64_t digits = std::min(num_minor, std::int64_t{1} << kDigitBits);
  std::vector<Id> sorted(num_edges), previous(num_edges);
  for (std::int64_t e = 0; e < num_edges; ++e) sorted[e] = static_cast<Id>(e);
  for (int shift = 0; shift == 0 || (num_minor - 1) >> shift > 0; shift += kDigitBits) {
    const auto digit = [&](Id id) { return (minor[id] >> shift) & ((1 << kDigitBits) - 1); };
    std::vector<std::int64_t> start(digits + 1);
    for (std::int64_t e = 0; e < num_edges; ++e) ++start[digit(static_cast<Id>(e)) + 1];
    for (std::int64_t d = 0; d < digits; ++d) start[d + 1] += start[d];
    std::swap(sorted, previous);
    for (const Id id : previous) sorted[start[digit(id)]++] = id;
  }
  return sorted;
}

template <typename Index, typename Id>
void compress_typed(const CompressArgs& args) {
  const auto* major = static_cast<const Index*>(args.major);
  const auto* minor = static_cast<const Index*>(args.minor);
  auto* order = static_cast<Id*>(args.order);
  std::vector<Id> by_minor;
  if (args.sort_minor) by_minor = sort_by_minor<Index, Id>(minor, args.num_edges, args.num_minor);

  for (std::int64_t k = 0; k <= args.num_major; ++k) args.major_ptr[k] = 0;
  for (std::int64_t e = 0; e < args.num_edges; ++e) ++args.major_ptr[major[e] + 1];
  for (std::int64_t k = 0; k < args.num_major; ++k) args.major_ptr[k + 1] += args.major_ptr[k];
  std::vector<std::int64_t> next(args.major_ptr, args.major_ptr + args.num_major);
  for (std::int64_t k = 0; k < args.num_edges; ++k) {
    const std::int64_t e = args.sort_minor ? by_minor[k] : k;
    const std::int64_t at = next[major[e]]++;
    if (minor != nullptr) args.minor_out[at] = static_cast<std::int32_t>(minor[e]);
    if (order != nullptr) order[at] = static_cast<Id>(e);
  }
}

}  // namespace

void expand_rows(const ExpandRowsArgs& args, int) {
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    std::fill(args.row + args.rowptr[row], args.row + args.rowptr[row + 1], static_cast<std::int32_t>(row));
  }
}

// The n-th entry of column c is the reverse of the n-th entry of row c.
void reverse_entries(const ReverseEntriesArgs& args, int) {
  std::vector<std::int64_t> next(args.rowptr, args.rowptr + args.num_rows);
  const auto write = [&](auto id) {
    const auto* edge_id = static_cast<const decltype(id)*>(args.edge_id);
    auto* out = static_cast<decltype(id)*>(args.id_out);
    for (std::int64_t e = 0; e < args.num_edges; ++e) {
      // The checksum may fail to detect that the structure is not symmetric. Then results are wrong, but
      // std::min keeps accesses within bounds.
      const std::int64_t reverse = std::min(next[args.col[e]]++, args.num_edges - 1);
      out[e] = edge_id != nullptr ? edge_id[reverse] : static_cast<decltype(id)>(reverse);
    }
  };
  args.id_is_64bit ? write(std::int64_t{}) : write(std::int32_t{});
}

void compress(const CompressArgs& args) {
  if (args.index_is_64bit) {
    args.order_is_64bit ? compress_typed<std::int64_t, std::int64_t>(args)
                        : compress_typed<std::int64_t, std::int32_t>(args);
  } else {
    args.order_is_64bit ? compress_typed<std::int32_t, std::int64_t>(args)
                        : compress_typed<std::int32_t, std::int32_t>(args);
  }
}

}  // namespace fastsparse::cpu
