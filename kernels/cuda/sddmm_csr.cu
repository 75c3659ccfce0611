// Sampled dense-dense product from CSR on CUDA cores. Floors, for E entries and H heads of width D: E * H * D
// * sizeof(T) bytes gathered, E * H * sizeof(out) bytes written, 4 E or 8 E bytes read (columns, and rows if
// they are short), 2 E H D flops.
//
// Entry by entry, if features start at multiples of 16 bytes: 4 to 32 lanes handle 4 or 8 consecutive entries
// of any rows. They have the features of all their sources in flight at once, 16 bytes per lane. No slice is
// read before the entries, no lanes are idle on short rows, and results are written coalesced. Sums over
// lanes are transposed: in each step, each half of the lanes continues with half of the sums, so 8 sums over
// 8 lanes take 7 shuffles instead of 24.
//   - If rows have at least as many entries as a warp handles, a warp's entries often share a row, whose
//     features are read once.
//   - In shorter rows, each entry reads the features of its row, mostly from the L1 cache.
//
// Otherwise row by row: a group of 8 or 32 lanes handles one slice of a row, reads the row's features (they
// stay in the L1 cache) and gathers 4 neighbours at a time.

#include <initializer_list>
#include <type_traits>

#include "fastsparse/bsb.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace sddmm_csr_detail {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEntriesInFlight = 4;
// Entries per group of lanes. More entries would need too many registers for heads that take several steps,
// and would be slower in short rows of 16-bit features.
template <typename T, bool kLoop, bool kLong>
constexpr int kEntries = kLoop || sizeof(T) == 8 || (sizeof(T) == 2 && !kLong) ? 4 : 8;
// Number of blocks per multiprocessor, so that each block has enough registers.
template <typename T, bool kLong>
constexpr int kResident = sizeof(T) == 2 ? (kLong ? 7 : 8) : (sizeof(T) == 4 && kLong ? 8 : 5);
// In structures of more entries than this, a block handles consecutive entries for several rounds, so that
// the L1 cache has the sources that neighbouring rows share (float32, F = 128, 115 million entries: 6.4 ms
// instead of 7.6). Smaller structures would leave multiprocessors idle.
constexpr std::int64_t kManyEntries = 50'000'000;
constexpr int kRounds = 8;

template <typename T, int kVec, int kLanes>
__global__ void __launch_bounds__(kThreads, 8) sddmm_csr_kernel(const SddmmArgs args) {
  using A = Acc<T>;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const RowSlice slice = load_slice(args.split, group);
  // All lanes of a warp loop together, because they shuffle.
  const int longest = __reduce_max_sync(kFullWarp, slice.length);
  const std::int64_t row = slice.length > 0 ? row_of(args.split, slice) : 0;
  const std::int64_t head = blockIdx.y;
  const T* dst = static_cast<const T*>(args.x_dst.data) + row * args.x_dst.stride + head * args.head_width;
  const T* src = static_cast<const T*>(args.x_src.data) + head * args.head_width;
  const A row_scale =
      args.scale_dst != nullptr && slice.length > 0 ? static_cast<const A*>(args.scale_dst)[row] : A{1};

  for (int base = 0; base < longest; base += kEntriesInFlight) {
    std::int64_t col[kEntriesInFlight];
    A sum[kEntriesInFlight] = {};
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) {
      col[u] = base + u < slice.length ? __ldg(args.a.col + slice.begin + base + u) : 0;
    }
    for (std::int64_t f = lane * kVec; f < args.head_width; f += kLanes * kVec) {
      Pack<T, kVec> right[kEntriesInFlight];
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) {
        right[u] = Pack<T, kVec>{};
        if (base + u < slice.length) right[u] = load_pack<T, kVec>(src + col[u] * args.x_src.stride + f);
      }
      Pack<T, kVec> left{};
      if (base < slice.length) left = load_pack<T, kVec>(dst + f);
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[u] += widen(left.lane[i]) * widen(right[u].lane[i]);
      }
    }
#pragma unroll
    for (int u = 0; u < kEntriesInFlight; ++u) {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        sum[u] += __shfl_xor_sync(kFullWarp, sum[u], offset, kLanes);
      }
      if (lane == u && base + u < slice.length) {
        A value = sum[u] * row_scale;
        if (args.scale_src != nullptr) value *= static_cast<const A*>(args.scale_src)[col[u]];
        const std::int64_t at = edge_position(args.a, slice.begin + base + u) * args.heads + head;
        if (args.out_dtype == args.dtype) {
          static_cast<T*>(args.out)[at] = narrow<T>(value);
        } else {
          static_cast<A*>(args.out)[at] = value;
        }
      }
    }
  }
}

