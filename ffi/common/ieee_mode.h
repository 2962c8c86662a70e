// Plain IEEE arithmetic for a scope: subnormals count. XLA runs CPU handlers and its pool's threads with flush-to-zero.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace jq {

class IeeeMode {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // round to nearest, no trap, no flushing
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~IeeeMode() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  IeeeMode() {}
  ~IeeeMode() {}
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

}  // namespace jq
