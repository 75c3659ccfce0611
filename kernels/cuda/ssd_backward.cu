// Backward pass of the product with sparse features (MaxK): gradients of the kept values and of the edge
// values.
//
// Kept values, from row panels (RowPanelsView): windows of up to 64 rows, whose entries are sorted by source.
// A block of threads handles a slice of a window's entries. It copies the window's rows of the gradient to
// shared memory, and groups of lanes handle strips, which are a few consecutive entries. A lane has up to 4
// kept columns at a time. It reads these columns in the gradient's rows for a source's consecutive entries,
// sums in registers, and adds once per source and strip to the output: with one 16-byte reduction on sm_90,
// or with a plain store if the strip has all entries of the source. If the results do not fit the L2 cache,
// sources are divided into blocks, and the list of slices handles one block after another.
//
// Floors: 4 bytes + k ids read per entry from the L2 cache; 4 k bytes reduced per source and window (MaxK's
// kernel reduces them per edge, and they are its bottleneck); the gradient read once; 3.5 shared-memory
// cycles for 32 reads at random banks.
//
// Kept values, row by row of the transposed structure: every run gives the same bits, but there are k
// scattered reads per entry.

#include <cuda_pipeline.h>

#include <type_traits>

#include "fastsparse/combine_partials.cuh"
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/dependent_launch.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace ssd_backward_detail {

// Numbers of threads per block. Blocks have few threads if shared memory has space for several blocks.
constexpr int kFewThreads = 384;
constexpr int kManyThreads = 768;
constexpr int kEntriesInFlight = 4;
constexpr int kRowBits = 6;  // bits of an entry's row in the window, below the source
constexpr std::uint32_t kRowMask = (1u << kRowBits) - 1;
constexpr std::uint32_t kNoEntry = 0xffffffffu;  // no entry: its source is greater than any other source
constexpr std::uint32_t kSole = 0x80000000u;     // bit of an entry: this strip has all entries of the source

// Number of lanes that share the k kept columns of a source, kVec columns each; a power of two.
inline int lanes_for(std::int64_t k, int vec) {
  int lanes = 1;
  while (lanes < kWarp && lanes * vec < k) lanes *= 2;
  return lanes;
}

template <typename Id, int kVec>
__device__ __forceinline__ Pack<Id, kVec> load_ids(const KeptIdsView& ids, std::int64_t source, int first) {
  const Id* from = static_cast<const Id*>(ids.data) + source * ids.k + first;
  if constexpr (kVec == 1) {
    return {{__ldg(from)}};
  } else {
    return load_pack<Id, kVec>(from);
  }
}

// Calls f with the C++ type of the ids and with the number of ids per lane, which is 4 if rows allow it.
template <typename F>
void with_ids(const KeptIdsView& ids, F&& f) {
  const auto pick = [&](auto id, auto one, auto four) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(ids.data) % (4 * sizeof(id)) == 0;
    ids.k % 4 == 0 && aligned ? f(id, four) : f(id, one);
  };
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 4> four;
  ids.is_16bit ? pick(std::uint16_t{}, one, four) : pick(std::uint8_t{}, one, four);
}

// ---------------------------------------------------------------- kept values, from row panels

// Adds kVec neighbouring floats to global memory.
template <int kVec>
__device__ __forceinline__ void add_to(float* to, const float (&sum)[kVec]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kAtOnce = kVec == 4;
#else
  constexpr bool kAtOnce = false;
#endif
  if constexpr (kAtOnce) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(sum[0]), "f"(sum[1]),
                 "f"(sum[2]), "f"(sum[3])
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) atomicAdd(to + i, sum[i]);
  }
}

// Clears the results of sources that are summed by additions instead of one plain store.
template <int kVec>
__global__ void zero_sources_kernel(const std::int32_t* source, std::int64_t count, std::int64_t k,
                                    float* sum) {
  launch_dependents();
  const std::int64_t per_source = k / kVec;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count * per_source) return;
  const std::int64_t nth = at / per_source;
  store_pack(Pack<float, kVec>{}, sum + source[nth] * k + (at - nth * per_source) * kVec);
}

