// The kernels that an attention layer launches before and after attention, on CUDA. There are few kernels,
// because on small graphs launches take longer than kernels.
//   - scores_kernel: <a_h, v_ih> for both vectors of every head. Lanes are assigned as in head_lanes.cuh; a
//     group of lanes handles every `groups`-th row and keeps the vectors in registers. Floor: v read once.
//   - score_gradients_kernel: dv_ih += ds_ih a_h (both vectors), and sums over the rows of ds_ih v_ih and of
//     dO_i. Each block adds its groups in order, in shared memory, and writes one row of sums.
//     sum_partials_kernel adds these rows in float64, always in the same order. Floor: v, dO and dv read, dv
//     written.
//   - add_kernel: result + skip + bias.
//   - join_kernel: places the gradients of the maps' results next to each other.
//   - stack_kernel: stacks the weights and the biases of the maps, in the dtype of the products.

#include <algorithm>

#include "fastsparse/attention_layer.cuh"
#include "fastsparse/head_lanes.cuh"

namespace fastsparse::cuda {
namespace attention_layer_parts_detail {

constexpr int kThreads = 256;
// Number of rows per group of lanes, for kernels that keep vectors or sums in registers. If there are many
// rows, the number of blocks is limited, and a group handles more rows.
constexpr int kRowsPerGroup = 8;
constexpr int kRowsAhead = 2;  // rows that a lane loads before it uses them

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads)
    scores_kernel(const HeadScoresArgs args, int heads_per_group, std::int64_t groups) {
  const HeadLane<T, kVec, kHeadLanes> lane(args.heads, args.head_width, heads_per_group);
  float first[kLaneFeatures], second[kLaneFeatures];
  lane.load_vector(first, static_cast<const float*>(args.vectors[0]));
  lane.load_vector(second, static_cast<const float*>(args.vectors[1]));
  // All lanes of a warp take the same number of steps, because they exchange sums by shuffles.
  for (std::int64_t base = 0; base < args.num_rows; base += groups) {
    const std::int64_t row = base + lane.group;
    const bool inside = row < args.num_rows;
    float v[kLaneFeatures];
    lane.load(v, args.v, inside ? row : 0);
    float of_first = 0, of_second = 0;
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) {
      of_first += first[i] * v[i];
      of_second += second[i] * v[i];
    }
    of_first = sum_lanes<kHeadLanes>(of_first);
    of_second = sum_lanes<kHeadLanes>(of_second);
    if (!inside || !lane.live || lane.sub != 0) continue;
    static_cast<float*>(args.scores[0])[lane.at(row)] = of_first;
    static_cast<float*>(args.scores[1])[lane.at(row)] = of_second;
  }
}

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads)
    score_gradients_kernel(const ScoreGradients args, int heads_per_group, std::int64_t groups) {
  using Lane = HeadLane<T, kVec, kHeadLanes>;
  __shared__ float shared[kHeadThreads][kLaneFeatures];
  const HeadScoresArgs& scores = args.scores;
  const Lane lane(scores.heads, scores.head_width, heads_per_group);
  const std::int64_t width = scores.heads * scores.head_width;
  float first[kLaneFeatures], second[kLaneFeatures], sums[3][kLaneFeatures] = {};
  lane.load_vector(first, static_cast<const float*>(scores.vectors[0]));
  lane.load_vector(second, static_cast<const float*>(scores.vectors[1]));
  const bool sums_grad = args.grad.data != nullptr;
  const auto rows_v = lane.gather(scores.v), rows_grad = lane.gather(sums_grad ? args.grad : scores.v);
  // This kernel also writes grad_v, so grad_v is not read through the read-only cache, and all loads of a
  // step come before its stores.
  const auto load_grad_v = [&](std::int64_t row) {
    Features<T, kVec> features{};
    const T* from = static_cast<const T*>(args.grad_v) + row * width + lane.first;
#pragma unroll
    for (int c = 0; c < Lane::kChunks; ++c) {
      if (lane.inside[c]) features.pack[c] = *reinterpret_cast<const Pack<T, kVec>*>(from + lane.place(c));
    }
    return features;
  };
  for (std::int64_t base = lane.group; base < scores.num_rows; base += kRowsAhead * groups) {
    Features<T, kVec> v[kRowsAhead], grad_v[kRowsAhead] = {}, grad[kRowsAhead];
    float of_first[kRowsAhead], of_second[kRowsAhead];
#pragma unroll
    for (int r = 0; r < kRowsAhead; ++r) {
      const std::int64_t row = base + r * groups;
      const bool wanted = row < scores.num_rows;
      const auto number = static_cast<std::uint32_t>(row);
      of_first[r] = wanted ? __ldg(static_cast<const float*>(scores.scores[0]) + lane.at(row)) : 0.0f;
      of_second[r] = wanted ? __ldg(static_cast<const float*>(scores.scores[1]) + lane.at(row)) : 0.0f;
      v[r] = rows_v.load(number, wanted);
      if (wanted) grad_v[r] = load_grad_v(row);
      grad[r] = rows_grad.load(number, wanted && sums_grad);
    }
#pragma unroll
    for (int r = 0; r < kRowsAhead; ++r) {
      const std::int64_t row = base + r * groups;
      float sum[kLaneFeatures];
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) {
        sum[i] = grad_v[r][i] + of_first[r] * first[i] + of_second[r] * second[i];
        sums[0][i] += of_first[r] * v[r][i];
        sums[1][i] += of_second[r] * v[r][i];
        sums[2][i] += grad[r][i];
      }
      if (row < scores.num_rows) lane.template store<T>(args.grad_v, row, width, sum);
    }
  }
  // Neighbouring threads are the lanes of a group, and groups follow each other.
  const int lanes = kHeadLanes * heads_per_group, thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int s = 0; s < 3; ++s) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) shared[thread][i] = sums[s][i];
    __syncthreads();
    if (thread >= lanes) continue;
#pragma unroll 1
    for (int other = thread + lanes; other < kHeadThreads; other += lanes) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) sums[s][i] += shared[other][i];
    }
    lane.template store<float>(args.partial, static_cast<std::int64_t>(blockIdx.x) * 3 + s, width, sums[s]);
  }
}

__device__ __forceinline__ void store_number(void* to, Dtype dtype, std::int64_t at, double number) {
  const auto rounded = static_cast<float>(number);
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(to)[at] = rounded;
  } else if (dtype == Dtype::kFloat16) {
    static_cast<__half*>(to)[at] = narrow<__half>(rounded);
  } else {
    static_cast<__nv_bfloat16*>(to)[at] = narrow<__nv_bfloat16>(rounded);
  }
}

// Each lane handles one column; each of the block's 32 warps handles every 32nd row.
__global__ void __launch_bounds__(kWarp* kWarp)
    sum_partials_kernel(const float* partial, std::int64_t num_rows, std::int64_t width,
                        const ScoreSums sums) {
  __shared__ double shared[kWarp][kWarp];
  const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + lane;
  double total = 0;
  if (column < 3 * width) {
    for (std::int64_t row = warp; row < num_rows; row += kWarp) total += partial[row * 3 * width + column];
  }
  shared[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || column >= 3 * width) return;
  for (int other = 1; other < kWarp; ++other) total += shared[other][lane];
  const std::int64_t piece = column / width;
  if (sums.to[piece] != nullptr) {
    store_number(sums.to[piece], sums.dtype[piece], column - piece * width, total);
  }
}

