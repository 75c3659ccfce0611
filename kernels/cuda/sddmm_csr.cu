// Sampled dense-dense product from CSR. Floors: E * H * D * sizeof(T) bytes gathered, E * H * sizeof(out)
// written, 4 E or 8 E read (columns, and rows where they are short), 2 E H D flops.
//
// Entry by entry, where features start at multiples of 16 bytes: a warp takes a tile of consecutive entries,
// whatever their rows, and has the features of all their sources in flight at once, 16 bytes a lane. Nothing
// is looked up before the entries, and results leave coalesced. A row's own features are read once a tile
// where rows are long, else once an entry, mostly from the L1. Sums over lanes are transposed: each half of
// the lanes goes on with half of the sums, so 8 sums over 8 lanes take 7 shuffles instead of 24.
//   - On CUDA cores 4 to 32 lanes take 8 entries, or 4 where rows are short or features wide.
//   - On tensor cores, for 16-bit heads of 64 or 128 bytes: see sddmm_tensor_kernel.
//
// In large structures blocks are as large as a multiprocessor holds and stay with consecutive entries, so
// that sources that neighbouring rows share are found in its L1.
//
// Row by row otherwise: a group of 8 or 32 lanes takes one slice of a row, reads the row's features (they
// stay in the L1) and gathers 4 neighbours at a time.

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "fastsparse/bsb.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"
#include "fastsparse/mma.cuh"

namespace fastsparse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kEntriesInFlight = 4;
// Blocks that keep an H200 evenly busy: 8 for each of 132 multiprocessors.
constexpr std::int64_t kManyBlocks = 132 * 8;
constexpr int kMostRounds = 16;
// Of a block that has a multiprocessor to itself: as many as the features in flight leave registers for.
template <typename T>
constexpr int kMostThreads = sizeof(T) == 4 ? 768 : 640;

