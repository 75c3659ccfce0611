// What the fused attention kernels share: tiles of gathered rows in shared memory, filled by asynchronous
// copies, and products with them on tensor cores. lane = 4 g + t throughout.
//
// A warp works alone, on the 8 rows of a window ("own" rows) and the 16 vectors of one block after the other.
// A tile holds the gathered rows of a block's 16 vectors for kHeads heads. Two products take it as it lies:
//   - multiply_rows: 8 own rows x 16 vectors, the sum over a head's features (Q K^T);
//   - add_columns: features x 8 own rows, the sum over the vectors, with weights from the first (V^T P^T).
// The first leaves (row g, vectors 2t, 2t + 1 and 8 + 2t, 8 + 2t + 1) in each thread, which is what the
// second wants of its weights: nothing moves between lanes. Its own rows fill half of the 16 rows of the
// tensor cores' shape, which costs nothing where gathering is the limit; in float32 the other half holds the
// rows' second TF32 terms. Vector 4t + 2j + e of a block lies in row 8j + 2t + e of a tile, so that a thread
// owns 4 consecutive vectors of the format.
#pragma once

#include <type_traits>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/mma.cuh"

namespace fastsparse::cuda::attention {

constexpr int kRows = 8;           // rows of a window
constexpr int kBlockVectors = 16;  // vectors of a block
constexpr int kOwned = 4;          // vectors of a block that one thread owns
constexpr int kPieceBytes = 16;    // what one lane copies at once
constexpr int kStages = 2;         // blocks in shared memory: one in use, the other on its way

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
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
  static constexpr int kPieces = kHeads * kHeadPieces;  // of a row
  static constexpr int kRowBytes = kPieces * kPieceBytes;
  static constexpr int kTileBytes = kBlockVectors * kRowBytes;
  static constexpr int kOwnBytes = kRows * kRowBytes;
  static constexpr int kHeadTiles = kHeadWidth / 16;  // 16 features x 8 rows of results
  static constexpr int kTiles = kHeads * kHeadTiles;
  // Copying: kLanes neighbouring lanes to one row, which takes kParts copies.
  static constexpr int kLanes = kPieces < 8 ? kPieces : 8;
  static constexpr int kParts = kPieces / kLanes;
  static constexpr int kRowsAtOnce = 8 / kLanes;  // by a quarter of the warp
  static_assert(kPieces == 4 || kPieces % 8 == 0);
};

// A block of threads stays below 48 KB of shared memory where it can, and registers are limited to what lets
// shared memory decide how many blocks run at once, but not below 80 (24 warps) or with several heads, whose
// scores take registers, 128 (16 warps).
constexpr int warps_of_block(int bytes_of_warp) {
  return 4 * bytes_of_warp <= 48 * 1024 ? 4 : 2 * bytes_of_warp <= 48 * 1024 ? 2 : 1;
}
constexpr int blocks_at_once(int bytes_of_warp, int heads) {
  const int warps = warps_of_block(bytes_of_warp);
  const int fit = 227 * 1024 / (warps * bytes_of_warp + 1024);
  const int most = (heads > 1 ? 16 : 24) / warps;
  return fit < most ? fit : most;
}

// Own rows of a window: its 8 rows of the matrix, -1 for none.
struct WindowRow {
  const std::int32_t* window_row;
  std::int64_t num_rows;
  __device__ __forceinline__ std::int64_t operator()(std::int64_t window, int r) const {
    const std::int64_t at = window * kRows + r;
    if (window_row != nullptr) return window_row[at];
    return at < num_rows ? at : -1;
  }
};

// ---------------------------------------------------------------- instructions

// Copies 16 bytes of global memory to shared memory, or zeros where `bytes` is 0.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_8(std::uint32_t to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncwarp();
}

