// GraphSAGE's layer in float32 in one kernel: sums neighbours, and applies linear maps to the sums and to the
// nodes' own features.
//
// Floors per call, for E entries, n rows of width K to N features: 4 K E bytes gathered, 4 n (K + N) bytes
// read and written, 4 n K bytes for sums that the backward pass reads; 4 n K N flops. On an H200, bytes and
// flops take about equally long and do not overlap, so products run on tensor cores. A float32 number is
// exactly the sum of three bfloat16 terms. Of the nine products of terms, six are summed; the others are
// below 2^-22 of the first. If torch.set_float32_matmul_precision allows less, there are two terms and three
// products.
//
// Both weights stay in shared memory, as terms, if they are up to 128 wide. Wider weights are divided into
// tiles of 128, with one launch per tile. The first tile of outputs gathers the neighbours and writes their
// sums, which the next tiles of outputs read. Later tiles of features add to the results of earlier ones.
//
// The two warpgroups of a block share only the weights and never wait for each other, so that one gathers
// while the other multiplies. A warp handles 16 rows. A quad of lanes gathers two of them directly into the
// registers of operand A: lane t has features 16 j + 4 t .. + 3 of every group j of 16. The order within a
// group is free, because a product sums over the group. Outputs are distributed in the same way, so that a
// quad stores 64 contiguous bytes of a row.

#include <algorithm>

#include "fastsparse/bfloat16_terms.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/wgmma.cuh"

namespace fastsparse::cuda {
namespace aggregate_linear_detail {

constexpr int kThreads = 256;
constexpr int kWarpgroup = 128;
constexpr int kWarpgroups = kThreads / kWarpgroup;
constexpr int kRows = 16;  // rows per warp
constexpr int kTileRows = kWarpgroup / kWarp * kRows;
constexpr int kGroup = 16;  // features per product
// Number of groups whose products are summed by tensor cores, before ordinary float32 additions continue:
// tensor cores truncate their sums.
constexpr int kGroupsPerTotal = 4;
constexpr std::int64_t kMostWidth = 128;  // largest width of a tile

// Sizes of the whole weight. The kernel's other arguments describe one tile of the weight.
struct Whole {
  std::int64_t width, out_width;
  bool adds;  // whether the tile adds to `out`, which has the results of earlier tiles of features
};

// This lane's features of rows g and g + 8 of the warp's 16 rows: a piece of four features in every group.
template <int kGroups>
struct Rows {
  float4 piece[2][kGroups] = {};
};

__device__ __forceinline__ void add(float4& to, const float4& what) {
  to.x += what.x;
  to.y += what.y;
  to.z += what.z;
  to.w += what.w;
}

__device__ __forceinline__ void scale_by(float4& what, float factor) {
  what.x *= factor;
  what.y *= factor;
  what.z *= factor;
  what.w *= factor;
}

// Reads this lane's pieces of two rows; zeros for a row whose address is null.
template <int kGroups>
__device__ __forceinline__ Rows<kGroups> read_rows(const float* const (&from)[2], int feature, int width) {
  Rows<kGroups> rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (from[h] != nullptr && feature + j * kGroup < width)
        rows.piece[h][j] = __ldg(reinterpret_cast<const float4*>(from[h] + j * kGroup));
    }
  }
  return rows;
}

// Reads this lane's pieces of rows `row` and `row` + 8 of a matrix.
template <int kGroups>
__device__ __forceinline__ Rows<kGroups> read_rows(const float* matrix, std::int64_t stride, std::int64_t row,
                                                   std::int64_t num_rows, int feature, int width) {
  const float* from[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    from[h] = row + 8 * h < num_rows ? matrix + (row + 8 * h) * stride + feature : nullptr;
  }
  return read_rows<kGroups>(from, feature, width);
}

// A weight (outputs x features) as bfloat16 terms in shared memory. For each term, there are panels of 64
// features of all outputs.
template <int kGroups, int kOutputs, int kTerms>
struct Weight {
  static constexpr int kPanelBytes = kOutputs * kSwizzledRowBytes;
  static constexpr int kGroupsPerPanel = 4;
  static constexpr int kPanels = kGroups / kGroupsPerPanel;
  static constexpr int kBytes = kTerms * kPanels * kPanelBytes;

