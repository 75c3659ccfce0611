// SpMM on tensor cores from the binary sparse block format (FlashSparse, sections 3.2-3.4, with Fused3S's
// bitmaps).
//
// A warp computes one slice of a window (8 rows), or a run of several short windows, for one tile of
// features. Operands are swapped and transposed as in FlashSparse: C^T (features x 8 rows) = X^T (features x
// vectors) A^T (vectors x 8 rows), so a row of X that several of the 8 rows need is gathered once. Fragments
// are built in registers, without shared memory (lane = 4 g + t):
//   - Thread t has one of the block's four quads of vectors, and lane g has kFeatures neighbouring features
//     of the tile: 8 lanes cover one contiguous piece of a gathered row.
//   - The 16 rows of an mma are features 2r and 2r + 1 of the 8 lanes. Any order of features is possible, as
//     results have the same order.
//   - B, 16 vectors x 8 rows, is the bitmap itself: bit g of the vector's mask, as 0 or 1 (or as the edge's
//     value).
//
// Floors, for V vectors of width F: V F sizeof(T) bytes gathered, 4 V bytes of columns and masks; 16 V F
// flops on tensor cores. The gather is the bottleneck, so a lane has kBlocks x 4 loads in flight, and the
// columns of a run's next window are read before the current window is finished.

#include <type_traits>

#include "fastsparse/bsb.cuh"
#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/mma.cuh"

namespace fastsparse::cuda {
namespace spmm_bsb_detail {

constexpr int kThreads = 128;
// float32: every 4 blocks, the tensor cores' sums are added to other sums, which round to nearest. A block is
// the last of 4 if the number of its first quad has all of these bits.
constexpr int kLastOfSum = 3 * kBlockQuads;

__device__ __forceinline__ std::uint32_t one_bits(__half) { return 0x3c00u; }
__device__ __forceinline__ std::uint32_t one_bits(__nv_bfloat16) { return 0x3f80u; }

__device__ __forceinline__ std::uint32_t bits_of(__half v) { return __half_as_ushort(v); }
__device__ __forceinline__ std::uint32_t bits_of(__nv_bfloat16 v) { return __bfloat16_as_ushort(v); }

// Rounds to the nearest TF32 number. The addition can turn NaN into -0; then the second term is NaN. Without
// a second term, the conversion instruction is needed, which keeps NaN but is slower.
template <int kTerms>
__device__ __forceinline__ std::uint32_t round_tf32(float v) {
  if constexpr (kTerms > 1) return (__float_as_uint(v) + 0x1000u) & 0xffffe000u;
  std::uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
  return rounded;
}

// Kinds of weights of entries.
enum class Weight {
  kOne,
  kVectorScale,  // a factor per column: one number per vector, streamed with the masks
  kValue,        // a value per entry
};

// The part of a block that one thread has: features and masks of its vectors and, with weights, the weights
// of the entries of row g.
template <typename T, int kFeatures>
struct Block {
  Pack<T, kFeatures> pack[kOwned];
  std::uint32_t mask;
  Acc<T> value[kOwned];
};

// Adds features x weights of a block to `sum`, for 16-bit elements. sum[r] has the features 2r and 2r + 1 of
// every lane, for the 8 rows of the window.
template <typename T, int kFeatures, Weight kWeight>
__device__ __forceinline__ void multiply(float (&sum)[kFeatures / 2][4], const Block<T, kFeatures>& block,
                                         int g) {
  std::uint32_t b[2];
  if constexpr (kWeight != Weight::kOne) {
    b[0] = bits_of(narrow<T>(block.value[0])) | bits_of(narrow<T>(block.value[1])) << 16;
    b[1] = bits_of(narrow<T>(block.value[2])) | bits_of(narrow<T>(block.value[3])) << 16;
  } else {
    // Bit g of each of the four masks, moved to the low bits of four halves and multiplied by 1 in the
    // element type.
    const std::uint32_t bits = (block.mask >> g) & 0x01010101u;
    b[0] = __byte_perm(bits, 0, 0x4140) * one_bits(T{});
    b[1] = __byte_perm(bits, 0, 0x4342) * one_bits(T{});
  }
  std::uint32_t words[kOwned][kFeatures / 2];
#pragma unroll
  for (int v = 0; v < kOwned; ++v) memcpy(words[v], &block.pack[v], sizeof words[v]);
#pragma unroll
  for (int r = 0; r < kFeatures / 2; ++r) {
    const std::uint32_t a[4] = {
        __byte_perm(words[0][r], words[1][r], 0x5410), __byte_perm(words[0][r], words[1][r], 0x7632),
        __byte_perm(words[2][r], words[3][r], 0x5410), __byte_perm(words[2][r], words[3][r], 0x7632)};
    mma_m16n8k16<T>(sum[r], a, b[0], b[1]);
  }
}

// Does the same as `multiply`, for float32. kTerms = 1: TF32. kTerms = 2: x is the sum of two TF32 numbers,
// exact to 2^-23 of x, and values are split in the same way. The product of the two second terms is left out,
// because it is below 2^-22 of the result.
template <int kFeatures, Weight kWeight, int kTerms>
__device__ __forceinline__ void multiply_float(float (&sum)[kFeatures / 2][4],
                                               const Block<float, kFeatures>& block, int g) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    std::uint32_t b[2], b_low[2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if constexpr (kWeight != Weight::kOne) {
        b[k] = round_tf32<kTerms>(block.value[2 * step + k]);
        b_low[k] = __float_as_uint(block.value[2 * step + k] - __uint_as_float(b[k]));
      } else {
        b[k] = ((block.mask >> (8 * (2 * step + k) + g)) & 1u) * 0x3f800000u;
      }
    }
#pragma unroll
    for (int r = 0; r < kFeatures / 2; ++r) {
      std::uint32_t a[4], a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = block.pack[2 * step + i / 2].lane[2 * r + i % 2];
        a[i] = round_tf32<kTerms>(x);
        a_low[i] = __float_as_uint(x - __uint_as_float(a[i]));
      }
      if constexpr (kTerms > 1) {
        mma_m16n8k8_tf32(sum[r], a_low, b[0], b[1]);
        if constexpr (kWeight != Weight::kOne) mma_m16n8k8_tf32(sum[r], a, b_low[0], b_low[1]);
      }
      mma_m16n8k8_tf32(sum[r], a, b[0], b[1]);
    }
  }
}

