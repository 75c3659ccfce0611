// Gradients of the parameters of aggregate_linear, in float32: dW = dY^T S, dW_r = dY^T X and the sums of
// dY's columns, in one pass over the rows. S has the sums over neighbours, X the nodes' own features, and dY
// the gradient of the result.
//
// Floors per call, for n rows: 4 n (2 K + N) bytes, 4 n K N flops, as bfloat16 terms on tensor cores
// (aggregate_linear.cu).
//   - A block sums a slab of rows for up to 128 x 128 gradients of W or W_r in registers. Each of its two
//     warpgroups has 64 of dY's columns.
//   - Rows are processed in stages of 64. dY is copied unchanged into shared memory, from where every lane
//     splits its part of operand A into terms, by columns. S or X (operand B) is split into terms in
//     registers and then stored in shared memory, while the tensor cores work on the previous stage.
//   - A second kernel adds the slabs, one gradient per thread. The order depends only on the number of slabs,
//     so every run gives the same bits.

#include <cuda_pipeline.h>

#include "fastsparse/bfloat16_terms.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/slab_sums.h"
#include "fastsparse/wgmma.cuh"

namespace fastsparse::cuda {
namespace aggregate_linear_backward_detail {

constexpr int kThreads = 256;
constexpr int kTile = 128;          // rows and columns of the gradients that one block computes
constexpr int kRows = 64;           // rows per stage
constexpr int kGroup = 16;          // rows per product
constexpr int kStride = kTile + 4;  // row stride of dY: rows 2 t of a group are in different banks
constexpr int kPanelBytes = kRows * kSwizzledRowBytes;
constexpr int kPanels = kTile * 2 / kSwizzledRowBytes;
constexpr int kPieces = kTile / 4;                       // pieces of four features per row
constexpr int kRowsTogether = kThreads / kPieces;        // rows whose pieces the threads load at a time
constexpr int kPiecesPerThread = kRows / kRowsTogether;  // pieces of a stage that a thread loads
constexpr int kBiasRows = kThreads / kTile;              // rows of dY that are added at a time

template <int kTerms>
struct alignas(kAtomBytes) Stage {
  char features[kTerms][kPanels][kPanelBytes];
  float grad[kRows][kStride];
};

// The pieces of a matrix that this thread loads: the same four columns of every kRowsTogether-th row of a
// slab.
struct Pieces {
  const float* from;
  std::int64_t stride;
  int row, column, rows;
  bool inside;

  __device__ __forceinline__ Pieces(const float* matrix, std::int64_t row_stride, std::int64_t first_row,
                                    int num_rows, int columns)
      : stride(row_stride),
        row(static_cast<int>(threadIdx.x) / kPieces),
        column(static_cast<int>(threadIdx.x) % kPieces * 4),
        rows(num_rows) {
    inside = column < columns;
    from = inside ? matrix + (first_row + row) * stride + column : matrix;
  }

  __device__ __forceinline__ bool exists(int place) const { return inside && row + place < rows; }
  __device__ __forceinline__ const float4* at(int place) const {
    return reinterpret_cast<const float4*>(exists(place) ? from + place * stride : from);
  }
};

template <int kTerms>
__device__ __forceinline__ void multiply(float (&sum)[kTile / 8][4], const Stage<kTerms>& stage, int output) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  std::uint32_t a[kRows / kGroup][kTerms][4];
#pragma unroll
  for (int group = 0; group < kRows / kGroup; ++group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = group * kGroup + 8 * half + 2 * t;
      const float2 even = *reinterpret_cast<const float2*>(&stage.grad[row][output + 2 * g]);
      const float2 odd = *reinterpret_cast<const float2*>(&stage.grad[row + 1][output + 2 * g]);
      std::uint32_t first[kTerms],
          second[kTerms];  // columns 2 g and 2 g + 1, which are rows g and g + 8 of operand A
      split_pair<kTerms>(even.x, odd.x, first);
      split_pair<kTerms>(even.y, odd.y, second);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        a[group][term][2 * half] = first[term];
        a[group][term][2 * half + 1] = second[term];
      }
    }
  }
  wgmma_fence();
  bool adds = false;
