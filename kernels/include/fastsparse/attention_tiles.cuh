// Shared code of the fused attention kernels: tiles of gathered rows in shared memory, filled by asynchronous
// copies, and products with them on tensor cores. lane = 4 g + t throughout.
//
// A warp works without other warps, on the 8 rows of a window ("own" rows) and the 16 vectors of one block
// after another. A tile has the gathered rows of a block's 16 vectors for kHeads heads. Two products read the
// tile:
//   - multiply_rows: 16 vectors x 8 own rows, the sum over a head's features (K Q^T);
//   - add_columns: features x 8 own rows, the sum over the vectors, with the weights that the first product
//     gave (V^T P^T).
// Between the products, a thread owns 4 entries of the block, as the tensor cores distribute them (Owned). In
// 16-bit formats, the tile is the first operand of both products, and the weights are transposed before the
// second. In float32, the own rows are the first operand of the first product. They fill half of its 16 rows,
// and their second TF32 terms fill the other half. Then the weights already have the layout of the second
// product. Vector 4q + 2j + e of a block is in row 8j + 2q + e of a tile.
#pragma once

#include <type_traits>

#include "fastsparse/bsb.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/mma.cuh"

namespace fastsparse::cuda::attention {

constexpr int kPieceBytes = 16;  // bytes that one lane copies at once
constexpr int kBlockBytes = 4 * kQuadWords * kBlockQuads;
constexpr int kQuadBytes = 4 * kQuadWords;
constexpr int kMaskByte = 4 * kMaskWord;  // offset of a quad's first mask
constexpr int kStages = 2;                // blocks in shared memory: one in use, one being copied

constexpr float kLog2E = 1.4426950408889634f;
// Maximum of a row before its first entry: finite, so that differences with it are never NaN.
constexpr float kNoMaximum = -1e30f;

// The shape of a tile: kHeads heads of at most kHeadWidth features side by side, narrower ones padded with 0.
template <typename Element, int kHeadsOfTile, int kWidthOfHead>
struct Shape {
  using T = Element;
  static constexpr bool kFloat = std::is_same_v<T, float>;
  static constexpr int kHeads = kHeadsOfTile;
  static constexpr int kHeadWidth = kWidthOfHead;
  static constexpr int kHeadPieces = kHeadWidth * static_cast<int>(sizeof(T)) / kPieceBytes;
  static constexpr int kPieces = kHeads * kHeadPieces;  // pieces per row
  static constexpr int kRowBytes = kPieces * kPieceBytes;
  static constexpr int kTileBytes = kBlockVectors * kRowBytes;
  static constexpr int kOwnBytes = kRows * kRowBytes;
  static constexpr int kHeadTiles = kHeadWidth / 16;  // a head tile has 16 features x 8 rows of results
  static constexpr int kTiles = kHeads * kHeadTiles;
  // Copying: kLanes neighbouring lanes copy one row, in kParts copies each.
  static constexpr int kLanes = kPieces < 8 ? kPieces : 8;
  static constexpr int kParts = kPieces / kLanes;
  static constexpr int kRowsAtOnce = 8 / kLanes;  // rows that a quarter of the warp copies at once
  static_assert(kPieces == 4 || kPieces % 8 == 0);
};

// A thread block uses at most 48 KB of shared memory if possible. Registers are limited so that shared memory
// determines how many blocks run at once, up to `most_warps`.
constexpr int warps_of_block(int bytes_of_warp) {
  return 4 * bytes_of_warp <= 48 * 1024 ? 4 : 2 * bytes_of_warp <= 48 * 1024 ? 2 : 1;
}
constexpr int blocks_at_once(int bytes_of_warp, int most_warps) {
  const int warps = warps_of_block(bytes_of_warp);
  const int fit = 227 * 1024 / (warps * bytes_of_warp + 1024);
  return fit < most_warps / warps ? fit : most_warps / warps;
}

// ---------------------------------------------------------------- instructions

// Copies kBytes (16 or 8) from global to shared memory, or zeros if `bytes` is 0; 16 bytes bypass the L1
// cache.
template <int kBytes = kPieceBytes>
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, std::uint32_t bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncwarp();
}

// Loads four matrices of 8 rows of 16 bytes; lane 8i + r gives the address of row r of matrix i.
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t matrix) {
  std::uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}
