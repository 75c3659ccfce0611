// SpMM from CSR on CUDA cores.
//
// A group of 4, 8 or 32 lanes computes one slice of a row for one tile of features. Floors per call, for E
// entries of width F: E * F * sizeof(T) bytes gathered, E * 4 bytes of columns; 2 E F flops, far below the
// arithmetic limit. So the kernel is designed for the gather: loads have 16 bytes, 8 lanes cover 128
// contiguous bytes, and each lane keeps 8 loads in flight (4 entries x 2 chunks). Tiles of features are the
// slow grid dimension, because one tile of all rows of x is more likely to stay in the L2 cache than all of
// x.
//
// Rows are cut into slices (HR-SpMM, section 4.1; RoDe). Slices of similar length are adjacent in the list,
// so the groups of a warp finish together. A second kernel adds the partial sums of split rows in slot order.
// There are no atomics, so every run gives the same bits.

#include <algorithm>
#include <initializer_list>

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace spmm_csr_detail {

constexpr int kThreads = 128;
constexpr int kEntriesInFlight = 4;
// Number of entries after which a sum is added to a total, so that rounding errors grow much less with the
// length of a slice.
constexpr int kEntriesPerSum = 32;

enum class Weight { kNone, kScalar, kPerHead };

template <typename T, int kVec, int kLanes, int kChunks, Weight kWeight>
__global__ void __launch_bounds__(kThreads) spmm_csr_kernel(const SpmmArgs args) {
  using A = Acc<T>;
  constexpr int kChunkWidth = kLanes * kVec;
  // Unrolling eight steps would give eight times the code, but no more loads in flight.
  constexpr int kStepsUnrolled = kLanes == kWarp ? 1 : kLanes / kEntriesInFlight;
  launch_dependents();
  const int lane = threadIdx.x % kLanes;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const RowSlice slice = load_slice(args.split, group);
  // All groups of a warp loop to the end of the longest slice, and mask entries beyond their own slice, so
  // that shuffles need no divergent branches.
  const int longest = __reduce_max_sync(kFullWarp, slice.length);
  const std::int64_t feature0 = static_cast<std::int64_t>(blockIdx.y) * (kChunkWidth * kChunks) + lane * kVec;
  const T* x = static_cast<const T*>(args.x.data) + feature0;
  const bool value_in_feature_dtype = args.value.dtype == args.dtype;

  bool inside[kChunks];
  std::int64_t head[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    inside[c] = feature0 + c * kChunkWidth < args.width;
    if constexpr (kWeight == Weight::kPerHead) {
      head[c] = inside[c] ? (feature0 + c * kChunkWidth) / (args.width / args.value.heads) : 0;
    }
  }

  A sum[kChunks][kVec] = {}, total[kChunks][kVec] = {};
  int next_col = lane < slice.length ? __ldg(args.a.col + slice.begin + lane) : 0;
  for (int base = 0; base < longest; base += kLanes) {
    const int col = next_col;
    const int mine = base + lane;
    A weight = 1;
    std::int64_t position = 0;
    if constexpr (kWeight == Weight::kScalar) {
      if (mine < slice.length) {
        if (args.value.data != nullptr) {
          weight =
              load_value<T>(args.value, value_in_feature_dtype, edge_position(args.a, slice.begin + mine));
        }
        if (args.scale_src != nullptr) weight *= static_cast<const A*>(args.scale_src)[col];
      }
    } else if constexpr (kWeight == Weight::kPerHead) {
      if (mine < slice.length) {
        position = edge_position(args.a, slice.begin + mine) * args.value.heads;
        if (args.scale_src != nullptr) weight = static_cast<const A*>(args.scale_src)[col];
      }
    }
    next_col = mine + kLanes < slice.length ? __ldg(args.a.col + slice.begin + mine + kLanes) : 0;

#pragma unroll kStepsUnrolled
    for (int step = 0; step < kLanes; step += kEntriesInFlight) {
      if (base + step >= longest) break;
      Pack<T, kVec> pack[kEntriesInFlight][kChunks];
      A entry_weight[kEntriesInFlight];
      A head_weight[kEntriesInFlight][kChunks];
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) {
        const std::int64_t source = __shfl_sync(kFullWarp, col, step + u, kLanes);
        const bool live = base + step + u < slice.length;
        if constexpr (kWeight != Weight::kNone)
          entry_weight[u] = __shfl_sync(kFullWarp, weight, step + u, kLanes);
        std::int64_t entry_position = 0;
        if constexpr (kWeight == Weight::kPerHead) {
          entry_position = __shfl_sync(kFullWarp, position, step + u, kLanes);
        }
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          pack[u][c] = Pack<T, kVec>{};
          head_weight[u][c] = 0;
          if (live && inside[c]) {
            pack[u][c] = load_pack<T, kVec>(x + source * args.x.stride + c * kChunkWidth);
            if constexpr (kWeight == Weight::kPerHead) {
              head_weight[u][c] = entry_weight[u] *
                                  load_value<T>(args.value, value_in_feature_dtype, entry_position + head[c]);
            }
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const A feature = widen(pack[u][c].lane[i]);
            if constexpr (kWeight == Weight::kNone) sum[c][i] += feature;
            if constexpr (kWeight == Weight::kScalar) sum[c][i] += entry_weight[u] * feature;
            if constexpr (kWeight == Weight::kPerHead) sum[c][i] += head_weight[u][c] * feature;
          }
        }
      }
    }
    if ((base / kLanes) % (kEntriesPerSum / kLanes) == kEntriesPerSum / kLanes - 1) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          total[c][i] += sum[c][i];
          sum[c][i] = 0;
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[c][i] += total[c][i];
  }

  if (group >= args.split.num_slices) return;
  const Epilogue epilogue = epilogue_of(args);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!inside[c]) continue;
    const std::int64_t feature = feature0 + c * kChunkWidth;
    if (slice.target < 0) {
      A* partial = static_cast<A*>(args.partial) + ~slice.target * args.width + feature;
      constexpr int kMost = 16 / static_cast<int>(sizeof(A));
      constexpr int kStore = kVec < kMost ? kVec : kMost;
#pragma unroll
      for (int i = 0; i < kVec; i += kStore) {
        Pack<A, kStore> pack;
#pragma unroll
        for (int k = 0; k < kStore; ++k) pack.lane[k] = sum[c][i + k];
        store_pack(pack, partial + i);
      }
    } else {
      store_pack(epilogue.finish<T>(sum[c], slice.target, feature),
                 static_cast<T*>(args.out) + slice.target * args.width + feature);
    }
  }
}