  char* shared;

  // Row 16 p + 8 h + c of the operand is output 16 p + 4 (c / 2) + 2 h + c % 2.
  __device__ void load(const float* weight, std::int64_t stride, int width, int out_width) const {
    constexpr int kPieces = kOutputs * kGroups * 4;
    static_assert(kPieces % kThreads == 0);
#pragma unroll 8  // number of loads in flight
    for (int step = 0; step < kPieces / kThreads; ++step) {
      const int piece = step * kThreads + static_cast<int>(threadIdx.x);
      const int n = piece / (kGroups * 4), group = piece / 4 % kGroups, t = piece % 4;
      const int feature = group * kGroup + 4 * t;
      float4 w{};
      if (n < out_width && feature < width) {
        w = __ldg(reinterpret_cast<const float4*>(weight + n * stride + feature));
      }
      std::uint32_t low[kTerms], high[kTerms];
      split_pair<kTerms>(w.x, w.y, low);
      split_pair<kTerms>(w.z, w.w, high);
      const int row = n / 16 * 16 + n / 2 % 2 * 8 + n / 4 % 4 * 2 + n % 2;
      const int byte = group % kGroupsPerPanel * 32 + 4 * t;
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        char* const panel = at(term, group / kGroupsPerPanel);
        *reinterpret_cast<std::uint32_t*>(panel + swizzled(row, byte)) = low[term];
        *reinterpret_cast<std::uint32_t*>(panel + swizzled(row, byte + 16)) = high[term];
      }
    }
  }

  __device__ __forceinline__ char* at(int term, int panel) const {
    return shared + (term * kPanels + panel) * kPanelBytes;
  }

  __device__ __forceinline__ std::uint64_t operand(int term, int group) const {
    return operand_b(at(term, group / kGroupsPerPanel) + group % kGroupsPerPanel * 32, kAtomBytes, 16);
  }
};

// Computes total += rows * weight^T.
template <int kGroups, int kOutputs, int kTerms>
__device__ __forceinline__ void multiply(float (&total)[kOutputs / 8][4], const Rows<kGroups>& rows,
                                         const Weight<kGroups, kOutputs, kTerms>& weight) {
#pragma unroll
  for (int first = 0; first < kGroups; first += kGroupsPerTotal) {
    float sum[kOutputs / 8][4];
    std::uint32_t a[kGroupsPerTotal][kTerms][4];
#pragma unroll
    for (int j = 0; j < kGroupsPerTotal; ++j) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float4& piece = rows.piece[row][first + j];
        std::uint32_t low[kTerms], high[kTerms];
        split_pair<kTerms>(piece.x, piece.y, low);
        split_pair<kTerms>(piece.z, piece.w, high);
#pragma unroll
        for (int i = 0; i < kTerms; ++i) {
          a[j][i][row] = low[i];
          a[j][i][2 + row] = high[i];
        }
      }
    }
    wgmma_fence();
    bool adds = false;
    // Adds small products first, for accuracy.
#pragma unroll
    for (int order = kTerms - 1; order >= 0; --order) {
#pragma unroll
      for (int term = 0; term <= order; ++term) {
#pragma unroll
        for (int j = 0; j < kGroupsPerTotal; ++j) {
          wgmma_bf16<false>(sum, a[j][term], weight.operand(order - term, first + j), adds);
          adds = true;
        }
      }
    }
    wgmma_commit();
    wgmma_wait(sum);
#pragma unroll
    for (int tile = 0; tile < kOutputs / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[tile][i] += sum[tile][i];
    }
  }
}