__device__ __forceinline__ uint4 load_shared(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t load_shared_word(std::uint32_t from) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t load_shared_byte(std::uint32_t from) {
  std::uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
template <typename T>
__device__ __forceinline__ float load_element(std::uint32_t from) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(load_shared_word(from));
  } else {
    unsigned short bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(from) : "memory");
    T v;
    memcpy(&v, &bits, sizeof v);
    return widen(v);
  }
}
__device__ __forceinline__ void load_shared(float2& v, std::uint32_t from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(float4& v, std::uint32_t from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

__device__ __forceinline__ float exp2_approx(
    float x) {  // error up to 2 ulp; exp2f has additional instructions for denormals
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

// Splits v into v rounded to TF32, and the rest, which is rounded to TF32 with an error of at most 2^-23 of
// v. If v is NaN: with one term, the conversion instruction keeps NaN; with two terms, the rest is NaN.
template <int kTerms>
__device__ __forceinline__ void split_tf32(float v, std::uint32_t& high, std::uint32_t& low) {
  if constexpr (kTerms > 1) {
    high = (__float_as_uint(v) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(v - __uint_as_float(high));
  } else {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(v));
    low = 0;
  }
}

// ---------------------------------------------------------------- tiles

// The pieces of a row are permuted, so that neither copies nor matrix loads have bank conflicts.
template <typename S>
__device__ __forceinline__ std::uint32_t place(int row, int piece) {
  const int swizzle = S::kPieces >= 8 ? row % 8 : row / 2 % 4;
  return row * S::kRowBytes + (piece ^ swizzle) * kPieceBytes;
}

// The rows of a matrix, for a group of heads: the addresses of the pieces that this lane copies.
template <typename S>
class Table {
 public:
  __device__ __forceinline__ Table(const DenseView& view, std::int64_t first_head, std::int64_t heads,
                                   std::int64_t head_width, int lane)
      : row_bytes_(static_cast<std::uint32_t>(view.stride * sizeof(typename S::T))),
        head_bytes_(static_cast<std::uint32_t>(head_width * sizeof(typename S::T))) {
    const int piece = lane % S::kLanes;
    const int head = piece / S::kHeadPieces, inner = piece % S::kHeadPieces;
    address_ = static_cast<const char*>(view.data) + first_head * head_bytes_ + head * head_bytes_ +
               inner * kPieceBytes;
    present_ = 0;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const bool present = first_head + head + part_head(part) < heads &&
                           inner * kPieceBytes + part_inner(part) < static_cast<int>(head_bytes_);
      present_ |= static_cast<std::uint32_t>(present) << part;
    }
  }
  // The lane's first piece of `row`.
  __device__ __forceinline__ const char* row(std::uint32_t row) const {
    return row_address(address_, row, row_bytes_);
  }
  // Distance, in bytes, from the lane's first piece to the piece of a part.
  __device__ __forceinline__ std::uint32_t offset(int part) const {
    return part_head(part) * head_bytes_ + part_inner(part);
  }
  __device__ __forceinline__ bool present(int part) const { return (present_ >> part) & 1u; }

  // Starts copying a part of a row to shared memory. Pieces beyond the last head, or beyond a head's width,
  // become 0.
  __device__ __forceinline__ void copy(std::uint32_t to, const char* row, int part,
                                       bool wanted = true) const {
    copy_async(to, row + offset(part), wanted && present(part) ? kPieceBytes : 0);
  }

 private:
  static __device__ __forceinline__ std::uint32_t part_head(int part) {
    return S::kHeadPieces >= 8 ? 8 * part / S::kHeadPieces : part * (S::kLanes / S::kHeadPieces);
  }
  static __device__ __forceinline__ int part_inner(int part) {
    return S::kHeadPieces >= 8 ? 8 * part % S::kHeadPieces * kPieceBytes : 0;
  }

  const char* address_;
  std::uint32_t row_bytes_;
  std::uint32_t head_bytes_;
  std::uint32_t present_;  // bit per part
};

// Copies the 16 gathered rows of a block; `column` has the columns that this quarter of the warp copies.
template <typename S>
__device__ __forceinline__ void copy_tile(std::uint32_t tile, const Table<S>& table,
                                          const std::uint32_t (&column)[kOwned], int lane) {
  const int quarter = lane / 8, sub = lane % 8 / S::kLanes;
#pragma unroll
  for (int i = 0; i < kOwned; i += S::kRowsAtOnce) {
    const std::uint32_t own = S::kRowsAtOnce == 2 && sub ? column[(i + 1) % kOwned] : column[i];
    const char* from = table.row(own);
    const int row = 8 * (i / 2) + 2 * quarter + (S::kRowsAtOnce == 2 ? sub : i % 2);
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      table.copy(tile + place<S>(row, lane % S::kLanes + 8 * part), from, part);
    }
  }
}

// Copies the quads of a block, because its masks are read later. Only `left` quads exist; the others become
// 0.
__device__ __forceinline__ void copy_block(std::uint32_t to, const std::uint32_t* quads, int left, int lane) {
  static_assert(kQuadBytes == kPieceBytes);
  if (lane < kBlockQuads) {
    copy_async(to + lane * kPieceBytes, quads + lane * kQuadWords, lane < left ? kPieceBytes : 0);
  }
}

// Calls f(row of the window, part, place) for every piece of a window's own rows that this lane copies.
template <typename S, typename F>
__device__ __forceinline__ void for_own_pieces(int lane, F&& f) {
#pragma unroll
  for (int half = 0; half < 2; half += S::kRowsAtOnce) {
    const int row = S::kRowsAtOnce == 2 ? lane / 8 * 2 + lane % 8 / S::kLanes : lane / 8 + 4 * half;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      f(row, part, place<S>(row, lane % S::kLanes + 8 * part));
    }
  }
}

