// Activations as the kernels read them: float32, or int8 codes with a scale for 32 of them.
//
//   scale = amax / 127,  code = x / scale, rounded half to even
//
// A span that holds NaN or an infinity gets the scale NaN, so that its row's results are NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/common/numeric.h"
#include "ffi/ggml/linear/coding.h"

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

// What ActivationSpan::sums holds.
enum class Sums { kWide, kPairs, kScaled };
struct Correction {
  Sums sums;
  int zero;
  int group;  // 16 or 32
};

template <typename Real>
inline __attribute__((always_inline)) void LoadFloats(const Real* x, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = Convert<float>(x[i]);
}
template <>
inline __attribute__((always_inline)) void LoadFloats(const float* x, int64_t count, float* to) {
  memcpy(to, x, count * sizeof(float));
}

// By which the values of a span are divided. Where the scale underflows to 0, and in spans without numbers, the codes
// are 0. largest: the largest magnitude, as an integer; an infinity or NaN is above every number.
inline float Divisor(uint32_t largest, float* scale) {
  const bool finite = largest < 0x7f800000u;
  *scale = finite ? BitCast<float>(largest) / 127.0f : BitCast<float>(0x7fc00000u);
  return finite && *scale > 0.0f ? *scale : BitCast<float>(0x7f800000u);
}

#if defined(JQ_VNNI)
inline __attribute__((always_inline)) uint32_t Largest(__m512i values) {
  const __m256i eight =
      _mm256_max_epu32(_mm512_maskz_extracti64x4_epi64(15, values, 0), _mm512_maskz_extracti64x4_epi64(15, values, 1));
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}
#endif

// Codes and scale of a span, and the sums of its codes: [half][0] of codes 0, 1 of each four, [half][1] of the others.
inline __attribute__((always_inline)) void QuantizeCodes(const float* x, ActivationSpan* to, int32_t (&sums)[2][2]) {
#if defined(JQ_VNNI)
  const __m512 values[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
  const __m512i magnitudes[2] = {_mm512_and_si512(_mm512_castps_si512(values[0]), _mm512_set1_epi32(0x7fffffff)),
                                 _mm512_and_si512(_mm512_castps_si512(values[1]), _mm512_set1_epi32(0x7fffffff))};
  const __m512i larger = _mm512_maskz_max_epu32(0xffff, magnitudes[0], magnitudes[1]);
  const __m512 divisor = _mm512_set1_ps(Divisor(Largest(larger), &to->scale));
  for (int half = 0; half < 2; ++half) {
    // An infinity or NaN divided by the divisor then is NaN, whose code is 0.
    const __m512 quotient = _mm512_div_ps(values[half], divisor);
    const __mmask16 number = _mm512_cmp_ps_mask(quotient, quotient, _CMP_ORD_Q);
    const __m512 least = _mm512_maskz_max_ps(number, quotient, _mm512_set1_ps(-127.0f));
    const __m512i codes =
        _mm512_maskz_cvt_roundps_epi32(number, _mm512_maskz_min_ps(number, least, _mm512_set1_ps(127.0f)),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, codes);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to->codes + 16 * half), bytes);
    for (int pair = 0; pair < 2; ++pair) {
      const __m128i ones = _mm_set1_epi32(pair == 0 ? 0x0101 : 0x01010000);
      const __m128i fours = _mm_dpbusd_epi32(_mm_setzero_si128(), ones, bytes);
      const __m128i twos = _mm_add_epi32(fours, _mm_shuffle_epi32(fours, 0x4e));
      sums[half][pair] = _mm_cvtsi128_si32(_mm_add_epi32(twos, _mm_shuffle_epi32(twos, 0xb1)));
    }
  }
#else
  uint32_t largest = 0;
  for (int i = 0; i < kSpan; ++i) {
    const uint32_t magnitude = BitCast<uint32_t>(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float divisor = Divisor(largest, &to->scale);
  const bool finite = largest < 0x7f800000u;
  int32_t codes[kSpan];
  for (int i = 0; i < kSpan; ++i) {
    const float code = ClampNumber(RoundHalfToEven(x[i] / divisor), Range<float>{-127.0f, 127.0f});
    codes[i] = static_cast<int32_t>(code);
  }
  for (int i = 0; i < kSpan; ++i) {
    codes[i] &= -static_cast<int32_t>(finite);
    to->codes[i] = static_cast<int8_t>(codes[i]);
  }
  int32_t columns[2][4] = {};
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 16; i += 4) {
      for (int j = 0; j < 4; ++j) columns[half][j] += codes[16 * half + i + j];
    }
  }
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 2; ++i) sums[half][i] = columns[half][2 * i] + columns[half][2 * i + 1];
  }
#endif
}

inline __attribute__((always_inline)) void QuantizeSpan(const float* x, Correction correction, ActivationSpan* to) {
  int32_t sums[2][2];
  QuantizeCodes(x, to, sums);
  for (int half = 0; half < 2; ++half) {
    int32_t pairs[2];
    for (int i = 0; i < 2; ++i) pairs[i] = correction.group == kSpan ? sums[0][i] + sums[1][i] : sums[half][i];
    if (correction.sums == Sums::kPairs) {
      for (int i = 0; i < 2; ++i) to->sums.pairs[half][i] = static_cast<int16_t>(-correction.zero * pairs[i]);
    } else if (correction.sums == Sums::kWide) {
      to->sums.wide[half] = -correction.zero * (pairs[0] + pairs[1]);
    } else {
      to->sums.scaled[half] = to->scale * static_cast<float>(pairs[0] + pairs[1]);
    }
  }
}

template <typename Real>
void QuantizeRow(const Real* x, int64_t k, Correction correction, ActivationSpan* to) {
  for (int64_t at = 0; at < k; at += kSpan) {
    float values[kSpan];
    LoadFloats(x + at, kSpan, values);
    QuantizeSpan(values, correction, to++);
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq
