// The attention of a layer on CUDA in one call each way: scores of nodes, attention, what is added to its
// result; and the gradients of all that. Small graphs take as long as the host needs for its calls, so the
// small products around attention are kernels here:
//   - scores_kernel: <a_h, v_ih> for both vectors of every head. Lanes as in head_lanes.cuh; a group of lanes
//     takes every `groups`-th row and keeps the vectors in registers. Floor: v read once.
//   - score_gradients_kernel: dv_ih += ds_ih a_h (both vectors), and sums over the rows of ds_ih v_ih and of
//     dO_i. Each block adds up its groups in order, in shared memory, and writes one row of sums;
//     sum_partials_kernel adds those in float64, always in the same order. Floor: v, dO and dv read, dv
//     written.
//   - add_kernel, join_kernel: result + skip + bias; gradients of the maps' results side by side.

#include <algorithm>

#include "fastsparse/attention_layer.h"
#include "fastsparse/head_lanes.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerGroup = 8;  // of the kernels that keep vectors or sums, where there are few rows
constexpr int kRowsPerPart = 32;
constexpr int kBlockRows = 8;  // of a window of binary sparse blocks
constexpr int kMostMaps = 4;

// ---------------------------------------------------------------- scores of nodes

template <typename T, int kVec, int kHeadLanes>
__global__ void __launch_bounds__(kHeadThreads)
    scores_kernel(const HeadScoresArgs args, int heads_per_group, std::int64_t groups) {
  const HeadLane<T, kVec, kHeadLanes> lane(args.heads, args.head_width, heads_per_group);
  float first[kLaneFeatures], second[kLaneFeatures];
  lane.load_vector(first, static_cast<const float*>(args.vectors[0]));
  lane.load_vector(second, static_cast<const float*>(args.vectors[1]));
  // All lanes of a warp take as many steps, for they add up together.
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

struct ScoreGradients {
  HeadScoresArgs scores;  // their gradients in it
  DenseView grad;         // of the result; null data: its sum is not wanted
  void* grad_v;           // contiguous; added to
  float* partial;         // (blocks, 3, width)
};

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
  for (std::int64_t row = lane.group; row < scores.num_rows; row += groups) {
    const float of_first = static_cast<const float*>(scores.scores[0])[lane.at(row)];
    const float of_second = static_cast<const float*>(scores.scores[1])[lane.at(row)];
    float v[kLaneFeatures], grad_v[kLaneFeatures] = {};
    lane.load(v, scores.v, row);
    const T* from = static_cast<const T*>(args.grad_v) + row * width + lane.first;
#pragma unroll
    for (int c = 0; c < Lane::kChunks; ++c) {
      if (!lane.inside[c]) continue;
      const Pack<T, kVec> pack = *reinterpret_cast<const Pack<T, kVec>*>(from + lane.place(c));
#pragma unroll
      for (int i = 0; i < kVec; ++i) grad_v[c * kVec + i] = widen(pack.lane[i]);
    }
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) {
      grad_v[i] += of_first * first[i] + of_second * second[i];
      sums[0][i] += of_first * v[i];
      sums[1][i] += of_second * v[i];
    }
    lane.template store<T>(args.grad_v, row, width, grad_v);
    if (args.grad.data != nullptr) {
      lane.load(v, args.grad, row);
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) sums[2][i] += v[i];
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
    for (int other = thread + lanes; other < kHeadThreads; other += lanes) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) sums[s][i] += shared[other][i];
    }
    lane.template store<float>(args.partial, static_cast<std::int64_t>(blockIdx.x) * 3 + s, width, sums[s]);
  }
}

struct Sums {
  void* to[3];  // null: not wanted
  Dtype dtype[3];
};

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

// A warp's lanes take a column each, its 32 warps every 32nd row.
__global__ void __launch_bounds__(kWarp* kWarp)
    sum_partials_kernel(const float* partial, std::int64_t num_rows, std::int64_t width, const Sums sums) {
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

// Blocks of a kernel whose groups take several rows each.
unsigned row_blocks(std::int64_t num_rows, const dim3& whole, std::int64_t most) {
  const std::int64_t few = std::max<std::int64_t>(ceil_div(whole.x, kRowsPerGroup), 1);
  return static_cast<unsigned>(num_rows == 0 ? 1 : std::min(few, most));
}

// ---------------------------------------------------------------- results and gradients put together

struct Addends {
  const void* out;  // contiguous
  DenseView skip;   // null data: none
  const void* bias;
  bool bias_is_float;
  void* result;
  std::int64_t num_rows;
  std::int64_t width;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) add_kernel(const Addends args) {
  const std::int64_t packs = args.width / kVec;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= args.num_rows * packs) return;
  const std::int64_t row = item / packs, column = (item - row * packs) * kVec;
  // The result may be what is read here: no load that assumes otherwise.
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

struct Pieces {
  DenseView from[kMostMaps];
  std::int64_t count;
  void* to;  // (num_rows, count * width)
  std::int64_t num_rows;
  std::int64_t width;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) join_kernel(const Pieces args) {
  const std::int64_t packs = args.width / kVec, of_row = args.count * packs;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= args.num_rows * of_row) return;
  const std::int64_t row = item / of_row, rest = item - row * of_row;
  const std::int64_t piece = rest / packs, column = (rest - piece * packs) * kVec;
  DenseView from = args.from[0];
#pragma unroll
  for (int i = 1; i < kMostMaps; ++i) {
    if (piece == i) from = args.from[i];
  }
  const auto pack = load_pack<T, kVec>(static_cast<const T*>(from.data) + row * from.stride + column);
  *reinterpret_cast<Pack<T, kVec>*>(static_cast<T*>(args.to) + item * kVec) = pack;
}

