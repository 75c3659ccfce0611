// COO -> compressed rows on the CPU: a least-significant-digit sort with two counting passes, O(edges +
// nodes).
#include <vector>

#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

// Exclusive prefix sum of the histogram of `keys` (num_edges of them, each below num_keys).
template <typename Index>
void count(const Index* keys, std::int64_t num_edges, std::int64_t num_keys, std::int64_t* start) {
  for (std::int64_t k = 0; k <= num_keys; ++k) start[k] = 0;
  for (std::int64_t e = 0; e < num_edges; ++e) ++start[keys[e] + 1];
  for (std::int64_t k = 0; k < num_keys; ++k) start[k + 1] += start[k];
}

template <typename Index, typename Id>
void compress_typed(const CompressArgs& args) {
  const auto* major = static_cast<const Index*>(args.major);
  const auto* minor = static_cast<const Index*>(args.minor);
  auto* order = static_cast<Id*>(args.order);
  std::vector<Id> by_minor;
  if (args.sort_minor) {
    std::vector<std::int64_t> start(args.num_minor + 1);
    count(minor, args.num_edges, args.num_minor, start.data());
    by_minor.resize(args.num_edges);
    for (std::int64_t e = 0; e < args.num_edges; ++e) by_minor[start[minor[e]]++] = static_cast<Id>(e);
  }
  count(major, args.num_edges, args.num_major, args.major_ptr);
  std::vector<std::int64_t> next(args.major_ptr, args.major_ptr + args.num_major);
  for (std::int64_t k = 0; k < args.num_edges; ++k) {
    const std::int64_t e = args.sort_minor ? by_minor[k] : k;
    const std::int64_t at = next[major[e]]++;
    args.minor_out[at] = static_cast<std::int32_t>(minor[e]);
    if (order != nullptr) order[at] = static_cast<Id>(e);
  }
}

}  // namespace

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
