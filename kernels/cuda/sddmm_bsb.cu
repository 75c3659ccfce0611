// Sampled dense-dense product on tensor cores from the binary sparse block format (FlashSparse, section 3.5).
//
// A warp handles one head of one slice of a window (8 rows), or of a run of several short windows. A row of
// X_src that several of the 8 rows need is gathered once. Fragments are built in registers, without shared
// memory (lane = 4 g + t). The product is S (rows x vectors) = X_dst (rows x features) X_src^T (features x
// vectors). Features may be summed in any order that is the same for both operands, so the loaded words are
// used as operands without shuffles:
//   - heads of more than 64 bytes: 8 neighbouring lanes load 128 bytes of one gathered row, a single cache
//     line. The lower 4 lanes are one column of the operand, the upper 4 another. The 8 lower rows of X_dst's
//     operand hold the features of the lower 4 lanes, the 8 upper rows those of the upper 4. A result is the
//     sum of one element of each half, and the same lane holds both.
//   - heads of up to 64 bytes: 4 neighbouring lanes load one gathered row, and half of X_dst's operand is 0.
//
// In both cases, thread t has the results of row g and vectors 4t .. 4t + 3 of the block.
//
// Only about 20 of a block's 128 products belong to entries, and these are scattered over the warp. The
// entries of a row have the same order in the vectors as in a CSR structure with sorted rows. So the CSR
// position of an entry is the position of the row's first entry plus the number of the row's mask bits before
// the entry. Results are queued in shared memory by row and written as runs of consecutive results, so that
// few store transactions reach the L2 cache.

#include <type_traits>

#include "fastsparse/bsb.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/mma.cuh"

namespace fastsparse::cuda {
namespace sddmm_bsb_detail {

constexpr int kThreads = 128;
constexpr int kSlots = 64;  // number of results per row of the queue

// The load does not use __ldg, because the assembler would move it down past a __syncwarp.
__device__ __forceinline__ uint4 load_words(const char* from, bool inside) {
  uint4 words{};
  if (inside) {
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
  }
  return words;
}

// Rounds to the nearest TF32 operand: the tensor cores ignore the low 13 bits.
__device__ __forceinline__ std::uint32_t round_tf32(std::uint32_t bits) {
  return bits + (fabsf(__uint_as_float(bits)) < INFINITY ? 0x1000u : 0u);
}

// A float32 number as the sum of two TF32 numbers, exact to 2^-23.
struct Split {
  std::uint32_t high, low;
  __device__ __forceinline__ explicit Split(std::uint32_t bits) {
    high = (bits + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high));
  }
};

// One step of the window's rows as operand A of two products: words (x, y), and words (z, w), of the lower
// and the upper lanes.
struct Rows {
  std::uint32_t a[2][4];

  Rows() = default;
  __device__ __forceinline__ Rows(const uint4& lower, const uint4& upper)
      : a{{lower.x, upper.x, lower.y, upper.y}, {lower.z, upper.z, lower.w, upper.w}} {}
};

template <typename T, int kTerms>
__device__ __forceinline__ void multiply(float (&sum)[4], const Rows& rows, const uint4& words) {
  const std::uint32_t b[2][2] = {{words.x, words.y}, {words.z, words.w}};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if constexpr (!std::is_same_v<T, float>) {
      mma_m16n8k16<T>(sum, rows.a[k], b[k][0], b[k][1]);
    } else if constexpr (kTerms == 1) {
      std::uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = round_tf32(rows.a[k][i]);
      mma_m16n8k8_tf32(sum, a, round_tf32(b[k][0]), round_tf32(b[k][1]));
    } else {
      // Each factor is split into two TF32 numbers, x = x.high + x.low. The product x.low * y.low is left
      // out: it is below 2^-22 of x * y.
      std::uint32_t a[4], a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Split x(rows.a[k][i]);
        a[i] = x.high;
        a_low[i] = x.low;
      }
      const Split y0(b[k][0]), y1(b[k][1]);
      mma_m16n8k8_tf32(sum, a_low, y0.high, y1.high);
      mma_m16n8k8_tf32(sum, a, y0.low, y1.low);
      mma_m16n8k8_tf32(sum, a, y0.high, y1.high);
    }
  }
}

