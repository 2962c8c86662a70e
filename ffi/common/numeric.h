// The arithmetic every kernel shares, host and device: number formats, rounding, division, clamping. Nothing here may
// depend on the instruction set, the thread or the platform: jaxquant promises the same bits everywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define JQ_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined, so that no copy compiled for one instruction set can be linked into the code of another.
#define JQ_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace jq {

enum class DType : int { kF32, kF64, kF16, kBF16, kI8, kU8, kI16, kU16 };

template <typename Real>
constexpr DType kRealType = sizeof(Real) == sizeof(float) ? DType::kF32 : DType::kF64;

constexpr int64_t SizeOf(DType type) {
  return type == DType::kF64 ? 8 : type == DType::kF32 ? 4 : type == DType::kI8 || type == DType::kU8 ? 1 : 2;
}

// Storage of the 16-bit floats; arithmetic on them happens in float.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename To, typename From>
JQ_HOST_DEVICE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "BitCast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

JQ_HOST_DEVICE float ToFloat(Float16 value) {
  // Subnormal halves are ordinary floats, so they are built from an integer: a float multiplication of their raw
  // bits would meet the denormals-are-zero mode that XLA sets.
  const uint32_t magnitude = value.bits & 0x7fffu;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-8f;  // 2^-24
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  uint32_t bits = magnitude < 0x0400u ? BitCast<uint32_t>(subnormal) : normal;
  bits = magnitude >= 0x7c00u ? special : bits;
  return BitCast<float>(bits | (static_cast<uint32_t>(value.bits & 0x8000u) << 16));
}

JQ_HOST_DEVICE float ToFloat(BFloat16 value) { return BitCast<float>(static_cast<uint32_t>(value.bits) << 16); }

JQ_HOST_DEVICE Float16 ToFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Adding 0.5 aligns a would-be subnormal half to its last bit, so that the addition itself rounds half to even.
  const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? special : half;
  return {static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u))};
}

JQ_HOST_DEVICE BFloat16 ToBFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

// Convert<To>(value): exact widening, rounding narrowing. Codes are integers within the range of To (the quantiser
// clamps in floating point first), so the integer conversions never saturate.
template <typename To, typename From>
struct Converter {
  static JQ_HOST_DEVICE To Of(From value) { return static_cast<To>(value); }
};
template <typename To>
struct Converter<To, Float16> {
  static JQ_HOST_DEVICE To Of(Float16 value) { return static_cast<To>(ToFloat(value)); }
};
template <typename To>
struct Converter<To, BFloat16> {
  static JQ_HOST_DEVICE To Of(BFloat16 value) { return static_cast<To>(ToFloat(value)); }
};
template <typename From>
struct Converter<Float16, From> {
  static JQ_HOST_DEVICE Float16 Of(From value) { return ToFloat16(static_cast<float>(value)); }
};
template <typename From>
struct Converter<BFloat16, From> {
  static JQ_HOST_DEVICE BFloat16 Of(From value) { return ToBFloat16(static_cast<float>(value)); }
};
// Through int32, which every vector unit converts to; straight to 8 or 16 bits is scalar code.
#define JQ_CONVERT_CODE(Code, Real)                                                                      \
  template <>                                                                                            \
  struct Converter<Code, Real> {                                                                         \
    static JQ_HOST_DEVICE Code Of(Real value) { return static_cast<Code>(static_cast<int32_t>(value)); } \
  };
JQ_CONVERT_CODE(int8_t, float)
JQ_CONVERT_CODE(uint8_t, float)
JQ_CONVERT_CODE(int16_t, float)
JQ_CONVERT_CODE(uint16_t, float)
JQ_CONVERT_CODE(int8_t, double)
JQ_CONVERT_CODE(uint8_t, double)
JQ_CONVERT_CODE(int16_t, double)
JQ_CONVERT_CODE(uint16_t, double)
#undef JQ_CONVERT_CODE

template <typename To, typename From>
JQ_HOST_DEVICE To Convert(From value) {
  return Converter<To, From>::Of(value);
}

JQ_HOST_DEVICE float RoundHalfToEven(float value) {
#if defined(__CUDA_ARCH__)
  return rintf(value);
#else
  return __builtin_rintf(value);
#endif
}
JQ_HOST_DEVICE double RoundHalfToEven(double value) {
#if defined(__CUDA_ARCH__)
  return rint(value);
#else
  return __builtin_rint(value);
#endif
}

// A zero point as the quantiser uses it: rounded, and never -0, so that v is not either.
template <typename Real>
JQ_HOST_DEVICE Real RoundZeroPoint(Real value) {
  return RoundHalfToEven(value) + Real(0);
}

// A row's scale as the quantiser uses it. Division is IEEE division, never a multiplication by 1 / scale: the two round
// apart at ties.
template <typename Real>
struct Divisor {
  Real scale;
  static JQ_HOST_DEVICE Divisor Of(Real scale) { return {scale}; }
  JQ_HOST_DEVICE Real Divide(Real value) const { return value / scale; }
  // The same to those who clamp it to a range of codes; RoundedQuotient() rounds it half to even besides.
  JQ_HOST_DEVICE Real Quotient(Real value) const { return value / scale; }
  JQ_HOST_DEVICE Real RoundedQuotient(Real value) const { return RoundHalfToEven(value / scale); }
#if defined(__CUDACC__) || defined(JQ_CUDA_ON_HOST)
  static JQ_HOST_DEVICE bool Suits(Real, Real) { return true; }
  static JQ_HOST_DEVICE Divisor Fast(Real scale) { return {scale}; }
  static JQ_HOST_DEVICE Divisor One() { return {Real(1)}; }
#endif
};