// Loads kCount consecutive numbers of a list. Numbers beyond its end repeat the last number.
template <int kCount>
__device__ __forceinline__ void load_run(const std::int32_t* list, std::int64_t first, std::int64_t last,
                                         std::int32_t (&to)[kCount]) {
  static_assert(kCount % 4 == 0);
  if (first + kCount - 1 <= last) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      // The numbers are read once, so they must not evict features from the L1 cache.
      asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                   : "l"(list + first + i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = __ldg(list + min(first + i, last));
  }
}

// Sums each of kCount numbers over kLanes lanes. Lane l gets kCount / kLanes sums, from sum l * kCount /
// kLanes on, or one sum if there are fewer numbers than lanes.
template <int kCount, int kLanes, typename A>
__device__ __forceinline__ void sum_over_lanes(A (&number)[kCount], int lane) {
  int count = kCount;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    if (count == 1) {
      number[0] += __shfl_xor_sync(kFullWarp, number[0], offset);
      continue;
    }
    count /= 2;
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= count) break;
      const A kept = upper ? number[count + i] : number[i], given = upper ? number[i] : number[count + i];
      number[i] = kept + __shfl_xor_sync(kFullWarp, given, offset);
    }
  }
}

// kPlain: one head, no scales, results in the order of the entries and in the dtype of the features.
template <typename T, bool kPlain>
__device__ __forceinline__ void store_result(const SddmmArgs& args, std::int64_t entry, Acc<T> value) {
  using A = Acc<T>;
  if constexpr (kPlain) {
    static_cast<T*>(args.out)[entry] = narrow<T>(value);
    return;
  }
  if (args.scale_dst != nullptr) value *= static_cast<const A*>(args.scale_dst)[args.row[entry]];
  if (args.scale_src != nullptr) value *= static_cast<const A*>(args.scale_src)[args.a.col[entry]];
  const std::int64_t at = edge_position(args.a, entry) * args.heads + blockIdx.y;
  if (args.out_dtype == args.dtype) {
    static_cast<T*>(args.out)[at] = narrow<T>(value);
  } else {
    static_cast<A*>(args.out)[at] = value;
  }
}

// kLoop: heads have more than kLanes * 16 bytes. kLong: rows are long, so that the entries of a warp often
// share a row. kPlain: the conditions of store_result, and the head fills all of its lanes.
template <typename T, int kLanes, bool kLoop, bool kLong, bool kPlain>
__global__ void __launch_bounds__(kThreads, kResident<T, kLong>)
    sddmm_entries_kernel(const __grid_constant__ SddmmArgs args, const int rounds) {
  using A = Acc<T>;
  constexpr int kVec = 16 / static_cast<int>(sizeof(T)), kOwn = kEntries<T, kLoop, kLong>;
  constexpr int kTile = kWarp / kLanes * kOwn;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % kWarp / kLanes;
  const std::int64_t last = args.a.num_edges - 1;
  const auto head_bytes = static_cast<std::uint32_t>(args.head_width * sizeof(T));
  const auto src_bytes = static_cast<std::uint32_t>(args.x_src.stride * sizeof(T));
  const auto dst_bytes = static_cast<std::uint32_t>(args.x_dst.stride * sizeof(T));
  const std::uint32_t own_bytes = blockIdx.y * head_bytes + lane * 16;
  const char* dst = static_cast<const char*>(args.x_dst.data) + own_bytes;
  const char* src = static_cast<const char*>(args.x_src.data) + own_bytes;
  // Words stay packed. If 16-bit features were unpacked before all loads have finished, they would need twice
  // the registers.
  const auto load = [&](const char* base, std::int32_t index, std::uint32_t bytes, std::uint32_t step) {
    const bool inside = kPlain || step + lane * 16 < head_bytes;
    return inside ? __ldg(reinterpret_cast<const uint4*>(row_address(base, index, bytes) + step)) : uint4{};
  };
  const auto multiply = [](const uint4& left_words, const uint4& right_words, A& sum) {
    Pack<T, kVec> left, right;
    memcpy(&left, &left_words, 16);
    memcpy(&right, &right_words, 16);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum += widen(left.lane[i]) * widen(right.lane[i]);
  };

  std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * rounds * kWarps + threadIdx.x / kWarp;
  for (int round = 0; round < rounds && tile * kTile <= last; ++round, tile += kWarps) {
    const std::int64_t first = tile * kTile + group * kOwn;
    std::int32_t row = 0, last_row = 0, rows[kOwn], col[kOwn];
    if constexpr (kLong) {
      row = __ldg(args.row + tile * kTile);
      last_row = __ldg(args.row + min(tile * kTile + kTile - 1, last));
    } else {
      load_run(args.row, first, last, rows);
    }
    load_run(args.a.col, first, last, col);
    A sum[kOwn] = {};
    const auto add = [&](std::uint32_t step) {
      uint4 right[kOwn];
#pragma unroll
      for (int u = 0; u < kOwn; ++u) right[u] = load(src, col[u], src_bytes, step);
      if (kLong && row == last_row) {
        const uint4 left = load(dst, row, dst_bytes, step);
#pragma unroll
        for (int u = 0; u < kOwn; ++u) multiply(left, right[u], sum[u]);
        return;
      }
      // Four at a time, to save registers.
#pragma unroll
      for (int base = 0; base < kOwn; base += 4) {
        std::int32_t own[4];
        if constexpr (kLong) load_run(args.row, first + base, last, own);
        uint4 left[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) left[u] = load(dst, kLong ? own[u] : rows[base + u], dst_bytes, step);
#pragma unroll
        for (int u = 0; u < 4; ++u) multiply(left[u], right[base + u], sum[base + u]);
      }
    };
    if constexpr (kLoop) {
#pragma unroll 1
      for (std::uint32_t step = 0; step < head_bytes; step += kLanes * 16) add(step);
    } else {
      add(0);
    }
    sum_over_lanes<kOwn, kLanes>(sum, lane);
    // If there are more lanes than sums, neighbouring lanes have the same sum.
    constexpr int kSums = kOwn > kLanes ? kOwn / kLanes : 1, kCopies = kOwn < kLanes ? kLanes / kOwn : 1;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const std::int64_t entry = first + lane / kCopies * kSums + i;
      if (lane % kCopies == 0 && entry <= last) store_result<T, kPlain>(args, entry, sum[i]);
    }
  }
}