// Computes row g's products with the vectors of one load.
template <typename T, int kTerms, int kLanes>
class Products {
 public:
  __device__ __forceinline__ void add(const Rows& rows, const uint4& words) {
    multiply<T, kTerms>(sum_, rows, words);
    if constexpr (kTerms > 1) {
      // Tensor cores truncate their sums, so these sums are added to other sums, which round to nearest.
      total_[0] += kLanes == 8 ? sum_[0] + sum_[3] : sum_[0];
      if constexpr (kLanes == 4) total_[1] += sum_[1];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum_[i] = 0;
    }
  }

  // kLanes = 8: the result of row g and the vector of thread t; 4: the result of row g and the n-th of two
  // vectors.
  __device__ __forceinline__ float get(int n) const {
    if constexpr (kTerms > 1) return total_[n];
    return kLanes == 8 ? sum_[0] + sum_[3] : sum_[n];
  }

 private:
  float sum_[4] = {}, total_[2] = {};
};

// The columns that this lane gathers. With kLanes = 8, quarter warp q gathers vector 4q + load in each of a
// block's 4 loads. With kLanes = 4, quad g gathers vector 2g + load in each of the block's 2 loads.
template <int kLanes>
class Columns;
template <>
class Columns<8> {
 public:
  __device__ __forceinline__ void read(const std::uint32_t* quads, int lane) {
    packed_ = load_columns(quads, lane / 8);
  }
  __device__ __forceinline__ void cut(int left) { cut_words(packed_.word, left); }
  __device__ __forceinline__ void unpack_to(std::uint32_t (&column)[4], int) const {
    unpack(packed_, column);
  }

 private:
  PackedColumns packed_;
};
template <>
class Columns<4> {
 public:
  // Reads 6 bytes. For odd quads of lanes, they start in the middle of a word.
  __device__ __forceinline__ void read(const std::uint32_t* quads, int lane) {
    const std::uint32_t* at = quads + lane / 8 * kQuadWords + lane / 4 % 2;
    word_[0] = __ldg(at);
    word_[1] = __ldg(at + 1);
  }
  __device__ __forceinline__ void cut(int left) { cut_words(word_, left); }
  __device__ __forceinline__ void unpack_to(std::uint32_t (&column)[2], int lane) const {
    const int shift = lane & 4 ? 16 : 0;
    const std::uint32_t low = __funnelshift_r(word_[0], word_[1], shift);
    column[0] = low & 0xffffffu;
    column[1] = __funnelshift_r(low, word_[1] >> shift, 24) & 0xffffffu;
  }

 private:
  std::uint32_t word_[2];
};

template <typename T>
__device__ __forceinline__ void store_result(const SddmmBsbArgs& args, std::int64_t at, float result) {
  if (args.out_dtype == args.dtype) {
    static_cast<T*>(args.out)[at] = narrow<T>(result);
  } else {
    static_cast<float*>(args.out)[at] = result;
  }
}

// Queue of a warp's results, at most kSlots per row. It gets them from fragments, keeps the results of every
// row in CSR order, and writes them at the edges' positions.
template <typename T>
class Queue {
 public:
  // The rows are padded, so that the first results of all rows are in different banks.
  using Slots = float[kRows][kSlots + 4];

  __device__ __forceinline__ Queue(const SddmmBsbArgs& args, Slots& slots, int lane)
      : args_(args), slots_(slots), own_(slots[lane / 4]) {}

  // entry: CSR position of row g's first result.
  __device__ __forceinline__ void start(std::int64_t entry) { entry_ = entry; }

