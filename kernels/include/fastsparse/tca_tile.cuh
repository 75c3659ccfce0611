// The matricised dot product of TCA-SpMM (section 4.1) with mma m16n8k8. It reads CSR.
//
// The entries of a row form an 8x8 matrix. Multiplied by the features of these entries, it gives a matrix
// whose trace is the row's dot product. In registers (lane = 4 g + t), lane (g, t) gathers 16 bytes, 8
// features, of two entries. One product takes one of these features in rows 0-7 of A, the next feature in
// rows 8-15, and the entries' weights in B. Element (g, g) of the result is a dot product of 8 entries; the
// other elements are not used. Sums stay in the result until the row is done, and only then is the trace
// computed.
//
// Each element of row g of A may be a feature of any entry, if the same element of column g of B is the
// weight of this entry. Here, the lanes of one entry gather neighbouring pieces of 8 features, so that eight
// lanes read up to 128 consecutive bytes of a row of x. g numbers one of kChunks chunks of entries and one of
// kRowPieces pieces; t numbers one of kLanePieces pieces. The product sums over t, so zeros in B keep the
// pieces of different t apart: lane (g, t) gives its weights only if column g stands for its piece. The
// packings of the paper (section 4.2: 4, 8 or 16 features of 32, 16 or 8 entries) do the same in g alone.
// Chunks of one warp may belong to different rows.
#pragma once

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/mma.cuh"

namespace fastsparse::cuda {

// The arguments of a call that a tile reads.
struct TileArgs {
  CsrView a;
  EdgeValueView value;
  const float* scale_src;  // null: 1
  DenseView x;
  bool value_in_feature_dtype;
};

template <typename T>
__device__ __forceinline__ float entry_weight(const TileArgs& args, std::int64_t entry, int col) {
  float weight = 1;
  if (args.value.data != nullptr) {
    weight = load_value<T>(args.value, args.value_in_feature_dtype, edge_position(args.a, entry));
  }
  if (args.scale_src != nullptr) weight *= __ldg(args.scale_src + col);
  return weight;
}

template <typename T>
__device__ __forceinline__ std::uint32_t bits_of(float v) {
  const T narrowed = narrow<T>(v);
  std::uint16_t bits;
  memcpy(&bits, &narrowed, sizeof bits);
  return bits;
}

// kLanePieces <= kRowPieces. A slot is a group of 4 kRowPieces kChunks lanes of a warp that sum one row.
template <typename T, int kLanePieces, int kRowPieces, int kChunks>
struct TcaTile {
  static constexpr int kPieces = kLanePieces * kRowPieces;
  static constexpr int kWidth = 8 * kPieces;  // number of features
  static constexpr int kSlotLanes = 4 * kRowPieces * kChunks;
  static constexpr int kChunk = 8 / kLanePieces;  // number of entries of a chunk in one product
  static constexpr int kStep = kChunk * kChunks;  // number of entries of a slot in one product
  static constexpr int kSteps = 4;                // products per batch: eight 16-byte loads per lane
  static constexpr int kBatch = kStep * kSteps;
  static constexpr int kResult = 2 * kLanePieces;  // number of features whose sums `sum` leaves in a lane
  // The lanes of a chunk gather 2 kSteps entries together; each lane reads the columns of kOwn of them.
  static constexpr int kOwn = kPieces < 2 * kSteps ? 2 * kSteps / kPieces : 1;
  // Number of batches after which a sum is added to a total: tensor cores round sums towards zero, so the
  // error of a sum grows with the number of products.
  static constexpr int kBatchesPerSum = 32;

  int lane, piece, chunk, nth;  // piece, chunk and pair of entries (of the chunk) that this lane gathers
  bool in_column;               // whether this lane's piece is the one that column g of B stands for

  __device__ __forceinline__ TcaTile() : lane(threadIdx.x % kWarp) {
    const int g = lane / 4, t = lane % 4;
    piece = g % kRowPieces * kLanePieces + t % kLanePieces;
    chunk = g / kRowPieces % kChunks;
    nth = t / kLanePieces;
    in_column = t % kLanePieces == g % kRowPieces;
  }

  // The first feature of the tile whose result `sum` returns in this lane.
  __device__ __forceinline__ int feature() const { return 8 * piece + kResult * nth; }

  // True in the lanes in which `sum` returns results: those of the first of every kChunks chunks.
  __device__ __forceinline__ bool has_result() const { return chunk == 0; }

  // Sums entries [begin + first, begin + length) over the features from `feature0` on: of every `stride`
  // entries, the first kBatch. Whole warps call this; `feature0`, `width` and `stride` must be the same in
  // all slots.
  __device__ __forceinline__ void sum(const TileArgs& args, std::int64_t feature0, std::int64_t width,
                                      std::int64_t begin, int first, int length, int stride,
                                      float (&result)[kResult]) const {
    // Lanes beyond the width gather other features. Entries beyond the row read its last entry again, with a
    // weight of zero. So all addresses are valid, and loads need no tests.
    const std::int64_t my_feature = feature0 + 8 * piece;
    const char* x = reinterpret_cast<const char*>(static_cast<const T*>(args.x.data) +
                                                  (my_feature < width ? my_feature : 0));
    // The caller checks that rows are less than 4 GB apart.
    const auto row_bytes = static_cast<std::uint32_t>(args.x.stride * sizeof(T));
    const int* columns = args.a.col + begin;
    const int padding = length > 0 ? __ldg(columns + length - 1) : 0;
    const bool weighted = args.value.data != nullptr || args.scale_src != nullptr;
    // Number of remaining entries of this slot, then the largest number in any slot of the warp, because all
    // lanes take part in the products.
    const int first_of_all = first;
    int left = length - first;
    if constexpr (kSlotLanes < kWarp) left = __reduce_max_sync(kFullWarp, left);

    float sums[4][4] = {};
    float total[4][4] = {};
    int next[kOwn];
    load_columns(columns, first, length, padding, next);
    for (int batch = 1; left > 0; ++batch, left -= stride, first += stride) {
      int own[kOwn];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) own[j] = next[j];
      std::uint32_t col[2 * kSteps];
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) col[i] = from_owner(own[i % kOwn], i);
      uint4 gathered[2 * kSteps];
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        if (i / 2 * kStep >= left) break;
        gathered[i] = __ldg(reinterpret_cast<const uint4*>(x + std::uint64_t{col[i]} * row_bytes));
      }
      load_columns(columns, first + stride, length, padding, next);

