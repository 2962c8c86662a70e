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

// What ActivationSpan::sums holds for a format.
struct Correction {
  int zero;     // of its codes
  int group;    // 16 or 32
  bool offset;  // its weights have an offset, and then no zero
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
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < 16; ++i) {
    sums[0] += codes[i];
    sums[1] += codes[16 + i];
  }
  for (int i = 0; i < kSpan; ++i) {
    to->codes[i] = static_cast<int8_t>(codes[i] & -static_cast<int32_t>(finite));
  }
  to->scale = finite ? scale : BitCast<float>(0x7fc00000u);
  if (correction.group == kSpan) sums[0] = sums[1] = sums[0] + sums[1];
  for (int half = 0; half < 2; ++half) {
    const int32_t sum = finite ? sums[half] : 0;
    if (correction.offset) {
      to->sums.scaled[half] = to->scale * static_cast<float>(sum);
    } else {
      to->sums.integer[half] = -correction.zero * sum;
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