template <typename S>
__device__ __forceinline__ void copy_own(std::uint32_t to, const Table<S>& table, const WindowRow& window_row,
                                         std::int64_t window, int lane) {
  for_own_pieces<S>(lane, [&](int r, int part, std::uint32_t where) {
    const std::int64_t row = window_row(window, r);
    table.copy(to + where, table.row(static_cast<std::uint32_t>(row < 0 ? 0 : row)), part, row >= 0);
  });
}

// Loads own rows as an operand of the tensor cores: word i is the t-th pair (float32: number) of piece i of
// row g.
template <typename S>
__device__ __forceinline__ void load_own(std::uint32_t (&own)[S::kPieces], std::uint32_t from, int lane) {
#pragma unroll
  for (int piece = 0; piece < S::kPieces; piece += 4) {
    std::uint32_t m[4];
    load_matrices(m, from + place<S>(lane % 8, piece + lane / 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) own[piece + i] = m[i];
  }
}

// Address, for load_matrices, of pieces (piece, piece + 1) of rows 0..7 and 8..15. The four matrices are
// ordered by rows, then pieces (kRowsFirst), or by pieces, then rows.
template <typename S, bool kRowsFirst>
__device__ __forceinline__ std::uint32_t matrix_address(std::uint32_t tile, int piece, int lane) {
  const int low = lane / 8 % 2, high = lane / 16;
  const std::uint32_t first =
      tile + place<S>(lane % 8 + 8 * (kRowsFirst ? high : low), kRowsFirst ? low : high);
  return (first ^ piece % 8 * kPieceBytes) + piece / 8 * 8 * kPieceBytes;
}

// score[i] = <own row, gathered row> of the thread's i-th entry (Owned), over the features of `head`. The
// result has the same bits if own and gathered rows are swapped, as in the transposed pass of the backward
// pass. This is necessary, because rounding a score of 10,000 differently changes its weight by 1e-3.
template <typename S, int kTerms>
__device__ __forceinline__ void multiply_rows(float (&score)[kOwned], const std::uint32_t (&own)[S::kPieces],
                                              std::uint32_t tile, int head, int lane) {
#pragma unroll
  for (int i = 0; i < kOwned; ++i) score[i] = 0;
  if constexpr (!S::kFloat) {
#pragma unroll
    for (int step = 0; step < S::kHeadPieces; step += 2) {
      const int piece = head * S::kHeadPieces + step;
      std::uint32_t a[4];
      load_matrices(a, matrix_address<S, false>(tile, piece, lane));
      mma_m16n8k16<typename S::T>(score, a, own[piece], own[piece + 1]);
    }
  } else {
    float sum[2][4] = {}, low[2][4] = {};
#pragma unroll
    for (int step = 0; step < S::kHeadPieces; step += 2) {
      const int piece = head * S::kHeadPieces + step;
      std::uint32_t m[4], a[4], b[4], b_low[4];
      load_matrices(m, matrix_address<S, true>(tile, piece, lane));
      split_tf32<kTerms>(__uint_as_float(own[piece]), a[0], a[1]);
      split_tf32<kTerms>(__uint_as_float(own[piece + 1]), a[2], a[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) split_tf32<kTerms>(__uint_as_float(m[i]), b[i], b_low[i]);
      if constexpr (kTerms > 1) {
        mma_m16n8k8_tf32(low[0], a, b_low[0], b_low[1]);
        mma_m16n8k8_tf32(low[1], a, b_low[2], b_low[3]);
      }
      mma_m16n8k8_tf32(sum[0], a, b[0], b[1]);
      mma_m16n8k8_tf32(sum[1], a, b[2], b[3]);
      // Tensor cores truncate when they accumulate. So after every 16 features, the products of the high TF32
      // parts are added to `score` in float32, which rounds to nearest.
      if (step % 4 == 2) {
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
          score[i] += sum[i / 2][i % 2];
          sum[i / 2][i % 2] = 0;
        }
      }
      // Otherwise the compiler moves all loads of wide heads to the front, where there are not enough
      // registers.
      if (S::kHeadPieces > 16 && step % 16 == 14) __syncwarp();
    }
    if constexpr (kTerms > 1) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        score[i] += (sum[i / 2][i % 2 + 2] + low[i / 2][i % 2]) + low[i / 2][i % 2 + 2];
      }
    }
  }
}