// Calls f(element type, elements per load) for what can be read and written 16 bytes at a time, or singly.
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

void add(Dtype dtype, const Addends& args, cudaStream_t stream) {
  if (args.num_rows == 0 || (args.skip.data == nullptr && args.bias == nullptr)) return;
  with_packs(dtype, {args.width, args.skip.stride}, {args.out, args.skip.data, args.result},
             [&](auto type, auto vec) {
               using T = decltype(type);
               constexpr int kVec = decltype(vec)::value;
               const std::int64_t items = args.num_rows * (args.width / kVec);
               add_kernel<T, kVec><<<ceil_div(items, kThreads), kThreads, 0, stream>>>(args);
             });
}

void join(Dtype dtype, const Pieces& args, cudaStream_t stream) {
  const DenseView *from = args.from, &last = from[args.count - 1];
  with_packs(dtype, {args.width, last.stride}, {from[0].data, from[1].data, from[2].data, last.data, args.to},
             [&](auto type, auto vec) {
               using T = decltype(type);
               constexpr int kVec = decltype(vec)::value;
               const std::int64_t items = args.num_rows * args.count * (args.width / kVec);
               join_kernel<T, kVec><<<ceil_div(items, kThreads), kThreads, 0, stream>>>(args);
             });
}

// ---------------------------------------------------------------- a layer

// Room, cut into arrays that start at multiples of 16 bytes.
struct Room {
  float* base;
  std::int64_t used = 0;

  float* take(std::int64_t numbers) {
    float* found = base + used;
    used += (numbers + 3) / 4 * 4;
    return found;
  }
};

struct Layer {
  const CudaAttentionLayerArgs& args;
  cudaStream_t stream;
  const std::int64_t width = args.heads * args.head_width, joint_width = args.maps * width;
  const std::int64_t items = args.num_nodes * args.heads, features = args.num_nodes * width;
  const std::int64_t bytes = args.dtype == Dtype::kFloat32 ? 4 : 2;

  bool is(AttentionScore kind) const { return args.kind == kind; }

  DenseView column(const void* joint, std::int64_t map) const {
    return {static_cast<const char*>(joint) + map * width * bytes, joint_width};
  }

  float* state(int array) const { return static_cast<float*>(args.state) + array * items; }

  HeadScoresArgs scores(void* first, void* second) const {
    return {column(args.joint, 0),
            {args.vectors[0], args.vectors[1]},
            {first, second},
            args.num_nodes,
            args.heads,
            args.head_width,
            args.dtype};
  }

  AdditiveAttentionInput additive() const {
    return {state(1),
            state(0),
            column(args.joint, 0),
            {nullptr, args.dtype, args.heads},
            args.scale,
            args.dropout,
            args.heads,
            args.head_width,
            args.dtype};
  }

  Gatv2AttentionInput gatv2() const {
    return {column(args.joint, args.maps - 1),
            column(args.joint, 0),
            args.vectors[0],
            args.scale,
            args.dropout,
            args.heads,
            args.head_width,
            args.dtype};
  }

  AttentionBsbInput dot_product() const {
    return {column(args.joint, 2),
            column(args.joint, 0),
            column(args.joint, 1),
            {nullptr, args.dtype, args.heads},
            args.scale,
            args.dropout,
            args.heads,
            args.head_width,
            args.head_width,
            args.tf32,
            args.dtype};
  }

  struct Forward {
    float *partial, *partial_state;
    std::int64_t numbers;
  };

  Forward forward_room() const {
    const std::int64_t rows = args.num_slots * (is(AttentionScore::kDotProduct) ? kBlockRows : 1);
    Room room{args.scratch};
    Forward found{room.take(rows * width), room.take(rows * args.heads * 2), 0};
    found.numbers = room.used;
    return found;
  }

