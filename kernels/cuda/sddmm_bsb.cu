// Sampled dense-dense product on tensor cores from the binary sparse block format (FlashSparse, section 3.5).
//
// A warp takes one slice of a window (8 rows) and one head, and a row of X_src that several of the 8 rows need is
// gathered once. Fragments are built in registers, without shared memory (lane = 4 g + t): the lane loads 16 bytes of
// the rows of vectors 2g and 2g + 1 of a block, and of row g of the window, every 64 bytes. Any order of features is
// free, as both operands follow the same one, so the loaded registers are operands as they are. The product is
// S (rows x vectors) = X_dst (rows x features) X_src^T (features x vectors): gathered rows are the operand of two
// registers, as those of four would have to be put together from two loads. That leaves the 8 lower rows of X_dst's
// operand; they hold other features of the same rows (Products), or the rest of float32 numbers split in two.
//
// Of a block's 128 products only the entries are wanted, some 20 of them, scattered over the warp. An entry's place is
// the number of mask bits before it, by vector and row, and one binary tensor-core product counts them for all 128.
// The entries queue in shared memory in that order and leave 32 at a time, so that few store transactions reach the L2
// and the positions in the caller's order are read coalesced and ahead of time.
//
// Floors, V vectors, E entries, H heads of width D: V H D sizeof(T) bytes gathered, 5 V H bytes of columns and masks,
// E H (sizeof(out) + 4) bytes of results and their positions; 16 V H D useful flops.

#include <type_traits>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/mma.cuh"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 8;           // rows of a window
constexpr int kBlockVectors = 16;  // vectors of a block
constexpr int kStepBytes = 64;     // bytes of a row that the quad's 16-byte loads cover
constexpr int kChunk = 4;          // steps in flight where a head is too wide to stay in registers
constexpr int kRounds = 4;         // rounds of 32 results that leave the queue together
constexpr int kLeaving = kRounds * kWarp;
constexpr int kQueue = kLeaving + kBlockVectors * kRows;

// C (16 x 8, int32) += A (16 x 256 bits) B (256 x 8 bits): for every pair the number of bits that both have.
__device__ __forceinline__ void count_common_bits(int (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                  std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Shared memory by 32-bit address: the compiler would rebuild a pointer at every store, and branch around each.
__device__ __forceinline__ void store_shared_if(std::uint32_t condition, std::uint32_t address, float value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.f32 [%1], %2; }" ::"r"(condition),
               "r"(address), "f"(value));
}
__device__ __forceinline__ float load_shared(std::uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// base + index * bytes, in one instruction: left to itself the compiler widens `bytes` ahead of the loop, and multiplies
// 64 bits in it.
template <typename P>
__device__ __forceinline__ P* advance(P* base, std::uint32_t index, std::uint32_t bytes) {
  std::uint64_t offset;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(offset) : "r"(index), "r"(bytes));
  return base + offset;
}

template <typename T>
__device__ __forceinline__ void store_global(char* to, T value) {
  if constexpr (sizeof(T) == 2) {
    std::uint16_t bits;
    memcpy(&bits, &value, sizeof bits);
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(bits) : "memory");
  } else {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
  }
}

// Hide where a number comes from: `opaque` from the compiler, which would add its terms one by one to others, and
// `keep` (a shuffle from the lane itself) from the assembler too, which would compute it anew in every iteration.
__device__ __forceinline__ std::uint32_t opaque(std::uint32_t v) {
  asm("" : "+r"(v));
  return v;
}
template <typename P>
__device__ __forceinline__ P* opaque(P* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}
__device__ __forceinline__ std::uint32_t keep(std::uint32_t v) {
  return __shfl_sync(kFullWarp, v, threadIdx.x % kWarp);
}

// A TF32 operand rounded to nearest: the tensor cores ignore the low 13 bits.
__device__ __forceinline__ std::uint32_t round_tf32(float v) {
  return __float_as_uint(v) + (fabsf(v) < INFINITY ? 0x1000u : 0u);
}

// A float32 number as the sum of two TF32 numbers, exact to 2^-23.
struct Split {
  std::uint32_t high, low;
  __device__ __forceinline__ explicit Split(std::uint32_t bits)
      : high((bits + 0x1000u) & 0xffffe000u),
        low(__float_as_uint(__uint_as_float(bits) - __uint_as_float(high))) {}
};