// The feature of a tile's row to which sum[f][i] belongs. Its own row is 2t + i % 2.
template <typename S>
__device__ __forceinline__ int feature_of(int f, int i, int g) {
  return S::kFloat ? 32 * (f / 2) + 4 * g + 2 * (f % 2) + i / 2 : 16 * f + 8 * (i / 2) + g;
}

// sum[f] += gathered features x weights of own rows 2t and 2t + 1, for the features of `head` (see
// feature_of). weight[i] is the weight of the thread's i-th entry.
template <typename S, int kTerms>
__device__ __forceinline__ void add_columns(float (&sum)[S::kTiles][4], std::uint32_t tile,
                                            const float (&weight)[kOwned], int head, int lane) {
  if constexpr (!S::kFloat) {
    const std::uint32_t b0 = transpose(pack_pair<typename S::T>(weight[0], weight[1]));
    const std::uint32_t b1 = transpose(pack_pair<typename S::T>(weight[2], weight[3]));
#pragma unroll
    for (int f = head * S::kHeadTiles; f < (head + 1) * S::kHeadTiles; ++f) {
      std::uint32_t a[4];
      load_matrices_transposed(a, matrix_address<S, true>(tile, 2 * f, lane));
      mma_m16n8k16<typename S::T>(sum[f], a, b0, b1);
    }
  } else {
    const int g = lane / 4, t = lane % 4;
    std::uint32_t b[kOwned], b_low[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) split_tf32<kTerms>(weight[i], b[i], b_low[i]);
#pragma unroll
    for (int f = head * S::kHeadTiles; f < (head + 1) * S::kHeadTiles; f += 2) {
      float fresh[2][4] = {};  // tensor cores truncate, so `sum` is added in float32
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 even = load_shared(tile + place<S>(8 * j + 2 * t, 4 * f + g));
        const uint4 odd = load_shared(tile + place<S>(8 * j + 2 * t + 1, 4 * f + g));
        const std::uint32_t x[8] = {even.x, even.y, odd.x, odd.y, even.z, even.w, odd.z, odd.w};
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          std::uint32_t a[4], a_low[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) split_tf32<kTerms>(__uint_as_float(x[4 * y + i]), a[i], a_low[i]);
          if constexpr (kTerms > 1) {
            mma_m16n8k8_tf32(fresh[y], a_low, b[2 * j], b[2 * j + 1]);
            mma_m16n8k8_tf32(fresh[y], a, b_low[2 * j], b_low[2 * j + 1]);
          }
          mma_m16n8k8_tf32(fresh[y], a, b[2 * j], b[2 * j + 1]);
        }
      }
#pragma unroll
      for (int y = 0; y < 2; ++y) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[f + y][i] += fresh[y][i];
      }
    }
  }
}

