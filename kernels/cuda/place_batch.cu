// Copies a batch into memory with spare capacity, in one launch. In the grid, the first row of blocks writes
// masks and hop ends, the second row writes edges, and each further row copies a tensor. The sizes of hops
// are arguments of the launch, so nothing is copied to the device before.
//
// A thread copies a word (16 bytes if addresses and rows allow it), and neighbouring threads copy
// neighbouring words. Floor: all tensors read and written once, 48 bytes per edge, one byte per row.
#include <algorithm>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/place_batch.h"

namespace fastsparse::cuda {
namespace place_batch_detail {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 132 * 8;
constexpr int kUnroll = 4;

__device__ __forceinline__ std::int64_t first_item() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ std::int64_t items_apart() {
  return static_cast<std::int64_t>(gridDim.x) * kThreads;
}

__device__ void mark(const HopRows& rows, bool* mask, float* ends) {
  for (std::int64_t place = first_item(); place < all_places(rows); place += items_apart()) {
    mask[place] = placed(rows, place).is_given;
    if (place < rows.num_hops) ends[place] = static_cast<float>(rows.end[place]);
  }
}

// `Number` must be able to represent the number of words plus one step.
template <typename Word, typename Number>
__device__ void place_rows(const PlacedRows& tensor, const HopRows& rows) {
  const auto* from = static_cast<const Word*>(tensor.from);
  auto* to = static_cast<Word*>(tensor.to);
  const auto words = static_cast<Number>(tensor.row_bytes / static_cast<std::int64_t>(sizeof(Word)));
  const Number all = static_cast<Number>(tensor.num_rows) * words;
#pragma unroll kUnroll
  for (auto word = static_cast<Number>(first_item()); word < all;
       word += static_cast<Number>(items_apart())) {
    const Number place = word / words;
    Word value{};
    if (!tensor.is_empty) {
      value =
          __ldg(from + placed(rows, place).row * static_cast<std::int64_t>(words) + (word - place * words));
    }
    to[word] = value;
  }
}

template <typename Word>
__device__ void place_words(const PlacedRows& tensor, const HopRows& rows) {
  // Divisions of 32-bit numbers are several times as fast as divisions of 64-bit numbers.
  if (tensor.num_rows * tensor.row_bytes < (std::int64_t{1} << 31)) {
    place_rows<Word, std::uint32_t>(tensor, rows);
  } else {
    place_rows<Word, std::int64_t>(tensor, rows);
  }
}

__global__ void __launch_bounds__(kThreads) place_batch_kernel(const __grid_constant__ PlaceBatchArgs args) {
  if (blockIdx.y == 0) {
    mark(args.nodes, args.node_mask, args.node_ends);
    mark(args.edges, args.edge_mask, args.edge_ends);
    return;
  }
  if (blockIdx.y == 1) {
    if (args.edge_index_out == nullptr) return;
    for (std::int64_t place = first_item(); place < all_places(args.edges); place += items_apart()) {
      args.edge_index_is_64bit ? place_edge<std::int64_t>(args, place)
                               : place_edge<std::int32_t>(args, place);
    }
    return;
  }
  const PlacedRows& tensor = args.tensor[blockIdx.y - 2];
  const HopRows& rows = tensor.is_of_edges ? args.edges : args.nodes;
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.from) |
                       reinterpret_cast<std::uintptr_t>(tensor.to) |
                       static_cast<std::uintptr_t>(tensor.row_bytes);
  if (address % 16 == 0) {
    place_words<uint4>(tensor, rows);
  } else if (address % 8 == 0) {
    place_words<uint2>(tensor, rows);
  } else if (address % 4 == 0) {
    place_words<std::uint32_t>(tensor, rows);
  } else if (address % 2 == 0) {
    place_words<std::uint16_t>(tensor, rows);
  } else {
    place_words<std::uint8_t>(tensor, rows);
  }
}

}  // namespace place_batch_detail

int place_batch(const PlaceBatchArgs& args, void* stream) {
  using namespace place_batch_detail;
  std::int64_t items = std::max(all_places(args.nodes), all_places(args.edges));
  for (int k = 0; k < args.num_tensors; ++k) {
    items = std::max(items, args.tensor[k].num_rows * args.tensor[k].row_bytes / (16 * kUnroll));
  }
  const auto blocks =
      static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(items, kThreads), 1, kMostBlocks));
  const dim3 grid(blocks, static_cast<unsigned>(2 + args.num_tensors));
  place_batch_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
