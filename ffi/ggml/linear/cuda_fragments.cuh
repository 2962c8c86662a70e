// Integer products on tensor cores: 16 rows of weights by 8 of activations, a span or half of it at a time.
//
// The fragments of a warp, with g = lane / 4 and q = lane % 4 (every fragment of four codes is a word):
//
//   weights      [0]: row g, codes 4 q ... + 3    [1]: row g + 8, the same    [2], [3]: the same rows, 16 codes later
//   activations  [0]: row g, codes 4 q ... + 3    [1]: 16 codes later
//   sums         [0], [1]: weight row g, activation rows 2 q and 2 q + 1      [2], [3]: weight row g + 8
//
// Sums start from kMagic and end as floats: an integer below 2^22 added to the bits of 1.5 2^23 is that float plus the
// integer, so that a subtraction stands for a conversion at a quarter of its rate. 32 products of 8 bits stay below
// 2^19.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_portable.h"
#include "ffi/common/numeric.h"

#if defined(__CUDACC__)
#define JQ_NOINLINE __noinline__
#else
#define JQ_NOINLINE __attribute__((noinline))
#endif

namespace jq {
namespace ggml {

constexpr int32_t kMagic = 0x4b400000;
constexpr float kMagicFloat = 12582912.0f;

// What is computed from the result is computed where it is used, not ahead of a loop that needs the registers.
__device__ __forceinline__ int Opaque(int value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

struct WeightFragment {
  uint32_t w[4];
};
struct ActivationFragment {
  uint32_t w[2];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// Turing's product has eight rows of weights and 16 codes.
__device__ __forceinline__ void MultiplyEight(int32_t& first, int32_t& second, uint32_t weights, uint32_t activations,
                                              int32_t first_addend, int32_t second_addend) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %5};"
               : "=r"(first), "=r"(second)
               : "r"(weights), "r"(activations), "r"(first_addend), "r"(second_addend));
}
#endif

#if defined(JQ_CUDA_ON_HOST)

// Through memory that the warp shares.
inline void MultiplyOnHost(int32_t (&sums)[4], uint32_t low_rows, uint32_t high_rows, uint32_t activations) {
  constexpr int kMaxWarps = 32;
  JQ_SHARED(uint32_t, all, kMaxWarps, 3, 32);
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, q = lane % 4;
  auto& of_warp = all[threadIdx.x / 32];
  of_warp[0][lane] = low_rows;
  of_warp[1][lane] = high_rows;
  of_warp[2][lane] = activations;
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    for (int word = 0; word < 4; ++word) {
      sums[i] = __dp4a(static_cast<int>(of_warp[i / 2][4 * g + word]),
                       static_cast<int>(of_warp[2][4 * (2 * q + i % 2) + word]), sums[i]);
    }
  }
  __syncwarp();
}

#endif

// 16 codes: those of `half`. From kMagic on, which stays in registers.
__device__ __forceinline__ void MultiplyHalf(int32_t (&sums)[4], const WeightFragment& w, const ActivationFragment& x,
                                             int half) {
#if defined(JQ_CUDA_ON_HOST)
  for (int i = 0; i < 4; ++i) sums[i] = kMagic;
  MultiplyOnHost(sums, w.w[2 * half], w.w[2 * half + 1], x.w[half]);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
               : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
               : "r"(w.w[2 * half]), "r"(w.w[2 * half + 1]), "r"(x.w[half]), "r"(kMagic));
#else
  MultiplyEight(sums[0], sums[1], w.w[2 * half], x.w[half], kMagic, kMagic);
  MultiplyEight(sums[2], sums[3], w.w[2 * half + 1], x.w[half], kMagic, kMagic);
#endif
}

// 32 codes.
__device__ __forceinline__ void MultiplySpan(int32_t (&sums)[4], const WeightFragment& w, const ActivationFragment& x) {
#if defined(JQ_CUDA_ON_HOST)
  MultiplyHalf(sums, w, x, 0);
  MultiplyOnHost(sums, w.w[2], w.w[3], x.w[1]);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(w.w[0]), "r"(w.w[1]), "r"(w.w[2]), "r"(w.w[3]), "r"(x.w[0]), "r"(x.w[1]), "r"(kMagic));
#else
  MultiplyHalf(sums, w, x, 0);
  MultiplyEight(sums[0], sums[1], w.w[2], x.w[1], sums[0], sums[1]);
  MultiplyEight(sums[2], sums[3], w.w[3], x.w[1], sums[2], sums[3]);
#endif
}

// What a span needs besides its codes, for the sums that a lane holds.
struct WeightScales {
  float scale[2][2], offset[2][2];  // [half or 0][row g, row g + 8]
};
struct ActivationScales {
  float scale[2], sums[2][2];  // [row 2 q, row 2 q + 1], [half or 0][...]
};

// out += the products of a span, in an order of its own that every kernel keeps to: the integer products of a group,
// then its offset; halves in turn. kColumns: 2, or 1 where nobody asks for the activation rows 2 q + 1.
template <int kGroup, bool kOffset, int kColumns>
__device__ __forceinline__ void AddSpan(float (&out)[4], const WeightFragment& w, const ActivationFragment& x,
                                        const WeightScales& ws, const ActivationScales& xs) {
#pragma unroll
  for (int half = 0; half < 32 / kGroup; ++half) {
    int32_t sums[4];
    if constexpr (kGroup == 32) {
      MultiplySpan(sums, w, x);
    } else {
      MultiplyHalf(sums, w, x, half);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 3 - kColumns) {
      const float product = BitCast<float>(sums[i]) - kMagicFloat;
      out[i] = __fmaf_rn(ws.scale[half][i / 2] * xs.scale[i % 2], product, out[i]);
      if constexpr (kOffset) out[i] = __fmaf_rn(ws.offset[half][i / 2], xs.sums[half][i % 2], out[i]);
    }
  }
}

}  // namespace ggml
}  // namespace jq
