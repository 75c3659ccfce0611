// COO -> compressed rows on the GPU: one CUB radix sort over only the bits that the indices use, then a
// binary search per row. Each pass of 8 bits reads and writes keys and positions (if requested) once.

#include <cub/device/device_radix_sort.cuh>
#include <type_traits>
#include <utility>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/sort_segments.h"

namespace fastsparse::cuda {
namespace compress_detail {

constexpr int kThreads = 256;
constexpr std::size_t kAlign = 256;

// Number of bits that indices below `count` need.
int bits_of(std::int64_t count) {
  int bits = 1;
  while (bits < 63 && (std::int64_t{1} << bits) < count) ++bits;
  return bits;
}

// The sort key is (major << minor_bits) | minor, or major alone.
struct KeyLayout {
  int minor_bits;
  int key_bits;
  bool key_is_64bit;
};

KeyLayout key_layout(const CompressArgs& args) {
  const int minor_bits = args.sort_minor ? bits_of(args.num_minor) : 0;
  // Without a minor index there is one more key, for invalid indices (`make_keys_kernel`).
  const int key_bits = bits_of(args.num_major + (args.minor == nullptr ? 1 : 0)) + minor_bits;
  // 64-bit positions occur only with more than 2^31 edges, so they are not compiled for 32-bit keys.
  return {minor_bits, key_bits, key_bits > 32 || args.order_is_64bit};
}

// The type of positions, if only keys are sorted.
using cub::NullType;

// Without a minor index, major indices that are negative or too large are sorted to the end, and the caller
// finds them by major_ptr[num_major]. With a minor index, the caller has checked both.
template <typename Index, typename Key, typename Id>
__global__ void make_keys_kernel(const CompressArgs args, int minor_bits, Key* keys, Id* ids) {
  const std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= args.num_edges) return;
  const std::int64_t index = static_cast<const Index*>(args.major)[e];
  auto major = static_cast<std::uint64_t>(index);
  if (args.minor == nullptr && major > static_cast<std::uint64_t>(args.num_major)) major = args.num_major;
  Key key = static_cast<Key>(major);
  if (args.sort_minor) key = (key << minor_bits) | static_cast<Key>(static_cast<const Index*>(args.minor)[e]);
  keys[e] = key;
  if constexpr (!std::is_same_v<Id, NullType>) ids[e] = static_cast<Id>(e);
}

template <typename Index, typename Key, typename Id>
__global__ void unpack_keys_kernel(const CompressArgs args, int minor_bits, const Key* keys, const Id* ids) {
  const std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= args.num_edges) return;
  const auto minor_of_key = static_cast<std::int32_t>(keys[e] & ((Key{1} << minor_bits) - 1));
  if constexpr (std::is_same_v<Id, NullType>) {
    args.minor_out[e] = minor_of_key;
  } else {
    const Id id = ids[e];
    static_cast<Id*>(args.order)[e] = id;
    args.minor_out[e] =
        args.sort_minor ? minor_of_key : static_cast<std::int32_t>(static_cast<const Index*>(args.minor)[id]);
  }
}

// Computes major_ptr[r] = number of sorted keys whose major index is below r.
template <typename Key>
__global__ void find_rows_kernel(const CompressArgs args, int minor_bits, const Key* keys) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row > args.num_major) return;
  std::int64_t low = 0, high = args.num_edges;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (static_cast<std::int64_t>(keys[middle] >> minor_bits) < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  args.major_ptr[row] = low;
}

// If `scratch` is null, only its size is computed. CUB's kernels are slower with 64-bit offsets.
template <typename Key, typename Id>
cudaError_t sort(void* scratch, std::size_t& bytes, cub::DoubleBuffer<Key>& keys, cub::DoubleBuffer<Id>& ids,
                 std::int64_t num_edges, int bits, cudaStream_t stream) {
  if constexpr (std::is_same_v<Id, NullType>) {
    return cub::DeviceRadixSort::SortKeys(scratch, bytes, keys, num_edges, 0, bits, stream);
  } else {
    using Offset = std::conditional_t<sizeof(Id) == 4, std::uint32_t, std::int64_t>;
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, ids, static_cast<Offset>(num_edges), 0, bits,
                                           stream);
  }
}