  int forward() const {
    const Forward room = forward_room();
    int code = cudaSuccess;
    if (is(AttentionScore::kAdditive)) {
      launch_scores(scores(state(0), state(1)));
      code = cuda::additive_attention(
          {args.a, args.split, additive(), args.out, state(2), room.partial, room.partial_state}, stream);
    } else if (is(AttentionScore::kGatv2)) {
      code = cuda::gatv2_attention(
          {args.a, args.split, gatv2(), args.out, state(0), room.partial, room.partial_state}, stream);
    } else {
      code = cuda::attention_bsb({args.blocks, dot_product(), args.out, static_cast<double*>(args.state),
                                  room.partial, room.partial_state},
                                 stream);
    }
    if (code != cudaSuccess) return code;
    const DenseView skip = args.maps == 4 ? column(args.joint, 3) : DenseView{nullptr, 0};
    add(args.dtype, {args.out, skip, args.bias, args.bias_is_float, args.result, args.num_nodes, width},
        stream);
    return cudaGetLastError();
  }

  void launch_scores(const HeadScoresArgs& of) const {
    with_head_lanes(
        of.dtype, of.head_width, {of.v.stride}, {of.v.data}, [&](auto type, auto vec, auto head_lanes) {
          using T = decltype(type);
          constexpr int kVec = decltype(vec)::value, kHeadLanes = decltype(head_lanes)::value;
          dim3 grid = head_grid(of.num_rows, of.heads, kHeadLanes);
          const int per_group = heads_per_group(of.heads, kHeadLanes);
          grid.x = row_blocks(of.num_rows, grid, 4 * args.num_parts);
          const std::int64_t groups = grid.x * (kHeadThreads / kHeadLanes / per_group);
          scores_kernel<T, kVec, kHeadLanes><<<grid, kHeadThreads, 0, stream>>>(of, per_group, groups);
        });
  }

  struct Backward {
    float *row_state, *partial_row, *partial_column, *partial_other;
    float *first, *second, *third;  // gradients that are not yet where they belong
    float* sums;
    double* parts;
    std::int64_t numbers;
  };

  // Rows of the partial sums of scores' gradients, at most.
  std::int64_t score_blocks() const { return args.num_parts; }

  Backward backward_room() const {
    Room room{args.scratch};
    Backward found{};
    const std::int64_t matrix = (features * bytes + 3) / 4;
    if (is(AttentionScore::kAdditive)) {
      found.row_state = room.take(items * 4);
      found.partial_row = room.take(args.num_slots * args.heads * 4);
      found.partial_column = room.take(args.num_slots_t * width);
      found.partial_other = room.take(args.num_slots_t * args.heads);
      found.first = room.take(items);
      found.second = room.take(items);
      found.sums = room.take(std::min<std::int64_t>(score_blocks(), args.num_nodes) * 3 * width);
    } else if (is(AttentionScore::kGatv2)) {
      found.row_state = room.take(items * 2);
      found.partial_row = room.take(args.num_slots * width);
      found.partial_column = room.take(args.num_slots_t * width);
      found.sums = room.take(args.att_rows * width);
      found.first = room.take(matrix);
      if (args.maps == 2) found.second = room.take(matrix);
    } else {
      found.row_state = room.take(items * 4);
      found.partial_row = room.take(args.num_slots * kBlockRows * width);
      found.partial_column = room.take(args.num_slots_t * kBlockRows * width);
      found.partial_other = room.take(args.num_slots_t * kBlockRows * width);
      found.first = room.take(matrix);
      found.second = room.take(matrix);
      found.third = room.take(matrix);
    }
    found.parts = reinterpret_cast<double*>(room.take(num_parts(most_summed()) * joint_width * 2));
    found.numbers = room.used;
    return found;
  }

  std::int64_t most_summed() const { return std::max(args.num_nodes, args.att_rows); }

  std::int64_t num_parts(std::int64_t rows) const {
    return std::min<std::int64_t>(std::max(ceil_div(rows, kRowsPerPart), 1u), args.num_parts);
  }

  int sum(const void* rows, std::int64_t num_rows, std::int64_t columns, std::int64_t stride, Dtype dtype,
          double* parts, void* to, Dtype to_dtype) const {
    if (to == nullptr) return cudaSuccess;
    const SumOfRowsArgs of{rows, num_rows, columns, stride, parts, num_parts(num_rows), to, dtype, to_dtype};
    return cuda::sum_of_rows(of, stream);
  }

  int backward() const {
    const Backward room = backward_room();
    const int code = is(AttentionScore::kAdditive) ? additive_backward(room)
                     : is(AttentionScore::kGatv2)  ? gatv2_backward(room)
                                                   : dot_product_backward(room);
    if (code != cudaSuccess) return code;
    return sum(args.grad_joint, args.num_nodes, joint_width, joint_width, args.dtype, room.parts,
               args.grad_map_bias, args.grad_map_bias_dtype);
  }