// L2 policy of the gradient, which is read once or a few times, while results are added to repeatedly: the
// gradient's lines are evicted first.
__device__ __forceinline__ std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Starts to copy 16 bytes to shared memory.
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "l"(policy)
               : "memory");
}

// Copies `count` rows of the gradient to consecutive rows in shared memory. A warp copies one row, 16 bytes
// at a time if addresses allow it.
template <int kWindowThreads, typename T>
__device__ __forceinline__ void copy_rows(const DenseView& grad, std::int64_t first_row, int count, int width,
                                          bool in_pieces, T* to) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const int lane = threadIdx.x % kWarp;
  const std::uint64_t policy = evict_first();
  for (int row = threadIdx.x / kWarp; row < count; row += kWindowThreads / kWarp) {
    const T* from = static_cast<const T*>(grad.data) + (first_row + row) * grad.stride;
    T* own = to + row * width;
    if (in_pieces) {
      for (int f = lane * kPiece; f < width; f += kWarp * kPiece) {
        copy_16_bytes(own + f, from + f, policy);
      }
    } else {
      for (int f = lane; f < width; f += kWarp) own[f] = from[f];
    }
  }
  __pipeline_commit();
}

// The factor of an entry: its value times the scale of its row.
template <typename T>
__device__ __forceinline__ float weight_of(const SsdBackwardWindowsArgs& args, std::int64_t entry,
                                           float row_scale) {
  if (args.value.data == nullptr) return row_scale;
  const std::int64_t position = args.a.value_id_is_64bit
                                    ? static_cast<const std::int64_t*>(args.a.value_id)[entry]
                                    : static_cast<const std::int32_t*>(args.a.value_id)[entry];
  return row_scale * load_value<T>(args.value, args.value.dtype == args.dtype, position);
}

// Adds a strip's sum to the result of its source, or stores the sum if the source has no other strip.
template <int kVec>
__device__ __forceinline__ void finish_source(const SsdBackwardWindowsArgs& args, std::uint32_t source,
                                              bool sole, int first, float (&sum)[kVec]) {
  if (args.scale_src != nullptr) {
    const float scale = __ldg(args.scale_src + source);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] *= scale;
  }
  float* to = args.sum + source * args.ids.k + first;
  if (sole) {
    Pack<float, kVec> pack;
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.lane[i] = sum[i];
    store_pack(pack, to);
  } else {
    add_to(to, sum);
  }
}

// kWeighted: entries have values, or rows have scales. A separate kernel for calls with neither needs fewer
// registers.
template <typename T, typename Id, int kVec, int kWindowThreads, bool kWeighted>
__global__ void __launch_bounds__(kWindowThreads, kWindowThreads == kFewThreads ? 3 : 1)
    ssd_backward_windows_kernel(const SsdBackwardWindowsArgs args, bool in_pieces, int lanes) {
  extern __shared__ __align__(16) unsigned char shared[];
  launch_dependents();
  const RowSlice slice = args.a.slices[blockIdx.x];
  const std::int64_t first_row = static_cast<std::int64_t>(slice.target) * args.a.height;
  const int count =
      static_cast<int>(min(static_cast<std::int64_t>(args.a.height), args.a.num_rows - first_row));
  const int width = static_cast<int>(args.width), k = static_cast<int>(args.ids.k);
  float* row_scale = reinterpret_cast<float*>(shared);
  T* rows = reinterpret_cast<T*>(shared + args.a.height * sizeof(float));
  copy_rows<kWindowThreads>(args.grad, first_row, count, width, in_pieces, rows);
  if (kWeighted && threadIdx.x < count) {
    row_scale[threadIdx.x] = args.scale_dst != nullptr ? args.scale_dst[first_row + threadIdx.x] : 1.0f;
  }

  const int strip = args.a.strip;
  __pipeline_wait_prior(0);
  __syncthreads();
  wait_for_kernel_before();  // the previous kernel clears the sums

  for (int c = threadIdx.x % lanes * kVec; c < k; c += lanes * kVec) {
    for (int begin = threadIdx.x / lanes * strip; begin < slice.length;
         begin += kWindowThreads / lanes * strip) {
      const std::uint32_t* entry = args.a.entry + slice.begin + begin;
      int left = min(strip, slice.length - begin);
      float sum[kVec] = {};
      std::uint32_t next[kEntriesInFlight];
#pragma unroll
      for (int u = 0; u < kEntriesInFlight; ++u) next[u] = u < left ? __ldg(entry + u) : kNoEntry;
      for (; left > 0; left -= kEntriesInFlight, entry += kEntriesInFlight) {
        std::uint32_t word[kEntriesInFlight + 1];
        Pack<Id, kVec> ids[kEntriesInFlight];
#pragma unroll
        for (int u = 0; u < kEntriesInFlight; ++u) {
          word[u] = next[u];
          ids[u] = Pack<Id, kVec>{};
          if (word[u] != kNoEntry) ids[u] = load_ids<Id, kVec>(args.ids, (word[u] & ~kSole) >> kRowBits, c);
        }
#pragma unroll
        for (int u = 0; u < kEntriesInFlight; ++u) {
          next[u] = kEntriesInFlight + u < left ? __ldg(entry + kEntriesInFlight + u) : kNoEntry;
        }
        word[kEntriesInFlight] = next[0];
#pragma unroll
        for (int u = 0; u < kEntriesInFlight; ++u) {
          if (word[u] == kNoEntry) break;
          const int row = static_cast<int>(word[u] & kRowMask);
          float weight = 1;
          if constexpr (kWeighted) weight = weight_of<T>(args, entry + u - args.a.entry, row_scale[row]);
#pragma unroll
          for (int i = 0; i < kVec; ++i) sum[i] += weight * widen(rows[row * width + ids[u].lane[i]]);
          if ((word[u] ^ word[u + 1]) > kRowMask) {  // the last entry of its source in the strip
            finish_source(args, (word[u] & ~kSole) >> kRowBits, (word[u] & kSole) != 0, c, sum);
#pragma unroll
            for (int i = 0; i < kVec; ++i) sum[i] = 0;
          }
        }
      }
    }
  }
}

// Converts the sums to the result's dtype, 16 bytes of results per thread.
template <typename T>
__global__ void cast_sums_kernel(const float* sum, std::int64_t count, T* out) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  wait_for_kernel_before();
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPiece;
  if (first + kPiece <= count) {
    Pack<float, 4> in[kPiece / 4];
#pragma unroll
    for (int i = 0; i < kPiece / 4; ++i) {
      const float4 raw = __ldcg(reinterpret_cast<const float4*>(sum + first) + i);
      memcpy(&in[i], &raw, sizeof raw);
    }
    Pack<T, kPiece> pack;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) pack.lane[i] = narrow<T>(in[i / 4].lane[i % 4]);
    store_pack(pack, out + first);
  } else {
    for (std::int64_t at = first; at < count; ++at) out[at] = narrow<T>(__ldcg(sum + at));
  }
}

// The second and third kernel begin while the previous one runs. The first kernel is launched normally, so it
// begins after all earlier work, including the gradient's kernel. Without the first kernel, the second one is
// launched normally.
template <typename T, typename Id, int kVec>
cudaError_t launch_windows(const SsdBackwardWindowsArgs& args, cudaStream_t stream) {
  constexpr int kSmallThreads = 256, kReservedBytes = 1024;  // shared memory that is reserved per block
  const std::int64_t zeroed = args.a.num_other * (args.ids.k / kVec);
  if (zeroed > 0) {
    zero_sources_kernel<kVec><<<ceil_div(zeroed, kSmallThreads), kSmallThreads, 0, stream>>>(
        args.a.other_source, args.a.num_other, args.ids.k, args.sum);
  }
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;

  if (args.a.num_slices > 0) {
    const int bytes = static_cast<int>(args.a.height * (sizeof(float) + args.width * sizeof(T)));
    int device = 0, shared_bytes = 0;
    error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (error != cudaSuccess) return error;
    const bool alone = 2 * (bytes + kReservedBytes) > shared_bytes;
    const bool weighted = args.value.data != nullptr || args.scale_dst != nullptr;
    const auto pick = [&](auto is_weighted) {
      constexpr bool kWeighted = is_weighted.value;
      return alone ? ssd_backward_windows_kernel<T, Id, kVec, kManyThreads, kWeighted>
                   : ssd_backward_windows_kernel<T, Id, kVec, kFewThreads, kWeighted>;
    };
    const auto kernel = weighted ? pick(std::true_type{}) : pick(std::false_type{});
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    const bool in_pieces =
        vector_width<T>({args.width, args.grad.stride}, {args.grad.data}) * sizeof(T) == 16;
    error = launch_dependent(kernel, zeroed > 0, dim3(static_cast<unsigned>(args.a.num_slices)),
                             dim3(alone ? kManyThreads : kFewThreads), bytes, stream, args, in_pieces,
                             lanes_for(args.ids.k, kVec));
    if (error != cudaSuccess) return error;
  }

  if constexpr (sizeof(T) == 2) {
    const std::int64_t results = args.a.num_cols * args.ids.k;
    error = launch_dependent(cast_sums_kernel<T>, true, dim3(ceil_div(results, kSmallThreads * 8)),
                             dim3(kSmallThreads), 0, stream, args.sum, results, static_cast<T*>(args.out));
  }
  return error;
}