// Does the same as add_columns, but entry by entry, for tiles with infinity or NaN. In add_columns, such a
// number would reach own rows without that entry, because 0 times infinity is NaN. `block` is the address of
// the block's quads.
template <typename S>
__device__ __forceinline__ void add_entries(float (&sum)[S::kTiles][4], std::uint32_t tile,
                                            std::uint32_t block, const float (&weight)[kOwned], int head,
                                            int lane) {
  using T = typename S::T;
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int vector = 0; vector < kBlockVectors; ++vector) {
    const std::uint32_t mask =
        load_shared_byte(block + vector / kOwned * kQuadBytes + kMaskByte + vector % kOwned);
    float of_row[2];  // weights of rows 2t and 2t + 1, from the lanes that own the entries
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (S::kFloat) {
        const float even = vector % 4 < 2 ? weight[0] : weight[2];
        const float odd = vector % 4 < 2 ? weight[1] : weight[3];
        const float mine = vector % 2 == 0 ? even : odd;
        of_row[n] = __shfl_sync(kFullWarp, mine, 4 * (2 * t + n) + vector / 4);
      } else {
        const float mine = vector % 4 < 2 ? weight[n] : weight[2 + n];
        of_row[n] = __shfl_sync(kFullWarp, mine, 4 * (vector / 4 * 2 + vector % 2) + t);
      }
    }
    const int row = 8 * (vector / 2 % 2) + 2 * (vector / 4) + vector % 2;
#pragma unroll
    for (int f = head * S::kHeadTiles; f < (head + 1) * S::kHeadTiles; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int feature = feature_of<S>(f, 2 * half, g);
        constexpr int kOfPiece = kPieceBytes / static_cast<int>(sizeof(T));
        const float x = load_element<T>(tile + place<S>(row, feature / kOfPiece) +
                                        feature % kOfPiece * static_cast<int>(sizeof(T)));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (mask >> (2 * t + n) & 1u) sum[f][2 * half + n] += of_row[n] * x;
        }
      }
    }
  }
}

// Tells if the sums in all lanes are finite.
template <typename S>
__device__ __forceinline__ bool finite(const float (&sum)[S::kTiles][4]) {
  float zero = 0;
#pragma unroll
  for (int f = 0; f < S::kTiles; ++f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) zero += 0 * sum[f][i];
  }
  return __all_sync(kFullWarp, zero == 0);
}

// ---------------------------------------------------------------- results

// The matrix (rows, heads * head_width) to which a window's results are written, from head first_head on.
struct Target {
  void* data;
  std::int64_t heads;
  std::int64_t head_width;
};

// Stores rows that only this warp computes. They pass through shared memory, so that every lane stores whole
// pieces.
template <typename S>
__device__ __forceinline__ void store_rows(const Target& target, const float (&sum)[S::kTiles][4],
                                           std::uint32_t scratch, const WindowRow& window_row,
                                           std::int64_t window, std::int64_t first_head, int lane) {
  using T = typename S::T;
  const int g = lane / 4, t = lane % 4;
  if constexpr (S::kFloat) {
#pragma unroll
    for (int f = 0; f < S::kTiles; f += 2) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        store_shared(scratch + place<S>(2 * t + n, 4 * f + g),
                     make_uint4(__float_as_uint(sum[f][n]), __float_as_uint(sum[f][2 + n]),
                                __float_as_uint(sum[f + 1][n]), __float_as_uint(sum[f + 1][2 + n])));
      }
    }
  } else {
#pragma unroll
    for (int f = 0; f < S::kTiles; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_shared(scratch + place<S>(g, 2 * f + half) + 4 * t,
                     transpose(pack_pair<T>(sum[f][2 * half], sum[f][2 * half + 1])));
      }
    }
  }
  __syncwarp();
  const Table<S> out({target.data, target.heads * target.head_width}, first_head, target.heads,
                     target.head_width, lane);
  for_own_pieces<S>(lane, [&](int r, int part, std::uint32_t where) {
    const std::int64_t row = window_row(window, r);
    if (row < 0 || !out.present(part)) return;
    *reinterpret_cast<uint4*>(const_cast<char*>(out.row(static_cast<std::uint32_t>(row))) +
                              out.offset(part)) = load_shared(scratch + where);
  });
  __syncwarp();
}