  int sum_grad(const Backward& room) const {
    return sum(args.grad.data, args.num_nodes, width, args.grad.stride, args.dtype, room.parts,
               args.grad_bias, args.grad_bias_dtype);
  }

  int additive_backward(const Backward& room) const {
    const int code = cuda::additive_attention_backward(
        {args.a, args.split, args.a_t, args.split_t, additive(), args.grad, state(2), room.second, room.first,
         args.grad_joint, nullptr, room.row_state, room.partial_row, room.partial_column, room.partial_other},
        stream);
    if (code != cudaSuccess) return code;
    const HeadScoresArgs of = scores(room.first, room.second);
    const DenseView grad = args.grad_bias == nullptr ? DenseView{nullptr, 0} : args.grad;
    const ScoreGradients gradients{of, grad, args.grad_joint, room.sums};
    unsigned blocks = 1;
    with_head_lanes(of.dtype, of.head_width, {of.v.stride, grad.stride},
                    {of.v.data, grad.data, args.grad_joint, room.sums},
                    [&](auto type, auto vec, auto head_lanes) {
                      using T = decltype(type);
                      constexpr int kVec = decltype(vec)::value, kHeadLanes = decltype(head_lanes)::value;
                      dim3 grid = head_grid(of.num_rows, of.heads, kHeadLanes);
                      const int per_group = heads_per_group(of.heads, kHeadLanes);
                      grid.x = blocks = row_blocks(of.num_rows, grid, score_blocks());
                      const std::int64_t groups = grid.x * (kHeadThreads / kHeadLanes / per_group);
                      score_gradients_kernel<T, kVec, kHeadLanes>
                          <<<grid, kHeadThreads, 0, stream>>>(gradients, per_group, groups);
                    });
    const Sums sums{{args.grad_vectors[0], args.grad_vectors[1], args.grad_bias},
                    {Dtype::kFloat32, Dtype::kFloat32, args.grad_bias_dtype}};
    sum_partials_kernel<<<ceil_div(3 * width, kWarp), dim3(kWarp, kWarp), 0, stream>>>(room.sums, blocks,
                                                                                       width, sums);
    return cudaGetLastError();
  }

  int gatv2_backward(const Backward& room) const {
    const bool shared = args.maps == 1;
    void* grad_src = shared ? args.grad_joint : room.first;
    void* grad_dst = shared ? room.first : room.second;
    int code = cuda::gatv2_attention_backward({args.a,
                                               args.split,
                                               args.a_t,
                                               args.split_t,
                                               gatv2(),
                                               {args.out, width},
                                               args.grad,
                                               state(0),
                                               grad_dst,
                                               grad_src,
                                               room.sums,
                                               args.att_rows,
                                               room.row_state,
                                               room.partial_row,
                                               room.partial_column},
                                              stream);
    if (code == cudaSuccess) {
      code = sum(room.sums, args.att_rows, width, width, Dtype::kFloat32, room.parts, args.grad_vectors[0],
                 Dtype::kFloat32);
    }
    if (code == cudaSuccess) code = sum_grad(room);
    if (code != cudaSuccess) return code;
    if (shared) {
      add(args.dtype, {grad_src, {grad_dst, width}, nullptr, false, args.grad_joint, args.num_nodes, width},
          stream);
    } else {
      join(args.dtype, {{{grad_src, width}, {grad_dst, width}}, 2, args.grad_joint, args.num_nodes, width},
           stream);
    }
    return cudaGetLastError();
  }

  int dot_product_backward(const Backward& room) const {
    int code = cuda::attention_bsb_backward(
        {args.blocks, args.blocks_t, dot_product(), args.out, static_cast<const double*>(args.state),
         args.grad, room.third, room.first, room.second, nullptr, room.row_state, room.partial_row,
         room.partial_column, room.partial_other},
        stream);
    if (code == cudaSuccess) code = sum_grad(room);
    if (code != cudaSuccess) return code;
    join(args.dtype,
         {{{room.first, width}, {room.second, width}, {room.third, width}, args.grad},
          args.maps,
          args.grad_joint,
          args.num_nodes,
          width},
         stream);
    return cudaGetLastError();
  }
};

}  // namespace

int attention_layer(const CudaAttentionLayerArgs& args, void* stream) {
  return Layer{args, static_cast<cudaStream_t>(stream)}.forward();
}

int attention_layer_backward(const CudaAttentionLayerArgs& args, void* stream) {
  return Layer{args, static_cast<cudaStream_t>(stream)}.backward();
}

std::int64_t attention_layer_scratch(const CudaAttentionLayerArgs& args, bool backward) {
  const Layer layer{args, nullptr};
  return backward ? layer.backward_room().numbers : layer.forward_room().numbers;
}

}  // namespace fastsparse::cuda