// Number of blocks for a kernel whose groups handle several rows each.
unsigned row_blocks(std::int64_t num_rows, const dim3& whole, std::int64_t most) {
  const std::int64_t few = std::max<std::int64_t>(ceil_div(whole.x, kRowsPerGroup), 1);
  return static_cast<unsigned>(num_rows == 0 ? 1 : std::min(few, most));
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) add_kernel(const Addends args) {
  const std::int64_t packs = args.width / kVec;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= args.num_rows * packs) return;
  const std::int64_t row = item / packs, column = (item - row * packs) * kVec;
  // The result may be the input itself, so it is not read through the read-only cache.
  Pack<T, kVec> pack =
      *reinterpret_cast<const Pack<T, kVec>*>(static_cast<const T*>(args.out) + row * args.width + column);
  float sum[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] = widen(pack.lane[i]);
  if (args.skip.data != nullptr) {
    const auto skip =
        load_pack<T, kVec>(static_cast<const T*>(args.skip.data) + row * args.skip.stride + column);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] += widen(skip.lane[i]);
  }
  if (args.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sum[i] += args.bias_is_float ? static_cast<const float*>(args.bias)[column + i]
                                   : widen(static_cast<const T*>(args.bias)[column + i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) pack.lane[i] = narrow<T>(sum[i]);
  *reinterpret_cast<Pack<T, kVec>*>(static_cast<T*>(args.result) + row * args.width + column) = pack;
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) join_kernel(const Pieces args) {
  const std::int64_t packs = args.width / kVec, of_row = args.count * packs;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= args.num_rows * of_row) return;
  const std::int64_t row = item / of_row, rest = item - row * of_row;
  const std::int64_t piece = rest / packs, column = (rest - piece * packs) * kVec;
  DenseView from = args.from[0];
#pragma unroll
  for (int i = 1; i < kMostLinears; ++i) {
    if (piece == i) from = args.from[i];
  }
  const auto pack = load_pack<T, kVec>(static_cast<const T*>(from.data) + row * from.stride + column);
  *reinterpret_cast<Pack<T, kVec>*>(static_cast<T*>(args.to) + item * kVec) = pack;
}

// Copies one tensor per blockIdx.y: first the weights, then the biases.
template <typename From, typename To, int kVec>
__global__ void __launch_bounds__(kThreads) stack_kernel(const __grid_constant__ StackedMapsArgs args) {
  const bool of_weight = blockIdx.y < args.num_linears;
  const std::int64_t nth = of_weight ? blockIdx.y : blockIdx.y - args.num_linears;
  const std::int64_t size = of_weight ? args.weight_size : args.bias_size;
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (at >= size) return;
  const void* from = of_weight ? args.weights[nth] : args.biases[nth];
  const auto pack = load_pack<From, kVec>(static_cast<const From*>(from) + at);
  Pack<To, kVec> stored;
#pragma unroll
  for (int i = 0; i < kVec; ++i) stored.lane[i] = narrow<To>(widen(pack.lane[i]));
  To* to = static_cast<To*>(of_weight ? args.weight : args.bias) + nth * size + at;
  *reinterpret_cast<Pack<To, kVec>*>(to) = stored;
}

template <typename From, typename To>
void stack(const StackedMapsArgs& args, cudaStream_t stream) {
  const auto run = [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    const std::int64_t longest = std::max(args.weight_size, args.bias_size);
    const dim3 grid(ceil_div(longest, kThreads * kVec),
                    static_cast<unsigned>(args.num_linears * (args.bias_size > 0 ? 2 : 1)));
    stack_kernel<From, To, kVec><<<grid, kThreads, 0, stream>>>(args);
  };
  constexpr int kMost = 16 / sizeof(From);
  bool packed = vector_width<From>({args.weight_size, args.bias_size}, {args.weight, args.bias}) == kMost;
  for (int i = 0; i < args.num_linears; ++i) {
    packed = packed && vector_width<From>({}, {args.weights[i], args.biases[i]}) == kMost;
  }
  packed ? run(Constant<kMost>{}) : run(Constant<1>{});
}

// Calls f(element type, elements per load): 16 bytes per load if all sizes and addresses allow it, otherwise
// one element.
template <typename F>
void with_packs(Dtype dtype, std::initializer_list<std::int64_t> divisors,
                std::initializer_list<const void*> addresses, F&& f) {
  const auto call = [&](auto type) {
    using T = decltype(type);
    constexpr int kVec = 16 / sizeof(T);
    vector_width<T>(divisors, addresses) == kVec ? f(type, Constant<kVec>{}) : f(type, Constant<1>{});
  };
  if (dtype == Dtype::kFloat32) return call(float{});
  if (dtype == Dtype::kFloat16) return call(__half{});
  call(__nv_bfloat16{});
}

}  // namespace attention_layer_parts_detail

