// Arithmetic on lanes. The quantisers are written once over a type V of float lanes, each lane a block of its own: V is
// a SIMD vector on the CPU, where W blocks are quantised at once, and a plain float where a thread has one block. Every
// lane does the operations of ggml's reference in their order, so that the bytes are those of the reference.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"

namespace jq {
namespace ggml {

// The integers beside V, and the masks that comparisons of V give.
template <typename V>
struct LaneTypes {
  using Int = decltype(V{} < V{});
  using Mask = Int;
};
template <>
struct LaneTypes<float> {
  using Int = int32_t;
  using Mask = bool;
};
template <typename V>
using IntOf = typename LaneTypes<V>::Int;
template <typename V>
using MaskOf = typename LaneTypes<V>::Mask;

template <typename V>
constexpr int kLanes = sizeof(V) / sizeof(float);

template <typename V>
JQ_HOST_DEVICE V Splat(float value) {
  return V{} + value;
}

// mask ? a : b. Masks are combined by & and |, never by &&.
template <typename Mask, typename T>
JQ_HOST_DEVICE T Choose(Mask mask, T a, T b) {
  return mask ? a : b;
}

template <typename V>
JQ_HOST_DEVICE V Abs(V v) {
  return BitCast<V>(BitCast<IntOf<V>>(v) & 0x7fffffff);
}

template <typename Int>
JQ_HOST_DEVICE Int Min(Int v, int bound) {
  const Int b = Int{} + bound;
  return Choose(v < b, v, b);
}
template <typename Int>
JQ_HOST_DEVICE Int Clamp(Int v, int low, int high) {
  const Int b = Int{} + low;
  return Min(Choose(v > b, v, b), high);
}

template <typename V>
JQ_HOST_DEVICE V ToReal(IntOf<V> i) {
  if constexpr (kLanes<V> == 1) {
    return static_cast<float>(i);
  } else {
    return __builtin_convertvector(i, V);
  }
}

// v << bits, into the sign bit too.
template <typename Int>
JQ_HOST_DEVICE Int ShiftLeft(Int v, int bits) {
  if constexpr (sizeof(Int) == sizeof(int32_t)) {
    return static_cast<int32_t>(static_cast<uint32_t>(v) << bits);
  } else {
    return v << bits;
  }
}

// Towards zero. What lies outside int32 (or is NaN) gives any integer: callers mask such lanes.
template <typename V>
JQ_HOST_DEVICE IntOf<V> Truncate(V v) {
  if constexpr (kLanes<V> == 1) {
#if defined(__CUDA_ARCH__)
    return __float2int_rz(v);
#else
    return v > -2147483648.0f && v < 2147483648.0f ? static_cast<int32_t>(v) : INT32_MIN;
#endif
  } else {
    return __builtin_convertvector(v, IntOf<V>);
  }
}

// ggml's nearest_int: the addition rounds half to even and leaves the integer in the low bits. For |v| >= 2^22 and NaN
// it is whatever these operations make of it, here as there.
template <typename V>
JQ_HOST_DEVICE IntOf<V> NearestInt(V v) {
  return (BitCast<IntOf<V>>(v + 12582912.0f) & 0x007fffff) - 0x00400000;
}

// The same within bounds, as a float.
template <typename V>
JQ_HOST_DEVICE V NearestReal(V v, int low, int high) {
  const V nearest = ToReal<V>(NearestInt(v)), l = Splat<V>(static_cast<float>(low)),
          h = Splat<V>(static_cast<float>(high));
  const V bounded = Choose(nearest > l, nearest, l);
  return Choose(bounded < h, bounded, h);
}

// roundf, half away from zero, of |v| < 2^22: adding the float before 0.5 reaches the next integer exactly from the
// half on.
template <typename V>
JQ_HOST_DEVICE IntOf<V> RoundAway(V v) {
  const IntOf<V> sign = BitCast<IntOf<V>>(v) & static_cast<int>(0x80000000u);
  return Truncate(v + BitCast<V>(sign | 0x3effffff));
}

template <typename V>
JQ_HOST_DEVICE V Sqrt(V v) {
  if constexpr (kLanes<V> == 1) {
    return sqrtf(v);
  } else {
    float lanes[kLanes<V>];
    memcpy(lanes, &v, sizeof(v));
    for (int i = 0; i < kLanes<V>; ++i) lanes[i] = __builtin_sqrtf(lanes[i]);
    memcpy(&v, lanes, sizeof(v));
    return v;
  }
}

// Whether any lane of the mask is set.
template <typename V>
JQ_HOST_DEVICE bool Any(MaskOf<V> mask) {
  if constexpr (kLanes<V> == 1) {
    return mask;
  } else {
    int64_t words[sizeof(V) / sizeof(int64_t)];
    memcpy(words, &mask, sizeof(mask));
    int64_t any = 0;
    for (const int64_t word : words) any |= word;
    return any != 0;
  }
}

// The bits of a half, and back; see ToFloat16 and ToFloat.
template <typename V>
JQ_HOST_DEVICE IntOf<V> HalfBits(V v) {
  using Int = IntOf<V>;
  const Int bits = BitCast<Int>(v);
  const Int magnitude = bits & 0x7fffffff;
  const Int subnormal = BitCast<Int>(BitCast<V>(magnitude) + 0.5f) - 0x3f000000;
  const Int normal = (magnitude - 0x37fff001 + ((magnitude >> 13) & 1)) >> 13;
  const Int special = Choose(magnitude > 0x7f800000, Int{} + 0x7e00, Int{} + 0x7c00);
  Int half = Choose(magnitude < 0x38800000, subnormal, normal);
  half = Choose(magnitude >= 0x47800000, special, half);
  return half | ((bits >> 16) & 0x8000);
}
template <typename V>
JQ_HOST_DEVICE V HalfValue(IntOf<V> half) {
  using Int = IntOf<V>;
  const Int magnitude = half & 0x7fff;
  const Int subnormal = BitCast<Int>(ToReal<V>(magnitude) * 5.9604644775390625e-8f);  // 2^-24
  const Int normal = (magnitude << 13) + (112 << 23);
  const Int special = (magnitude << 13) | 0x7f800000;
  Int bits = Choose(magnitude < 0x0400, subnormal, normal);
  bits = Choose(magnitude >= 0x7c00, special, bits);
  return BitCast<V>(bits | ShiftLeft(half & 0x8000, 16));
}

// Four bytes as a word.
template <typename Int>
JQ_HOST_DEVICE Int Word(Int b0, Int b1, Int b2, Int b3) {
  return b0 | (b1 << 8) | (b2 << 16) | ShiftLeft(b3, 24);
}
template <typename Int>
JQ_HOST_DEVICE Int Word(const Int* bytes) {
  return Word(bytes[0], bytes[1], bytes[2], bytes[3]);
}

// Where the blocks of all lanes go: lane i's is i * kSize bytes further.
template <typename V, int kSize>
struct BlockWriter {
  uint8_t* blocks;

  // The low kBytes of value at an offset in each block.
  template <int kBytes>
  JQ_HOST_DEVICE void Put(int offset, IntOf<V> value) const {
    static_assert(kBytes <= 4, "a lane has four bytes");
    int32_t lanes[kLanes<V>];
    memcpy(lanes, &value, sizeof(value));
    for (int i = 0; i < kLanes<V>; ++i) memcpy(blocks + i * kSize + offset, &lanes[i], kBytes);
  }
};

}  // namespace ggml
}  // namespace jq