// Four 8 x 16-byte matrices; lane 8i + r gives the address of row r of matrix i.
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
__device__ __forceinline__ float2 load_shared_pair(std::uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(std::uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {  // within 2 ulp; exp2f adds what denormals need
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

// v rounded to TF32, and what that leaves, which is exact in TF32 to 2^-24 of v. One term keeps NaN by the
// conversion instruction; with two it shows in the second.
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

// Rows are permuted piece by piece so that neither copies nor matrix loads meet in a bank.
template <typename S>
__device__ __forceinline__ std::uint32_t place(int row, int piece) {
  const int swizzle = S::kPieces >= 8 ? row % 8 : row / 2 % 4;
  return row * S::kRowBytes + (piece ^ swizzle) * kPieceBytes;
}

// A table of rows as one lane copies it: for a group of heads, its pieces of each row.
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
  // Bytes from the lane's first piece of row 0 to a part of `row`.
  __device__ __forceinline__ std::uint64_t offset(std::uint32_t row, int part) const {
    return static_cast<std::uint64_t>(row) * row_bytes_ + part_head(part) * head_bytes_ + part_inner(part);
  }
  __device__ __forceinline__ bool present(int part) const { return (present_ >> part) & 1u; }
  __device__ __forceinline__ const char* address() const { return address_; }

  // Starts copying a part of `row` to shared memory; pieces that the heads do not have become 0.
  __device__ __forceinline__ void copy(std::uint32_t to, std::uint32_t row, int part, bool wanted = true) const {
    const bool load = wanted && present(part);
    copy_async(to, load ? address_ + offset(row, part) : address_, load ? kPieceBytes : 0);
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

// The 16 rows of a block; `word` holds the 4 vectors of this quarter of the warp.
template <typename S>
__device__ __forceinline__ void copy_tile(std::uint32_t tile, const Table<S>& table, const uint4& word,
                                          int lane) {
  const int quarter = lane / 8, sub = lane % 8 / S::kLanes;
  const std::uint32_t words[kOwned] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < kOwned; i += S::kRowsAtOnce) {
    const std::uint32_t own = S::kRowsAtOnce == 2 && sub ? words[(i + 1) % kOwned] : words[i];
    const int row = 8 * (i / 2) + 2 * quarter + (S::kRowsAtOnce == 2 ? sub : i % 2);
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      table.copy(tile + place<S>(row, lane % S::kLanes + 8 * part), own & 0xffffffu, part);
    }
  }
}

// Calls f(row of the window, part, place) for what this lane copies of a window's own rows.
template <typename S, typename F>
__device__ __forceinline__ void for_own_pieces(int lane, F&& f) {
#pragma unroll
  for (int half = 0; half < 2; half += S::kRowsAtOnce) {
    const int row =
        S::kRowsAtOnce == 2 ? lane / 8 * 2 + lane % 8 / S::kLanes : lane / 8 + 4 * half;
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
    table.copy(to + where, static_cast<std::uint32_t>(row), part, row >= 0);
  });
}

// Own rows as the tensor cores' first operand: word i holds piece i of row g, the pair (or number) t.
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

// Address, for load_matrices, of pieces (piece, piece + 1) of rows 0..7, then of rows 8..15.
template <typename S>
__device__ __forceinline__ std::uint32_t matrix_address(std::uint32_t tile, int piece, int lane) {
  const std::uint32_t first = tile + place<S>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  return (first ^ piece % 8 * kPieceBytes) + piece / 8 * 8 * kPieceBytes;
}

// score[i] = <own row g, gathered vector 4t + i> over the features of `head`.
template <typename S, int kTerms>
__device__ __forceinline__ void multiply_rows(float (&score)[kOwned], const std::uint32_t (&own)[S::kPieces],
                                              std::uint32_t tile, int head, int lane) {
  float sum[2][4] = {};
  if constexpr (S::kFloat) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) score[i] = 0;
  }
#pragma unroll
  for (int step = 0; step < S::kHeadPieces; step += 2) {
    const int piece = head * S::kHeadPieces + step;
    std::uint32_t b[4];
    load_matrices(b, matrix_address<S>(tile, piece, lane));
    if constexpr (!S::kFloat) {
      const std::uint32_t a[4] = {own[piece], 0, own[piece + 1], 0};
      mma_m16n8k16<typename S::T>(sum[0], a, b[0], b[1]);
      mma_m16n8k16<typename S::T>(sum[1], a, b[2], b[3]);
    } else {
      std::uint32_t a[4], b_high[4], b_low[4];
      split_tf32<kTerms>(__uint_as_float(own[piece]), a[0], a[1]);
      split_tf32<kTerms>(__uint_as_float(own[piece + 1]), a[2], a[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) split_tf32<kTerms>(__uint_as_float(b[i]), b_high[i], b_low[i]);
      if constexpr (kTerms > 1) {
        mma_m16n8k8_tf32(sum[0], a, b_low[0], b_low[1]);
        mma_m16n8k8_tf32(sum[1], a, b_low[2], b_low[3]);
      }
      mma_m16n8k8_tf32(sum[0], a, b_high[0], b_high[1]);
      mma_m16n8k8_tf32(sum[1], a, b_high[2], b_high[3]);
      // The tensor cores' sums are cut off, not rounded: every 16 features they move to ordinary additions.
      if (step % 4 == 2) {
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
          score[i] += sum[i / 2][i % 2] + sum[i / 2][i % 2 + 2];
          sum[i / 2][i % 2] = sum[i / 2][i % 2 + 2] = 0;
        }
      }
    }
  }
  if constexpr (!S::kFloat) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) score[i] = sum[i / 2][i % 2];
  }
}