template <typename T, int kLanes, bool kLoop, bool kLong>
void launch_long(const SddmmArgs& args, cudaStream_t stream) {
  constexpr std::int64_t kOfBlock = kThreads / kLanes * kEntries<T, kLoop, kLong>;
  const int rounds = kLong && args.a.num_edges > kManyEntries ? kRounds : 1;
  const dim3 grid(ceil_div(args.a.num_edges, kOfBlock * rounds), static_cast<unsigned>(args.heads));
  const auto launch = [&](auto plain) {
    constexpr bool kPlain = decltype(plain)::value;
    sddmm_entries_kernel<T, kLanes, kLoop, kLong, kPlain><<<grid, kThreads, 0, stream>>>(args, rounds);
  };
  if constexpr (!kLoop) {
    const bool scaled = args.scale_dst != nullptr || args.scale_src != nullptr;
    const bool in_order = args.heads == 1 && args.a.edge_id == nullptr && args.out_dtype == args.dtype;
    if (in_order && !scaled && args.head_width * sizeof(T) == kLanes * 16) return launch(std::true_type{});
  }
  launch(std::false_type{});
}

template <typename T, int kLanes, bool kLoop = false>
void launch_entries(const SddmmArgs& args, cudaStream_t stream) {
  constexpr int kTile = kWarp / kLanes * kEntries<T, kLoop, true>;
  args.a.num_edges >= kTile* args.a.num_rows ? launch_long<T, kLanes, kLoop, true>(args, stream)
                                             : launch_long<T, kLanes, kLoop, false>(args, stream);
}

template <typename T>
void launch_by_entry(const SddmmArgs& args, cudaStream_t stream) {
  const std::int64_t bytes = args.head_width * static_cast<std::int64_t>(sizeof(T));
  bytes <= 64    ? launch_entries<T, 4>(args, stream)
  : bytes <= 128 ? launch_entries<T, 8>(args, stream)
  : bytes <= 256 ? launch_entries<T, 16>(args, stream)
  : bytes <= 512 ? launch_entries<T, 32>(args, stream)
                 : launch_entries<T, 32, true>(args, stream);
}

template <typename T, int kVec, int kLanes>
void launch_shape(const SddmmArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kLanes), static_cast<unsigned>(args.heads));
  sddmm_csr_kernel<T, kVec, kLanes><<<grid, kThreads, 0, stream>>>(args);
}

template <typename T>
void launch(const SddmmArgs& args, cudaStream_t stream) {
  const int vec = vector_width<T>({args.head_width, args.x_dst.stride, args.x_src.stride},
                                  {args.x_dst.data, args.x_src.data});
  const bool aligned_lists = vector_width<std::int32_t>({}, {args.a.col, args.row}) == 4;
  if constexpr (sizeof(T) == 8) {  // float64 is used for tests, so one kernel handles every width
    launch_shape<T, 1, 32>(args, stream);
  } else if (vec * sizeof(T) == 16 && args.row != nullptr && aligned_lists && args.head_width > 0) {
    launch_by_entry<T>(args, stream);
  } else if constexpr (sizeof(T) < 4) {
    vec > 1 ? launch_shape<T, 4 / sizeof(T), 32>(args, stream) : launch_shape<T, 1, 32>(args, stream);
  } else {
    args.head_width <= 8 ? launch_shape<T, 1, 8>(args, stream) : launch_shape<T, 1, 32>(args, stream);
  }
}

}  // namespace sddmm_csr_detail

int sddmm_csr(const SddmmArgs& args, void* stream) {
  using namespace sddmm_csr_detail;
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