  // Adds row g's results of vectors 4t .. 4t + 3 of the next block. present: bit 8i is set if the i-th result
  // belongs to an entry.
  __device__ __forceinline__ void put(const float (&result)[kOwned], std::uint32_t present, int t) {
    const std::uint32_t upto = present * 0x01010101u;  // byte i: entries of the row among the first i + 1
    const std::uint32_t before = upto - present;
    const int own = static_cast<int>(upto >> 24);
    int through = own;
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      const int left = __shfl_up_sync(kFullWarp, through, offset, 4);
      if (t >= offset) through += left;
    }
    float* to = own_ + filled_ + through - own;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (present & (1u << 8 * i)) to[(before >> 8 * i) & 0xffu] = result[i];
    }
    filled_ += __shfl_sync(kFullWarp, through, 3, 4);
    if (__any_sync(kFullWarp, filled_ > kSlots - kBlockVectors)) leave();
  }

  // Writes all results of the queue, with 16 lanes per row.
  __device__ __forceinline__ void leave() {
    __syncwarp();
    const int lane = threadIdx.x % kWarp, half = lane / 16;
#pragma unroll
    for (int pair = 0; pair < kRows / 2; ++pair) {
      const int row = 2 * pair + half;
      const int count = __shfl_sync(kFullWarp, filled_, 4 * row);
      const std::int64_t first = __shfl_sync(kFullWarp, entry_, 4 * row);
      for (int i = lane % 16; i < count; i += 16) write(first + i, slots_[row][i]);
    }
    __syncwarp();
    entry_ += filled_;
    filled_ = 0;
  }

 private:
  __device__ __forceinline__ void write(std::int64_t entry, float result) const {
    std::int64_t at = entry;
    if (args_.edge_id != nullptr) {
      at = args_.edge_id_is_64bit ? __ldg(static_cast<const std::int64_t*>(args_.edge_id) + entry)
                                  : __ldg(static_cast<const std::int32_t*>(args_.edge_id) + entry);
    }
    store_result<T>(args_, at * args_.heads + blockIdx.y, result);
  }

  const SddmmBsbArgs& args_;
  Slots& slots_;
  float* own_;
  std::int64_t entry_ = 0;  // CSR position of row g's first result in the queue
  int filled_ = 0;          // number of row g's results in the queue
};

// Row r of a window, or row 0 if the window has fewer rows; then the results of row 0 are not written.
__device__ __forceinline__ std::uint32_t row_of_window(const BsbView& a, std::int64_t window, int r) {
  const std::int64_t row = WindowRow{a.window_row, a.num_rows}(window, r);
  return row < 0 ? 0 : static_cast<std::uint32_t>(row);
}

// Computes one product without splitting. Splitting an infinite or huge number into TF32 numbers gives NaN,
// even if the product is not NaN.
__device__ __noinline__ float multiply_again(const SddmmBsbArgs& args, std::uint32_t row, std::uint32_t col) {
  const std::int64_t head = blockIdx.y * args.head_width;
  const float* x = static_cast<const float*>(args.x_dst.data) + row * args.x_dst.stride + head;
  const float* y = static_cast<const float*>(args.x_src.data) + col * args.x_src.stride + head;
  float sum = 0;
  for (std::int64_t f = 0; f < args.head_width; ++f) sum += x[f] * y[f];
  return sum;
}

// Multiplies results by scale_dst and scale_src. columns: the columns of the results.
__device__ __forceinline__ void scale(const SddmmBsbArgs& args, float (&result)[kOwned], std::uint32_t row,
                                      const PackedColumns& columns) {
  if (args.scale_src != nullptr) {
    std::uint32_t column[kOwned];
    unpack(columns, column);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      result[i] *= __ldg(static_cast<const float*>(args.scale_src) + column[i]);
    }
  }
  if (args.scale_dst != nullptr) {
    const float factor = __ldg(static_cast<const float*>(args.scale_dst) + row);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) result[i] *= factor;
  }
}

