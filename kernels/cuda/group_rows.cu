// Row grouping on the GPU: signatures of rows, comparison of neighbours in sorted orders, links to clusters'
// roots. Memory traffic: 4 bytes per edge to read its column, which 16 lanes hash in registers; per row and
// order, 16 bytes to read a signature and 4 bytes to write a key.

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/group_rows.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace group_rows_detail {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / kHashes;  // rows per block, each hashed by 16 lanes
constexpr int kAlone = 1024;  // most entries of a row that its 16 lanes hash; the block hashes the others

// The hash function of a lane.
struct LaneHash {
  ColumnHash hash;
  std::uint32_t first;
  std::uint32_t second;

  // Smallest hash of the columns of entries begin, begin + step, ...
  __device__ __forceinline__ std::uint32_t least(const std::int32_t* col, std::int64_t begin,
                                                 std::int64_t end, int step) const {
    std::uint32_t least = hash.most();
#pragma unroll 4
    for (std::int64_t entry = begin; entry < end; entry += step) {
      least = min(least, hash(__ldg(col + entry), first, second));
    }
    return least;
  }
};

__global__ void __launch_bounds__(kThreads)
    row_signatures_kernel(const RowSignaturesArgs args, const HashFactors factors) {
  __shared__ std::uint32_t signature[kRows][kHashes];
  const int lane = threadIdx.x % kHashes, group = threadIdx.x / kHashes;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * kRows;
  const std::int64_t row = first_row + group;
  const bool has_row = row < args.num_rows;
  const std::int64_t begin = has_row ? args.rowptr[row] : 0, end = has_row ? args.rowptr[row + 1] : 0;
  const LaneHash hash{column_hash(args.column_bits), factors.first[lane], factors.second[lane]};
  signature[group][lane] = hash.least(args.col, begin, min(end, begin + kAlone), 1);

  if (__syncthreads_or(end - begin > kAlone)) {
    for (int long_row = 0; long_row < kRows && first_row + long_row < args.num_rows; ++long_row) {
      const std::int64_t rest = args.rowptr[first_row + long_row] + kAlone;
      const std::int64_t rest_end = args.rowptr[first_row + long_row + 1];
      if (rest >= rest_end) continue;
      atomicMin(&signature[long_row][lane], hash.least(args.col, rest + group, rest_end, kRows));
    }
    __syncthreads();
  }
  if (!has_row) return;
  args.signature[row * kHashes + lane] = static_cast<std::uint8_t>(signature[group][lane]);
  if (lane < args.num_bands) {
    args.keys[lane * args.num_rows + row] =
        sort_key(signature[group][lane], signature[group][lane + 1], args.column_bits);
  }
}

__global__ void __launch_bounds__(kThreads) similar_rows_kernel(const SimilarRowsArgs args) {
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (place >= args.num_rows) return;
  const std::int64_t first = blockIdx.y * args.num_rows;
  const auto* signature = reinterpret_cast<const Signature*>(args.signature);
  const auto row_at = [&](std::int64_t at) { return args.order[first + at] - first; };
  const std::int64_t row = row_at(place);
  const Signature own = signature[row];
  std::int64_t best = -1;
  for (const std::int64_t neighbour : {place - 1, place + 1}) {
    if (neighbour < 0 || neighbour >= args.num_rows) continue;
    const std::int64_t other = row_at(neighbour);
    best = max(best, similarity(own, signature[other], other));
  }
  atomicMax(reinterpret_cast<long long*>(args.best) + row, static_cast<long long>(best));
}

__global__ void __launch_bounds__(kThreads) link_rows_kernel(const LinkRowsArgs args) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const RowLinks links{args.rowptr, args.best};
  const bool has_row = row < args.num_rows;
  const bool is_linked = has_row && links.is_linked(row);
  if (has_row) args.root[row] = static_cast<std::int32_t>(links.root(row));
  const int linked = __syncthreads_count(is_linked);
  const int near = __syncthreads_count(is_linked && links.is_near(row));
  if (threadIdx.x == 0) {
    auto* counts = reinterpret_cast<unsigned long long*>(args.counts);
    atomicAdd(counts, static_cast<unsigned long long>(linked));
    atomicAdd(counts + 1, static_cast<unsigned long long>(near));
  }
}

}  // namespace group_rows_detail

int row_signatures(const RowSignaturesArgs& args, void* stream) {
  using namespace group_rows_detail;
  row_signatures_kernel<<<ceil_div(args.num_rows, kRows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      args, kHashFactors);
  return cudaGetLastError();
}

int similar_rows(const SimilarRowsArgs& args, void* stream) {
  using namespace group_rows_detail;
  const dim3 grid(ceil_div(args.num_rows, kThreads), static_cast<unsigned>(args.num_bands));
  similar_rows_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

int link_rows(const LinkRowsArgs& args, void* stream) {
  using namespace group_rows_detail;
  link_rows_kernel<<<ceil_div(args.num_rows, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      args);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