// Stores partial sums, (num_slots, 8, heads * head_width), of a window that several warps compute.
template <typename S>
__device__ __forceinline__ void store_partial(const Target& target, const float (&sum)[S::kTiles][4],
                                              std::int64_t slot, std::int64_t first_head, int lane) {
  const int t = lane % 4, feature0 = feature_of<S>(0, 0, lane / 4);
  const std::int64_t width = target.heads * target.head_width;
  float* even = static_cast<float*>(target.data) + (slot * kRows + 2 * t) * width +
                first_head * target.head_width + feature0;
  const int left =
      static_cast<int>(target.head_width) - feature0;  // number of the head's features from feature0 on
  // The compiler adds only constants to the addresses `even` and `odd` in the inner loops.
#pragma unroll
  for (int h = 0; h < S::kHeads; ++h, even += target.head_width) {
    if (first_head + h >= target.heads) return;
    float* odd = even + width;
#pragma unroll
    for (int f = h * S::kHeadTiles; f < (h + 1) * S::kHeadTiles; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int feature = feature_of<S>(f, i, 0) - h * S::kHeadWidth;
        if (feature < left) (i % 2 == 0 ? even : odd)[feature] = sum[f][i];
      }
    }
  }
}

// ---------------------------------------------------------------- entries

// The 4 entries of a block that a thread owns. They are in kRowsOwned rows: entry i is in row i % kRowsOwned.
// In 16-bit formats, these are rows 2t and 2t + 1 of two vectors; in float32, row g of the vectors 4t .. 4t +
// 3.
template <typename S>
struct Owned {
  static constexpr int kRowsOwned = S::kFloat ? 1 : 2;
  static constexpr int kVectors = kOwned / kRowsOwned;

  static __device__ __forceinline__ int row(int i, int lane) {
    return S::kFloat ? lane / 4 : lane % 4 * 2 + i % 2;
  }
  // Index of the nth owned vector in its block.
  static __device__ __forceinline__ int vector(int nth, int lane) {
    return S::kFloat ? lane % 4 * 4 + nth : lane / 8 * 4 + lane / 4 % 2 + 2 * nth;
  }
  // Tells if this thread stores the results of its rows.
  static __device__ __forceinline__ bool stores(int lane) { return S::kFloat ? lane % 4 == 0 : lane < 4; }

  // Combines the values of the threads that have the same row.
  template <typename F>
  static __device__ __forceinline__ float reduce(float v, F&& combine) {
#pragma unroll
    for (int distance = S::kFloat ? 1 : 4; distance < (S::kFloat ? 4 : kWarp); distance *= 2) {
      v = combine(v, __shfl_xor_sync(kFullWarp, v, distance));
    }
    return v;
  }
  // Values of rows 2t and 2t + 1, in the layout of the sums of add_columns.
  static __device__ __forceinline__ void of_sums(float (&of_row)[2], const float (&own)[kRowsOwned],
                                                 int lane) {
    if constexpr (S::kFloat) {
      of_row[0] = __shfl_sync(kFullWarp, own[0], lane % 4 * 8);
      of_row[1] = __shfl_sync(kFullWarp, own[0], lane % 4 * 8 + 4);
    } else {
      of_row[0] = own[0];
      of_row[1] = own[1];
    }
  }
};

// sum *= own, one factor per row, for the features of `head`.
template <typename S>
__device__ __forceinline__ void scale_rows(float (&sum)[S::kTiles][4],
                                           const float (&own)[Owned<S>::kRowsOwned], int head, int lane) {
  float of_row[2];
  Owned<S>::of_sums(of_row, own, lane);
#pragma unroll
  for (int f = head * S::kHeadTiles; f < (head + 1) * S::kHeadTiles; ++f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[f][i] *= of_row[i % 2];
  }
}

