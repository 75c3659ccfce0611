// Overlapping launches: a kernel may be launched while the previous kernel in its stream still runs, so that
// its launch, and its code before the wait, overlap with the end of the previous kernel.
//
// A kernel starts early only if its launch requests this, and it overlaps only with the kernel right before
// it in the stream. Kernels before that one must have ended by then. So the kernel right before it must be
// launched without overlap, or at least one of its threads must wait for the kernels before it.
#pragma once

#include <cstddef>

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

// Every block of a kernel calls this. After all blocks have called it or ended, the next kernel may be
// launched.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the previous kernel has ended and its writes are visible, except to loads with __ldg.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Sets `can` if kernels may start early on the current device: overlapping launches, and the wait within the
// kernel, need architecture 9.0. All kernels are compiled for the same architectures, so the answer for one
// kernel holds for all. The answer is stored, because a check at every launch would take half as much host
// time as the launch.
inline cudaError_t can_overlap(const void* kernel, bool& can) {
  thread_local int known_device = -1;
  thread_local bool known = false;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device != known_device) {
    cudaFuncAttributes compiled{};
    error = cudaFuncGetAttributes(&compiled, kernel);
    if (error == cudaSuccess) {
      known = compiled.ptxVersion >= 90;
      known_device = device;
    }
  }
  can = known;
  return error;
}

// Launches a kernel after the previous kernel or, with `overlap` and if the architecture supports it, while
// the previous kernel runs. With overlap, every thread that reads the previous kernel's results must call
// wait_for_kernel_before, and at least one thread must call it.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), bool overlap, dim3 grid, dim3 block,
                             std::size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  bool can = false;
  const cudaError_t error = can_overlap(reinterpret_cast<const void*>(kernel), can);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap && can ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace fastsparse::cuda