std::size_t padded(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Scratch: two buffers of keys, two buffers of positions, and CUB's scratch. If `scratch` is null, only its
// size is computed.
template <typename Index, typename Key, typename Id>
int compress_typed(const CompressArgs& args, char* scratch, std::size_t* scratch_bytes, cudaStream_t stream) {
  const KeyLayout layout = key_layout(args);
  const std::size_t key_bytes = padded(args.num_edges * sizeof(Key)),
                    id_bytes = std::is_same_v<Id, NullType> ? 0 : padded(args.num_edges * sizeof(Id));
  cub::DoubleBuffer<Key> keys(reinterpret_cast<Key*>(scratch), reinterpret_cast<Key*>(scratch + key_bytes));
  cub::DoubleBuffer<Id> ids(reinterpret_cast<Id*>(scratch + 2 * key_bytes),
                            reinterpret_cast<Id*>(scratch + 2 * key_bytes + id_bytes));
  const std::size_t own_bytes = 2 * (key_bytes + id_bytes);
  std::size_t sort_bytes = 0;
  cudaError_t error = sort<Key, Id>(nullptr, sort_bytes, keys, ids, args.num_edges, layout.key_bits, stream);
  if (error != cudaSuccess) return error;
  if (scratch == nullptr) {
    *scratch_bytes = own_bytes + sort_bytes;
    return cudaSuccess;
  }
  const unsigned blocks = ceil_div(args.num_edges, kThreads);
  if (args.minor == nullptr) ids.d_buffers[1] = static_cast<Id*>(args.order);
  make_keys_kernel<Index>
      <<<blocks, kThreads, 0, stream>>>(args, layout.minor_bits, keys.Current(), ids.Current());
  error = sort<Key, Id>(scratch + own_bytes, sort_bytes, keys, ids, args.num_edges, layout.key_bits, stream);
  if (error != cudaSuccess) return error;
  if (args.minor != nullptr) {
    unpack_keys_kernel<Index>
        <<<blocks, kThreads, 0, stream>>>(args, layout.minor_bits, keys.Current(), ids.Current());
  } else if (ids.selector == 0) {  // an even number of passes ends in the first buffer
    error = cudaMemcpyAsync(args.order, ids.Current(), args.num_edges * sizeof(Id), cudaMemcpyDeviceToDevice,
                            stream);
    if (error != cudaSuccess) return error;
  }
  find_rows_kernel<<<ceil_div(args.num_major + 1, kThreads), kThreads, 0, stream>>>(args, layout.minor_bits,
                                                                                    keys.Current());
  return cudaGetLastError();
}

int dispatch(const CompressArgs& args, void* scratch, std::size_t* scratch_bytes, void* stream) {
  const auto with_key = [&](auto index) {
    using Index = decltype(index);
    auto* bytes = static_cast<char*>(scratch);
    auto* queue = static_cast<cudaStream_t>(stream);
    if (args.order == nullptr) {
      return key_layout(args).key_is_64bit
                 ? compress_typed<Index, std::uint64_t, NullType>(args, bytes, scratch_bytes, queue)
                 : compress_typed<Index, std::uint32_t, NullType>(args, bytes, scratch_bytes, queue);
    }
    if (args.order_is_64bit) {
      return compress_typed<Index, std::uint64_t, std::int64_t>(args, bytes, scratch_bytes, queue);
    }
    if (key_layout(args).key_is_64bit) {
      return compress_typed<Index, std::uint64_t, std::int32_t>(args, bytes, scratch_bytes, queue);
    }
    return compress_typed<Index, std::uint32_t, std::int32_t>(args, bytes, scratch_bytes, queue);
  };
  return args.index_is_64bit ? with_key(std::int64_t{}) : with_key(std::int32_t{});
}

// ---------------------------------------------------------------- segments

constexpr int kKeysPerThread = 4;

template <typename Index>
__global__ void make_segment_keys_kernel(const SortSegmentsArgs args, std::uint32_t* keys,
                                         std::int32_t* ids) {
  const auto* index = static_cast<const Index*>(args.index);
  const auto most = static_cast<std::uint64_t>(args.num_segments);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads * kKeysPerThread + threadIdx.x;
  // All loads come before the first store. The compiler would not move a load before a store, because it does
  // not know that the arrays do not overlap.
  Index segment[kKeysPerThread], before[kKeysPerThread];
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    const std::int64_t e = first + i * kThreads;
    segment[i] = e < args.num_rows ? index[e] : 0;
    before[i] = e < args.num_rows && e > 0 ? index[e - 1] : segment[i];
  }
  bool descends = false;
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    const std::int64_t e = first + i * kThreads;
    if (e >= args.num_rows) continue;
    const auto key = static_cast<std::uint64_t>(static_cast<std::int64_t>(segment[i]));
    keys[e] = static_cast<std::uint32_t>(key < most ? key : most);
    ids[e] = static_cast<std::int32_t>(e);
    if (segment[i] < before[i]) descends = true;
  }
  // Each block stores at most once; even so, all stores to this address take a microsecond.
  if (__syncthreads_or(descends ? 1 : 0) != 0 && threadIdx.x == 0) args.facts[kIndexDescends] = 1;
}

