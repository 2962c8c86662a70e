// Activations as the kernels read them: float32, or int8 codes with a scale for 32 of them.
//
//   scale = amax / 127,  code = x / scale, rounded half to even
//
// A span that holds NaN or an infinity gets the scale NaN, so that its row's results are NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/common/numeric.h"
#include "ffi/ggml/linear/blocking.h"

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

inline __attribute__((always_inline)) void QuantizeSpan(const float* x, Correction correction, ActivationSpan* to) {
  // As integers: the largest magnitude, and above every number an infinity or NaN.
  uint32_t largest = 0;
  for (int i = 0; i < kSpan; ++i) {
    const uint32_t magnitude = BitCast<uint32_t>(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool finite = largest < 0x7f800000u;
  const float scale = BitCast<float>(largest) / 127.0f;
  // Where the scale underflows to 0, and in spans without numbers, the codes are 0.
  const float divisor = finite && scale > 0.0f ? scale : BitCast<float>(0x7f800000u);
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
  int32_t sums[2][2];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 2; ++i) sums[half][i] = columns[half][2 * i] + columns[half][2 * i + 1];
  }
  to->scale = finite ? scale : BitCast<float>(0x7fc00000u);
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
