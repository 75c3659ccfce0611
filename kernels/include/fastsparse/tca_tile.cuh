// The matricised dot product of TCA-SpMM (section 4.1) on mma m16n8k8, straight from CSR.
//
// A slot is 4 kPieces kChunks lanes, lane = 4 g + t of its warp. They sum the entries of one row for
// 8 kPieces features, 8 kChunks entries at a time: the lanes of one g own the 8 entries of one chunk and one
// piece of 8 features (16 bytes), lane t of them entries 2t and 2t + 1. Lanes of one chunk gather
// neighbouring pieces, so that a row of x is read in runs of 16 kPieces bytes.
//
// A product takes feature f in rows 0-7 of A and f + 1 in rows 8-15, one row for each g, and the weights of
// the entries of g in column g of B. Entry (g, g) of the result is then the dot product of g's entries, all
// others are of no use. Sums stay there until the row is done; only then is the trace taken, over the g of
// one slot that have the same piece. kPieces = 1, kChunks = 8 is the paper's 8x8 matrix of 64 non-zeros;
// (2, 4), (4, 2) and (8, 1) are its packings of 32, 16 and 8 non-zeros; kPieces kChunks < 8 packs rows.
#pragma once

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/mma.cuh"

namespace fastsparse::cuda {

// What a tile needs to know of a call.
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

template <typename T, int kPieces, int kChunks>
struct TcaTile {
  static constexpr int kSlotLanes = 4 * kPieces * kChunks;
  static constexpr int kStep = 8 * kChunks;  // entries per product
  static constexpr int kSteps = 4;           // products per batch: eight 16-byte loads in flight per lane
  static constexpr int kBatch = kStep * kSteps;
  static constexpr int kWidth = 8 * kPieces;  // features
  // Of the 2 kSteps entries that the lanes of one chunk and one t share, each reads so many.
  static constexpr int kOwn = 2 * kSteps / kPieces;
  // Batches in a sum before it moves to a total: tensor cores round sums towards zero, so that their error
  // grows with the number of products.
  static constexpr int kBatchesPerSum = 16;

  int lane, t, piece, chunk;

  __device__ __forceinline__ TcaTile()
      : lane(threadIdx.x % kWarp),
        t(lane % 4),
        piece(lane / 4 % kPieces),
        chunk(lane / (4 * kPieces) % kChunks) {}

  // First of the two features that `sum` leaves in this lane, of the tile.
  __device__ __forceinline__ int feature() const { return 8 * piece + 2 * t; }

  // Which lane of the slot has the result: one of every kChunks.
  __device__ __forceinline__ bool has_result() const { return chunk == 0; }

  // Sums entries [begin + first, begin + length), kBatch of every `stride`, of the features from `feature0`
  // on. Called by whole warps; slots may differ in all but `feature0` and `stride`.
  __device__ __forceinline__ void sum(const TileArgs& args, std::int64_t feature0, std::int64_t width,
                                      std::int64_t begin, int first, int length, int stride,
                                      float (&result)[2]) const {
    const std::int64_t my_feature = feature0 + 8 * piece;
    const bool inside = my_feature < width;
    const T* x = static_cast<const T*>(args.x.data) + (inside ? my_feature : 0);
    const int* columns = args.a.col + begin;
    const bool weighted = args.value.data != nullptr || args.scale_src != nullptr;
    // Batches of this slot, and the most of any slot of the warp, which all take part in the products.
    int left = length - first;
    if constexpr (kSlotLanes < kWarp) left = __reduce_max_sync(kFullWarp, left);

    float sums[4][4] = {};
    float total[8] = {};
    int next[kOwn];
    load_columns(columns, first, length, next);
    for (int batch = 0; left > 0; ++batch, left -= stride, first += stride) {
      int own[kOwn];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) own[j] = next[j];
      uint4 gathered[2 * kSteps];
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const int col = from_owner(own[i % kOwn], i);
        gathered[i] = uint4{0, 0, 0, 0};  // of no entry: zero times a weight of zero
        if (col >= 0 && inside) {
          gathered[i] = __ldg(reinterpret_cast<const uint4*>(x + col * args.x.stride));
        }
      }

      load_columns(columns, first + stride, length, next);

      std::uint32_t weights[kSteps];
      if (weighted) {
        float own_weight[kOwn];
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          own_weight[j] =
              own[j] >= 0 ? entry_weight<T>(args, begin + first + offset(piece * kOwn + j), own[j]) : 0.0f;
        }
        share_weights(own_weight, weights);
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) weights[s] = bits_of<T>(1.0f) * 0x10001u;
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s > 0 && s * kStep >= left) break;
        multiply(gathered[2 * s], gathered[2 * s + 1], weights[s], sums);
      }
      if (batch % kBatchesPerSum == kBatchesPerSum - 1) flush(sums, total);
    }
    flush(sums, total);
    trace(total, result);
  }

 private:
  // Place in a batch of the i-th of the entries that this lane multiplies.
  __device__ __forceinline__ int offset(int i) const { return i / 2 * kStep + 8 * chunk + 2 * t + i % 2; }

  // Columns of the entries that this lane reads for all that share them; -1: none.
  __device__ __forceinline__ void load_columns(const int* columns, int first, int length,
                                               int (&own)[kOwn]) const {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int entry = first + offset(piece * kOwn + j);
      own[j] = entry < length ? __ldg(columns + entry) : -1;
    }
  }

  // What the lane that reads the i-th entry has of it.
  template <typename V>
  __device__ __forceinline__ V from_owner(V own, int i) const {
    if constexpr (kPieces == 1) return own;
    const int source = (lane & ~(4 * (kPieces - 1))) | (i / kOwn * 4);
    return __shfl_sync(kFullWarp, own, source);
  }

  // The weights of entries 2t and 2t + 1 of every step, rounded to 16 bits.
  __device__ __forceinline__ void share_weights(const float (&own)[kOwn],
                                                std::uint32_t (&weights)[kSteps]) const {
    if constexpr (kOwn == 1) {
      const std::uint32_t mine = bits_of<T>(own[0]);
      const std::uint32_t other = __shfl_xor_sync(kFullWarp, mine, 4);
      const std::uint32_t pair = mine | other << 16;  // as even pieces need it, the only ones that are asked
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

  // Eight features of two entries.
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

  // Adds the column of this lane's g to the totals: of use in one of its four lanes.
  __device__ __forceinline__ void flush(float (&sums)[4][4], float (&total)[8]) const {
    const bool odd = lane / 4 % 2 == 1;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      total[2 * pair] += odd ? sums[pair][1] : sums[pair][0];
      total[2 * pair + 1] += odd ? sums[pair][3] : sums[pair][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[pair][i] = 0;
    }
  }

  // Hands two features to each lane of a g, then adds the chunks.
  __device__ __forceinline__ void trace(const float (&total)[8], float (&result)[2]) const {
    const int diagonal = (lane & ~3) | (lane / 8);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float even = __shfl_sync(kFullWarp, total[2 * pair], diagonal);
      const float odd = __shfl_sync(kFullWarp, total[2 * pair + 1], diagonal);
      if (t == pair) {
        result[0] = even;
        result[1] = odd;
      }
    }
#pragma unroll
    for (int other = 4 * kPieces; other < kSlotLanes; other *= 2) {
      result[0] += __shfl_xor_sync(kFullWarp, result[0], other);
      result[1] += __shfl_xor_sync(kFullWarp, result[1], other);
    }
  }
};

}  // namespace fastsparse::cuda
