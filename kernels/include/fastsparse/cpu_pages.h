// Large results on the CPU: allocators give memory that was never touched, and the first touch of every page
// of 4 KB is a fault that takes longer than the kernel needs to fill it.
#pragma once

#include <cstdint>

#include "fastsparse/views.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fastsparse::cpu {

// Asks for pages of 2 MB under a result before it is written. It is advice: where the system does not give
// any, or the memory was touched before, nothing changes.
inline void prefer_huge_pages(void* out, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::int64_t kLeast = 8 << 20;  // allocators keep what is smaller, and it was touched
  constexpr std::uintptr_t kPage = 2 << 20;
  if (out == nullptr || bytes < kLeast) return;
  const auto address = reinterpret_cast<std::uintptr_t>(out);
  const std::uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(out);
  static_cast<void>(bytes);
#endif
}

// Bytes of a number.
inline std::int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

}  // namespace fastsparse::cpu