#if defined(__CUDACC__) || defined(JQ_CUDA_ON_HOST)
// On a GPU a division costs ten instructions and a branch; with 1 / scale at hand three give the same bits, for scales
// and values that tests/cpp/quotient_proof.cc bounds.
template <>
struct Divisor<float> {
  float scale;
  float negative_reciprocal;
  bool fast;  // a literal wherever it matters: inlined, no test of it is left

  static JQ_HOST_DEVICE Divisor Of(float scale) { return {scale, 0.0f, false}; }

  // Whether Fast(scale) may stand for Of(scale) next to this zero point: a larger one could bring quotients that only
  // Divide() keeps exact back into the range of codes.
  static JQ_HOST_DEVICE bool Suits(float scale, float zero_point) {
    return scale >= 0x1p-46f && scale <= 0x1p24f && Magnitude(zero_point) <= 0x1p28f;
  }
  static JQ_HOST_DEVICE Divisor Fast(float scale) { return {scale, -Reciprocal(scale), true}; }
  static JQ_HOST_DEVICE Divisor One() { return {1.0f, -1.0f, true}; }

  // Powers of two bring every value between 2^-100 and 2^80; only an infinite one is left, which the first product
  // holds.
  JQ_HOST_DEVICE float Divide(float value) const {
    if (!fast) return value / scale;
    const bool large = Magnitude(value) > 1.0f;
    const float up = large ? 0x1p-48f : 0x1p26f, down = large ? 0x1p48f : 0x1p-26f;
    const float quotient = Corrected(value * up);
    return quotient * down;
  }
  // Exact below 2^54; a larger value lies outside every range of codes, and its quotient will do.
  JQ_HOST_DEVICE float Quotient(float value) const {
    return fast ? Corrected(value * 0x1p26f) * 0x1p-26f : value / scale;
  }
  // A value below 2^-100 rounds to zero whatever its last bits.
  JQ_HOST_DEVICE float RoundedQuotient(float value) const {
    return RoundHalfToEven(fast ? Corrected(value) : value / scale);
  }

 private:
  static JQ_HOST_DEVICE float Magnitude(float value) { return BitCast<float>(BitCast<uint32_t>(value) & 0x7fffffffu); }

  static JQ_HOST_DEVICE float MultiplyAdd(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
  }

  // value / scale for values up to 2^80; beyond, uncorrected: the correction of an infinity would be NaN.
  JQ_HOST_DEVICE float Corrected(float value) const {
    const float quotient = -value * negative_reciprocal;
    const float error = MultiplyAdd(quotient, scale, -value);
    return Magnitude(value) <= 0x1p80f ? MultiplyAdd(error, negative_reciprocal, quotient) : quotient;
  }

  // 1 / scale, rounded, without the call that the compiler's division keeps for subnormals.
  static JQ_HOST_DEVICE float Reciprocal(float scale) {
#if defined(__CUDA_ARCH__)
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(scale));
#else
    float r = 1.0f / scale;
#endif
    r = MultiplyAdd(MultiplyAdd(-scale, r, 1.0f), r, r);
    r = MultiplyAdd(MultiplyAdd(-scale, r, 1.0f), r, r);
    return BitCast<float>(BitCast<uint32_t>(r) | ((BitCast<uint32_t>(scale) & 0x007fffffu) == 0x007fffffu ? 1u : 0u));
  }
};
#endif

template <typename Real>
struct Range {
  Real qmin;
  Real qmax;
};

// condition ? a : b and condition ? a : +0, by masks on the host: compilers turn a ternary into a branch first and into
// a tangle of masks afterwards.
template <typename Real>
JQ_HOST_DEVICE Real Select(bool condition, Real a, Real b) {
#if defined(__CUDA_ARCH__)
  return condition ? a : b;
#else
  using Bits = typename std::conditional<sizeof(Real) == 4, uint32_t, uint64_t>::type;
  const Bits mask = -static_cast<Bits>(condition);
  return BitCast<Real>((BitCast<Bits>(a) & mask) | (BitCast<Bits>(b) & ~mask));
#endif
}
template <typename Real>
JQ_HOST_DEVICE Real Keep(bool condition, Real a) {
#if defined(__CUDA_ARCH__)
  return condition ? a : Real(0);
#else
  using Bits = typename std::conditional<sizeof(Real) == 4, uint32_t, uint64_t>::type;
  return BitCast<Real>(BitCast<Bits>(a) & -static_cast<Bits>(condition));
#endif
}

// Explicit compares, since min and max treat NaN differently on x86 and CUDA. NaN passes through.
template <typename Real>
JQ_HOST_DEVICE Real Clamp(Real value, Range<Real> range) {
  value = value < range.qmin ? range.qmin : value;
  return value > range.qmax ? range.qmax : value;
}
// NaN gives qmin.
template <typename Real>
JQ_HOST_DEVICE Real ClampNumber(Real value, Range<Real> range) {
  const Real above_qmin = value >= range.qmin ? value : range.qmin;
  return above_qmin > range.qmax ? range.qmax : above_qmin;
}

#if defined(__CUDA_ARCH__)
// One instruction a side. They differ from the compares in the sign of zero alone, and v is never -0.
#if __CUDA_ARCH__ >= 800
JQ_HOST_DEVICE float Clamp(float value, Range<float> range) {
  asm("max.NaN.ftz.f32 %0, %0, %1;" : "+f"(value) : "f"(range.qmin));
  asm("min.NaN.ftz.f32 %0, %0, %1;" : "+f"(value) : "f"(range.qmax));
  return value;
}
#endif
JQ_HOST_DEVICE float ClampNumber(float value, Range<float> range) {
  return fminf(fmaxf(value, range.qmin), range.qmax);
}
#endif

}  // namespace jq