// ---------------------------------------------------------------- kept values, row by row

constexpr int kThreads = 128;
// Number of entries after which a sum is added to a total, so that rounding errors grow less with the length
// of a slice.
constexpr int kEntriesPerSum = 32;

// A group of lanes handles one slice of a row of the transposed structure, which is a source.
template <typename T, typename Id>
__global__ void __launch_bounds__(kThreads) ssd_backward_kernel(const SsdBackwardArgs args, int lanes) {
  using A = Acc<T>;
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  if (group >= args.split_t.num_slices) return;
  const RowSlice slice = load_slice(args.split_t, group);
  const std::int64_t source = row_of(args.split_t, slice);
  const T* grad = static_cast<const T*>(args.grad.data);
  const bool value_in_feature_dtype = args.value.dtype == args.dtype;
  const Epilogue epilogue{args.scale_src, nullptr, false, args.out, args.ids.k};
  for (std::int64_t c = threadIdx.x % lanes; c < args.ids.k; c += lanes) {
    const T* column = grad + static_cast<const Id*>(args.ids.data)[source * args.ids.k + c];
    A total[1] = {};
    for (int block = 0; block < slice.length; block += kEntriesPerSum) {
      const int end = min(block + kEntriesPerSum, slice.length);
      A sum = 0;
      for (int base = block; base < end; base += kEntriesInFlight) {
        std::int64_t row[kEntriesInFlight];
        A look_up[kEntriesInFlight];
        // Entries beyond the end repeat the last entry, so that there are no branches and all loads are in
        // flight at once, also in short rows.
#pragma unroll
        for (int u = 0; u < kEntriesInFlight; ++u) {
          row[u] = __ldg(args.a_t.col + slice.begin + min(base + u, end - 1));
        }
#pragma unroll
        for (int u = 0; u < kEntriesInFlight; ++u) look_up[u] = widen(column[row[u] * args.grad.stride]);
#pragma unroll
        for (int u = 0; u < kEntriesInFlight; ++u) {
          if (base + u >= end) break;
          A weight = 1;
          if (args.value.data != nullptr) {
            weight = load_value<T>(args.value, value_in_feature_dtype,
                                   edge_position(args.a_t, slice.begin + base + u));
          }
          if (args.scale_dst != nullptr) weight *= static_cast<const A*>(args.scale_dst)[row[u]];
          sum += weight * look_up[u];
        }
      }
      total[0] += sum;
    }
    if (slice.target < 0) {
      static_cast<A*>(args.partial)[~slice.target * args.ids.k + c] = total[0];
    } else {
      store_pack(epilogue.finish<T>(total, source, c), static_cast<T*>(args.out) + source * args.ids.k + c);
    }
  }
}

template <typename T, typename Id>
void launch_rows(const SsdBackwardArgs& args, cudaStream_t stream) {
  const int lanes = lanes_for(args.ids.k, 1);
  ssd_backward_kernel<T, Id>
      <<<ceil_div(args.split_t.num_slices, kThreads / lanes), kThreads, 0, stream>>>(args, lanes);
  const Epilogue epilogue{args.scale_src, nullptr, false, args.out, args.ids.k};
  combine_partials<T, 1>(args.split_t, args.partial, epilogue, SameRow{}, stream);
}