// Not the load for constants: the assembler would move that one down over a __syncwarp.
__device__ __forceinline__ uint4 load_words(const char* from, bool inside) {
  uint4 words{};
  if (inside) {
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
  }
  return words;
}

// 64 bytes of the window's rows as operand A: rows 0..7 take the k-th registers of a pair of words, rows 8..15 what
// Products says.
template <typename T, int kTerms>
struct Rows {
  std::uint32_t a[kTerms][4];

  Rows() = default;
  __device__ __forceinline__ explicit Rows(const uint4& words) {
    if constexpr (!std::is_same_v<T, float>) {
      const std::uint32_t order[4] = {words.x, words.z, words.y, words.w};
      memcpy(a, order, sizeof order);
    } else if constexpr (kTerms == 1) {
      const std::uint32_t order[4] = {words.x, words.z, words.y, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][i] = round_tf32(__uint_as_float(order[i]));
    } else {
      const Split x(words.x), y(words.y), z(words.z), w(words.w);
      const std::uint32_t order[2][4] = {{x.high, x.low, y.high, y.low}, {z.high, z.low, w.high, w.low}};
      memcpy(a, order, sizeof order);
    }
  }
};

// The products of the window's rows and one of the two vectors of every lane. Of the operands' words 0..3, (0, 1) and
// (2, 3) are pairs.
//   - one term: rows 0..7 of sum_[0] are the products of the first pair, rows 8..15 of sum_[1] those of the second. The
//     other halves pair words that do not belong together, and nobody reads them.
//   - two terms, x = x1 + x2 (both TF32): sum_[0] has x1 y1 in rows 0..7 and x2 y1 in rows 8..15, sum_[1] x1 y2, x2 y2.
template <typename T, int kTerms>
class Products {
 public:
  __device__ __forceinline__ void add(const Rows<T, kTerms>& rows, const uint4& words, int step) {
    if constexpr (!std::is_same_v<T, float>) {
      mma_m16n8k16<T>(sum_[0], rows.a[0], words.x, words.y);
      mma_m16n8k16<T>(sum_[1], rows.a[0], words.z, words.w);
    } else if constexpr (kTerms == 1) {
      const auto rounded = [](std::uint32_t bits) { return round_tf32(__uint_as_float(bits)); };
      mma_m16n8k8_tf32(sum_[0], rows.a[0], rounded(words.x), rounded(words.y));
      mma_m16n8k8_tf32(sum_[1], rows.a[0], rounded(words.z), rounded(words.w));
    } else {
      const Split x(words.x), y(words.y), z(words.z), w(words.w);
      mma_m16n8k8_tf32(sum_[0], rows.a[0], x.high, y.high);
      mma_m16n8k8_tf32(sum_[1], rows.a[0], x.low, y.low);
      mma_m16n8k8_tf32(sum_[0], rows.a[1], z.high, w.high);
      mma_m16n8k8_tf32(sum_[1], rows.a[1], z.low, w.low);
      // Tensor cores truncate their sums, so these move to sums that round to nearest.
      if (step % 2 == 1) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          total_[n] += sum_[0][n];
          sum_[0][n] = 0;
        }
      }
    }
  }

  // Row g with the vectors of lanes 4 (2t) and 4 (2t + 1).
  __device__ __forceinline__ float get(int n) const {
    if constexpr (kTerms == 1) return sum_[0][n] + sum_[1][2 + n];
    return total_[n] + (sum_[0][n] + (sum_[0][2 + n] + (sum_[1][n] + sum_[1][2 + n])));
  }

 private:
  float sum_[2][4] = {}, total_[2] = {};
};

// Counts the entries of a block before those of row g and vectors 4t, 4t + 2, 4t + 1, 4t + 3, as a product of 256 bits.
// Column n of operand B has the mask bits of the vectors before vector 2n, then those of 2n and 2n + 1 themselves. Of
// operand A, row r < 8 picks what comes before (2n, r), row 8 + r what comes before (2n + 1, r).
class PlaceFinder {
 public:
  __device__ __forceinline__ PlaceFinder(int g, int t) {
    // The pair 2g, 2g + 1 is a half of word g / 2.
    const bool own = t == g / 2, upper = g % 2 != 0;
    const std::uint32_t rows = (1u << g) - 1;
    before_ = keep(t < g / 2 ? 0xffffffffu : own && upper ? 0xffffu : 0);
    pair_ = keep(own ? (upper ? 0xffff0000u : 0xffffu) : 0);
    a_[0] = a_[1] = keep(0xffffffffu);
    a_[2] = keep(rows * 0x00010001u);
    a_[3] = keep(rows * 0x01000100u | 0x00ff00ffu);
  }

