// Sums of outer products per head, as the gradient of the edges' linear map asks for (edge_attention.cu):
// out[h] = sum_i x_i,h e_i,h^T + y_i,h f_i,h^T, (D, A) for each head, of x, y (n, H D) and e, f (n, H, A).
//
// One product of matrices would compute every pair of heads, H times the work, and a product per head has too
// few results to fill a GPU. Here rows are divided into parts, and a block of threads takes a part: lane x 4
// features of a head and 8 of its edges' features, 32 sums in registers; line y every (kThreads /
// columns)-th row. Lines are added one after the other, parts by the caller: the order depends on the sizes
// alone.
//
// Floor: 2 n H (D + A) sizeof(T) bytes, once: 0.39 ms for 542,080 rows of 16 heads, D = 16, A = 8, float32.

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace in_head_outer {

constexpr int kThreads = 256;
constexpr int kFour = 4;  // features of a head, and of an edge, that one load takes
constexpr int kEdge = 2 * kFour;

template <typename T>
__device__ __forceinline__ void add_outer(float (&sum)[kFour][kEdge], const T* x, const T* e, bool both) {
  const Pack<T, kFour> left = load_pack<T, kFour>(x), first = load_pack<T, kFour>(e);
  Pack<T, kFour> second{};
  if (both) second = load_pack<T, kFour>(e + kFour);
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
#pragma unroll
    for (int a = 0; a < kFour; ++a) {
      sum[i][a] += widen(left.lane[i]) * widen(first.lane[a]);
      sum[i][kFour + a] += widen(left.lane[i]) * widen(second.lane[a]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) head_outer_kernel(const HeadOuterArgs args, const int columns) {
  __shared__ float sums[kFour * kEdge][kThreads];
  const int x = static_cast<int>(threadIdx.x) % columns, y = static_cast<int>(threadIdx.x) / columns;
  const int lines = kThreads / columns;
  const std::int64_t width = args.heads * args.head_width;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * columns + x) * kFour;
  const std::int64_t edge = static_cast<std::int64_t>(blockIdx.z) * kEdge;
  const bool both = edge + kFour < args.edge_width;
  const std::int64_t length = (args.num_rows + args.num_parts - 1) / args.num_parts;
  const std::int64_t begin = blockIdx.y * length, end = min(begin + length, args.num_rows);

  float sum[kFour][kEdge] = {};
  if (column < width) {
    const std::int64_t of_row = args.heads * args.edge_width;
    const std::int64_t of_head = column / args.head_width * args.edge_width + edge;
    const T *left = static_cast<const T*>(args.x) + column, *right = static_cast<const T*>(args.y) + column;
    const T *e = static_cast<const T*>(args.x_edge) + of_head,
            *f = static_cast<const T*>(args.y_edge) + of_head;
#pragma unroll 2
    for (std::int64_t row = begin + y; row < end; row += lines) {
      add_outer<T>(sum, left + row * args.x_stride, e + row * of_row, both);
      add_outer<T>(sum, right + row * args.y_stride, f + row * of_row, both);
    }
  }
#pragma unroll
  for (int i = 0; i < kFour * kEdge; ++i) sums[i][threadIdx.x] = sum[i / kEdge][i % kEdge];
  __syncthreads();
  if (y > 0 || column >= width) return;
  float* out = args.partial + (blockIdx.y * width + column) * args.edge_width + edge;
#pragma unroll
  for (int i = 0; i < kFour * kEdge; ++i) {
    if (i % kEdge >= kFour && !both) continue;
    float total = sum[i / kEdge][i % kEdge];
    for (int line = 1; line < lines; ++line) total += sums[i][line * columns + x];
    out[i / kEdge * args.edge_width + i % kEdge] = total;
  }
}

template <typename T>
void launch(const HeadOuterArgs& args, cudaStream_t queue) {
  const std::int64_t fours = args.heads * args.head_width / kFour;
  int columns = 1;
  while (columns < fours && columns < kThreads) columns *= 2;
  const dim3 grid(ceil_div(fours, columns), static_cast<unsigned>(args.num_parts),
                  ceil_div(args.edge_width, kEdge));
  head_outer_kernel<T><<<grid, kThreads, 0, queue>>>(args, columns);
}

}  // namespace in_head_outer

int head_outer(const HeadOuterArgs& args, void* stream) {
  using namespace in_head_outer;
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (args.dtype) {
    case Dtype::kFloat32:
      launch<float>(args, queue);
      break;
    case Dtype::kFloat16:
      launch<__half>(args, queue);
      break;
    case Dtype::kBFloat16:
      launch<__nv_bfloat16>(args, queue);
      break;
    case Dtype::kFloat64:
      break;  // the caller takes the unfused operators
  }
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