// kLanes: lanes per gathered row. kSteps: number of steps of kLanes * 16 bytes that hold a head; 0: any
// number, with X_dst read again for every block. kPlain: the head fills all steps, there are no scales, and
// results are written at the edges' positions. kMin: blocks per multiprocessor for which registers must
// suffice.
template <typename T, int kTerms, int kLanes, int kSteps, bool kPlain, int kMin>
__global__ void __launch_bounds__(kThreads, kMin)
    sddmm_bsb_kernel(const __grid_constant__ SddmmBsbArgs args) {
  constexpr int kStepBytes = kLanes * 16;
  constexpr int kLoads = kLanes / 2;  // loads per block and step
  __shared__ typename Queue<T>::Slots slots[kThreads / kWarp];
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (warp >= args.a.num_runs) return;
  const int4 raw_run = __ldg(reinterpret_cast<const int4*>(args.a.runs) + warp);
  const WindowRun run{raw_run.x, raw_run.y, raw_run.z, raw_run.w};
  if (run.length == 0) return;
  // Quads are read one block ahead. The array is padded, so the read may go past the run.
  const std::uint32_t* quads = args.a.quad + static_cast<std::int64_t>(run.begin) * kQuadWords;
  Columns<kLanes> next;
  next.read(quads, lane);
  std::uint32_t next_mask = load_masks(quads, t);
  Queue<T> queue(args, slots[threadIdx.x / kWarp], lane);

  const bool whole = run.target >= 0;
  const std::int64_t window = whole ? run.target : __ldg(args.slot_window + ~run.target);
  // In lane n: the end of the run's n-th window.
  int window_end = run.length;
  if (run.num_windows > 1 && lane < run.num_windows) {
    window_end = __ldg(args.a.window_ptr + window + 1 + lane) - run.begin;
  }

  const auto head_bytes = static_cast<std::uint32_t>(args.head_width * sizeof(T));
  const auto src_bytes = static_cast<std::uint32_t>(args.x_src.stride * sizeof(T));
  const auto dst_bytes = static_cast<std::uint32_t>(args.x_dst.stride * sizeof(T));
  const std::uint32_t head = blockIdx.y * head_bytes;
  const std::uint32_t own_bytes = lane % kLanes * 16;
  const char* src = static_cast<const char*>(args.x_src.data) + head + own_bytes;
  const char* dst = static_cast<const char*>(args.x_dst.data) + head + t * 16;
  const auto load_src = [&](std::uint32_t column, std::uint32_t step) {
    return load_words(row_address(src, column, src_bytes) + step * kStepBytes,
                      kPlain || step * kStepBytes + own_bytes < head_bytes);
  };
  const auto load_rows = [&](std::uint32_t row, std::uint32_t step) {
    const char* from = row_address(dst, row, dst_bytes);
    const std::uint32_t lower = step * kStepBytes, upper = lower + 64;
    const uint4 low = load_words(from + lower, kPlain || lower + t * 16 < head_bytes);
    return Rows(low, kLanes == 8 ? load_words(from + upper, kPlain || upper + t * 16 < head_bytes) : uint4{});
  };
  const auto first_entry = [&](std::uint32_t row) {
    return __ldg(whole ? args.rowptr + row
                       : args.slot_entry + static_cast<std::int64_t>(~run.target) * kRows + g);
  };

  int nth = -1, end = 0;  // number of the block's window within the run, and the end of this window
  std::uint32_t row = 0;  // row g of the window
  Rows rows[kSteps > 0 ? kSteps : 1];
  for (int index = 0; index < run.length;) {
    if (index == end) {
      do end = __shfl_sync(kFullWarp, window_end, ++nth);
      while (index == end);
      row = row_of_window(args.a, window + nth, g);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) rows[s] = load_rows(row, s);
      queue.start(first_entry(row));
    }
    const int left = min(end - index, kBlockQuads);
    const std::uint32_t mask = t < left ? next_mask : 0;
    next.cut(left);
    std::uint32_t column[kLoads];
    next.unpack_to(column, lane);
    uint4 words[kLoads][kSteps > 0 ? kSteps : 1];
#pragma unroll
    for (int v = 0; v < kLoads; ++v) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) words[v][s] = load_src(column[v], s);
    }
    const std::uint32_t* block = quads;
    quads += left * kQuadWords;
    index += left;
    next.read(quads, lane);
    next_mask = load_masks(quads, t);
    __syncwarp();  // so that all loads start here instead of one by one where they are needed

    Products<T, kTerms, kLanes> products[kLoads];
    if constexpr (kSteps > 0) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int v = 0; v < kLoads; ++v) products[v].add(rows[s], words[v][s]);
      }
    } else {
#pragma unroll 1
      for (std::uint32_t step = 0; step * kStepBytes < head_bytes; ++step) {
        uint4 chunk[kLoads];
#pragma unroll
        for (int v = 0; v < kLoads; ++v) chunk[v] = load_src(column[v], step);
        const Rows chunk_rows = load_rows(row, step);
#pragma unroll
        for (int v = 0; v < kLoads; ++v) products[v].add(chunk_rows, chunk[v]);
      }
    }
    float result[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      result[i] = kLanes == 8 ? products[i % kLoads].get(0) : products[i % kLoads].get(i / kLoads);
    }
    if constexpr (kTerms > 1) {
      if ((result[0] + result[1] + result[2] + result[3]) * 0.0f !=
          0) {  // true (NaN) if a result is not finite
        std::uint32_t of_result[kOwned];
        unpack(load_columns(block, min(t, left - 1)), of_result);
#pragma unroll
        for (int i = 0; i < kOwned; ++i) result[i] = multiply_again(args, row, of_result[i]);
      }
    }
    const std::uint32_t present = (mask >> g) & 0x01010101u;
    if constexpr (!kPlain) scale(args, result, row, load_columns(block, min(t, left - 1)));
    if (kPlain || args.quad_vector == nullptr) {
      queue.put(result, present, t);
    } else {
      const std::int64_t first = __ldg(args.quad_vector + run.begin + index - left + min(t, left - 1));
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        if (((mask >> 8 * i) & 0xffu) == 0) continue;
        store_result<T>(args, ((first + i) * kRows + g) * args.heads + blockIdx.y,
                        present & (1u << 8 * i) ? result[i] : 0.0f);
      }
    }
    if (index == end) queue.leave();
  }
}