  // `mask`: masks of vectors 4t .. 4t + 3.
  __device__ __forceinline__ void find(int (&place)[4], std::uint32_t mask) const {
    count_common_bits(place, a_, mask & before_, mask & pair_);
  }

 private:
  std::uint32_t before_, pair_, a_[4];
};

// Results of one warp on their way from the fragments to the caller's edge order.
// kPlain: their positions have 32 bits.
template <typename T, bool kPlain>
class Queue {
 public:
  __device__ __forceinline__ Queue(const SddmmBsbArgs& args, float* slots, const RowSlice& slice, int lane)
      : args_(args),
        slots_(keep(static_cast<std::uint32_t>(__cvta_generic_to_shared(slots)))),
        lane_slot_(slots_ + lane * 4) {
    const std::int64_t first = __ldg(args.a.block_entry + slice.begin);
    left_ = static_cast<int>(__ldg(args.a.block_entry + slice.begin + slice.length) - first) - lane;
    value_id_ = static_cast<const char*>(args.a.value_id) + (first + lane) * id_bytes();
    const std::uint32_t size = narrow_out() ? sizeof(T) : sizeof(float);
    out_bytes_ = static_cast<std::uint32_t>(args.heads) * size;
    out_ = opaque(static_cast<char*>(args.out) + blockIdx.y * size);
    read_ahead();
  }

