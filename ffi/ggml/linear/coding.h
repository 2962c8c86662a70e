// How the kernels store the codes of each format: as code + zero in a byte, where that makes the integer products
// cheaper. Results do not depend on it: the products are exact.
#pragma once

#include <cstdint>

#include "ffi/ggml/decode.h"
#include "ffi/ggml/linear/blocking.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define JQ_VNNI 1
#endif

#define JQ_INLINE inline __attribute__((always_inline))

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

struct Interval {
  int lowest, highest;
};

// Of any bytes, not of those a quantiser writes.
template <typename F>
constexpr Interval kCodes = {-128, 127};
#define JQ_CODES(F, lowest, highest) \
  template <>                        \
  constexpr Interval kCodes<F> = {lowest, highest};
JQ_CODES(Q1_0, -1, 1)
JQ_CODES(Q2_0, -1, 2)
JQ_CODES(Q4_0, -8, 7)
JQ_CODES(Q4_1, 0, 15)
JQ_CODES(Q5_0, -16, 15)
JQ_CODES(Q5_1, 0, 31)
JQ_CODES(Q2_K, 0, 3)
JQ_CODES(Q3_K, -4, 3)
JQ_CODES(Q4_K, 0, 15)
JQ_CODES(Q5_K, 0, 31)
JQ_CODES(Q6_K, -32, 31)
JQ_CODES(IQ2_XXS, -43, 43)
JQ_CODES(IQ2_XS, -43, 43)
JQ_CODES(IQ2_S, -43, 43)
JQ_CODES(IQ3_XXS, -62, 62)
JQ_CODES(IQ3_S, -15, 15)
JQ_CODES(IQ1_S, -9, 9)
JQ_CODES(IQ1_M, -9, 9)
JQ_CODES(TQ1_0, -1, 1)
JQ_CODES(TQ2_0, -1, 2)
JQ_CODES(MXFP4, -12, 12)
JQ_CODES(NVFP4, -12, 12)
#undef JQ_CODES

template <typename F>
struct Coding {
  static constexpr int kGroup = Decoder<F>::kGroup;
  static constexpr bool kOffset = Decoder<F>::kOffset;
  static constexpr int kWidth = kCodes<F>.highest - kCodes<F>.lowest;
#if defined(JQ_VNNI)
  static constexpr int kRun = 0;
  static constexpr int kZero = -kCodes<F>.lowest;
#elif defined(__AVX2__)
  // Unsigned codes times activations of at most 127, summed in pairs: how many such sums fit 16 bits. None: the codes
  // are kept signed.
  static constexpr int kRun = kWidth <= 16 ? 8 : kWidth <= 32 ? 4 : kWidth <= 64 ? 2 : kWidth <= 128 ? 1 : 0;
  static constexpr int kZero = kRun == 0 ? 0 : -kCodes<F>.lowest;
#else
  static constexpr int kRun = 0;
  static constexpr int kZero = 0;
#endif
};

// What a micro-kernel needs to know of a format: formats alike share one.
template <int group, bool offset, int run, bool zero>
struct Kind {
  static constexpr int kGroup = group;
  static constexpr bool kOffset = offset;
  static constexpr int kRun = run;
  static constexpr bool kHasZero = zero;
};
template <typename F>
using KindOf = Kind<Coding<F>::kGroup, Coding<F>::kOffset, Coding<F>::kRun, Coding<F>::kZero != 0>;

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq
