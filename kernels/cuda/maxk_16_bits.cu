// MaxK of 16-bit numbers, up to 1024 columns: exactly the k largest entries of every row, found bit by bit.
//
// A team of 4, 8 or 16 lanes handles a row. Every four lanes have 128 columns. Lane 4 h + q (q = 0 .. 3) has
// four pieces (i = 0 .. 3) of 8 columns, or 16 bytes:
//
//     columns 128 h + 32 i + 8 q, ..., + 7
//
// If kWords = 2, every lane has the same number of columns again, after the columns of all lanes. Four lanes
// load 64 consecutive bytes at once. Entries become integers that have the same order (-0 becomes +0, and NaN
// the largest integer), and the 32 entries of a lane become 16 words, one for each bit (bit_matrix.cuh).
//
// The bits are examined from the highest to the lowest. In each step, the candidates that have the bit set
// are counted. If there are enough, only these remain candidates. Otherwise they are kept, and the candidates
// without the bit remain. The last candidates are equal, and the first of them fill the row. That takes 16
// steps for any numbers, and no row waits for another row.
//
// For float32, a search by pivots takes seven counts (simulated). But for bfloat16, in 35 to 56 % of the
// warps with four rows of 256 normally distributed numbers, the k-th largest entry of some row equals another
// entry. Then no pivot separates exactly k entries, equal entries must be ranked, and the team's next search
// has no first guess.
//
// Four lanes transpose bytes to get the kept columns as words of bits: lane l has word l, that is, columns
// 32 l .. 32 l + 31 (if kWords = 2, also word l + number of lanes). For a dense result, the row is read
// again, from the L1 cache, and written with 0 for entries that are not kept. For values and ids, only the
// kept entries are read again, at ids that went through shared memory.
//
// The floor is the memory traffic: num_rows * (width * 2 + k * (2 + id)) bytes, or for dense rows num_rows *
// (width * 4 + width / 8). Instructions per warp for eight rows of 256 with dense results, counted in the
// machine code for sm_90: 1043, 670 of them for the selection.

#include <algorithm>
#include <type_traits>

#include "fastsparse/bit_matrix.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/maxk_16_bits.cuh"

namespace fastsparse::cuda {
namespace maxk_16_bits_detail {

constexpr int kThreads = 128;
constexpr int kBlocks = 8;  // blocks per SM
constexpr int kPieces = 4;  // pieces of a lane whose columns share the words of bits
constexpr int kPiece = 8;   // columns per piece, 16 bytes
constexpr int kApart = 32;  // columns from one piece of a lane to the next
constexpr int kRegisters = kPieces * kPiece / 2;

using Bits = std::uint16_t;  // an entry

// Adds 0 to a pair of entries: -0 becomes +0, and every NaN becomes the NaN with the bits 0x7fff.
template <typename T>
__device__ __forceinline__ unsigned plus_zero(unsigned pair) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(0x3c003c00u), "r"(0u));
  } else {
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(0x3f803f80u), "r"(0u));
  }
  return pair;
}

// Reads the columns of kPieces pieces, as pairs. `from` is the address of the lane's first column, and `left`
// the number of columns from there to the row's end. Columns beyond the end are 0.
template <bool kAligned>
__device__ __forceinline__ void load_columns(const Bits* from, int left, unsigned (&pairs)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int first = i * kApart;
    if constexpr (kAligned) {
      uint4 piece{0, 0, 0, 0};
      if (first < left) piece = __ldg(reinterpret_cast<const uint4*>(from + first));
      memcpy(pairs + i * kPiece / 2, &piece, sizeof piece);
    } else {
#pragma unroll
      for (int j = first; j < first + kPiece; j += 2) {
        const unsigned even = j < left ? from[j] : Bits{0}, odd = j + 1 < left ? from[j + 1] : Bits{0};
        pairs[(i * kPiece + j - first) / 2] = even | odd << 16;
      }
    }
  }
}

