// From the values of a block to its scale and zero point. See jaxquant/affine/choose.py, which has the same rules in
// jax.numpy.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ffi/common/numeric.h"

namespace jq {

// The bits of a floating type as signed integers. Finding extremes is then integer work, which is associative (any
// order gives the same bits), wants no conversion of 16-bit floats and tells apart what is not finite by one compare.
template <typename X>
struct BitsOf {
  using Int = int32_t;
  static constexpr Int kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
};
template <>
struct BitsOf<Float16> {
  using Int = int16_t;
  static constexpr Int kMagnitude = 0x7fff, kInfinity = 0x7c00;
};
template <>
struct BitsOf<BFloat16> {
  using Int = int16_t;
  static constexpr Int kMagnitude = 0x7fff, kInfinity = 0x7f80;
};
template <>
struct BitsOf<double> {
  using Int = int64_t;
  static constexpr Int kMagnitude = 0x7fffffffffffffff, kInfinity = 0x7ff0000000000000;
};

// Keys are ordered as the numbers are. Low() and High() give what is not finite the key of the infinity that neither
// extreme takes: a block without a finite value has the range from +inf to -inf.
template <typename X>
struct Keys : BitsOf<X> {
  using typename BitsOf<X>::Int;
  using BitsOf<X>::kMagnitude;
  using BitsOf<X>::kInfinity;
  static constexpr Int kLowest = kInfinity, kHighest = static_cast<Int>(~kInfinity);

  // Its own inverse.
  static JQ_HOST_DEVICE Int Ordered(Int bits) {
    return static_cast<Int>(bits ^ ((bits >> (8 * sizeof(Int) - 1)) & kMagnitude));
  }
  static JQ_HOST_DEVICE Int Magnitude(Int bits) {
    const Int magnitude = static_cast<Int>(bits & kMagnitude);
    return magnitude < kInfinity ? magnitude : Int{0};
  }
  static JQ_HOST_DEVICE Int Low(Int bits) { return IfFinite(bits, kLowest); }
  static JQ_HOST_DEVICE Int High(Int bits) { return IfFinite(bits, kHighest); }

 private:
  // By a mask: compilers make one branch of two choices, and then no vectors.
  static JQ_HOST_DEVICE Int IfFinite(Int bits, Int otherwise) {
    const Int finite = static_cast<Int>(-static_cast<Int>(static_cast<Int>(bits & kMagnitude) < kInfinity));
    return static_cast<Int>((Ordered(bits) & finite) | (otherwise & ~finite));
  }
};

// Ranges are float32 numbers; a finite double beyond them counts as the largest.
JQ_HOST_DEVICE float ToRange(float value) { return value; }
JQ_HOST_DEVICE float ToRange(Float16 value) { return ToFloat(value); }
JQ_HOST_DEVICE float ToRange(BFloat16 value) { return ToFloat(value); }
JQ_HOST_DEVICE float ToRange(double value) {
  constexpr double kLargest = 0x1.fffffep127, kInfinity = __builtin_inf();
  const double high = value > kLargest && value != kInfinity ? kLargest : value;
  return static_cast<float>(high < -kLargest && high != -kInfinity ? -kLargest : high);
}

// The float32 key of a value, and of a key of its type.
template <typename X>
JQ_HOST_DEVICE int32_t BitsOfRange(X value) {
  return BitCast<int32_t>(ToRange(value));
}
template <typename X>
JQ_HOST_DEVICE int32_t ToFloatKey(typename BitsOf<X>::Int key) {
  return Keys<float>::Ordered(BitsOfRange(BitCast<X>(Keys<X>::Ordered(key))));
}
// Never -0.
JQ_HOST_DEVICE float FromKey(int32_t key) { return BitCast<float>(Keys<float>::Ordered(key)) + 0.0f; }

struct ScaleAndZero {
  float scale, zero_point;
};

// Neither zero nor subnormal: at least the smallest normal number, and 1 for a block of zeros.
JQ_HOST_DEVICE float PositiveNormal(float scale, float extent) {
  constexpr float kSmallest = 0x1p-126f;
  const float normal = scale > kSmallest ? scale : kSmallest;
  return extent >= kSmallest ? normal : 1.0f;
}

JQ_HOST_DEVICE ScaleAndZero ChooseSymmetric(float largest, Range<float> range) {
  return {PositiveNormal(largest / range.qmax, largest), 0.0f};
}

JQ_HOST_DEVICE ScaleAndZero ChooseAsymmetric(float low, float high, Range<float> range) {
  low = low < 0.0f ? low : 0.0f;
  high = high > 0.0f ? high : 0.0f;
  const float steps = range.qmax - range.qmin, span = high - low;
  // The same quotient where the span overflows.
  const float halved = (high * 0.5f - low * 0.5f) / steps * 2.0f;
  const float scale = PositiveNormal(span <= 0x1.fffffep127f ? span / steps : halved, span);
  return {scale, Clamp(range.qmin - RoundHalfToEven(low / scale), range)};
}

// low_key is not looked at where symmetric: high_key is then the largest magnitude's.
JQ_HOST_DEVICE ScaleAndZero Choose(int32_t low_key, int32_t high_key, bool symmetric, Range<float> range) {
  return symmetric ? ChooseSymmetric(FromKey(high_key), range)
                   : ChooseAsymmetric(FromKey(low_key), FromKey(high_key), range);
}

}  // namespace jq