// Computes the sums of the neighbours of rows `row` and `row` + 8.
template <int kGroups>
__device__ __forceinline__ Rows<kGroups> gather(const AggregateLinearArgs& args, std::int64_t row,
                                                int feature) {
  const float* x = static_cast<const float*>(args.x.data) + feature;
  const std::int32_t* col[2];
  int count[2], next[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool inside = row + 8 * h < args.a.num_rows;
    const std::int64_t begin = inside ? __ldg(args.a.rowptr + row + 8 * h) : 0;
    count[h] = inside ? static_cast<int>(__ldg(args.a.rowptr + row + 8 * h + 1) - begin) : 0;
    col[h] = args.a.col + begin;
    next[h] = count[h] > 0 ? __ldg(col[h]) : 0;
  }
  Rows<kGroups> sums;
  for (int entry = 0; entry < max(count[0], count[1]); ++entry) {
    const float* from[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      from[h] = entry < count[h] ? x + next[h] * args.x.stride : nullptr;
      next[h] = entry + 1 < count[h] ? __ldg(col[h] + entry + 1) : 0;
    }
    const auto source = read_rows<kGroups>(from, feature, static_cast<int>(args.width));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) add(sums.piece[h][j], source.piece[h][j]);
    }
  }
  if (args.scale_dst != nullptr) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = row + 8 * h < args.a.num_rows ? __ldg(args.scale_dst + row + 8 * h) : 0.0f;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) scale_by(sums.piece[h][j], scale);
    }
  }
  return sums;
}

// Writes rows `row` and `row` + 8.
template <int kGroups>
__device__ __forceinline__ void write_rows(const Rows<kGroups>& rows, float* matrix, std::int64_t stride,
                                           std::int64_t row, std::int64_t num_rows, int feature, int width) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int column = feature + j * kGroup;
      if (row + 8 * h < num_rows && column < width)
        *reinterpret_cast<float4*>(matrix + (row + 8 * h) * stride + column) = rows.piece[h][j];
    }
  }
}

template <int kGroups, int kOutputs, int kTerms, bool kIsTile>
__global__ void __launch_bounds__(kThreads)
    aggregate_linear_kernel(const AggregateLinearArgs args, const Whole whole) {
  using Weights = Weight<kGroups, kOutputs, kTerms>;
  extern __shared__ __align__(kAtomBytes) char shared[];
  const Weights weight{shared}, root_weight{shared + Weights::kBytes};
  const int width = static_cast<int>(args.width), out_width = static_cast<int>(args.out_width);
  const std::int64_t stride = kIsTile ? whole.width : width;
  const std::int64_t out_stride = kIsTile ? whole.out_width : out_width;
#pragma unroll 1
  for (int nth = 0; nth < 2; ++nth) {
    const Weights to{shared + nth * Weights::kBytes};
    to.load(nth == 0 ? args.weight : args.root_weight, stride, width, out_width);
  }
  shared_to_wgmma();
  __syncthreads();

  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int feature = 4 * t;  // first feature of this thread in the first group
  const std::int64_t num_rows = args.a.num_rows;
  // All warps of a warpgroup multiply together.
  const int warpgroup = threadIdx.x / kWarpgroup;
  std::int64_t tile_row = (static_cast<std::int64_t>(blockIdx.x) * kWarpgroups + warpgroup) * kTileRows;
  for (; tile_row < num_rows; tile_row += static_cast<std::int64_t>(gridDim.x) * kWarpgroups * kTileRows) {
    const std::int64_t row = tile_row + threadIdx.x % kWarpgroup / kWarp * kRows + g;
    float total[kOutputs / 8][4];
#pragma unroll
    for (int tile = 0; tile < kOutputs / 8; ++tile) {
      const int n = tile / 2 * 16 + 4 * t + 2 * (tile % 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool has_bias = args.bias != nullptr && n < out_width;
        total[tile][i] = has_bias ? __ldg(args.bias + n + i % 2) : 0.0f;
      }
    }
    if (kIsTile && whole.adds) {
#pragma unroll
      for (int pair = 0; pair < kOutputs / 16; ++pair) {
        const int n = pair * 16 + 4 * t;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (row + 8 * h >= num_rows || n >= out_width) continue;
          const float4 before = *reinterpret_cast<const float4*>(args.out + (row + 8 * h) * out_stride + n);
          total[2 * pair][2 * h] = before.x;
          total[2 * pair][2 * h + 1] = before.y;
          total[2 * pair + 1][2 * h] = before.z;
          total[2 * pair + 1][2 * h + 1] = before.w;
        }
      }
    }
    {
      Rows<kGroups> sums;
      if (args.sums_given) {
        sums = read_rows<kGroups>(args.sums, stride, row, num_rows, feature, width);
      } else {
        sums = gather<kGroups>(args, row, feature);
        if (args.sums != nullptr) write_rows(sums, args.sums, stride, row, num_rows, feature, width);
      }
      multiply(total, sums, weight);
    }
    const float* const x = static_cast<const float*>(args.x.data);
    multiply(total, read_rows<kGroups>(x, args.x.stride, row, num_rows, feature, width), root_weight);
#pragma unroll
    for (int pair = 0; pair < kOutputs / 16; ++pair) {
      const int n = pair * 16 + 4 * t;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row + 8 * h >= num_rows || n >= out_width) continue;
        *reinterpret_cast<float4*>(args.out + (row + 8 * h) * out_stride + n) =
            float4{total[2 * pair][2 * h], total[2 * pair][2 * h + 1], total[2 * pair + 1][2 * h],
                   total[2 * pair + 1][2 * h + 1]};
      }
    }
  }
}