// Writes the columns of kPieces pieces, with 0 for columns whose bits are not set in `kept`.
template <bool kAligned>
__device__ __forceinline__ void store_kept(unsigned (&pairs)[kRegisters], unsigned kept, int left, Bits* to) {
  const unsigned halves = evens_first(kept);
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    pairs[i] &= signs_of_halves(halves << (15 - i));
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int first = i * kApart;
    if constexpr (kAligned) {
      Pack<unsigned, kPiece / 2> pack;
      memcpy(&pack, pairs + i * kPiece / 2, sizeof pack);
      if (first < left) store_pack(pack, reinterpret_cast<unsigned*>(to + first));
    } else {
#pragma unroll
      for (int j = first; j < first + kPiece; ++j) {
        if (j < left) to[j] = static_cast<Bits>(pairs[(i * kPiece + j - first) / 2] >> (j % 2 * 16));
      }
    }
  }
}

template <int kLanes, int kWords>
struct Team {
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  static __device__ __forceinline__ int sum(int v) {
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) v += __shfl_xor_sync(kFullWarp, v, offset);
    return v;
  }

  // For each word of this lane, counts the set bits in the words of the row that come before it.
  static __device__ __forceinline__ void ranks(const unsigned (&words)[kWords], int (&before)[kWords]) {
    unsigned counts = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) counts |= static_cast<unsigned>(__popc(words[w])) << (16 * w);
    unsigned sums = counts;
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      const unsigned other = __shfl_up_sync(kFullWarp, sums, offset, kLanes);
      if (lane() >= offset) sums += other;
    }
    before[0] = static_cast<int>((sums - counts) & 0xffffu);
    if constexpr (kWords == 2) {
      const unsigned all = __shfl_sync(kFullWarp, sums, kLanes - 1, kLanes);
      before[1] = static_cast<int>(((sums - counts) >> 16) + (all & 0xffffu));
    }
  }
};

// Finds the columns of a row that are kept. Bit b of word w stands for column 32 * (w * kLanes + lane) + b.
template <typename T, int kLanes, int kWords, bool kAligned>
__device__ __forceinline__ void kept_columns(const Bits* from, int column, int width, int k,
                                             unsigned (&kept)[kWords]) {
  using OfTeam = Team<kLanes, kWords>;
  unsigned planes[kWords][kRegisters], left[kWords];  // left: bits of the remaining candidates
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    load_columns<kAligned>(from + w * kLanes * kApart, width - column - w * kLanes * kApart, planes[w]);
    left[w] = transposed_bytes(first_bits(width - (w * kLanes + OfTeam::lane()) * kApart));
    kept[w] = 0;
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) planes[w][i] = plus_zero<T>(planes[w][i]);
    bit_planes(planes[w]);
  }
  int remaining = k;
#pragma unroll
  for (int bit = 15; bit >= 0; --bit) {
    unsigned ones[kWords];
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const unsigned sign = planes[w][plane_of(15)];
      // Bits that sort like the numbers: the sign bit is always inverted, the other bits only for negative
      // numbers.
      ones[w] = left[w] & (bit == 15 ? ~sign : planes[w][plane_of(bit)] ^ sign);
      count += __popc(ones[w]);
    }
    count = OfTeam::sum(count);
    const bool enough = count >= remaining;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      kept[w] |= enough ? 0u : ones[w];
      left[w] = enough ? ones[w] : left[w] ^ ones[w];
    }
    remaining -= enough ? 0 : count;
  }
  int before[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    kept[w] = transposed_bytes(kept[w]);
    left[w] = transposed_bytes(left[w]);
  }
  OfTeam::ranks(left, before);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    // The candidates are equal, so those in higher columns are dropped.
    const int count = __popc(left[w]);
#pragma unroll 1
    for (int kept_of = max(remaining - before[w], 0); kept_of < count; ++kept_of) {
      left[w] ^= 0x80000000u >> __clz(static_cast<int>(left[w]));
    }
    kept[w] |= left[w];
  }
}

// Writes kept entries, kOut entries per lane at once.
template <int kLanes, int kOut, typename Id>
__device__ __forceinline__ void write_entries(const Bits* row, const Id* staged, int lane, int k,
                                              Bits* values, Id* ids) {
#pragma unroll 1
  for (int i = lane * kOut; i < k; i += kLanes * kOut) {
    const auto id = *reinterpret_cast<const Pack<Id, kOut>*>(staged + i);
    Pack<Bits, kOut> value;
#pragma unroll
    for (int j = 0; j < kOut; ++j) value.lane[j] = __ldg(row + id.lane[j]);
    store_pack(value, values + i);
    store_pack(id, ids + i);
  }
}