  // Takes the entries of the next block, `count` in all: result[i] goes to place[i] where bit[i] of `present` says so.
  __device__ __forceinline__ void put(const int (&place)[4], const float (&result)[4], std::uint32_t present,
                                      int count) {
    constexpr std::uint32_t kBit[4] = {1u, 1u << 16, 1u << 8, 1u << 24};
    const std::uint32_t end = opaque(slots_ + filled_ * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared_if(present & kBit[i], end + place[i] * 4, result[i]);
    filled_ += count;
    if (filled_ >= kLeaving) leave();
  }

  __device__ __forceinline__ void finish() {
    __syncwarp();
    write<false>();
  }

 private:
  __device__ __forceinline__ bool narrow_out() const { return args_.out_dtype == args_.dtype; }
  __device__ __forceinline__ bool wide_ids() const { return !kPlain && args_.a.value_id_is_64bit; }
  __device__ __forceinline__ int id_bytes() const { return wide_ids() ? 8 : 4; }

  // Positions of the results that leave next. 64-bit ones, of giant graphs, are read when they are needed.
  __device__ __forceinline__ void read_ahead() {
    if (wide_ids()) return;
#pragma unroll
    for (int u = 0; u < kRounds; ++u) {
      if (u * kWarp < left_) id_[u] = __ldg(reinterpret_cast<const std::uint32_t*>(value_id_) + u * kWarp);
    }
  }

  __device__ __forceinline__ void leave() {
    __syncwarp();
    write<true>();
    filled_ -= kLeaving;
    left_ -= kLeaving;
    value_id_ += kLeaving * id_bytes();
    read_ahead();
    __syncwarp();
    const int lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (int i = 0; i + lane < filled_; i += kWarp) {
      store_shared_if(1, lane_slot_ + i * 4, load_shared(lane_slot_ + (kLeaving + i) * 4));
    }
  }

  // Writes the first results, kAll: kLeaving of them, else as many as there are.
  template <bool kAll>
  __device__ __forceinline__ void write() const {
    const int ahead = filled_ - static_cast<int>(threadIdx.x % kWarp);
    if (wide_ids()) {
#pragma unroll 1
      for (int i = 0; i < kLeaving && (kAll || i < ahead); i += kWarp) {
        write(i, out_ + reinterpret_cast<const std::int64_t*>(value_id_)[i] * out_bytes_);
      }
      return;
    }
#pragma unroll
    for (int u = 0; u < kRounds; ++u) {
      if (kAll || u * kWarp < ahead) write(u * kWarp, advance(out_, id_[u], out_bytes_));
    }
  }
  __device__ __forceinline__ void write(int i, char* to) const {
    const float result = load_shared(lane_slot_ + i * 4);
    if (narrow_out()) {
      store_global(to, narrow<T>(result));
    } else {
      store_global(to, result);
    }
  }

  const SddmmBsbArgs& args_;
  std::uint32_t slots_, lane_slot_;  // kQueue of them
  const char* value_id_;
  char* out_;
  std::uint32_t out_bytes_;
  int left_, filled_ = 0;
  std::uint32_t id_[kRounds] = {};
};

// Row r of a window; a window that has fewer rows repeats the first row, of which nothing is written.
__device__ __forceinline__ std::uint32_t row_of_window(const BsbView& a, std::int64_t window, int r) {
  const int at = static_cast<int>(window) * kRows + r;
  if (a.window_row != nullptr) return max(__ldg(a.window_row + at), 0);
  return at < a.num_rows ? at : 0;
}

// Splitting an infinite or huge number leaves NaN, though its products may be none: multiplied again, unsplit.
__device__ __noinline__ float multiply_again(const SddmmBsbArgs& args, std::int64_t row, std::int64_t vector) {
  const float* x = static_cast<const float*>(args.x_dst.data) + row * args.x_dst.stride;
  const float* y = static_cast<const float*>(args.x_src.data) + args.a.col[vector] * args.x_src.stride;
  const std::int64_t head = blockIdx.y * args.head_width;
  float sum = 0;
  for (std::int64_t f = head; f < head + args.head_width; ++f) sum += x[f] * y[f];
  return sum;
}

// kSteps: steps of 64 bytes that hold a head; 0: any number, with X_dst read again for every block. kPlain: the head
// fills them, there are no scales, and positions have 32 bits. kBlocks: blocks in flight.
template <typename T, int kTerms, int kSteps, bool kPlain, int kBlocks>
__global__ void __launch_bounds__(kThreads) sddmm_bsb_kernel(const __grid_constant__ SddmmBsbArgs args) {
  __shared__ float slots[kThreads / kWarp][kQueue];
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const RowSlice slice = load_slice(args.a.split, warp);
  if (slice.length == 0) return;
  const int2* cols = reinterpret_cast<const int2*>(args.a.col) + slice.begin * (kBlockVectors / 2) + g;
  const std::uint32_t* masks = reinterpret_cast<const std::uint32_t*>(args.a.mask) + slice.begin * 4 + t;
  // Columns and masks are read one step ahead; the arrays are padded by 4 blocks, so that this may run past the slice.
  static_assert(kBlocks <= 2);
  int2 next_col[kBlocks];
  std::uint32_t next_mask[kBlocks];
  const auto read_ahead = [&] {
#pragma unroll
    for (int u = 0; u < kBlocks; ++u) {
      next_col[u] = cols[u * (kBlockVectors / 2)];
      next_mask[u] = masks[u * 4];
    }
    cols += kBlocks * (kBlockVectors / 2);
    masks += kBlocks * 4;
  };
  read_ahead();
  Queue<T, kPlain> queue(args, slots[threadIdx.x / kWarp], slice, lane);
  const PlaceFinder finder(g, t);

  const std::int64_t window = row_of(args.a.split, slice);
  const std::uint32_t dst_row = row_of_window(args.a, window, g);
  const auto head_bytes = static_cast<std::uint32_t>(args.head_width * sizeof(T));
  const auto src_bytes = static_cast<std::uint32_t>(args.x_src.stride * sizeof(T));
  const auto dst_bytes = static_cast<std::uint32_t>(args.x_dst.stride * sizeof(T));
  const std::uint32_t skip = blockIdx.y * head_bytes + t * 16;
  const char* src = opaque(static_cast<const char*>(args.x_src.data) + skip);
  const char* dst = advance(static_cast<const char*>(args.x_dst.data) + skip, dst_row, dst_bytes);
  const auto inside = [&](std::uint32_t step) { return kPlain || step * kStepBytes + t * 16 < head_bytes; };
  Rows<T, kTerms> rows[kSteps > 0 ? kSteps : 1];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) rows[s] = Rows<T, kTerms>(load_words(dst + s * kStepBytes, inside(s)));

  for (int left = slice.length;; left -= kBlocks) {
    const char* row[kBlocks][2];
    uint4 words[kBlocks][2][kSteps > 0 ? kSteps : 1];
    std::uint32_t mask[kBlocks];
#pragma unroll
    for (int u = 0; u < kBlocks; ++u) {
      if (u > 0 && u >= left) break;
      mask[u] = next_mask[u];
      row[u][0] = advance(src, next_col[u].x, src_bytes);
      row[u][1] = advance(src, next_col[u].y, src_bytes);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int v = 0; v < 2; ++v) words[u][v][s] = load_words(row[u][v] + s * kStepBytes, inside(s));
      }
    }
    read_ahead();
    __syncwarp();  // so that all loads start here, and not one after the other where they are needed

