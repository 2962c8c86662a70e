// A warp's integer product on tensor cores: 16 rows of a with 8 columns of w, 32 codes along k, added to sums.
//
// With g = lane / 4 and q = lane % 4, four codes a word:
//
//   a     [0]: row g, word q    [1]: row g + 8, word q    [2], [3]: the same rows, word q + 4
//   w     [0]: column g, word q    [1]: column g, word q + 4
//   sums  [0], [1]: row g, columns 2 q and 2 q + 1    [2], [3]: row g + 8
#pragma once

#include <cstdint>

#include "ffi/common/cuda_portable.h"

namespace jq {
namespace matmul {

#if defined(JQ_CUDA_ON_HOST)

// Through memory that the warp shares.
inline void Multiply(int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&w)[2]) {
  constexpr int kMaxWarps = 32;
  JQ_SHARED(uint32_t, all, kMaxWarps, 6, 32);
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, q = lane % 4;
  auto& of_warp = all[threadIdx.x / 32];
  for (int i = 0; i < 4; ++i) of_warp[i][lane] = a[i];
  for (int i = 0; i < 2; ++i) of_warp[4 + i][lane] = w[i];
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      for (int word = 0; word < 4; ++word) {
        sums[i] = __dp4a(static_cast<int>(of_warp[2 * half + i / 2][4 * g + word]),
                         static_cast<int>(of_warp[4 + half][4 * (2 * q + i % 2) + word]), sums[i]);
      }
    }
  }
  __syncwarp();
}

#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

__device__ __forceinline__ void Multiply(int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&w)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(w[0]), "r"(w[1]));
}

#else

// Turing's product has eight rows and 16 codes.
__device__ __forceinline__ void MultiplyEight(int32_t& first, int32_t& second, uint32_t a, uint32_t w) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+r"(first), "+r"(second)
               : "r"(a), "r"(w));
}
__device__ __forceinline__ void Multiply(int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&w)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    MultiplyEight(sums[0], sums[1], a[2 * half], w[half]);
    MultiplyEight(sums[2], sums[3], a[2 * half + 1], w[half]);
  }
}

#endif

}  // namespace matmul
}  // namespace jq