template <typename T, int kVec, int kLanes, int kChunks>
void launch_shape(const SpmmArgs& args, cudaStream_t stream) {
  const dim3 grid(ceil_div(args.split.num_slices, kThreads / kLanes),
                  ceil_div(args.width, kLanes * kVec * kChunks));
  if (args.value.data != nullptr && args.value.heads > 1) {
    spmm_csr_kernel<T, kVec, kLanes, kChunks, Weight::kPerHead><<<grid, kThreads, 0, stream>>>(args);
  } else if (args.value.data != nullptr || args.scale_src != nullptr) {
    spmm_csr_kernel<T, kVec, kLanes, kChunks, Weight::kScalar><<<grid, kThreads, 0, stream>>>(args);
  } else {
    spmm_csr_kernel<T, kVec, kLanes, kChunks, Weight::kNone><<<grid, kThreads, 0, stream>>>(args);
  }
}

// With 16-byte loads, a slice has only as many lanes as the tile needs. With narrower loads, it has a whole
// warp, so that loads are coalesced.
template <typename T, int kVec>
void launch_vector(const SpmmArgs& args, cudaStream_t stream) {
  const std::int64_t tile = std::min(args.width, args.tile);
  if (tile <= 4 * kVec) {
    launch_shape<T, kVec, 4, 1>(args, stream);
  } else if constexpr (kVec * sizeof(T) == 16) {
    if (tile <= 8 * kVec) {
      launch_shape<T, kVec, 8, 1>(args, stream);
    } else {
      launch_shape<T, kVec, 8, 2>(args, stream);
    }
  } else {
    launch_shape<T, kVec, 32, 2>(args, stream);
  }
}

template <typename T>
void launch(const SpmmArgs& args, cudaStream_t stream) {
  const bool per_head = args.value.data != nullptr && args.value.heads > 1;
  const int vec =
      vector_width<T>({args.width, args.x.stride, per_head ? args.width / args.value.heads : args.width},
                      {args.x.data, args.out});
  if constexpr (sizeof(T) == 8) {  // float64 is used for tests, so one shape handles every width
    launch_shape<T, 1, 32, 2>(args, stream);
  } else if (vec * sizeof(T) == 16) {
    launch_vector<T, 16 / sizeof(T)>(args, stream);
  } else if constexpr (sizeof(T) < 4) {
    vec > 1 ? launch_vector<T, 4 / sizeof(T)>(args, stream) : launch_vector<T, 1>(args, stream);
  } else {
    launch_vector<T, 1>(args, stream);
  }
  const Epilogue epilogue = epilogue_of(args);
  combine_partials<T, 1>(args.split, args.partial, epilogue, SameRow{}, stream);
}

}  // namespace spmm_csr_detail

int spmm_csr(const SpmmArgs& args, void* stream) {
  using namespace spmm_csr_detail;
  with_type(args.dtype, [&](auto type) { launch<decltype(type)>(args, static_cast<cudaStream_t>(stream)); });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