// sum[f] += gathered features x weights of rows 2t, 2t + 1 (feature_of says which), for the features of
// `head`. weight[i] is that of own row g and vector 4t + i.
template <typename S, int kTerms>
__device__ __forceinline__ void add_columns(float (&sum)[S::kTiles][4], std::uint32_t tile,
                                            const float (&weight)[kOwned], int head, int lane) {
  if constexpr (!S::kFloat) {
    const std::uint32_t b0 = pack_pair<typename S::T>(weight[0], weight[1]);
    const std::uint32_t b1 = pack_pair<typename S::T>(weight[2], weight[3]);
#pragma unroll
    for (int f = head * S::kHeadTiles; f < (head + 1) * S::kHeadTiles; ++f) {
      std::uint32_t a[4];
      load_matrices_transposed(a, matrix_address<S>(tile, 2 * f, lane));
      mma_m16n8k16<typename S::T>(sum[f], a, b0, b1);
    }
  } else {
    const int g = lane / 4, t = lane % 4;
    std::uint32_t b[kOwned], b_low[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) split_tf32<kTerms>(weight[i], b[i], b_low[i]);
#pragma unroll
    for (int f = head * S::kHeadTiles; f < (head + 1) * S::kHeadTiles; f += 2) {
      float fresh[2][4] = {};  // added at once, as ordinary additions round to nearest
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

// Feature of a tile's row that sum[f][i] belongs to; its own row is 2t + i % 2.
template <typename S>
__device__ __forceinline__ int feature_of(int f, int i, int g) {
  return S::kFloat ? 32 * (f / 2) + 4 * g + 2 * (f % 2) + i / 2 : 16 * f + 8 * (i / 2) + g;
}

// ---------------------------------------------------------------- results

// Where results of a window go: heads first_head.. of a (rows, heads * head_width) matrix.
struct Target {
  void* data;
  std::int64_t heads;
  std::int64_t head_width;
};

// Rows that this warp alone computes: through shared memory, to be stored in whole pieces.
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
    *reinterpret_cast<uint4*>(const_cast<char*>(out.address()) +
                              out.offset(static_cast<std::uint32_t>(row), part)) =
        load_shared(scratch + where);
  });
  __syncwarp();
}

// Partial sums (num_slots, 8, heads * head_width) of a window that several warps compute.
template <typename S>
__device__ __forceinline__ void store_partial(const Target& target, const float (&sum)[S::kTiles][4],
                                              std::int64_t slot, std::int64_t first_head, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int f = 0; f < S::kTiles; ++f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int feature = feature_of<S>(f, i, g);
      const std::int64_t head = first_head + feature / S::kHeadWidth;
      const int inner = feature % S::kHeadWidth;
      if (head >= target.heads || inner >= target.head_width) continue;
      static_cast<float*>(target.data)[((slot * kRows + 2 * t + i % 2) * target.heads + head) *
                                           target.head_width +
                                       inner] = sum[f][i];
    }
  }
}

// ---------------------------------------------------------------- entries

// The entries (row g, vectors 4t .. 4t + 3) of a block, for what belongs to an edge: a bias, a random number.
struct Entries {
  std::uint32_t word[kOwned];
  __device__ __forceinline__ Entries(std::uint32_t from) {
    const uint4 words = load_shared(from);
    word[0] = words.x, word[1] = words.y, word[2] = words.z, word[3] = words.w;
  }
  __device__ __forceinline__ bool present(int i, int g) const { return (word[i] >> (24 + g)) & 1u; }
  __device__ __forceinline__ std::uint32_t column(int i) const { return word[i] & 0xffffffu; }
};

// Positions of the entries among the edge values: they are stored by block, vector, row, so a place is a
// count of the bits before it.
__device__ __forceinline__ void value_positions(std::int64_t (&position)[kOwned], const Entries& entries,
                                                const BsbView& a, std::int64_t block, int lane) {
  const int g = lane / 4, t = lane % 4;
  int own = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) own += __popc(entries.word[i] >> 24);
  int before = own;
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const int left = __shfl_up_sync(kFullWarp, before, distance, 4);
    if (t >= distance) before += left;
  }
  std::int64_t entry = a.block_entry[block] + before - own;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const std::uint32_t mask = entries.word[i] >> 24;
    if (entries.present(i, g)) {
      const std::int64_t at = entry + __popc(mask & ((1u << g) - 1));
      position[i] = a.value_id_is_64bit ? static_cast<const std::int64_t*>(a.value_id)[at]
                                        : static_cast<const std::int32_t*>(a.value_id)[at];
    }
    entry += __popc(mask);
  }
}

// Bias of an entry and head in powers of two; 0 where there is none.
template <typename S>
__device__ __forceinline__ float bias_of(const AttentionBsbInput& input, const Entries& entries, int i, int g,
                                         std::int64_t position, std::int64_t head) {
  if (input.bias.data == nullptr || !entries.present(i, g) || head >= input.heads) return 0;
  return kLog2E * load_value<typename S::T>(input.bias, input.bias.dtype == input.dtype,
                                            position * input.heads + head);
}

// The block's vectors to shared memory, where every thread finds its own four.
__device__ __forceinline__ void store_words(std::uint32_t to, const uint4& word, int lane) {
  if (lane % 8 == 0) store_shared(to + lane / 8 * 16, word);
}

// ---------------------------------------------------------------- launching

// Lets a kernel use `bytes` of shared memory per block, and the multiprocessor give it most of its L1.
template <typename Kernel>
cudaError_t prepare_kernel(Kernel* kernel, int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                 cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess || bytes <= 48 * 1024) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

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

// Calls launch.run<Shape, TF32 terms>() with the narrowest shape that holds the heads; false where none does.
template <typename Launch>
bool with_shape(const AttentionBsbInput& input, Launch& launch) {
  const std::int64_t width =
      input.head_width > input.value_width ? input.head_width : input.value_width;
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
