// Where a code lies, and activations as integers.
//
// On the CPU a product is exact within a span: the activations of up to 64 consecutive k (of one group) are integers of
// 24 bits times a power of two, in three digits of a byte, and the codes are integers anyhow. The largest activation of
// a span keeps 23 bits, so the error of the others is what a float32 sum that begins with the largest one would make,
// and integers, halves and the like are exact.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"

namespace jq {
namespace weight_only {

constexpr int kSpan = 64;   // activations with a common exponent
constexpr int kDigits = 3;  // of an activation, base 256, the highest last; each in [-128, 127]
constexpr int kPanel = 16;  // columns, in the prepared layout
constexpr int kWordCodes = 4;

// A matrix [k, n] of codes. Plain: rows of n codes, those below 8 bits packed, low bits first. Prepared: panels of 16
// columns, in them words of 4 bytes for each column; a word holds `per` = 8 / bits times four consecutive k, the first
// four in the lowest bits of its bytes.
struct Codes {
  const uint8_t* data;
  int bits;
  bool is_signed, prepared;
  int64_t n, k;

  JQ_HOST_DEVICE int Per() const { return 8 / bits; }
  JQ_HOST_DEVICE int64_t RowBytes() const { return (n + Per() - 1) / Per(); }
  JQ_HOST_DEVICE int64_t PanelBytes() const { return (k + 4 * Per() - 1) / (4 * Per()) * (4 * kPanel); }
  JQ_HOST_DEVICE int64_t Bytes() const { return prepared ? (n + kPanel - 1) / kPanel * PanelBytes() : k * RowBytes(); }
  // What is added to a code so that none is negative: half of the range. Codes without a sign have it in them.
  JQ_HOST_DEVICE int Offset() const { return 1 << (bits - 1); }

  // A code plus Offset(), or an unsigned code.
  JQ_HOST_DEVICE int At(int64_t row, int64_t column) const {
    int64_t byte;
    int shift;
    if (prepared) {
      const int64_t word = row / (4 * Per());
      const int within = static_cast<int>(row - word * (4 * Per()));
      byte = column / kPanel * PanelBytes() + word * (4 * kPanel) + column % kPanel * 4 + within % 4;
      shift = within / 4 * bits;
    } else {
      byte = row * RowBytes() + column / Per();
      shift = static_cast<int>(column % Per()) * bits;
    }
    const int code = (data[byte] >> shift) & ((1 << bits) - 1);
    return is_signed ? code ^ Offset() : code;
  }
};

// Powers of two: x * to has at most 23 bits and a sign, and three digits hold it.
struct SpanScale {
  float to, from;
};
// largest: the bits of the largest magnitude; one that is not finite gives NaN.
JQ_HOST_DEVICE SpanScale ScaleOfSpan(uint32_t largest) {
  if (largest >= 0x7f800000u) return {0.0f, BitCast<float>(0x7fc00000u)};
  int exponent = 22 + 127 - static_cast<int>(largest >> 23);
  if ((largest & 0x7fffffu) > 0x7efefeu) --exponent;  // would round to more than digits of 127 each
  if (exponent > 126) exponent = 126;                 // 2^-126 is the last normal number
  return {BitCast<float>(static_cast<uint32_t>(127 + exponent) << 23),
          BitCast<float>(static_cast<uint32_t>(127 - exponent) << 23)};
}
JQ_HOST_DEVICE int32_t ToFixed(float x, float to) {
  const float scaled = x * to;
  return static_cast<int32_t>(scaled < 0 ? scaled - 0.5f : scaled + 0.5f);
}
struct Digits {
  int8_t at[kDigits];
};
JQ_HOST_DEVICE Digits DigitsOf(int32_t value) {
  Digits d{};
  d.at[0] = static_cast<int8_t>(value);
  value = (value - d.at[0]) >> 8;
  d.at[1] = static_cast<int8_t>(value);
  d.at[2] = static_cast<int8_t>((value - d.at[1]) >> 8);
  return d;
}

}  // namespace weight_only
}  // namespace jq