#pragma unroll
    for (int u = 0; u < kBlocks; ++u) {
      if (u > 0 && u >= left) break;
      int place[4] = {};
      finder.find(place, mask[u]);
      const int count = static_cast<int>(__reduce_add_sync(kFullWarp, static_cast<unsigned>(__popc(mask[u]))) / kRows);
      Products<T, kTerms> products[2];
      if constexpr (kSteps > 0) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int v = 0; v < 2; ++v) products[v].add(rows[s], words[u][v][s], s);
        }
      } else {
        for (std::uint32_t step = 0; step * kStepBytes < head_bytes; step += kChunk) {
          uint4 chunk[3][kChunk];
#pragma unroll
          for (int s = 0; s < kChunk; ++s) {
            const std::uint32_t at = (step + s) * kStepBytes;
            chunk[0][s] = load_words(row[u][0] + at, inside(step + s));
            chunk[1][s] = load_words(row[u][1] + at, inside(step + s));
            chunk[2][s] = load_words(dst + at, inside(step + s));
          }
#pragma unroll
          for (int s = 0; s < kChunk; ++s) {
            const Rows<T, kTerms> chunk_rows(chunk[2][s]);
#pragma unroll
            for (int v = 0; v < 2; ++v) products[v].add(chunk_rows, chunk[v][s], s);
          }
        }
      }
      float result[4] = {products[0].get(0), products[0].get(1), products[1].get(0), products[1].get(1)};
      const std::int64_t vector = (slice.begin + slice.length - left + u) * kBlockVectors + 4 * t;
      constexpr int kVector[4] = {0, 2, 1, 3};
      if constexpr (kTerms > 1) {
        if ((result[0] + result[1] + result[2] + result[3]) * 0.0f != 0) {  // NaN: one is not finite
#pragma unroll
          for (int i = 0; i < 4; ++i) result[i] = multiply_again(args, dst_row, vector + kVector[i]);
        }
      }
      if constexpr (!kPlain) {
        if (args.scale_src != nullptr) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            result[i] *= __ldg(static_cast<const float*>(args.scale_src) + __ldg(args.a.col + vector + kVector[i]));
          }
        }
        if (args.scale_dst != nullptr) {
          const float scale = __ldg(static_cast<const float*>(args.scale_dst) + dst_row);
#pragma unroll
          for (int i = 0; i < 4; ++i) result[i] *= scale;
        }
      }
      queue.put(place, result, mask[u] >> g, count);
    }
    if (left <= kBlocks) break;
  }
  queue.finish();
}

template <typename T, int kTerms, int kSteps, int kBlocks>
void launch_shape(const SddmmBsbArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.a.split.num_slices, kThreads / kWarp), static_cast<unsigned>(args.heads));
  if constexpr (kSteps > 0) {
    if (args.head_width * sizeof(T) == kSteps * kStepBytes && args.scale_dst == nullptr && args.scale_src == nullptr &&
        !args.a.value_id_is_64bit) {
      sddmm_bsb_kernel<T, kTerms, kSteps, true, kBlocks><<<grid, kThreads, 0, stream>>>(args);
      return;
    }
  }
  sddmm_bsb_kernel<T, kTerms, kSteps, false, kBlocks><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T, int kTerms>
void launch(const SddmmBsbArgs& args, cudaStream_t stream) {
  const auto steps = ceil_div(args.head_width * static_cast<std::int64_t>(sizeof(T)), kStepBytes);
  if (steps <= 1) return launch_shape<T, kTerms, 1, 2>(args, stream);
  if (steps <= 2) return launch_shape<T, kTerms, 2, 2>(args, stream);
  if (steps <= 4) return launch_shape<T, kTerms, 4, 1>(args, stream);
  if (steps <= 8) return launch_shape<T, kTerms, 8, 1>(args, stream);
  launch_shape<T, kTerms, 0, 1>(args, stream);
}

}  // namespace

int sddmm_bsb(const SddmmBsbArgs& args, void* stream_address) {
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
      return cudaErrorInvalidValue;  // no tensor-core path: the caller takes the CSR kernel
  }
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