template <typename T, int kLanes, int kWords, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks) bits_kernel(const MaxkArgs args, bool in_quads) {
  using Id = std::conditional_t<kLanes == 4, std::uint8_t, std::uint16_t>;
  using OfTeam = Team<kLanes, kWords>;
  extern __shared__ int4 shared[];  // (teams of the block, k) ids
  constexpr int kTeams = kThreads / kLanes;
  const int lane = OfTeam::lane(), width = static_cast<int>(args.width), k = static_cast<int>(args.k);
  // All lanes of a warp stay active: teams beyond the last row process the last row again.
  const std::int64_t index =
      min(static_cast<std::int64_t>(blockIdx.x) * kTeams + threadIdx.x / kLanes, args.num_rows - 1);
  const Bits* row = static_cast<const Bits*>(args.x.data) + index * args.x.stride;
  const int column = lane / 4 * (4 * kApart) + lane % 4 * kPiece;
  unsigned kept[kWords];
  kept_columns<T, kLanes, kWords, kAligned>(row + column, column, width, k, kept);
  if (args.out != nullptr) {
    const int num_words = (width + 31) / 32;
    unsigned* words = args.kept + index * num_words;
    const Bits* from = row + column;
    Bits* to = static_cast<Bits*>(args.out) + index * width + column;
    asm volatile(""
                 : "+l"(from));  // forces another read, from the L1 cache, because registers hold the planes
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int block = w * kLanes * kApart;
      if (w * kLanes + lane < num_words) words[w * kLanes + lane] = kept[w];
      unsigned pairs[kRegisters];
      load_columns<kAligned>(from + block, width - column - block, pairs);
      store_kept<kAligned>(pairs, transposed_bytes(kept[w]), width - column - block, to + block);
    }
    return;
  }
  Id* staged = reinterpret_cast<Id*>(shared) + threadIdx.x / kLanes * k;
  int before[kWords];
  OfTeam::ranks(kept, before);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    Id* to = staged + before[w];
#pragma unroll 1
    for (unsigned bits = kept[w]; bits != 0; bits &= bits - 1) {
      *to++ = static_cast<Id>((w * kLanes + lane) * kApart + __ffs(static_cast<int>(bits)) - 1);
    }
  }
  __syncwarp();
  Bits* values = static_cast<Bits*>(args.values) + index * k;
  Id* ids = static_cast<Id*>(args.ids) + index * k;
  in_quads ? write_entries<kLanes, 4>(row, staged, lane, k, values, ids)
           : write_entries<kLanes, 1>(row, staged, lane, k, values, ids);
}

template <typename T, int kLanes, int kWords>
void launch(const MaxkArgs& args, cudaStream_t stream) {
  constexpr int kTeams = kThreads / kLanes;
  const bool dense = args.out != nullptr;
  const std::size_t id_bytes = kLanes == 4 ? 1 : 2;
  const std::size_t shared = dense ? 0 : kTeams * static_cast<std::size_t>(args.k) * id_bytes;
  const unsigned grid = ceil_div(args.num_rows, kTeams);
  const bool aligned = vector_width<Bits>({args.width, args.x.stride}, {args.x.data, args.out}) == kPiece;
  const auto divides = [](std::size_t bytes, const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  const bool in_quads =
      args.k % 4 == 0 && divides(4 * sizeof(Bits), args.values) && divides(4 * id_bytes, args.ids);
  if (aligned) {
    bits_kernel<T, kLanes, kWords, true><<<grid, kThreads, shared, stream>>>(args, in_quads);
  } else {
    bits_kernel<T, kLanes, kWords, false><<<grid, kThreads, shared, stream>>>(args, in_quads);
  }
}

}  // namespace maxk_16_bits_detail

template <typename T>
void maxk_16_bits(const MaxkArgs& args, cudaStream_t stream) {
  using namespace maxk_16_bits_detail;
  if (args.width <= 128) {
    launch<T, 4, 1>(args, stream);
  } else if (args.width <= 256) {
    launch<T, 4, 2>(args, stream);
  } else if (args.width <= 512) {
    launch<T, 8, 2>(args, stream);
  } else {
    launch<T, 16, 2>(args, stream);
  }
}

template void maxk_16_bits<__half>(const MaxkArgs&, cudaStream_t);
template void maxk_16_bits<__nv_bfloat16>(const MaxkArgs&, cudaStream_t);

}  // namespace fastsparse::cuda