__device__ __forceinline__ std::int64_t value_position(const BsbView& a, std::int64_t entry) {
  return a.value_id_is_64bit ? static_cast<const std::int64_t*>(a.value_id)[entry]
                             : static_cast<const std::int32_t*>(a.value_id)[entry];
}

// The position of an entry's value, if values are (num_vectors, 8, heads).
__device__ __forceinline__ std::int64_t dense_position(const SpmmBsbArgs& args, std::int64_t quad, int vector,
                                                       int row) {
  return (__ldg(args.quad_vector + quad) + vector) * kRows + row;
}

// Replaces every 32-bit word of the pack by the same word of lane `source`.
template <typename P>
__device__ __forceinline__ void shuffle_pack(P& pack, int source) {
  constexpr int kWords = static_cast<int>(sizeof(P) / 4);
  std::uint32_t words[kWords];
  memcpy(words, &pack, sizeof words);
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = __shfl_sync(kFullWarp, words[w], source);
  memcpy(&pack, words, sizeof words);
}

// A zero of the bitmap times an infinite or NaN feature is NaN, although there is no edge. So if a result is
// not finite, this function sums the quads from `begin` to `end` again, entry by entry. target: a window, or
// ~slot of a partial result.
template <typename T, int kFeatures, bool kValued>
__device__ __noinline__ void sum_entry_by_entry(const SpmmBsbArgs& args, std::int64_t begin, std::int64_t end,
                                                std::int32_t target, int t, std::int64_t feature,
                                                std::int64_t head) {
  const Epilogue epilogue = epilogue_of(args);
#pragma unroll 1
  for (int r = 2 * t; r < 2 * t + 2; ++r) {
    float sum[kFeatures] = {};
#pragma unroll 1
    for (std::int64_t at = begin * kOwned; at < end * kOwned; ++at) {
      const std::int64_t quad = at / kOwned;
      const std::uint32_t masks = masks_of(args.a, quad), bit = 1u << (8 * (at % kOwned) + r);
      if ((masks & bit) == 0) continue;
      float weight = 1;
      if constexpr (kValued) {
        const std::int64_t position =
            args.quad_vector != nullptr
                ? dense_position(args, quad, static_cast<int>(at % kOwned), r)
                : value_position(args.a, args.a.quad_entry[quad] + __popc(masks & (bit - 1)));
        weight =
            load_value<T>(args.value, args.value.dtype == args.dtype, position * args.value.heads + head);
      } else if (args.vector_scale != nullptr) {
        weight = args.vector_scale[at];
      }
      const auto x =
          load_pack<T, kFeatures>(static_cast<const T*>(args.x.data) +
                                  static_cast<std::int64_t>(column_of(args.a, at)) * args.x.stride + feature);
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) sum[f] += weight * widen(x.lane[f]);
    }
    if (target < 0) {
      float* partial = static_cast<float*>(args.partial) +
                       (static_cast<std::int64_t>(~target) * kRows + r) * args.width + feature;
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) partial[f] = sum[f];
      continue;
    }
    const std::int64_t row = WindowRow{args.a.window_row, args.a.num_rows}(target, r);
    if (row < 0) continue;
    store_pack(epilogue.finish<T>(sum, row, feature), static_cast<T*>(args.out) + row * args.width + feature);
  }
}

