// Sums of outer products per head, for the gradient of the edges' linear map (edge_attention.cu): out[h] =
// sum_i x_i,h e_i,h^T + y_i,h f_i,h^T, (D, A) for each head, of x, y (n, H D) and e, f (n, H, A).
//
// One matrix product would compute every pair of heads, H times the work, and one product per head has too
// few results to fill a GPU. Instead, rows are divided into parts, and a block of threads handles one part.
// The threads of a block are divided into lines of `columns` threads. Thread x of a line handles 16 bytes of
// a head's features and 8 of its edges' features, with 32 or 64 sums in registers. Line y handles every
// (kThreads / columns)-th row, two at a time so that their loads overlap. Lines are added one after the
// other, and the caller adds the parts, so the order depends on the sizes alone. Rows without entries are
// left out: e and f are 0 there, but x and y may hold NaN.
//
// Floor: 2 n H (D + A) sizeof(T) bytes: 0.39 ms for 542,080 rows of 16 heads, D = 16, A = 8, float32.

#include "fastsparse/edge_attention.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace head_outer_detail {

constexpr int kThreads = 256;
constexpr int kFour = 4;  // edge features per load
constexpr int kEdge = 2 * kFour;
constexpr int kInFlight = 2;
template <typename T>
constexpr int kFeatures = 16 / static_cast<int>(sizeof(T));

// Features of a node and of its edges.
template <typename T>
struct Factors {
  Words<T, kFeatures<T>> x;
  Words<T, kFour> first, second;

  // Loads zeros unless `wanted`; loads zeros for the second four edge features unless `both`.
  __device__ __forceinline__ void load(const T* from, const T* edge, bool wanted, bool both) {
    x.load(from, wanted);
    first.load(edge, wanted);
    second.load(edge + kFour, wanted && both);
  }

  __device__ __forceinline__ void add_to(float (&sum)[kFeatures<T>][kEdge]) {
#pragma unroll
    for (int i = 0; i < kFeatures<T>; ++i) {
#pragma unroll
      for (int a = 0; a < kFour; ++a) {
        sum[i][a] += x[i] * first[a];
        sum[i][kFour + a] += x[i] * second[a];
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    head_outer_kernel(const HeadOuterArgs args, const int columns) {
  __shared__ float sums[kEdge][kThreads];
  const int x = static_cast<int>(threadIdx.x) % columns, y = static_cast<int>(threadIdx.x) / columns;
  const int lines = kThreads / columns;
  const std::int64_t width = args.heads * args.head_width;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * columns + x) * kFeatures<T>;
  const std::int64_t edge = static_cast<std::int64_t>(blockIdx.z) * kEdge;
  const bool inside = column < width, both = edge + kFour < args.edge_width;
  const std::int64_t length = (args.num_rows + args.num_parts - 1) / args.num_parts;
  const std::int64_t begin = blockIdx.y * length, end = min(begin + length, args.num_rows);

  float sum[kFeatures<T>][kEdge] = {};
  if (inside) {
    const std::int64_t of_row = args.heads * args.edge_width, row = begin + y;
    const std::int64_t of_head = row * of_row + column / args.head_width * args.edge_width + edge;
    const T *left = static_cast<const T*>(args.x) + row * args.x_stride + column,
            *right = static_cast<const T*>(args.y) + row * args.y_stride + column,
            *e = static_cast<const T*>(args.x_edge) + of_head,
            *f = static_cast<const T*>(args.y_edge) + of_head;
    // In 32 bits, because registers are scarce. A part has fewer than 2^31 rows, and a step of a line is less
    // than 2^32 elements.
    const auto left_step = static_cast<std::uint32_t>(lines * args.x_stride),
               right_step = static_cast<std::uint32_t>(lines * args.y_stride),
               edge_step = static_cast<std::uint32_t>(lines * of_row);
    const int rows = static_cast<int>(end - row);
    const std::int64_t* rowptr = args.a.rowptr + row;
    const auto has_entries = [&](int at) { return at < rows && rowptr[at] != rowptr[at + 1]; };
    bool wanted[kInFlight];  // whether the next rows have entries, read one step ahead
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) wanted[u] = has_entries(u * lines);
#pragma unroll 1
    for (int at = 0; at < rows; at += kInFlight * lines) {
      Factors<T> factors[kInFlight][2];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        factors[u][0].load(left, e, wanted[u], both);
        factors[u][1].load(right, f, wanted[u], both);
        wanted[u] = has_entries(at + (kInFlight + u) * lines);
        left += left_step;
        right += right_step;
        e += edge_step;
        f += edge_step;
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        factors[u][0].add_to(sum);
        factors[u][1].add_to(sum);
      }
    }
  }
  float* out = args.partial + (blockIdx.y * width + column) * args.edge_width + edge;
#pragma unroll
  for (int i = 0; i < kFeatures<T>; ++i) {
    __syncthreads();
#pragma unroll
    for (int a = 0; a < kEdge; ++a) sums[a][threadIdx.x] = sum[i][a];
    __syncthreads();
    if (!inside) continue;
    for (int a = y; a < kEdge; a += lines) {
      if (a >= kFour && !both) break;
      float total = sums[a][x];
      for (int line = 1; line < lines; ++line) total += sums[a][line * columns + x];
      out[i * args.edge_width + a] = total;
    }
  }
}

template <typename T>
void launch(const HeadOuterArgs& args, cudaStream_t queue) {
  const std::int64_t packs = args.heads * args.head_width / kFeatures<T>;
  int columns = 1;
  while (columns < packs && columns < kThreads) columns *= 2;
  const dim3 grid(ceil_div(packs, columns), static_cast<unsigned>(args.num_parts),
                  ceil_div(args.edge_width, kEdge));
  head_outer_kernel<T><<<grid, kThreads, 0, queue>>>(args, columns);
}

}  // namespace head_outer_detail

int head_outer(const HeadOuterArgs& args, void* stream) {
  using namespace head_outer_detail;
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
      break;  // the caller uses the unfused operators
  }
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