template <int kGroups, int kOutputs, int kTerms, bool kIsTile = false>
cudaError_t launch(const AggregateLinearArgs& args, const Whole& whole, cudaStream_t stream) {
  const auto kernel = aggregate_linear_kernel<kGroups, kOutputs, kTerms, kIsTile>;
  constexpr int kBytes = 2 * Weight<kGroups, kOutputs, kTerms>::kBytes;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  if (error != cudaSuccess) return error;
  // The registers of a multiprocessor suffice for one block.
  const unsigned blocks = ceil_div(args.a.num_rows, kTileRows * kWarpgroups);
  kernel<<<std::min(blocks, static_cast<unsigned>(processors)), kThreads, kBytes, stream>>>(args, whole);
  return cudaGetLastError();
}

template <int kTerms>
cudaError_t launch_shape(const AggregateLinearArgs& args, const Whole& whole, cudaStream_t stream) {
  if (args.width != whole.width || args.out_width != whole.out_width) {
    return launch<8, 128, kTerms, true>(args, whole, stream);
  }
  if (args.width <= 64) {
    return args.out_width <= 64 ? launch<4, 64, kTerms>(args, whole, stream)
                                : launch<4, 128, kTerms>(args, whole, stream);
  }
  return args.out_width <= 64 ? launch<8, 64, kTerms>(args, whole, stream)
                              : launch<8, 128, kTerms>(args, whole, stream);
}

}  // namespace aggregate_linear_detail

int aggregate_linear(const AggregateLinearArgs& args, void* stream) {
  using namespace aggregate_linear_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  const std::int64_t width = args.width, out_width = args.out_width;
  if (out_width > kMostWidth && args.sums == nullptr) return cudaErrorInvalidValue;
  for (std::int64_t output = 0; output < out_width; output += kMostWidth) {
    for (std::int64_t feature = 0; feature < width; feature += kMostWidth) {
      AggregateLinearArgs tile = args;
      const Whole whole{width, out_width, feature > 0};
      tile.sums_given = args.sums_given || output > 0;
      tile.x.data = static_cast<const float*>(args.x.data) + feature;
      tile.weight += output * width + feature;
      tile.root_weight += output * width + feature;
      tile.bias = args.bias == nullptr || whole.adds ? nullptr : args.bias + output;
      if (args.sums != nullptr) tile.sums += feature;
      tile.out += output;
      tile.width = std::min(width - feature, kMostWidth);
      tile.out_width = std::min(out_width - output, kMostWidth);
      const cudaError_t error =
          args.num_terms > 2 ? launch_shape<3>(tile, whole, queue) : launch_shape<2>(tile, whole, queue);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace fastsparse::cuda
