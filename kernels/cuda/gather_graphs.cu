// Gathers batches of graphs in one launch: a block copies one graph's rows of one tensor, or a part of these
// rows. A graph's rows are contiguous, so no thread searches for its graph, and neighbouring lanes copy
// neighbouring words.
//
// Tensors of the dataset may be in page-locked host memory, which is read over PCIe.
#include <algorithm>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/gather_graphs.h"

namespace fastsparse::cuda {
namespace gather_graphs_detail {

constexpr int kThreads = 128;
// Average number of bytes per block, small enough that a few large graphs also fill the GPU.
constexpr std::int64_t kBytesPerBlock = std::int64_t{1} << 14;
constexpr std::int64_t kMostParts = 1024;

__device__ __forceinline__ std::int64_t first_item() {
  return static_cast<std::int64_t>(blockIdx.z) * kThreads + threadIdx.x;
}

__device__ __forceinline__ std::int64_t items_apart() {
  return static_cast<std::int64_t>(gridDim.z) * kThreads;
}

template <typename Word>
__device__ __forceinline__ void copy(const char* from, char* to, std::int64_t bytes) {
  const auto* words = reinterpret_cast<const Word*>(from);
  auto* out = reinterpret_cast<Word*>(to);
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Word));
#pragma unroll 4
  for (std::int64_t k = first_item(); k < count; k += items_apart()) out[k] = __ldg(words + k);
}

// Copies words of up to 16 bytes. `alignment` is the bitwise or of all addresses and sizes.
__device__ void copy_words(const char* from, char* to, std::int64_t bytes, std::uintptr_t alignment) {
  if (alignment % 16 == 0) {
    copy<uint4>(from, to, bytes);
  } else if (alignment % 8 == 0) {
    copy<uint2>(from, to, bytes);
  } else if (alignment % 4 == 0) {
    copy<std::uint32_t>(from, to, bytes);
  } else if (alignment % 2 == 0) {
    copy<std::uint16_t>(from, to, bytes);
  } else {
    copy<std::uint8_t>(from, to, bytes);
  }
}

template <typename Index>
__device__ void add(const char* from, char* to, std::int64_t bytes, std::int64_t added) {
  const auto* numbers = reinterpret_cast<const Index*>(from);
  auto* sums = reinterpret_cast<Index*>(to);
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Index));
  for (std::int64_t k = first_item(); k < count; k += items_apart()) {
    sums[k] = static_cast<Index>(__ldg(numbers + k) + added);
  }
}

__device__ void add_slices(const char* from, char* to, std::int64_t rows, std::int64_t entry,
                           std::int64_t row) {
  const auto* slices = reinterpret_cast<const RowSlice*>(from);
  auto* moved = reinterpret_cast<RowSlice*>(to);
  for (std::int64_t k = first_item(); k < rows; k += items_apart()) {
    const RowSlice slice = slices[k];
    moved[k] = {slice.begin + entry, slice.length, static_cast<std::int32_t>(slice.target + row)};
  }
}

__global__ void __launch_bounds__(kThreads)
    gather_graphs_kernel(const __grid_constant__ GatherGraphsArgs args) {
  const GraphField& field = args.field[blockIdx.y];
  const std::int64_t graph = blockIdx.x;
  const bool is_last = graph + 1 == args.num_graphs && first_item() == 0;
  const std::int64_t* first = first_in_batch(args, field.rows);
  auto* numbers = static_cast<std::int64_t*>(field.to);
  if (field.kind == GraphFieldKind::kFirst) {
    if (first_item() == 0) numbers[graph] = first[graph];
    if (is_last) numbers[graph + 1] = first[graph + 1];
    return;
  }
  const std::int64_t begin = first[graph], rows = first[graph + 1] - begin;
  if (field.kind == GraphFieldKind::kGraph) {
    for (std::int64_t row = first_item(); row < rows; row += items_apart()) numbers[begin + row] = graph;
    return;
  }
  const std::int64_t source = first_in_dataset(args, field.rows)[graph], bytes = rows * field.row_bytes;
  const std::uintptr_t alignment = reinterpret_cast<std::uintptr_t>(field.from) |
                                   reinterpret_cast<std::uintptr_t>(field.to) |
                                   static_cast<std::uintptr_t>(field.row_bytes);
  for (std::int64_t outer = 0; outer < field.outer; ++outer) {
    const char* from =
        static_cast<const char*>(field.from) + (outer * field.from_rows + source) * field.row_bytes;
    char* to = static_cast<char*>(field.to) + (outer * field.to_rows + begin) * field.row_bytes;
    if (field.kind == GraphFieldKind::kCopy) {
      copy_words(from, to, bytes, alignment);
      continue;
    }
    const std::int64_t* added = first_in_batch(args, field.added[outer == 1]);
    if (field.kind == GraphFieldKind::kAddInt32) {
      add<std::int32_t>(from, to, bytes, added[graph]);
    } else if (field.kind == GraphFieldKind::kSlices) {
      add_slices(from, to, rows, added[graph], begin);
    } else {
      add<std::int64_t>(from, to, bytes, added[graph]);
      if (field.kind == GraphFieldKind::kRowPointer && is_last) numbers[field.to_rows] = added[graph + 1];
    }
  }
}

}  // namespace gather_graphs_detail

int gather_graphs(const GatherGraphsArgs& args, void* stream) {
  using namespace gather_graphs_detail;
  if (args.num_graphs == 0 || args.num_fields == 0) return cudaSuccess;
  std::int64_t bytes = 0;
  for (int k = 0; k < args.num_fields; ++k) {
    const GraphField& field = args.field[k];
    const std::int64_t row_bytes = field.kind == GraphFieldKind::kGraph ? 8 : field.row_bytes;
    bytes = std::max(bytes, field.to_rows * row_bytes);
  }
  const auto parts = static_cast<unsigned>(
      std::clamp<std::int64_t>(ceil_div(bytes / args.num_graphs, kBytesPerBlock), 1, kMostParts));
  const dim3 grid(static_cast<unsigned>(args.num_graphs), static_cast<unsigned>(args.num_fields), parts);
  gather_graphs_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
