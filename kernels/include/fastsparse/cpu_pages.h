// Pages of 2 MB on the CPU.
//
// Large results: allocators give memory that was never touched, and the first touch of every page of 4 KB is
// a fault that takes longer than the kernel needs to fill it. What is read at random: a core translates few
// addresses at a time, and half as many lines of small pages come in a second.
#pragma once

#include <cstdint>

#include "fastsparse/views.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fastsparse::cpu {

// Asks for huge pages under a result before it is written. It is advice: where the system does not give any,
// or the memory was touched before, nothing changes. With `collapse` the system moves what was touched, now:
// 1.9 ms of a thread per MB, once.
inline void prefer_huge_pages(void* out, std::int64_t bytes, bool collapse = false) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::int64_t kLeast = 8 << 20;  // allocators keep what is smaller, and it was touched
  constexpr std::uintptr_t kPage = 2 << 20;
  if (out == nullptr || bytes < kLeast) return;
  const auto address = reinterpret_cast<std::uintptr_t>(out);
  const std::uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1; older ones refuse, and headers lack it
  if (collapse) madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
#else
  static_cast<void>(out);
  static_cast<void>(bytes);
  static_cast<void>(collapse);
#endif
}

// Bytes of a number.
inline std::int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

}  // namespace fastsparse::cpu
