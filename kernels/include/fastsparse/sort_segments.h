// Sorts an index into segments and reduces them before the host knows their number and lengths: views and
// launchers of kernels/cuda/compress.cu, row_split.cu and segment_reduce.cu.
#pragma once

#include <cstddef>
#include <limits>

#include "fastsparse/views.h"

namespace fastsparse {

// Facts about a sorted index, for the host.
enum SegmentFact : int {
  kCutSegments = 0,  // the first two facts are also `RowSplitArgs::totals`
  kSegmentSlots,
  kIndexDescends,   // 1: the index was not in ascending order
  kEntriesInRange,  // number of entries of all segments, without those whose segment is out of range
  kNumSegmentFacts,
};

// Target of the unused slices at the end of the list, which kernels skip.
constexpr std::int32_t kNoTarget = std::numeric_limits<std::int32_t>::min();

// Sorts an index stably, finds its segments, and cuts them into slices. The index is not checked: numbers
// that are no valid segments are sorted to the end, and belong to no segment.
struct SortSegmentsArgs {
  const void* index;  // (num_rows) segment of every row
  bool index_is_64bit;
  std::int64_t num_rows;      // 1 to 2^31 - 1
  std::int64_t num_segments;  // at least 1
  std::int64_t longest;       // largest number of entries in a slice, a power of two
  std::int64_t* rowptr;       // (num_segments + 1)
  std::int32_t* order;        // (num_rows) position of each sorted entry in the index
  RowSlice* slices;           // (num_segments + num_rows / longest), the largest possible number
  std::int32_t* split_row;    // (num_rows / longest)
  std::int64_t* split_ptr;    // (num_rows / longest + 1)
  std::int64_t* facts;        // (kNumSegmentFacts) in the device's memory
  std::int64_t* host_facts;   // (kNumSegmentFacts) in host memory that the device can write
};

// Sorted keys of entries. The entries of row r have the key r.
struct SortedKeys {
  const std::uint32_t* key;  // (num_keys)
  std::int64_t num_keys;
  std::int64_t* rowptr;  // out; the same pointer as in the RowSplitArgs of the call
};

namespace cuda {

std::size_t sort_segments_scratch_bytes(const SortSegmentsArgs& args);
int sort_segments(const SortSegmentsArgs& args, void* scratch, std::size_t scratch_bytes, void* stream);

// Finds the row pointers of sorted keys, then cuts the rows into slices. `args.totals` has space for all
// facts, which are also copied to the host. The caller must have written the fact kIndexDescends before.
int row_split_of_keys(const RowSplitArgs& args, const SortedKeys& keys, std::int64_t* host_facts,
                      void* stream);

// Does the same as `segment_reduce`, if only the device knows (in `facts`) how many segments are cut. In
// `args`, the numbers of cut segments and of slices are upper bounds; unused slices have no target.
int segment_reduce_unseen(const SegmentReduceArgs& args, const std::int64_t* facts, void* stream);

}  // namespace cuda

}  // namespace fastsparse
