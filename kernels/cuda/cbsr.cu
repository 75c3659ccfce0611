// Conversion between CBSR and dense rows, on CUDA cores. CBSR (MaxK-GNN) stores k values of every row, and
// their columns as ids of 8 or 16 bits.
//
// To dense: several lanes build one row in shared memory, a tile at a time, and write it in coalesced 16-byte
// pieces. In all, num_rows * (k * (sizeof(T) + sizeof(Id)) + width * sizeof(T)) bytes are moved. Gather: a
// thread handles up to four consecutive ids of a row at a time. All 32-byte sectors with kept columns are
// read, which are nearly all sectors if k is at least width / 8.

#include <type_traits>

#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace cbsr_detail {

constexpr int kThreads = 128;
// Number of lanes that share a row. For 2.4 million rows of width 256 with k = 16, 16-bit values take 0.45 ms
// with 8 lanes and 0.60 ms with a warp; 32-bit values take 0.96 ms and 0.75 ms.
template <typename T>
constexpr int kLanes = sizeof(T) == 2 ? 8 : kWarp;
template <typename T>
constexpr int kTeams = kThreads / kLanes<T>;
constexpr int kTileBytes = 1024;  // bytes of a row per tile
constexpr int kGatherThreads = 256;

// Number of kept entries that a lane moves at once, if alignment allows it.
template <typename T>
constexpr int kMost = sizeof(T) == 8 ? 2 : 4;

// Calls f with an unsigned integer as wide as `dtype`, because values are only copied.
template <typename F>
void with_bits(Dtype dtype, F&& f) {
  if (dtype == Dtype::kFloat64) return f(std::uint64_t{});
  dtype == Dtype::kFloat32 ? f(std::uint32_t{}) : f(std::uint16_t{});
}

// Calls f with a value of the C++ type of the column ids: std::uint8_t or std::uint16_t, depending on the
// width.
template <typename F>
void with_id_type(std::int64_t width, F&& f) {
  width <= 256 ? f(std::uint8_t{}) : f(std::uint16_t{});
}

template <typename T, int kIn>
__device__ __forceinline__ Pack<T, kIn> load_entries(const T* from) {
  if constexpr (kIn == 1) {
    return {{*from}};
  } else {
    return load_pack<T, kIn>(from);
  }
}

template <typename T, typename Id, int kVec, int kIn>
__global__ void __launch_bounds__(kThreads) to_dense_kernel(const CbsrToDenseArgs args) {
  constexpr int kTile = kTileBytes / sizeof(T);
  __shared__ alignas(16) T tiles[kTeams<T>][kTile];
  const int lane = static_cast<int>(threadIdx.x) % kLanes<T>;
  const int team = static_cast<int>(threadIdx.x) / kLanes<T>;
  // All lanes of a warp stay active: teams beyond the last row process the last row again.
  const std::int64_t row = min(static_cast<std::int64_t>(blockIdx.x) * kTeams<T> + team, args.num_rows - 1);
  T* tile = tiles[team];
  const T* values = static_cast<const T*>(args.values) + row * args.k;
  const Id* ids = static_cast<const Id*>(args.ids) + row * args.k;
  const int k = static_cast<int>(args.k), width = static_cast<int>(args.width);
  T* out = static_cast<T*>(args.out) + row * args.width;
  for (int begin = 0; begin < width; begin += kTile) {
    const int columns = min(kTile, width - begin);
    Pack<T, kVec> zeros;
    memset(&zeros, 0, sizeof zeros);
#pragma unroll 1
    for (int c = lane * kVec; c < columns; c += kLanes<T> * kVec) store_pack(zeros, tile + c);
    __syncwarp();
#pragma unroll 1
    for (int i = lane * kIn; i < k; i += kLanes<T> * kIn) {
      const Pack<Id, kIn> id = load_entries<Id, kIn>(ids + i);
      const Pack<T, kIn> value = load_entries<T, kIn>(values + i);
#pragma unroll
      for (int j = 0; j < kIn; ++j) {
        const int column = static_cast<int>(id.lane[j]) - begin;
        if (column >= 0 && column < columns) tile[column] = value.lane[j];
      }
    }
    __syncwarp();
    for (int c = lane * kVec; c < columns; c += kLanes<T> * kVec) {
      store_pack(*reinterpret_cast<const Pack<T, kVec>*>(tile + c), out + begin + c);
    }
    __syncwarp();
  }
}

template <typename T, typename Id, int kIn>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const CbsrGatherArgs args, unsigned lanes) {
  // `lanes` threads share a row.
  const unsigned rows = kGatherThreads / lanes, lane = threadIdx.x % lanes;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * rows + threadIdx.x / lanes;
  if (row >= args.num_rows) return;
  const auto k = static_cast<unsigned>(args.k);
  const T* dense = static_cast<const T*>(args.dense.data) + row * args.dense.stride;
  const Id* ids = static_cast<const Id*>(args.ids) + row * args.k;
  T* out = static_cast<T*>(args.out) + row * args.k;
  for (unsigned i = lane * kIn; i < k; i += lanes * kIn) {
    const Pack<Id, kIn> id = load_entries<Id, kIn>(ids + i);
    Pack<T, kIn> value;
#pragma unroll
    for (int j = 0; j < kIn; ++j) value.lane[j] = id.lane[j] < args.width ? dense[id.lane[j]] : T{0};
    store_pack(value, out + i);
  }
}

// Calls f with the number of entries, as a constant, that a lane can move at once.
template <typename T, typename Id, typename F>
void with_entries(std::int64_t k, const void* values, const void* ids, F&& f) {
  const auto divides = [](std::size_t bytes, const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  constexpr int kIn = kMost<T>;
  if (k % kIn == 0 && divides(kIn * sizeof(T), values) && divides(kIn * sizeof(Id), ids)) {
    f(std::integral_constant<int, kIn>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

}  // namespace cbsr_detail

int cbsr_to_dense(const CbsrToDenseArgs& args, void* stream) {
  using namespace cbsr_detail;
  with_bits(args.dtype, [&](auto type) {
    with_id_type(args.width, [&](auto id) {
      using T = decltype(type);
      using Id = decltype(id);
      constexpr int kVec = 16 / sizeof(T);
      const unsigned grid = ceil_div(args.num_rows, kTeams<T>);
      const auto queue = static_cast<cudaStream_t>(stream);
      with_entries<T, Id>(args.k, args.values, args.ids, [&](auto entries) {
        constexpr int kIn = decltype(entries)::value;
        if (vector_width<T>({args.width}, {args.out}) == kVec) {
          to_dense_kernel<T, Id, kVec, kIn><<<grid, kThreads, 0, queue>>>(args);
        } else {
          to_dense_kernel<T, Id, 1, kIn><<<grid, kThreads, 0, queue>>>(args);
        }
      });
    });
  });
  return cudaGetLastError();
}

int cbsr_gather(const CbsrGatherArgs& args, void* stream) {
  using namespace cbsr_detail;
  with_bits(args.dtype, [&](auto type) {
    with_id_type(args.width, [&](auto id) {
      using T = decltype(type);
      using Id = decltype(id);
      with_entries<T, Id>(args.k, args.out, args.ids, [&](auto entries) {
        constexpr int kIn = decltype(entries)::value;
        unsigned lanes = 1;
        while (lanes < kWarp && lanes * kIn < args.k) lanes *= 2;
        gather_kernel<T, Id, kIn><<<ceil_div(args.num_rows, kGatherThreads / lanes), kGatherThreads, 0,
                                    static_cast<cudaStream_t>(stream)>>>(args, lanes);
      });
    });
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