#pragma unroll
  for (int order = kTerms - 1; order >= 0; --order) {  // small products first
#pragma unroll
    for (int term = 0; term <= order; ++term) {
#pragma unroll
      for (int group = 0; group < kRows / kGroup; ++group) {
        const char* rows = &stage.features[order - term][0][group * kGroup * kSwizzledRowBytes];
        wgmma_bf16<true>(sum, a[group][term], operand_b(rows, kAtomBytes, kPanelBytes), adds);
        adds = true;
      }
    }
  }
  wgmma_commit();
}

// In the grid, x is the slab and y the tile; tiles alternate between W and W_r.
template <int kTerms>
__global__ void __launch_bounds__(kThreads)
    aggregate_linear_backward_kernel(const AggregateLinearBackwardArgs args) {
  extern __shared__ __align__(kAtomBytes) char shared[];
  auto* const stages = reinterpret_cast<Stage<kTerms>*>(shared);
  const bool is_root = blockIdx.y % 2 == 1;
  const int across = static_cast<int>((args.width + kTile - 1) / kTile);  // number of tiles of features
  const int nth = static_cast<int>(blockIdx.y) / 2;
  const int first_feature = nth % across * kTile, first_output = nth / across * kTile;
  const int width = min(static_cast<int>(args.width) - first_feature, kTile);
  const int out_width = min(static_cast<int>(args.out_width) - first_output, kTile);

  // Slabs consist of whole stages, except that the very last stage may be shorter. The lengths of slabs
  // differ by at most one stage.
  const std::int64_t all = (args.num_rows + kRows - 1) / kRows;
  const std::int64_t begin = all * blockIdx.x / args.num_slabs * kRows;
  const std::int64_t end = min(all * (blockIdx.x + 1) / args.num_slabs * kRows, args.num_rows);
  const int rows = static_cast<int>(end - begin), count = (rows + kRows - 1) / kRows;
  const Pieces grads(args.grad + first_output, args.out_width, begin, rows, out_width);
  const Pieces features((is_root ? static_cast<const float*>(args.x.data) : args.sums) + first_feature,
                        is_root ? args.x.stride : args.width, begin, rows, width);

  // Copies a stage's dY to shared memory and loads its features into registers. They are split into terms
  // later.
  float4 piece[kPiecesPerThread];
  const auto start = [&](int index) {
    Stage<kTerms>& stage = stages[index % 2];
#pragma unroll
    for (int i = 0; i < kPiecesPerThread; ++i) {
      const int place = index * kRows + i * kRowsTogether;
      __pipeline_memcpy_async(&stage.grad[grads.row + i * kRowsTogether][grads.column], grads.at(place),
                              sizeof(float4), grads.exists(place) ? 0 : sizeof(float4));
      piece[i] = features.exists(place) ? __ldg(features.at(place)) : float4{};
    }
    __pipeline_commit();
  };
  const auto finish = [&](int index) {
    Stage<kTerms>& stage = stages[index % 2];
#pragma unroll
    for (int i = 0; i < kPiecesPerThread; ++i) {
      std::uint32_t low[kTerms], high[kTerms];
      split_pair<kTerms>(piece[i].x, piece[i].y, low);
      split_pair<kTerms>(piece[i].z, piece[i].w, high);
      const int row = features.row + i * kRowsTogether;
      const int place = swizzled(row, features.column % 64 * 2);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        *reinterpret_cast<uint2*>(&stage.features[term][features.column / 64][place]) =
            uint2{low[term], high[term]};
      }
    }
    shared_to_wgmma();
    __pipeline_wait_prior(0);
    __syncthreads();
  };

  const int warp = threadIdx.x / kWarp, output = warp * 16;
  const bool sums_bias = args.bias != nullptr && !is_root && first_feature == 0;
  float total[kTile / 8][4] = {}, bias = 0;
  if (count > 0) {
    start(0);
    finish(0);
  }
  for (int index = 0; index < count; ++index) {
    const Stage<kTerms>& stage = stages[index % 2];
    if (index + 1 < count) start(index + 1);
    float sum[kTile / 8][4];
    multiply(sum, stage, output);
    if (sums_bias) {
      float part = 0;
#pragma unroll
      for (int row = 0; row < kRows; row += kBiasRows)
        part += stage.grad[row + threadIdx.x / kTile][threadIdx.x % kTile];
      bias += part;
    }
    wgmma_wait(sum);
#pragma unroll
    for (int tile = 0; tile < kTile / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[tile][i] += sum[tile][i];
    }
    if (index + 1 < count) finish(index + 1);
  }

  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  float* const out =
      args.weights +
      (2 * static_cast<std::int64_t>(blockIdx.x) + (is_root ? 1 : 0)) * args.out_width * args.width +
      first_output * args.width + first_feature;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int n = output + 2 * g + half;
