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

// Formats whose groups of 16 share a float32 factor and have small integer scales: those join the integer products.
template <typename F>
constexpr bool kIntegerScales = false;
template <>
constexpr bool kIntegerScales<Q3_K> = true;
template <>
constexpr bool kIntegerScales<Q6_K> = true;

// How "+ zero" is taken back.
enum class Zero {
  kNone,
  kWide,   // from the 32-bit sums
  kPairs,  // from sums of 16 bits. These may wrap on the way, since what is left fits
};

template <typename F>
struct Coding {
  static constexpr int kGroup = Decoder<F>::kGroup;
  static constexpr bool kOffset = Decoder<F>::kOffset;
  static constexpr int kLowest = kCodes<F>.lowest, kHighest = kCodes<F>.highest;
#if defined(JQ_VNNI)
  static constexpr int kRun = 0;
  static constexpr Zero kTakenBack = kLowest < 0 ? Zero::kWide : Zero::kNone;
#elif defined(__AVX2__)
  // An instruction multiplies unsigned codes with activations of at most 127 and adds pairs, in 16 bits. kRun: how many
  // of those sums fit 16 bits together. 0: not even one, the codes are kept signed.
  static constexpr int kWords = kGroup / 4, kLargest = kHighest > -kLowest ? kHighest : -kLowest;
  static constexpr int kWidth = kHighest - kLowest;
  static constexpr bool kPairs = kLowest < 0 && kLargest * 127 * 2 * kWords < 32768 && kWidth * 254 < 32768;
  static constexpr int kUnwrapped = kWidth <= 16 ? 8 : kWidth <= 32 ? 4 : kWidth <= 64 ? 2 : kWidth <= 128 ? 1 : 0;
  static constexpr int kRun = kPairs || kUnwrapped > kWords ? kWords : kUnwrapped;
  static constexpr Zero kTakenBack = kPairs ? Zero::kPairs : kLowest < 0 && kRun != 0 ? Zero::kWide : Zero::kNone;
#else
  static constexpr int kRun = 0;
  static constexpr Zero kTakenBack = Zero::kNone;
#endif
  static constexpr int kZero = kTakenBack == Zero::kNone ? 0 : -kLowest;
};

// What a micro-kernel needs to know of a format: formats alike share one.
template <int group, bool offset, int run, Zero taken_back, bool integer_scales>
struct Kind {
  static constexpr int kGroup = group;
  static constexpr bool kOffset = offset;
  static constexpr int kRun = run;
  static constexpr Zero kTakenBack = taken_back;
  static constexpr bool kIntegerScales = integer_scales;
};
template <typename F>
using KindOf = Kind<Coding<F>::kGroup, Coding<F>::kOffset, Coding<F>::kRun, Coding<F>::kTakenBack, kIntegerScales<F>>;

// The integer scale of group g, and the factor of the block.
JQ_INLINE int IntegerScale(const Q6_K& b, int g) { return b.scales[g]; }
JQ_INLINE int IntegerScale(const Q3_K& b, int g) {
  const int low = g < 8 ? b.scales[g] & 15 : b.scales[g - 8] >> 4;
  return (low | (b.scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4) - 32;
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq
