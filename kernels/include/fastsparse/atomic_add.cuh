// Float atomics that add numbers to memory in any order, 16 bytes at a time if the architecture supports it
// (sm_90).
#pragma once

namespace fastsparse::cuda {

__device__ __forceinline__ void atomic_add(float* to, const float (&v)[1]) { atomicAdd(to, v[0]); }

__device__ __forceinline__ void atomic_add(float* to, const float (&v)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]),
               "f"(v[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, v[i]);
#endif
}

}  // namespace fastsparse::cuda