template <typename T, int kFeatures, int kBlocks, Weight kWeight, int kTerms>
__global__ void __launch_bounds__(kThreads, kBlocks == 1 ? 7 : 5)
    spmm_bsb_kernel(const __grid_constant__ SpmmBsbArgs args) {
  constexpr bool kFloat = std::is_same_v<T, float>;
  launch_dependents();
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const auto warp = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (warp >= args.a.num_runs) return;
  const int4 raw_run = __ldg(reinterpret_cast<const int4*>(args.a.runs) + warp);
  const WindowRun run{raw_run.x, raw_run.y, raw_run.z, raw_run.w};
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.y) * 8 * kFeatures;
  // Loads and stores use 8 neighbouring lanes per row, and shuffles pass the data to and from the lanes of
  // the fragments. If the lanes of the fragments loaded directly, every 8 lanes would touch four cache lines
  // instead of one, and the L1 cache looks up one line at a time.
  const int quarter = lane / 8, place = lane % 8;
  const std::int64_t feature = tile + place * kFeatures;
  const bool inside = feature < args.width;
  // Lanes beyond the width gather the row's first features and discard them, because a predicate on every
  // load would cost more.
  const char* x = reinterpret_cast<const char*>(static_cast<const T*>(args.x.data) + (inside ? feature : 0));
  const auto row_bytes = static_cast<std::uint32_t>(args.x.stride * sizeof(T));
  const std::int64_t head = kWeight == Weight::kValue ? tile / (args.width / args.value.heads) : 0;
  // In lane n: the end of the run's n-th window.
  int window_end = run.begin + run.length;
  if (run.num_windows > 1 && lane < run.num_windows) {
    window_end = __ldg(args.a.window_ptr + run.target + 1 + lane);
  }

  const auto gather = [&](Block<T, kFeatures>& block, const PackedColumns& columns) {
    std::uint32_t source[kOwned];
    unpack(columns, source);
#pragma unroll
    for (int v = 0; v < kOwned; ++v) {
      block.pack[v] =
          load_pack<T, kFeatures>(reinterpret_cast<const T*>(row_address(x, source[v], row_bytes)));
    }
  };
  // own: the quad of thread t, or the window's last quad if thread t has none.
  const auto load_weights = [&](Block<T, kFeatures>& block, std::int64_t own) {
    if constexpr (kWeight == Weight::kVectorScale) {
      const float4 scale = __ldg(reinterpret_cast<const float4*>(args.vector_scale) + own);
      const float of_vector[kOwned] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
      for (int v = 0; v < kOwned; ++v) {
        block.value[v] = (block.mask >> (8 * v + g)) & 1u ? of_vector[v] : 0.0f;
      }
      return;
    }
    if (args.quad_vector != nullptr) {
#pragma unroll
      for (int v = 0; v < kOwned; ++v) {
        block.value[v] = 0;
        if (block.mask & (1u << (8 * v + g))) {
          block.value[v] = load_value<T>(args.value, args.value.dtype == args.dtype,
                                         dense_position(args, own, v, g) * args.value.heads + head);
        }
      }
      return;
    }
    // Entries are numbered by quad, vector and row, so the number of an entry is the number of mask bits
    // before it.
    const std::int64_t first = __ldg(args.a.quad_entry + own);
#pragma unroll
    for (int v = 0; v < kOwned; ++v) {
      block.value[v] = 0;
      const std::uint32_t bit = 1u << (8 * v + g);
      if (block.mask & bit) {
        const std::int64_t entry = first + __popc(block.mask & (bit - 1));
        block.value[v] = load_value<T>(args.value, args.value.dtype == args.dtype,
                                       value_position(args.a, entry) * args.value.heads + head);
      }
    }
  };

  float sum[kFeatures / 2][4] = {}, total[kFeatures / 2][4] = {};
  const auto accumulate = [&](Block<T, kFeatures>& block, int index, int left) {
    if constexpr (kWeight != Weight::kOne) load_weights(block, index + min(t, left - 1));
#pragma unroll
    for (int v = 0; v < kOwned; ++v) shuffle_pack(block.pack[v], 8 * t + g);
    if constexpr (kFloat) {
      multiply_float<kFeatures, kWeight, kTerms>(sum, block, g);
      if ((~index & kLastOfSum) == 0) {
#pragma unroll
        for (int r = 0; r < kFeatures / 2; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[r][i] += sum[r][i];
            sum[r][i] = 0;
          }
        }
      }
    } else {
      multiply<T, kFeatures, kWeight>(sum, block, g);
    }
  };

  std::uint32_t not_finite = 0;  // bit n: some sum of this lane in the run's n-th window is not finite
  // Stores the sums of the run's n-th window and clears them.
  const auto finish = [&](int nth) {
    float probe = 0;
#pragma unroll
    for (int r = 0; r < kFeatures / 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kFloat) sum[r][i] += total[r][i];
        probe += sum[r][i] * 0.0f;
      }
    }
    if (probe != 0) not_finite |= 1u << nth;
    const int source = 4 * place + quarter;  // this lane stores rows 2 quarter and 2 quarter + 1
    if (run.target < 0) {
      constexpr int kStore = kFeatures < 4 ? kFeatures : 4;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float* partial = static_cast<float*>(args.partial) +
                         (static_cast<std::int64_t>(~run.target) * kRows + 2 * quarter + n) * args.width +
                         feature;
#pragma unroll
        for (int f = 0; f < kFeatures; f += kStore) {
          Pack<float, kStore> pack;
#pragma unroll
          for (int i = 0; i < kStore; ++i) pack.lane[i] = sum[(f + i) / 2][2 * (i % 2) + n];
          shuffle_pack(pack, source);
          if (inside) store_pack(pack, partial + f);
        }
      }
    } else {
      const WindowRow row_of{args.a.window_row, args.a.num_rows};
      const std::int64_t window = run.target + nth;
      if (args.loop != nullptr) {
        const std::int64_t first = tile + g * kFeatures;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const std::int64_t row = row_of(window, 2 * t + n);
          if (row < 0 || first >= args.width) continue;
          float weight = *static_cast<const float*>(args.loop);
          if (args.scale_src != nullptr) weight *= static_cast<const float*>(args.scale_src)[row];
          const auto own =
              load_pack<T, kFeatures>(static_cast<const T*>(args.x.data) + row * args.x.stride + first);
#pragma unroll
          for (int r = 0; r < kFeatures / 2; ++r) {
            sum[r][n] += weight * widen(own.lane[2 * r]);
            sum[r][2 + n] += weight * widen(own.lane[2 * r + 1]);
          }
        }
      }
      if (args.scale_dst != nullptr) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const std::int64_t row = row_of(window, 2 * t + n);
          const float scale = row < 0 ? 0.0f : static_cast<const float*>(args.scale_dst)[row];