      std::uint32_t weights[kSteps];
      if (weighted) {
        float own_weight[kOwn];
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          const int entry = first + owned(j);
          own_weight[j] = entry < length ? entry_weight<T>(args, begin + entry, own[j]) : 0.0f;
        }
        share_weights(own_weight, weights);
      } else {
        const std::uint32_t one = bits_of<T>(1.0f);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          weights[s] = (first + offset(2 * s) < length ? one : 0) |
                       (first + offset(2 * s + 1) < length ? one << 16 : 0);
        }
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s * kStep >= left) break;
        multiply(gathered[2 * s], gathered[2 * s + 1], in_column ? weights[s] : 0, sums);
      }
      if (batch % kBatchesPerSum == 0) flush(sums, total);
    }
    flush(sums, total);
    trace(total, result);
    // A zero in B times infinity (of padding or of another piece) is NaN. So results that are not finite are
    // computed again without tensor cores.
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kResult; ++i) finite = finite && isfinite(result[i]);
    if (!finite && my_feature < width) {
      sum_plainly(args, feature0 + feature(), begin, first_of_all, length, stride, result);
    }
  }

  // The functions below are parts of `sum`.

  // Computes this lane's result without tensor cores, entry by entry.
  __device__ __forceinline__ static void sum_plainly(const TileArgs& args, std::int64_t feature,
                                                     std::int64_t begin, int first, int length, int stride,
                                                     float (&result)[kResult]) {
#pragma unroll
    for (int i = 0; i < kResult; ++i) result[i] = 0;
#pragma unroll 1
    for (; first < length; first += stride) {
#pragma unroll 1
      for (int entry = first; entry < min(first + kBatch, length); ++entry) {
        const int col = args.a.col[begin + entry];
        const float weight = widen(narrow<T>(entry_weight<T>(args, begin + entry, col)));
        const T* x = static_cast<const T*>(args.x.data) + col * args.x.stride + feature;
#pragma unroll
        for (int i = 0; i < kResult; ++i) result[i] += weight * widen(x[i]);
      }
    }
  }

  // The index in a batch of the i-th entry that this lane multiplies.
  __device__ __forceinline__ int offset(int i) const {
    return i / 2 * kStep + chunk * kChunk + 2 * nth + i % 2;
  }

  // The index in a batch of the j-th entry whose column and weight this lane reads.
  __device__ __forceinline__ int owned(int j) const { return offset(piece * kOwn % (2 * kSteps) + j); }

  // Loads the columns that this lane reads for all lanes of its chunk.
  __device__ __forceinline__ void load_columns(const int* columns, int first, int length, int padding,
                                               int (&own)[kOwn]) const {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int entry = first + owned(j);
      own[j] = entry < length ? __ldg(columns + entry) : padding;
    }
  }

  // The value of the i-th entry, from the lane that has read it.
  template <typename V>
  __device__ __forceinline__ V from_owner(V own, int i) const {
    if constexpr (kPieces == 1) return own;
    const int owner = i / kOwn;
    const int source = lane / (4 * kRowPieces) * (4 * kRowPieces) + owner / kLanePieces * 4 +
                       nth * kLanePieces + owner % kLanePieces;
    return __shfl_sync(kFullWarp, own, source);
  }

  // The weights of a lane's two entries of every step, rounded to 16 bits.
  __device__ __forceinline__ void share_weights(const float (&own)[kOwn],
                                                std::uint32_t (&weights)[kSteps]) const {
    if constexpr (kOwn == 1) {
      static_assert(kLanePieces > 1, "the other entry of a pair is read by the next lane");
      const std::uint32_t mine = bits_of<T>(own[0]);
      const std::uint32_t other = __shfl_xor_sync(kFullWarp, mine, 1);
      const std::uint32_t pair = mine | other << 16;  // correct for even pieces; only those are read
#pragma unroll
      for (int s = 0; s < kSteps; ++s) weights[s] = from_owner(pair, 2 * s);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int j = 2 * s % kOwn;
        weights[s] = from_owner(bits_of<T>(own[j]) | bits_of<T>(own[j + 1]) << 16, 2 * s);
      }
    }
  }

  // Multiplies eight features of two entries.
  __device__ __forceinline__ static void multiply(const uint4& even, const uint4& odd, std::uint32_t weights,
                                                  float (&sums)[4][4]) {
    const std::uint32_t a[4] = {even.x, even.y, even.z, even.w};
    const std::uint32_t b[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      mma_m16n8k8<T>(sums[pair], __byte_perm(a[pair], b[pair], 0x5410), __byte_perm(a[pair], b[pair], 0x7632),
                     weights);
    }
  }

  __device__ __forceinline__ static void flush(float (&sums)[4][4], float (&total)[4][4]) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[pair][i] += sums[pair][i];
        sums[pair][i] = 0;
      }
    }
  }

  // Fetches the results of row g and of the column that stands for this lane's piece, then adds the sums of
  // all chunks.
  __device__ __forceinline__ void trace(const float (&total)[4][4], float (&result)[kResult]) const {
    const int column = lane / (4 * kRowPieces) * kRowPieces + piece % kLanePieces;
    const int source = (lane & ~3) | (column / 2);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float even = __shfl_sync(kFullWarp, total[pair][2 * half], source);
        const float odd = __shfl_sync(kFullWarp, total[pair][2 * half + 1], source);
        if (nth == 2 * pair / kResult) {
          result[2 * pair % kResult + half] = column % 2 == 0 ? even : odd;
        }
      }
    }
#pragma unroll
    for (int other = 4 * kRowPieces; other < kSlotLanes; other *= 2) {
#pragma unroll
      for (int i = 0; i < kResult; ++i) result[i] += __shfl_xor_sync(kFullWarp, result[i], other);
    }
  }
};

}  // namespace fastsparse::cuda
