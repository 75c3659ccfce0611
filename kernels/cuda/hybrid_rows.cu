// The work list of spmm_hr (HR-SpMM, section 4.1, algorithm 1): what a row adds to it, then, after a prefix
// sum, the list. A thread per row: a row of n entries writes n / 256 items.

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 256;

// How a row is cut, see HybridRows in formats/hybrid_rows.py.
struct RowCut {
  std::int64_t begin;
  int rest;
  int whole;  // entries in long items
  int num_long;
  int num_short;

  __device__ __forceinline__ RowCut(const HybridRowsArgs& args, std::int64_t row) : begin(args.rowptr[row]) {
    const int length = static_cast<int>(args.rowptr[row + 1] - begin);
    rest = length % args.multiple;
    whole = length - rest;
    num_long = (whole + args.longest - 1) / args.longest;
    num_short = rest > 0 || length == 0;
  }

  __device__ __forceinline__ int items() const { return num_long + num_short; }
  __device__ __forceinline__ bool shared() const { return items() > 1; }
};

__device__ __forceinline__ std::int64_t two(std::int64_t high, std::int64_t low) { return high << 32 | low; }
__device__ __forceinline__ std::int64_t high(std::int64_t both) { return both >> 32; }
__device__ __forceinline__ std::int64_t low(std::int64_t both) { return both & 0xffffffff; }

__global__ void __launch_bounds__(kThreads) count_kernel(const HybridRowsArgs args) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= args.num_rows) return;
  const RowCut cut(args, row);
  args.sums[row] = two(cut.num_long, cut.num_short);
  args.sums[args.num_rows + row] = cut.shared() ? two(cut.items(), 1) : 0;
}

__global__ void __launch_bounds__(kThreads) fill_kernel(const HybridRowsArgs args) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= args.num_rows) return;
  const RowCut cut(args, row);
  // The sums run on from the last row's first number to the first row's second.
  const std::int64_t counted = args.sums[row];
  const std::int64_t slots_counted = args.sums[args.num_rows + row] - args.sums[args.num_rows - 1];
  const std::int64_t first_slot = high(slots_counted) - cut.items();
  const auto target = [&](int nth) {
    return static_cast<std::int32_t>(cut.shared() ? ~(first_slot + nth) : row);
  };
  RowSlice* item = args.slices + (high(counted) - cut.num_long);
  for (int nth = 0; nth < cut.num_long; ++nth) {
    const int first = nth * args.longest;
    item[nth] = {cut.begin + first, min(args.longest, cut.whole - first), target(nth)};
  }
  if (cut.num_short > 0) {
    args.slices[args.num_long + low(counted) - 1] = {cut.begin + cut.whole, cut.rest, target(cut.num_long)};
  }
  if (cut.shared()) {
    const std::int64_t nth = low(slots_counted) - 1;
    args.split_row[nth] = static_cast<std::int32_t>(row);
    args.split_ptr[nth + 1] = high(slots_counted);
  }
  if (row == 0) args.split_ptr[0] = 0;
}

}  // namespace

int count_hybrid_rows(const HybridRowsArgs& args, void* stream) {
  count_kernel<<<ceil_div(args.num_rows, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

int fill_hybrid_rows(const HybridRowsArgs& args, void* stream) {
  fill_kernel<<<ceil_div(args.num_rows, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