#pragma unroll
          for (int r = 0; r < kFeatures / 2; ++r) {
            sum[r][n] *= scale;
            sum[r][2 + n] *= scale;
          }
        }
      }
      if (args.bias != nullptr) {
        const std::int64_t first = tile + g * kFeatures;
        const auto bias =
            load_pack<T, kFeatures>(static_cast<const T*>(args.bias) + (first < args.width ? first : 0));
#pragma unroll
        for (int r = 0; r < kFeatures / 2; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[r][i] += widen(bias.lane[2 * r + i / 2]);
        }
      }
      if (args.relu) {
#pragma unroll
        for (int r = 0; r < kFeatures / 2; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[r][i] = rectify(sum[r][i]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Pack<T, kFeatures> pack;
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) pack.lane[f] = narrow<T>(sum[f / 2][2 * (f % 2) + n]);
        shuffle_pack(pack, source);
        const std::int64_t row = row_of(window, 2 * quarter + n);
        if (inside && row >= 0) store_pack(pack, static_cast<T*>(args.out) + row * args.width + feature);
      }
    }
#pragma unroll
    for (int r = 0; r < kFeatures / 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[r][i] = total[r][i] = 0;
    }
  };

  // Quads are read one step ahead, across the ends of windows. The array is padded, so the read may go past
  // the run.
  PackedColumns next[kBlocks];
  std::uint32_t next_mask[kBlocks];
  int index = run.begin;
  const auto load_next = [&] {
#pragma unroll
    for (int u = 0; u < kBlocks; ++u) {
      next[u] = load_columns(args.a.quad, index + u * kBlockQuads + quarter);
      next_mask[u] = load_masks(args.a.quad, index + u * kBlockQuads + t);
    }
  };
  load_next();
  for (int nth = 0; nth < run.num_windows; ++nth) {
    const int end = __shfl_sync(kFullWarp, window_end, nth);
    while (kBlocks > 1 && index + kBlocks * kBlockQuads <= end) {
      Block<T, kFeatures> block[kBlocks];
#pragma unroll
      for (int u = 0; u < kBlocks; ++u) {
        block[u].mask = next_mask[u];
        gather(block[u], next[u]);
      }
      index += kBlocks * kBlockQuads;
      load_next();
#pragma unroll
      for (int u = 0; u < kBlocks; ++u)
        accumulate(block[u], index - (kBlocks - u) * kBlockQuads, kBlockQuads);
    }
    while (index < end) {
      const int left = min(end - index, kBlockQuads);
      cut_words(next[0].word, left);
      Block<T, kFeatures> block;
      block.mask = t < left ? next_mask[0] : 0;
      gather(block, next[0]);
      index += left;
      load_next();
      accumulate(block, index - left, left);
    }
    finish(nth);
  }
  for (std::uint32_t left = __reduce_or_sync(kFullWarp, not_finite); left != 0; left &= left - 1) {
    const int nth = __ffs(static_cast<int>(left)) - 1;
    const int begin = nth == 0 ? run.begin : __shfl_sync(kFullWarp, window_end, nth - 1);
    const int end = __shfl_sync(kFullWarp, window_end, nth);
    if ((not_finite >> nth & 1u) != 0 && tile + g * kFeatures < args.width) {
      sum_entry_by_entry<T, kFeatures, kWeight == Weight::kValue>(
          args, begin, end, run.target < 0 ? run.target : run.target + nth, t, tile + g * kFeatures, head);
    }
  }
}

