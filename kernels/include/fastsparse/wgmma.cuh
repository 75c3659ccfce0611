// Products of a warpgroup (128 threads) on Hopper's tensor cores: operand A is in registers, in the layout of
// mma.sync, and operand B is in shared memory. Only in code for architecture 9.0a.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace fastsparse::cuda {

// Bytes per row of an operand in shared memory. 8 rows are a swizzle atom, in which the 16-byte piece c of
// row r is at c ^ r % 8. Atoms begin at multiples of kAtomBytes.
constexpr int kSwizzledRowBytes = 128;
constexpr int kAtomBytes = 8 * kSwizzledRowBytes;

__device__ __forceinline__ int swizzled(int row, int byte) {
  return row * kSwizzledRowBytes + (byte ^ (row % 8 * 16));
}

// The descriptor of operand B. If rows of B are outputs, a row has 64 elements of the dimension that is
// summed: `next_atom` is the distance, in bytes, between groups of 8 rows, and `next_panel` is not used. If
// rows are elements of the dimension that is summed, a row has 64 outputs: `next_atom` is the distance of 8
// rows, and `next_panel` the distance of 64 outputs.
__device__ __forceinline__ std::uint64_t operand_b(const void* shared, int next_atom, int next_panel) {
  const auto address = static_cast<std::uint64_t>(__cvta_generic_to_shared(shared));
  return (address & 0x3ffff) >> 4 | static_cast<std::uint64_t>(next_panel >> 4) << 16 |
         static_cast<std::uint64_t>(next_atom >> 4) << 32 | std::uint64_t{1} << 62;
}

// C (64 x 8 kTiles, float32) = A (64 x 16) B (16 x 8 kTiles) in bfloat16; adds C if `adds`. Products are
// enqueued in groups, between a fence and a wait. c[i] and a have a warp's 16 rows, in the layout of
// mma.sync. kByRow: rows of B in shared memory are elements of the sum's dimension.
template <bool kByRow>
__device__ __forceinline__ void wgmma_bf16(float (&c)[16][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                           bool adds);
template <bool kByRow>
__device__ __forceinline__ void wgmma_bf16(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                           bool adds);
// Must be called before the first product of a group, after A and C are in their registers.
__device__ __forceinline__ void wgmma_fence();
// Ends a group of products.
__device__ __forceinline__ void wgmma_commit();
// Waits for all groups of products. Afterwards, c has their results.
template <int kTiles>
__device__ __forceinline__ void wgmma_wait(float (&c)[kTiles][4]);
// Makes earlier writes of this thread to shared memory visible to later products, which must come after a
// barrier.
__device__ __forceinline__ void shared_to_wgmma();

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// clang-format off
#define FASTSPARSE_C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FASTSPARSE_C16(i) FASTSPARSE_C4(i), FASTSPARSE_C4(i + 1), FASTSPARSE_C4(i + 2), FASTSPARSE_C4(i + 3)

template <bool kByRow>
__device__ __forceinline__ void wgmma_bf16(float (&c)[16][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                           bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, adds, 1, 1, %70;\n}\n"
      : FASTSPARSE_C16(0), FASTSPARSE_C16(4), FASTSPARSE_C16(8), FASTSPARSE_C16(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)), "n"(kByRow ? 1 : 0));
}

template <bool kByRow>
__device__ __forceinline__ void wgmma_bf16(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                           bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1, %38;\n}\n"
      : FASTSPARSE_C16(0), FASTSPARSE_C16(4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)), "n"(kByRow ? 1 : 0));
}

#undef FASTSPARSE_C16
#undef FASTSPARSE_C4
// clang-format on

__device__ __forceinline__ void wgmma_fence() {
  __syncwarp();  // lanes that loop over rows of different lengths meet here
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kTiles>
__device__ __forceinline__ void wgmma_wait(float (&c)[kTiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  // Makes the compiler read c after the wait.
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    asm volatile("" : "+f"(c[tile][0]), "+f"(c[tile][1]), "+f"(c[tile][2]), "+f"(c[tile][3])::"memory");
  }
}
__device__ __forceinline__ void shared_to_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#else
// Architectures before 9.0a lack this instruction; `gpu.has_wgmma` prevents launches of the kernels there.
template <bool kByRow>
__device__ __forceinline__ void wgmma_bf16(float (&)[16][4], const std::uint32_t (&)[4], std::uint64_t,
                                           bool) {
  __trap();
}
template <bool kByRow>
__device__ __forceinline__ void wgmma_bf16(float (&)[8][4], const std::uint32_t (&)[4], std::uint64_t, bool) {
  __trap();
}
__device__ __forceinline__ void wgmma_fence() {}
__device__ __forceinline__ void wgmma_commit() {}
template <int kTiles>
__device__ __forceinline__ void wgmma_wait(float (&)[kTiles][4]) {}
__device__ __forceinline__ void shared_to_wgmma() {}
#endif

}  // namespace fastsparse::cuda