template <typename T, int kVec, int kLanes>
__global__ void __launch_bounds__(kThreads) sddmm_csr_kernel(const SddmmArgs args) {
  using A = Acc<T>;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const RowSlice slice = load_slice(args.split, group);
  // Whole warps loop together, so that the shuffles below need no divergent branches.
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

// kCount consecutive numbers of a list; those beyond its end repeat the last one.
template <int kCount>
__device__ __forceinline__ void load_run(const std::int32_t* list, std::int64_t first, std::int64_t last,
                                         std::int32_t (&to)[kCount]) {
  static_assert(kCount % 4 == 0);
  if (first + kCount - 1 <= last) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      // Read once, so it must not push features out of the L1.
      asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                   : "l"(list + first + i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = __ldg(list + min(first + i, last));
  }
}

// Sums each of kCount numbers over kLanes lanes. Lane l gets those from number l * kCount / kLanes on, one
// where there are fewer numbers than lanes.
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

// Writes kCount results of consecutive entries; those beyond the last entry are dropped.
template <typename T, int kCount>
__device__ __forceinline__ void store_run(const SddmmArgs& args, std::int64_t first, Acc<T>* result) {
  using A = Acc<T>;
  if constexpr (kCount == 2) {
    const bool apart = args.heads > 1 || args.a.edge_id != nullptr || args.out_dtype != args.dtype;
    const bool scaled = args.scale_dst != nullptr || args.scale_src != nullptr;
    if (!apart && !scaled && first + 1 < args.a.num_edges) {
      const Pack<T, 2> pair{narrow<T>(result[0]), narrow<T>(result[1])};
      store_pack<T, 2>(pair, static_cast<T*>(args.out) + first);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const std::int64_t entry = first + i;
    if (entry >= args.a.num_edges) return;
    A value = result[i];
    if (args.scale_dst != nullptr) value *= static_cast<const A*>(args.scale_dst)[args.row[entry]];
    if (args.scale_src != nullptr) value *= static_cast<const A*>(args.scale_src)[args.a.col[entry]];
    const std::int64_t at = edge_position(args.a, entry) * args.heads + blockIdx.y;
    if (args.out_dtype == args.dtype) {
      static_cast<T*>(args.out)[at] = narrow<T>(value);
    } else {
      static_cast<A*>(args.out)[at] = value;
    }
  }
}

// Tiles of this warp: one in each round of its block.
struct Tiles {
  std::int64_t next;
  int left, step;
  __device__ __forceinline__ explicit Tiles(int rounds) {
    step = blockDim.x / kWarp;
    next = static_cast<std::int64_t>(blockIdx.x) * rounds * step + threadIdx.x / kWarp;
    left = rounds;
  }
};

// kLoop: heads of more than kLanes * 16 bytes. kLong: rows are long, so that the entries of a tile often
// share theirs.
template <typename T, int kLanes, int kEntries, bool kLoop, bool kLong>
__global__ void __launch_bounds__(kMostThreads<T>)
    sddmm_entries_kernel(const __grid_constant__ SddmmArgs args, const int rounds) {
  using A = Acc<T>;
  constexpr int kVec = 16 / static_cast<int>(sizeof(T)), kTile = kWarp / kLanes * kEntries;
  using Features = Pack<T, kVec>;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t last = args.a.num_edges - 1;
  const auto head_bytes = static_cast<std::uint32_t>(args.head_width * sizeof(T));
  const auto src_bytes = static_cast<std::uint32_t>(args.x_src.stride * sizeof(T));
  const auto dst_bytes = static_cast<std::uint32_t>(args.x_dst.stride * sizeof(T));
  const auto load = [&](const DenseView& x, std::uint32_t bytes, std::int32_t row, std::uint32_t at) {
    // Lanes beyond the head read its last features and do not add them.
    const std::uint32_t inside = blockIdx.y * head_bytes + min(at, head_bytes - 16);
    const char* from = static_cast<const char*>(x.data) + inside;
    return load_pack<T, kVec>(reinterpret_cast<const T*>(row_address(from, row, bytes)));
  };
  const auto multiply = [](const Features& left, const Features& right, A& sum) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum += widen(left.lane[i]) * widen(right.lane[i]);
  };

  for (Tiles tile(rounds); tile.left > 0 && tile.next * kTile <= last; --tile.left, tile.next += tile.step) {
    const std::int64_t begin = tile.next * kTile;
    const std::int64_t first = begin + threadIdx.x % kWarp / kLanes * kEntries;
    std::int32_t row = 0, last_row = 0, rows[kEntries], col[kEntries];
    load_run(args.a.col, first, last, col);
    if constexpr (kLong) {
      row = __ldg(args.row + begin);
      last_row = __ldg(args.row + min(begin + kTile - 1, last));
    } else {
      load_run(args.row, first, last, rows);
    }
    A sum[kEntries] = {};
    const auto add = [&](std::uint32_t at) {
      Features right[kEntries];
#pragma unroll
      for (int u = 0; u < kEntries; ++u) right[u] = load(args.x_src, src_bytes, col[u], at);
      const bool inside = at < head_bytes;
      if (kLong && row == last_row) {
        const Features left = load(args.x_dst, dst_bytes, row, at);
        if (inside) {
#pragma unroll
          for (int u = 0; u < kEntries; ++u) multiply(left, right[u], sum[u]);
        }
        return;
      }
      // By four, for lack of registers.
#pragma unroll
      for (int base = 0; base < kEntries; base += 4) {
        std::int32_t own[4];
        if constexpr (kLong) load_run(args.row, first + base, last, own);
        Features left[4];
#pragma unroll
        for (int u = 0; u < 4; ++u)
          left[u] = load(args.x_dst, dst_bytes, kLong ? own[u] : rows[base + u], at);
        if (inside) {
#pragma unroll
          for (int u = 0; u < 4; ++u) multiply(left[u], right[base + u], sum[base + u]);
        }
      }
    };
    if constexpr (kLoop) {
#pragma unroll 1
      for (std::uint32_t step = 0; step < head_bytes; step += kLanes * 16) add(step + lane * 16);
    } else {
      add(lane * 16);
    }
    sum_over_lanes<kEntries, kLanes>(sum, lane);
    if constexpr (kEntries >= kLanes) {
      store_run<T, kEntries / kLanes>(args, first + lane * (kEntries / kLanes), sum);
    } else {
      constexpr int kCopies = kLanes / kEntries;
      if (lane % kCopies == 0) store_run<T, 1>(args, first + lane / kCopies, sum);
    }
  }
}

// The same for 16-bit heads of 64 kChunks bytes: without conversions, and with few shuffles. A quad loads the
// sources of kOwn entries, and the words of a source are operand A as they are (lane = 4 g + t): its row g is
// half of the features, its row g + 8 the other half. Columns 2j and 2j + 1 of operand B are the same halves
// of the j-th of four rows of X_dst. So element (g, 2j) plus element (g + 8, 2j + 1), both in lane 4 g + j,
// is the product of that row with the source of quad g. Entries that span more than four rows take another
// turn.
template <typename T, int kChunks, int kOwn>
__global__ void __launch_bounds__(kMostThreads<T>)
    sddmm_tensor_kernel(const __grid_constant__ SddmmArgs args, const int rounds) {
  constexpr int kTile = 8 * kOwn;
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  const std::int64_t last = args.a.num_edges - 1;
  const auto num_rows = static_cast<std::int32_t>(args.a.num_rows);
  const auto src_bytes = static_cast<std::uint32_t>(args.x_src.stride * sizeof(T));
  const auto dst_bytes = static_cast<std::uint32_t>(args.x_dst.stride * sizeof(T));
  const std::uint32_t own_bytes = blockIdx.y * kChunks * 64 + t * 16;
  const char* src = static_cast<const char*>(args.x_src.data) + own_bytes;
  const char* dst = static_cast<const char*>(args.x_dst.data) + own_bytes;
  const auto load = [](const char* from, int chunk) {
    return __ldg(reinterpret_cast<const uint4*>(from + chunk * 64));
  };

  for (Tiles tile(rounds); tile.left > 0 && tile.next * kTile <= last; --tile.left, tile.next += tile.step) {
    const std::int64_t begin = tile.next * kTile, first = begin + g * kOwn;
    std::int32_t row = __ldg(args.row + begin), col[kOwn];
    load_run(args.a.col, first, last, col);
    uint4 words[kOwn][kChunks];
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
      const char* from = row_address(src, col[u], src_bytes);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) words[u][c] = load(from, c);
    }
    float sum[kOwn] = {};
    while (true) {
      const char* from = row_address(dst, min(row + g / 2, num_rows - 1), dst_bytes);
      std::uint32_t b[kChunks][2];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4 left = load(from, c);
        b[c][0] = g % 2 == 0 ? left.x : left.y;
        b[c][1] = g % 2 == 0 ? left.z : left.w;
      }
      // Where a row begins, counted from the quad's first entry.
      const auto row_begin = [&](int r) {
        const std::int64_t at = __ldg(args.a.rowptr + min(r, num_rows)) - first;
        return at > kTile ? kTile : static_cast<int>(at);
      };
      const int row_from = row_begin(row + t), row_to = row_begin(row + t + 1);
#pragma unroll
      for (int u = 0; u < kOwn; ++u) {
        float product[4] = {};
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const std::uint32_t a[4] = {words[u][c].x, words[u][c].y, words[u][c].z, words[u][c].w};
          mma_m16n8k16<T>(product, a, b[c][0], b[c][1]);
        }
        sum[u] += u >= row_from && u < row_to ? product[0] + product[3] : 0.0f;
      }
      const int end = __shfl_sync(kFullWarp, row_to, 3);  // of the four rows, counted from the tile's first
      if (end >= kTile || begin + end > last) break;
      row = __ldg(args.row + begin + end);
    }
    sum_over_lanes<kOwn, 4>(sum, t);
    store_run<T, kOwn / 4>(args, first + t * (kOwn / 4), sum);
  }
}

