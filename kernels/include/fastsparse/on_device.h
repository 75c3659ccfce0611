// Launches on a device, for callers that have a device number and a stream: the binding and the C++ library.
#pragma once

#include <stdexcept>
#include <string>

#ifdef FASTSPARSE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace fastsparse {

struct CudaError {
  int code;
};

[[noreturn]] inline void throw_without_cuda() {
  throw std::runtime_error(
      "fastsparse_core was built without CUDA kernels; `python -m fastsparse_core.doctor` says how to build "
      "them");
}

// The error message that names the driver version that a build needs. CUDA versions are numbered as in
// CUDART_VERSION. `supported` is the CUDA version of the driver, 0 without a driver.
inline std::string old_driver_text(int built_for, int supported) {
  const auto version = [](int of) {
    return std::to_string(of / 1000) + "." + std::to_string(of % 1000 / 10);
  };
  // Programs built with any minor version of CUDA run with the first driver of its major version.
  const int oldest = built_for < 12000 ? 450 : built_for < 13000 ? 525 : 580;
  const std::string found = supported == 0
                                ? "there is no NVIDIA driver"
                                : "the NVIDIA driver is too old: it supports CUDA " + version(supported);
  return found + ", and this build of FastSparse (CUDA " + version(built_for) + ") needs driver " +
         std::to_string(oldest) + " or newer; update the driver, or build FastSparse with an older nvcc";
}

#ifdef FASTSPARSE_WITH_CUDA
#define FASTSPARSE_OF_CUDA(name) &cuda::name

inline void check(int code) {
  if (code != cudaSuccess) throw CudaError{code};
}

inline std::string text_of(const CudaError& error) {
  if (error.code != cudaErrorInsufficientDriver)
    return cudaGetErrorString(static_cast<cudaError_t>(error.code));
  int supported = 0;
  cudaDriverGetVersion(&supported);
  return old_driver_text(CUDART_VERSION, supported);
}

// Makes the device of the tensors current for a launch. With a statically linked runtime, a launch while
// another device is current would report success and write nothing.
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

// Calls `run`, which returns an error code, while `device` is current.
template <typename Run>
void on_device(int device, const Run& run) {
  const DeviceGuard guard(device);
  check(run());
}
#else
#define FASTSPARSE_OF_CUDA(name) nullptr

inline std::string text_of(const CudaError&) { return {}; }

template <typename Run>
void on_device(int, const Run&) {
  throw_without_cuda();
}
#endif

}  // namespace fastsparse
