// Launches that overlap: a kernel may be launched while the one before it in its stream still runs, so that
// its launch, and what it does before it waits, fall into the end of that one.
//
// Only a kernel whose launch asks for it starts early, and only relative to the one right before it in the
// stream: what came before that one must be over by then, because it was launched as usual, or when it ends,
// because some of its threads wait until it is.
#pragma once

#include <cstddef>

#include "fastsparse/cuda_common.cuh"

namespace fastsparse::cuda {

// Called by every block of a kernel: after all blocks have called it or ended, the next kernel may be
// launched.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before has ended and what it wrote can be read, though not through __ldg.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether a kernel may start early on the current device: overlapping launches, and the kernel's wait, came
// with architecture 9.0. All kernels are compiled for the same architectures, so the answer of one kernel
// holds for all of them; checking at every launch would cost the host half as much as the launch.
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

// Launches a kernel, behind the one before it or, where `overlap` says so and the architecture can, during
// it; then every thread that needs what that one writes, and one thread at least, calls
// wait_for_kernel_before.
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