// Calls launch(grid, threads of a block, rounds): small blocks of one round where there are few entries, else
// the largest.
template <typename F>
void with_grid(const SddmmArgs& args, int tile, int most_threads, F&& launch) {
  const std::int64_t of_round = static_cast<std::int64_t>(tile) * most_threads / kWarp;
  const std::int64_t rounds = args.a.num_edges / (of_round * kManyBlocks);
  const int threads = rounds > 0 ? most_threads : kThreads;
  const int most_rounds = static_cast<int>(std::clamp<std::int64_t>(rounds, 1, kMostRounds));
  const std::int64_t of_block = static_cast<std::int64_t>(tile) * threads / kWarp * most_rounds;
  launch(dim3(ceil_div(args.a.num_edges, of_block), static_cast<unsigned>(args.heads)), threads, most_rounds);
}

template <typename T, int kLanes, bool kLoop>
void launch_entries(const SddmmArgs& args, cudaStream_t stream) {
  const auto launch = [&](auto is_long) {
    constexpr bool kLong = decltype(is_long)::value;
    constexpr int kEntries = kLong && !kLoop && sizeof(T) < 8 ? 8 : 4;
    with_grid(args, kWarp / kLanes * kEntries, kMostThreads<T>, [&](dim3 grid, int threads, int rounds) {
      sddmm_entries_kernel<T, kLanes, kEntries, kLoop, kLong><<<grid, threads, 0, stream>>>(args, rounds);
    });
  };
  args.a.num_edges < 8 * args.a.num_rows ? launch(std::false_type{}) : launch(std::true_type{});
}