// The thread's entries of the block at shared address `block`.
template <typename S>
class Entries {
 public:
  __device__ __forceinline__ Entries(std::uint32_t block, int lane) : block_(block), lane_(lane) {
    bits_ = masks() >> (S::kFloat ? lane / 4 : lane / 4 % 2 * 8 + lane % 4 * 2);
  }
  __device__ __forceinline__ bool present(int i) const {
    return (bits_ >> (S::kFloat ? 8 * i : 16 * (i / 2) + i % 2)) & 1u;
  }
  __device__ __forceinline__ std::uint32_t column(int i) const {
    const int vector = Owned<S>::vector(i / Owned<S>::kRowsOwned, lane_);
    const std::uint32_t at = block_ + vector / kOwned * kQuadBytes + vector % kOwned * 3;
    return load_shared_byte(at) | load_shared_byte(at + 1) << 8 | load_shared_byte(at + 2) << 16;
  }
  // Decides ahead which entries dropout keeps, with several heads in 16-bit formats: bit h * kOwned + i is
  // set if entry i of head first_head + h is kept. The loop runs only as often as the thread of the warp with
  // the most entries needs. An unrolled loop would take a fifth of a kernel's time. With one head, and in
  // float32, the loop would spill registers, so the result is 0 and `factor` draws the numbers.
  template <bool kTransposed>
  __device__ __forceinline__ std::uint32_t draw(const Dropout& dropout, const WindowRow& window_row,
                                                std::int64_t window, std::int64_t first_head) const {
    std::uint32_t kept = 0;
    if constexpr (kDrawsAhead) {
      static_assert(S::kHeads * kOwned <= 32);
      std::uint32_t left = 0;
#pragma unroll
      for (int i = 0; i < kOwned; ++i) left |= present(i) ? 1u << i : 0;
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int i = __ffs(static_cast<int>(left)) - 1;
        const RowAndColumn at = row_and_column<kTransposed>(i, window_row, window);
#pragma unroll 1
        for (int h = 0; h < S::kHeads; ++h) {
          const auto head = static_cast<std::uint32_t>(first_head + h);
          kept |= dropout_factor(dropout, at.row, at.column, head) != 0 ? 1u << (h * kOwned + i) : 0;
        }
      }
    }
    return kept;
  }
  // The dropout factor of entry i, which must be present, and head first_head + h. drawn: the result of
  // `draw`.
  template <bool kTransposed>
  __device__ __forceinline__ float factor(const Dropout& dropout, std::uint32_t drawn, int i, int h,
                                          const WindowRow& window_row, std::int64_t window,
                                          std::int64_t first_head) const {
    if constexpr (kDrawsAhead) {
      return drawn >> (h * kOwned + i) & 1u ? dropout.scale : 0.0f;
    } else {
      const RowAndColumn at = row_and_column<kTransposed>(i, window_row, window);
      return dropout_factor(dropout, at.row, at.column, static_cast<std::uint32_t>(first_head + h));
    }
  }
  // Positions of the entries among the edge values. Entries are numbered by quad, vector and row, so an
  // entry's number is a count of the mask bits before it. first_quad: first quad of the block.
  __device__ __forceinline__ void positions(std::int64_t (&position)[kOwned], const BsbView& a,
                                            std::int64_t first_quad) const {
    const std::uint32_t masks = this->masks();
    if (masks == 0) return;  // also true if the quad does not exist
    const std::int64_t first = a.quad_entry[first_quad + quad()];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (!present(i)) continue;
      const int vector = Owned<S>::vector(i / Owned<S>::kRowsOwned, lane_) % kOwned;
      const std::uint32_t before = (1u << (vector * 8 + Owned<S>::row(i, lane_))) - 1;
      const std::int64_t at = first + __popc(masks & before);
      position[i] = a.value_id_is_64bit ? static_cast<const std::int64_t*>(a.value_id)[at]
                                        : static_cast<const std::int32_t*>(a.value_id)[at];
    }
  }
  // The bias of an entry and head, times log2(e), because weights are powers of two; 0 without a bias.
  __device__ __forceinline__ float bias(const AttentionBsbInput& input, int i, std::int64_t position,
                                        std::int64_t head) const {
    if (input.bias.data == nullptr || !present(i) || head >= input.heads) return 0;
    return kLog2E * load_value<typename S::T>(input.bias, input.bias.dtype == input.dtype,
                                              position * input.heads + head);
  }

 private:
  static constexpr bool kDrawsAhead = !S::kFloat && S::kHeads > 1;

  // Row and column of an entry in the caller's structure.
  struct RowAndColumn {
    std::uint32_t row, column;
  };
  template <bool kTransposed>
  __device__ __forceinline__ RowAndColumn row_and_column(int i, const WindowRow& window_row,
                                                         std::int64_t window) const {
    const auto own = static_cast<std::uint32_t>(window_row(window, Owned<S>::row(i, lane_)));
    const std::uint32_t other = column(i);
    return kTransposed ? RowAndColumn{other, own} : RowAndColumn{own, other};
  }
  // quad: index in the block of the quad that has the thread's entries. masks: the masks of this quad.
  __device__ __forceinline__ int quad() const { return S::kFloat ? lane_ % 4 : lane_ / 8; }
  __device__ __forceinline__ std::uint32_t masks() const {
    return load_shared_word(block_ + quad() * kQuadBytes + kMaskByte);
  }

  std::uint32_t block_;
  std::uint32_t bits_;  // mask bits from the thread's first entry on
  int lane_;
};

