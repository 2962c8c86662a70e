// Where a value is counted: its bin of a range, or a digit of its bits.
#pragma once

#include "ffi/common/numeric.h"

namespace jq {

JQ_HOST_DEVICE bool IsFinite(float value) { return (BitCast<uint32_t>(value) & 0x7fffffffu) < 0x7f800000u; }

// bin = clip(floor((value - low) * (bins / (high - low))), 0, bins - 1), all scaled by a power of two that brings the
// range near 1: nothing overflows, and no range of normal floats is too narrow.
struct Binning {
  float unit, origin, factor, last;

  static JQ_HOST_DEVICE Binning Of(float low, float high, int64_t bins) {
    const uint32_t a = BitCast<uint32_t>(low) & 0x7fffffffu, b = BitCast<uint32_t>(high) & 0x7fffffffu;
    const int32_t exponent = static_cast<int32_t>((a > b ? a : b) >> 23);
    const int32_t inverse = exponent >= 253 ? 1 : exponent == 0 ? 253 : 254 - exponent;
    Binning result;
    result.unit = BitCast<float>(static_cast<uint32_t>(inverse) << 23);
    const float origin = low * result.unit, width = high * result.unit - origin;
    const float factor = static_cast<float>(static_cast<int32_t>(bins)) / width;
    const bool good = width > 0.0f && IsFinite(width) && IsFinite(factor);
    result.origin = good ? origin : 0.0f;
    result.factor = good ? factor : 0.0f;
    result.last = static_cast<float>(static_cast<int32_t>(bins - 1));
    return result;
  }

  // Comparisons that are false for the NaN of infinity times 0.
  JQ_HOST_DEVICE uint32_t Bin(float value) const {
    const float t = (value * unit - origin) * factor;
    const float positive = t > 0.0f ? t : 0.0f;
    return static_cast<uint32_t>(static_cast<int32_t>(positive < last ? positive : last));
  }
};

JQ_HOST_DEVICE uint32_t MagnitudeMask(bool magnitude) { return magnitude ? 0x7fffffffu : 0xffffffffu; }

// Unsigned integers in the order of the values (of their magnitudes).
JQ_HOST_DEVICE uint32_t OrderedKey(uint32_t bits, bool magnitude) {
  const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return magnitude ? bits & 0x7fffffffu : bits ^ (negative | 0x80000000u);
}

// A digit of keys that begin with a prefix.
struct Digit {
  int shift, width;
  JQ_HOST_DEVICE uint32_t Of(uint32_t key) const { return (key >> shift) & ((1u << width) - 1u); }
  // In two steps: a shift by 32 is undefined.
  JQ_HOST_DEVICE uint32_t Before(uint32_t key) const { return (key >> shift) >> width; }
};

}  // namespace jq