template <typename T, int kChunks>
void launch_tensor(const SddmmArgs& args, cudaStream_t stream) {
  constexpr int kOwn = 8 / kChunks;
  with_grid(args, 8 * kOwn, kMostThreads<T>, [&](dim3 grid, int threads, int rounds) {
    sddmm_tensor_kernel<T, kChunks, kOwn><<<grid, threads, 0, stream>>>(args, rounds);
  });
}

template <typename T>
void launch_by_entry(const SddmmArgs& args, cudaStream_t stream) {
  const std::int64_t bytes = args.head_width * static_cast<std::int64_t>(sizeof(T));
  if constexpr (sizeof(T) == 2) {
    // In shorter rows a tile takes many turns.
    if (args.a.num_edges >= 8 * args.a.num_rows) {
      if (bytes == 64) return launch_tensor<T, 1>(args, stream);
      if (bytes == 128) return launch_tensor<T, 2>(args, stream);
    }
  }
  bytes <= 64    ? launch_entries<T, 4, false>(args, stream)
  : bytes <= 128 ? launch_entries<T, 8, false>(args, stream)
  : bytes <= 256 ? launch_entries<T, 16, false>(args, stream)
  : bytes <= 512 ? launch_entries<T, 32, false>(args, stream)
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
  if (vec * sizeof(T) == 16 && args.row != nullptr && aligned_lists && args.head_width > 0) {
    launch_by_entry<T>(args, stream);
  } else if (vec * sizeof(T) == 16) {
    launch_shape<T, 16 / sizeof(T), 8>(args, stream);
  } else if constexpr (sizeof(T) < 4) {
    vec > 1 ? launch_shape<T, 4 / sizeof(T), 32>(args, stream) : launch_shape<T, 1, 32>(args, stream);
  } else {
    args.head_width <= 8 ? launch_shape<T, 1, 8>(args, stream) : launch_shape<T, 1, 32>(args, stream);
  }
}

}  // namespace

int sddmm_csr(const SddmmArgs& args, void* stream) {
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