// ---------------------------------------------------------------- launching

// Lets a kernel use `bytes` of shared memory per block, and requests that as much of the L1 cache as possible
// becomes shared memory.
template <typename Kernel>
cudaError_t prepare_kernel(Kernel* kernel, int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                 cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess || bytes <= 48 * 1024) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// True if the same kernel runs with and without bias and dropout. That holds for wide heads: their products
// take so long that testing for bias and dropout takes no measurable time, and there are enough registers.
template <typename S>
inline constexpr bool kAlwaysExtras = !S::kFloat && S::kHeadWidth == 256;

inline bool has_extras(const AttentionBsbInput& input) {
  return input.bias.data != nullptr || input.dropout.threshold != 0;
}

template <typename T, typename Launch>
bool with_shape_16bit(std::int64_t width, std::int64_t heads, Launch& launch) {
  if (heads > 1 && width <= 16) return launch.template run<Shape<T, 4, 16>, 1>(), true;
  if (width <= 32) {
    heads > 1 ? launch.template run<Shape<T, 4, 32>, 1>() : launch.template run<Shape<T, 1, 32>, 1>();
  } else if (width <= 64) {
    heads > 1 ? launch.template run<Shape<T, 2, 64>, 1>() : launch.template run<Shape<T, 1, 64>, 1>();
  } else if (width <= 128) {
    launch.template run<Shape<T, 1, 128>, 1>();
  } else if (width <= 256) {
    launch.template run<Shape<T, 1, 256>, 1>();
  } else {
    return false;
  }
  return true;
}

template <int kTerms, typename Launch>
bool with_shape_float(std::int64_t width, std::int64_t heads, Launch& launch) {
  if (width <= 32) {
    heads > 1 ? launch.template run<Shape<float, 2, 32>, kTerms>()
              : launch.template run<Shape<float, 1, 32>, kTerms>();
  } else if (width <= 64) {
    launch.template run<Shape<float, 1, 64>, kTerms>();
  } else if (width <= 128) {
    launch.template run<Shape<float, 1, 128>, kTerms>();
  } else if (width <= 256) {
    launch.template run<Shape<float, 1, 256>, kTerms>();
  } else {
    return false;
  }
  return true;
}

// Calls launch.run<Shape, TF32 terms>() with the narrowest shape that the heads fit. Returns false if there
// is no such shape.
template <typename Launch>
bool with_shape(const AttentionBsbInput& input, Launch& launch) {
  const std::int64_t width = input.head_width > input.value_width ? input.head_width : input.value_width;
  switch (input.dtype) {
    case Dtype::kFloat16:
      return with_shape_16bit<__half>(width, input.heads, launch);
    case Dtype::kBFloat16:
      return with_shape_16bit<__nv_bfloat16>(width, input.heads, launch);
    case Dtype::kFloat32:
      return input.tf32 ? with_shape_float<1>(width, input.heads, launch)
                        : with_shape_float<2>(width, input.heads, launch);
    case Dtype::kFloat64:
      return false;
  }
  return false;
}

}  // namespace fastsparse::cuda::attention