void launch_scores(const HeadScoresArgs& of, std::int64_t most_blocks, cudaStream_t stream) {
  using namespace attention_layer_parts_detail;
  with_head_lanes(
      of.dtype, of.head_width, {of.v.stride}, {of.v.data}, [&](auto type, auto vec, auto head_lanes) {
        using T = decltype(type);
        constexpr int kVec = decltype(vec)::value, kHeadLanes = decltype(head_lanes)::value;
        dim3 grid = head_grid(of.num_rows, of.heads, kHeadLanes);
        const int per_group = heads_per_group(of.heads, kHeadLanes);
        grid.x = row_blocks(of.num_rows, grid, most_blocks);
        const std::int64_t groups = grid.x * (kHeadThreads / kHeadLanes / per_group);
        scores_kernel<T, kVec, kHeadLanes><<<grid, kHeadThreads, 0, stream>>>(of, per_group, groups);
      });
}

void launch_score_gradients(const ScoreGradients& args, const ScoreSums& sums, std::int64_t most_blocks,
                            cudaStream_t stream) {
  using namespace attention_layer_parts_detail;
  const HeadScoresArgs& of = args.scores;
  const std::int64_t width = of.heads * of.head_width;
  unsigned blocks = 1;
  with_head_lanes(of.dtype, of.head_width, {of.v.stride, args.grad.stride},
                  {of.v.data, args.grad.data, args.grad_v, args.partial},
                  [&](auto type, auto vec, auto head_lanes) {
                    using T = decltype(type);
                    constexpr int kVec = decltype(vec)::value, kHeadLanes = decltype(head_lanes)::value;
                    dim3 grid = head_grid(of.num_rows, of.heads, kHeadLanes);
                    const int per_group = heads_per_group(of.heads, kHeadLanes);
                    grid.x = blocks = row_blocks(of.num_rows, grid, most_blocks);
                    const std::int64_t groups = grid.x * (kHeadThreads / kHeadLanes / per_group);
                    score_gradients_kernel<T, kVec, kHeadLanes>
                        <<<grid, kHeadThreads, 0, stream>>>(args, per_group, groups);
                  });
  sum_partials_kernel<<<ceil_div(3 * width, kWarp), dim3(kWarp, kWarp), 0, stream>>>(args.partial, blocks,
                                                                                     width, sums);
}

void launch_add(Dtype dtype, const Addends& args, cudaStream_t stream) {
  using namespace attention_layer_parts_detail;
  if (args.num_rows == 0 || (args.skip.data == nullptr && args.bias == nullptr)) return;
  with_packs(dtype, {args.width, args.skip.stride}, {args.out, args.skip.data, args.result},
             [&](auto type, auto vec) {
               using T = decltype(type);
               constexpr int kVec = decltype(vec)::value;
               const std::int64_t items = args.num_rows * (args.width / kVec);
               add_kernel<T, kVec><<<ceil_div(items, kThreads), kThreads, 0, stream>>>(args);
             });
}

void launch_join(Dtype dtype, const Pieces& args, cudaStream_t stream) {
  using namespace attention_layer_parts_detail;
  const DenseView *from = args.from, &last = from[args.count - 1];
  with_packs(dtype, {args.width, last.stride}, {from[0].data, from[1].data, from[2].data, last.data, args.to},
             [&](auto type, auto vec) {
               using T = decltype(type);
               constexpr int kVec = decltype(vec)::value;
               const std::int64_t items = args.num_rows * args.count * (args.width / kVec);
               join_kernel<T, kVec><<<ceil_div(items, kThreads), kThreads, 0, stream>>>(args);
             });
}

int stack_maps(const StackedMapsArgs& args, void* stream_address) {
  using namespace attention_layer_parts_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  if (args.weight_size == 0 && args.bias_size == 0) return cudaSuccess;
  if (args.to_dtype == Dtype::kFloat32) {
    stack<float, float>(args, stream);
  } else if (args.to_dtype == Dtype::kFloat16) {
    args.dtype == Dtype::kFloat32 ? stack<float, __half>(args, stream) : stack<__half, __half>(args, stream);
  } else {
    args.dtype == Dtype::kFloat32 ? stack<float, __nv_bfloat16>(args, stream)
                                  : stack<__nv_bfloat16, __nv_bfloat16>(args, stream);
  }
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