#pragma unroll
    for (int tile = 0; tile < kTile / 8; ++tile) {
      const int k = tile * 8 + 2 * t;
      if (n >= out_width || k >= width) continue;
      *reinterpret_cast<float2*>(out + n * args.width + k) =
          float2{total[tile][2 * half], total[tile][2 * half + 1]};
    }
  }
  if (!sums_bias) return;
  __syncthreads();
  float* const parts = reinterpret_cast<float*>(shared);
  parts[threadIdx.x] = bias;
  __syncthreads();
  const int n = static_cast<int>(threadIdx.x);
  if (threadIdx.x >= kTile || n >= out_width) return;
  float sum = 0;
#pragma unroll
  for (int part = 0; part < kBiasRows; ++part) sum += parts[part * kTile + threadIdx.x];
  args.bias[blockIdx.x * args.out_width + first_output + n] = sum;
}

template <int kTerms>
cudaError_t launch(const AggregateLinearBackwardArgs& args, cudaStream_t stream) {
  const auto kernel = aggregate_linear_backward_kernel<kTerms>;
  constexpr int kBytes = 2 * static_cast<int>(sizeof(Stage<kTerms>));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const unsigned tiles = ceil_div(args.width, kTile) * ceil_div(args.out_width, kTile);
  kernel<<<dim3(static_cast<unsigned>(args.num_slabs), 2 * tiles), kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

constexpr int kSumThreads = 128;
constexpr int kSlabsAhead = 8;  // number of independent sums of a thread, so that loads overlap

__global__ void __launch_bounds__(kSumThreads) slab_sums_kernel(const SlabSumsArgs args) {
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  const std::int64_t of_weights = 2 * args.of_weight;
  const bool is_bias = place >= of_weights;
  const std::int64_t column = is_bias ? place - of_weights : place;
  const std::int64_t stride = is_bias ? args.of_bias : of_weights;
  if (column >= stride) return;
  const float* const from = (is_bias ? args.bias : args.weights) + column;
  float sums[kSlabsAhead] = {};
  std::int64_t slab = 0;
  for (; slab + kSlabsAhead <= args.num_slabs; slab += kSlabsAhead) {
#pragma unroll
    for (int i = 0; i < kSlabsAhead; ++i) sums[i] += __ldg(from + (slab + i) * stride);
  }
  for (; slab < args.num_slabs; ++slab) sums[0] += __ldg(from + slab * stride);
#pragma unroll
  for (int half = kSlabsAhead / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  if (is_bias) {
    args.grad_bias[column] = sums[0];
  } else if (column < args.of_weight) {
    args.grad_weight[column] = sums[0];
  } else {
    args.grad_root[column - args.of_weight] = sums[0];
  }
}

}  // namespace aggregate_linear_backward_detail

int slab_sums(const SlabSumsArgs& args, void* stream) {
  using namespace aggregate_linear_backward_detail;
  slab_sums_kernel<<<ceil_div(2 * args.of_weight + args.of_bias, kSumThreads), kSumThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

int aggregate_linear_backward(const AggregateLinearBackwardArgs& args, void* stream) {
  using namespace aggregate_linear_backward_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  return args.num_terms > 2 ? launch<3>(args, queue) : launch<2>(args, queue);
}

}  // namespace fastsparse::cuda