template <typename T, int kFeatures, int kBlocks, int kTerms>
void launch_shape(const SpmmBsbArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.a.num_runs, kThreads / kWarp), ceil_div(args.width, 8 * kFeatures));
  if (args.value.data != nullptr) {
    spmm_bsb_kernel<T, kFeatures, kBlocks, Weight::kValue, kTerms><<<grid, kThreads, 0, stream>>>(args);
  } else if (args.vector_scale == nullptr) {
    spmm_bsb_kernel<T, kFeatures, kBlocks, Weight::kOne, kTerms><<<grid, kThreads, 0, stream>>>(args);
  } else if constexpr (!std::is_same_v<T, float>) {
    spmm_bsb_kernel<T, kFeatures, kBlocks, Weight::kVectorScale, kTerms><<<grid, kThreads, 0, stream>>>(args);
  }
}

template <typename T, int kFeatures, int kTerms>
void launch_blocks(const SpmmBsbArgs& args, cudaStream_t stream) {
  args.blocks_per_step > 1 ? launch_shape<T, kFeatures, 2, kTerms>(args, stream)
                           : launch_shape<T, kFeatures, 1, kTerms>(args, stream);
}

template <typename T>
void launch_16bit(const SpmmBsbArgs& args, cudaStream_t stream) {
  switch (args.features_per_lane) {
    case 8:
      return launch_blocks<T, 8, 1>(args, stream);
    case 4:
      return launch_blocks<T, 4, 1>(args, stream);
    default:
      return launch_blocks<T, 2, 1>(args, stream);
  }
}

template <int kTerms>
void launch_float(const SpmmBsbArgs& args, cudaStream_t stream) {
  args.features_per_lane == 4 ? launch_blocks<float, 4, kTerms>(args, stream)
                              : launch_blocks<float, 2, kTerms>(args, stream);
}

}  // namespace spmm_bsb_detail

int spmm_bsb(const SpmmBsbArgs& args, void* stream_address) {
  using namespace spmm_bsb_detail;
  auto* stream = static_cast<cudaStream_t>(stream_address);
  const Epilogue epilogue = epilogue_of(args);
  const WindowRow window_row{args.a.window_row, args.a.num_rows};
  switch (args.dtype) {
    case Dtype::kFloat16:
      launch_16bit<__half>(args, stream);
      combine_partials<__half, kRows>(args.a.split, args.partial, epilogue, window_row, stream);
      break;
    case Dtype::kBFloat16:
      launch_16bit<__nv_bfloat16>(args, stream);
      combine_partials<__nv_bfloat16, kRows>(args.a.split, args.partial, epilogue, window_row, stream);
      break;
    case Dtype::kFloat32:
      args.tf32 ? launch_float<1>(args, stream) : launch_float<2>(args, stream);
      combine_partials<float, kRows>(args.a.split, args.partial, epilogue, window_row, stream);
      break;
    case Dtype::kFloat64:
      return cudaErrorInvalidValue;  // no tensor-core path: the caller uses the CSR kernel
  }
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