// ---------------------------------------------------------------- edge values

// A warp handles one slice of a row: it copies the row of the gradient to shared memory, and each group of
// its lanes handles one entry.
template <typename T, typename Id, int kVec>
__global__ void __launch_bounds__(kThreads)
    ssd_value_grad_kernel(const SsdValueGradArgs args, bool in_shared, int lanes) {
  using A = Acc<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const RowSlice slice = load_slice(args.split, warp);
  if (slice.length == 0) return;
  const std::int64_t row = row_of(args.split, slice);
  const T* grad = static_cast<const T*>(args.grad.data) + row * args.grad.stride;
  if (in_shared) {
    T* own = reinterpret_cast<T*>(shared) + threadIdx.x / kWarp * args.width;
    for (std::int64_t f = threadIdx.x % kWarp; f < args.width; f += kWarp) own[f] = grad[f];
    __syncwarp();
    grad = own;
  }
  const A row_scale = args.scale_dst != nullptr ? static_cast<const A*>(args.scale_dst)[row] : A{1};
  const int lane = threadIdx.x % lanes, group = threadIdx.x % kWarp / lanes;
  const int k = static_cast<int>(args.ids.k), groups = kWarp / lanes;

  // All groups of the warp loop together, because they exchange numbers by shuffles.
  for (int base = 0; base < slice.length; base += groups) {
    const bool live = base + group < slice.length;
    const std::int64_t entry = slice.begin + base + group;
    const std::int64_t source = live ? __ldg(args.a.col + entry) : 0;
    A sum = 0;
    if (live) {
#pragma unroll 2
      for (int c = lane * kVec; c < k; c += lanes * kVec) {
        const Pack<Id, kVec> ids = load_ids<Id, kVec>(args.ids, source, c);
        const T* kept = static_cast<const T*>(args.kept) + source * k + c;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += widen(grad[ids.lane[i]]) * widen(kept[i]);
      }
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (live && lane == 0) {
      if (args.scale_src != nullptr) sum *= static_cast<const A*>(args.scale_src)[source];
      static_cast<A*>(args.out)[edge_position(args.a, entry)] = sum * row_scale;
    }
  }
}

template <typename T, typename Id, int kVec>
void launch_values(const SsdValueGradArgs& args, cudaStream_t stream) {
  constexpr int kWarps = kThreads / kWarp, kMostBytes = 48 * 1024;
  const std::int64_t bytes = kWarps * args.width * static_cast<std::int64_t>(sizeof(T));
  const bool in_shared = bytes <= kMostBytes;
  ssd_value_grad_kernel<T, Id, kVec>
      <<<ceil_div(args.split.num_slices, kWarps), kThreads, in_shared ? bytes : 0, stream>>>(
          args, in_shared, lanes_for(args.ids.k, kVec));
}

}  // namespace ssd_backward_detail

int ssd_backward_windows(const SsdBackwardWindowsArgs& args, void* stream) {
  using namespace ssd_backward_detail;
  cudaError_t error = cudaErrorInvalidValue;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) <= 4) {
      with_ids(args.ids, [&](auto id, auto vec) {
        error = launch_windows<T, decltype(id), vec.value>(args, static_cast<cudaStream_t>(stream));
      });
    }
  });
  return error;
}

int ssd_backward(const SsdBackwardArgs& args, void* stream) {
  using namespace ssd_backward_detail;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    args.ids.is_16bit ? launch_rows<T, std::uint16_t>(args, static_cast<cudaStream_t>(stream))
                      : launch_rows<T, std::uint8_t>(args, static_cast<cudaStream_t>(stream));
  });
  return cudaGetLastError();
}

int ssd_value_grad(const SsdValueGradArgs& args, void* stream) {
  using namespace ssd_backward_detail;
  with_type(args.dtype, [&](auto type) {
    with_ids(args.ids, [&](auto id, auto vec) {
      launch_values<decltype(type), decltype(id), vec.value>(args, static_cast<cudaStream_t>(stream));
    });
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