// Offsets of the arrays of a sort in one allocation of scratch.
struct SegmentScratch {
  std::size_t second_keys, ids, counts, of_sort, sort_bytes, bytes;
  int bits;  // number of bits of a key by which keys are sorted

  cudaError_t measure(const SortSegmentsArgs& args) {
    bits = bits_of(args.num_segments + 1);
    const std::size_t array = padded(args.num_rows * sizeof(std::uint32_t));
    second_keys = array;
    ids = 2 * array;
    counts = 3 * array;
    of_sort = counts + padded(num_row_split_counts(args.num_segments) * sizeof(std::int64_t));
    cub::DoubleBuffer<std::uint32_t> no_keys(nullptr, nullptr);
    cub::DoubleBuffer<std::int32_t> no_ids(nullptr, nullptr);
    sort_bytes = 0;
    const cudaError_t error = sort(nullptr, sort_bytes, no_keys, no_ids, args.num_rows, bits, nullptr);
    bytes = of_sort + sort_bytes;
    return error;
  }
};

// The row of this thread's entry. All threads of the block must call it: two searches find the rows of the
// block's first and last entry, and each thread searches between them.
__device__ std::int64_t row_of_thread(const std::int64_t* rowptr, std::int64_t num_rows,
                                      std::int64_t num_edges) {
  __shared__ std::int64_t ends[2];
  const auto row_of_entry = [&](std::int64_t e, std::int64_t low, std::int64_t high) {
    while (low < high) {  // finds the last row that begins at or before e
      const std::int64_t middle = (low + high + 1) / 2;
      if (rowptr[middle] <= e) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  };
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads;
  if (threadIdx.x < 2) {
    const std::int64_t e = threadIdx.x == 0 ? first : first + kThreads - 1;
    ends[threadIdx.x] = row_of_entry(e < num_edges ? e : num_edges - 1, 0, num_rows - 1);
  }
  __syncthreads();
  return row_of_entry(first + threadIdx.x, ends[0], ends[1]);
}

__global__ void expand_rows_kernel(const ExpandRowsArgs args) {
  const std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t row = row_of_thread(args.rowptr, args.num_rows, args.num_edges);
  if (e < args.num_edges) args.row[e] = static_cast<std::int32_t>(row);
}

// The first of the entries low .. high whose column is at least `c`.
__device__ std::int64_t first_at_least(const std::int32_t* col, std::int64_t low, std::int64_t high,
                                       std::int64_t c) {
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (col[middle] < c) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ void reverse_entry(const ReverseEntriesArgs& args, std::int64_t row, std::int64_t e) {
  const std::int64_t c = args.col[e];
  const std::int64_t nth = e - first_at_least(args.col, args.rowptr[row], e, c);
  std::int64_t id = first_at_least(args.col, args.rowptr[c], args.rowptr[c + 1], row) + nth;
  // The checksum may fail to detect that the structure is not symmetric. Then results are wrong, but this
  // bound keeps accesses valid.
  if (id >= args.num_edges) id = args.num_edges - 1;
  if (args.id_is_64bit) {
    if (args.edge_id != nullptr) id = static_cast<const std::int64_t*>(args.edge_id)[id];
    static_cast<std::int64_t*>(args.id_out)[e] = id;
  } else {
    if (args.edge_id != nullptr) id = static_cast<const std::int32_t*>(args.edge_id)[id];
    static_cast<std::int32_t*>(args.id_out)[e] = static_cast<std::int32_t>(id);
  }
}

__global__ void reverse_entries_kernel(const ReverseEntriesArgs args) {
  const std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t row = row_of_thread(args.rowptr, args.num_rows, args.num_edges);
  if (e < args.num_edges) reverse_entry(args, row, e);
}

}  // namespace compress_detail

int expand_rows(const ExpandRowsArgs& args, void* stream) {
  using namespace compress_detail;
  if (args.num_edges == 0) return cudaSuccess;
  expand_rows_kernel<<<ceil_div(args.num_edges, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      args);
  return cudaGetLastError();
}

int reverse_entries(const ReverseEntriesArgs& args, void* stream) {
  using namespace compress_detail;
  if (args.num_edges == 0) return cudaSuccess;
  const auto blocks = ceil_div(args.num_edges, kThreads);
  reverse_entries_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

std::size_t compress_scratch_bytes(const CompressArgs& args) {
  using namespace compress_detail;
  std::size_t bytes = 0;
  dispatch(args, nullptr, &bytes, nullptr);
  return bytes;
}

int compress(const CompressArgs& args, void* scratch, std::size_t scratch_bytes, void* stream) {
  using namespace compress_detail;
  return dispatch(args, scratch, &scratch_bytes, stream);
}

std::size_t sort_segments_scratch_bytes(const SortSegmentsArgs& args) {
  compress_detail::SegmentScratch scratch{};
  scratch.measure(args);
  return scratch.bytes;
}

int sort_segments(const SortSegmentsArgs& args, void* scratch, std::size_t scratch_bytes, void* stream) {
  using namespace compress_detail;
  auto* queue = static_cast<cudaStream_t>(stream);
  auto* workspace = static_cast<char*>(scratch);
  SegmentScratch places{};
  cudaError_t error = places.measure(args);
  if (error != cudaSuccess) return error;
  if (places.bytes > scratch_bytes) return cudaErrorInvalidValue;
  error = cudaMemsetAsync(args.facts, 0, kNumSegmentFacts * sizeof *args.facts, queue);
  if (error != cudaSuccess) return error;

  cub::DoubleBuffer<std::uint32_t> keys(reinterpret_cast<std::uint32_t*>(workspace),
                                        reinterpret_cast<std::uint32_t*>(workspace + places.second_keys));
  // Every pass over 8 bits moves the positions to the other buffer. They start in the buffer from which they
  // end in `order`.
  cub::DoubleBuffer<std::int32_t> ids(reinterpret_cast<std::int32_t*>(workspace + places.ids), args.order);
  if ((places.bits + 7) / 8 % 2 == 0) std::swap(ids.d_buffers[0], ids.d_buffers[1]);
  const unsigned blocks = ceil_div(args.num_rows, kThreads * kKeysPerThread);
  auto* make_keys =
      args.index_is_64bit ? make_segment_keys_kernel<std::int64_t> : make_segment_keys_kernel<std::int32_t>;
  make_keys<<<blocks, kThreads, 0, queue>>>(args, keys.Current(), ids.Current());
  error = sort(workspace + places.of_sort, places.sort_bytes, keys, ids, args.num_rows, places.bits, queue);
  if (error != cudaSuccess) return error;
  if (ids.Current() != args.order) {  // CUB sorts few entries in a single pass
    error = cudaMemcpyAsync(args.order, ids.Current(), args.num_rows * sizeof *args.order,
                            cudaMemcpyDeviceToDevice, queue);
    if (error != cudaSuccess) return error;
  }
  const RowSplitArgs split{args.rowptr,    args.num_segments,
                           args.longest,   reinterpret_cast<std::int64_t*>(workspace + places.counts),
                           args.facts,     args.slices,
                           args.split_row, args.split_ptr};
  return row_split_of_keys(split, {keys.Current(), args.num_rows, args.rowptr}, args.host_facts, stream);
}

}  // namespace fastsparse::cuda
