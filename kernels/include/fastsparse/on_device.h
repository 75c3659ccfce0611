// Launches on a device, for callers that have its number and a stream: the binding and the C++ library.
#pragma once

#include <stdexcept>

#ifdef FASTSPARSE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace fastsparse {

struct CudaError {
  int code;
};

[[noreturn]] inline void throw_without_cuda() {
  throw std::runtime_error("fastsparse_core was built without CUDA: see doctor");
}

#ifdef FASTSPARSE_WITH_CUDA
#define FASTSPARSE_OF_CUDA(name) &cuda::name

inline void check(int code) {
  if (code != cudaSuccess) throw CudaError{code};
}

inline const char* text_of(const CudaError& error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error.code));
}

// Launches go to the tensors' device whatever device is current: with a statically linked runtime a launch
// for another device would otherwise report success and write nothing.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_));
    if (device != previous_) check(cudaSetDevice(device));
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Calls `run` where `device` is current; it returns an error code.
template <typename Run>
void on_device(int device, const Run& run) {
  const DeviceGuard guard(device);
  check(run());
}
#else
#define FASTSPARSE_OF_CUDA(name) nullptr

inline const char* text_of(const CudaError&) { return ""; }

template <typename Run>
void on_device(int, const Run&) {
  throw_without_cuda();
}
#endif

}  // namespace fastsparse