template <typename T, int kTerms, int kLanes, int kSteps, int kMin>
void launch_shape(const SddmmBsbArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.a.num_runs, kThreads / kWarp), static_cast<unsigned>(args.heads));
  if constexpr (kSteps > 0) {
    if (args.head_width * sizeof(T) == kSteps * kLanes * 16 && args.scale_dst == nullptr &&
        args.scale_src == nullptr && args.quad_vector == nullptr) {
      sddmm_bsb_kernel<T, kTerms, kLanes, kSteps, true, kMin><<<grid, kThreads, 0, stream>>>(args);
      return;
    }
  }
  sddmm_bsb_kernel<T, kTerms, kLanes, kSteps, false, kMin><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T, int kTerms>
void launch(const SddmmBsbArgs& args, cudaStream_t stream) {
  const auto bytes = args.head_width * static_cast<std::int64_t>(sizeof(T));
  if (bytes <= 64) return launch_shape<T, kTerms, 4, 1, kTerms == 1 ? 10 : 7>(args, stream);
  if (bytes <= 128) return launch_shape<T, kTerms, 8, 1, kTerms == 1 ? 8 : 7>(args, stream);
  if (bytes <= 256) return launch_shape<T, kTerms, 8, 2, kTerms == 1 ? 6 : 4>(args, stream);
  if (bytes <= 512) return launch_shape<T, kTerms, 8, 4, kTerms == 1 ? 4 : 3>(args, stream);
  launch_shape<T, kTerms, 8, 0, 8>(args, stream);
}

}  // namespace sddmm_bsb_detail

int sddmm_bsb(const SddmmBsbArgs& args, void* stream_address) {
  using namespace sddmm_bsb_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  switch (args.dtype) {
    case Dtype::kFloat16:
      launch<__half, 1>(args, stream);
      break;
    case Dtype::kBFloat16:
      launch<__nv_bfloat16, 1>(args, stream);
      break;
    case Dtype::kFloat32:
      args.tf32 ? launch<float, 1>(args, stream) : launch<float, 2>(args, stream);
      break;
    case Dtype::kFloat64:
      return cudaErrorInvalidValue;  // no tensor-core path: the caller uses the CSR kernel
  }
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
