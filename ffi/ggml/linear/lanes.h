// Blocks of eight rows at a time, a row a lane, from the prepared form (layout.h). For a format F with such a form:
//
//   Lanes<F> block(bytes);
//   block.Code(s, i)    codes 32 s + 4 i ... + 3 of each row, plus Coding<F>::kZero
//   block.Scale(s, h)   float32 scales of span s (of its half h where groups are of 16)
//   block.Offset(s, h)
//
// and where kIntegerScales<F>, instead of Scale:
//
//   block.IntegerScale(s, h)   (see Widened)
//   block.Factor()
//
// The values are decode.h's, bit for bit.
#pragma once

#include "ffi/ggml/linear/coding.h"

#if defined(__AVX2__)

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

JQ_INLINE __m256i Load(const uint8_t* bytes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)); }
JQ_INLINE __m256i Bytes(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }
JQ_INLINE __m256i And(__m256i a, int byte) { return _mm256_and_si256(a, Bytes(byte)); }
// Each byte shifted right, and masked: bits of the neighbour come along otherwise.
JQ_INLINE __m256i Field(__m256i a, int shift, int mask) { return And(_mm256_srli_epi16(a, shift), mask); }
// The reverse, for bits that stay within their byte.
JQ_INLINE __m256i Raised(__m256i a, int shift) { return _mm256_slli_epi16(a, shift); }

JQ_INLINE __m256 HalvesToFloat(const uint8_t* bytes) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
struct TwoFloats {
  __m256 low, high;
};
// The halves in the low and high 16 bits of each lane.
JQ_INLINE TwoFloats HalvesToFloat(__m256i lanes) {
  const __m256i low = _mm256_and_si256(lanes, _mm256_set1_epi32(0xffff)), high = _mm256_srli_epi32(lanes, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
}
JQ_INLINE __m256 Negated(__m256 a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }

// Byte i of each lane.
JQ_INLINE __m256i ByteOf(__m256i lanes, int i) {
  return _mm256_and_si256(_mm256_srli_epi32(lanes, 8 * i), _mm256_set1_epi32(255));
}
// Signed byte i of each lane, as the integer products take it: in 32 bits, or in 16 and twice.
JQ_INLINE __m256i Widened(__m256i lanes, int i) {
#if defined(JQ_VNNI)
  return _mm256_srai_epi32(_mm256_slli_epi32(lanes, 24 - 8 * i), 24);
#else
  const __m256i first = _mm256_setr_epi8(-1, 0, -1, 0, -1, 4, -1, 4, -1, 8, -1, 8, -1, 12, -1, 12, -1, 0, -1, 0, -1, 4,
                                         -1, 4, -1, 8, -1, 8, -1, 12, -1, 12);
  const __m256i byte = _mm256_add_epi8(first, _mm256_set1_epi16(static_cast<int16_t>(i << 8)));
  return _mm256_srai_epi16(_mm256_shuffle_epi8(lanes, byte), 8);
#endif
}
JQ_INLINE __m256 Times(__m256 d, __m256i integer) { return _mm256_mul_ps(d, _mm256_cvtepi32_ps(integer)); }

// A table of 16 bytes looked up by the nibbles of `index`.
JQ_INLINE __m256i Table(const int8_t* values, int added) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm256_add_epi8(_mm256_broadcastsi128_si256(table), Bytes(added));
}

template <typename F>
struct Lanes;

// Nibbles of a block of 32: words 0..3 hold codes 0..15 in their low halves and 16..31 in the high ones.
JQ_INLINE __m256i SplitNibble(const uint8_t* words, int i) {
  return Field(Load(words + 32 * (i % 4)), i < 4 ? 0 : 4, 15);
}
// Bits 4 i ... of a 32-bit mask in each lane, as `value` in each byte.
JQ_INLINE __m256i SpreadBits(__m256i masks, int i, int value) {
  const __m256i select = _mm256_set1_epi32(i % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010u));
  const __m256i byte = _mm256_add_epi8(_mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 0, 0, 0, 0,
                                                        4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12),
                                       Bytes(i / 2));
  const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(masks, byte), select);
  return And(_mm256_cmpeq_epi8(bits, select), value);
}

template <typename F>
struct HalfScale {  // formats that begin with d alone
  const uint8_t* at;
  JQ_INLINE explicit HalfScale(const uint8_t* bytes) : at(bytes) {}
  JQ_INLINE __m256 Scale(int, int) const { return HalvesToFloat(at); }
};
template <typename F>
struct HalfScaleAndMin {  // with d and m
  const uint8_t* at;
  TwoFloats halves;
  JQ_INLINE explicit HalfScaleAndMin(const uint8_t* bytes) : at(bytes), halves(HalvesToFloat(Load(bytes))) {}
  JQ_INLINE __m256 Scale(int, int) const { return halves.low; }
  JQ_INLINE __m256 Offset(int, int) const { return halves.high; }
};

template <>
struct Lanes<Q4_0> : HalfScale<Q4_0> {
  using HalfScale::HalfScale;
  JQ_INLINE __m256i Code(int, int i) const { return SplitNibble(at + 16, i); }
};
template <>
struct Lanes<Q4_1> : HalfScaleAndMin<Q4_1> {
  using HalfScaleAndMin::HalfScaleAndMin;
  JQ_INLINE __m256i Code(int, int i) const { return SplitNibble(at + 32, i); }
};
template <>
struct Lanes<Q5_0> : HalfScale<Q5_0> {
  using HalfScale::HalfScale;
  JQ_INLINE __m256i Code(int, int i) const {
    return _mm256_or_si256(SplitNibble(at + 48, i), SpreadBits(Load(at + 16), i, 16));
  }
};
template <>
struct Lanes<Q5_1> : HalfScaleAndMin<Q5_1> {
  using HalfScaleAndMin::HalfScaleAndMin;
  JQ_INLINE __m256i Code(int, int i) const {
    return _mm256_or_si256(SplitNibble(at + 64, i), SpreadBits(Load(at + 32), i, 16));
  }
};
// Signed bytes, plus zero: 0 or 128.
template <typename F>
JQ_INLINE __m256i SignedCode(const uint8_t* bytes) {
  return Coding<F>::kZero == 0 ? Load(bytes) : _mm256_xor_si256(Load(bytes), Bytes(0x80));
}
template <>
struct Lanes<Q8_0> : HalfScale<Q8_0> {
  using HalfScale::HalfScale;
  JQ_INLINE __m256i Code(int, int i) const { return SignedCode<Q8_0>(at + 16 + 32 * i); }
};
template <>
struct Lanes<Q8_1> : HalfScaleAndMin<Q8_1> {
  using HalfScaleAndMin::HalfScaleAndMin;
  JQ_INLINE __m256i Code(int, int i) const { return SignedCode<Q8_1>(at + 32 + 32 * i); }
};
template <>
struct Lanes<IQ4_NL> : HalfScale<IQ4_NL> {
  using HalfScale::HalfScale;
  JQ_INLINE __m256i Code(int, int i) const {
    return _mm256_shuffle_epi8(Table(kValuesIQ4, Coding<IQ4_NL>::kZero), SplitNibble(at + 16, i));
  }
};
template <>
struct Lanes<MXFP4> {
  const uint8_t* at;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : at(bytes) {}
  JQ_INLINE __m256i Code(int, int i) const {
    return _mm256_shuffle_epi8(Table(kValuesFP4, Coding<MXFP4>::kZero), SplitNibble(at + 8, i));
  }
  JQ_INLINE __m256 Scale(int, int) const {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, subnormal, small));
  }
};
template <>
struct Lanes<NVFP4> {
  const uint8_t* at;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : at(bytes) {}
  JQ_INLINE __m256i Code(int s, int i) const {
    const __m256i bytes = Load(at + 32 + 32 * (2 * (2 * s + i / 4) + i % 2));
    return _mm256_shuffle_epi8(Table(kValuesFP4, Coding<NVFP4>::kZero), Field(bytes, i % 4 / 2 * 4, 15));
  }
  JQ_INLINE __m256 Scale(int s, int h) const {
    const __m256i bits = ByteOf(Load(at), 2 * s + h);
    const __m256i mantissa = _mm256_and_si256(bits, _mm256_set1_epi32(7));
    const __m256i exponent = _mm256_and_si256(_mm256_srli_epi32(bits, 3), _mm256_set1_epi32(15));
    const __m256i normal = _mm256_or_si256(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(119)), 23),
                                           _mm256_slli_epi32(mantissa, 20));
    const __m256 subnormal = Times(_mm256_set1_ps(0x1p-10f), mantissa);
    const __m256i small = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    const __m256i nan = _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(0x7f));
    const __m256i value = _mm256_blendv_epi8(normal, _mm256_castps_si256(subnormal), small);
    return _mm256_castsi256_ps(_mm256_andnot_si256(nan, value));
  }
};

// ---- Super-blocks

// Q4_K and Q5_K: d, dmin, then 6-bit scales and mins in 12 bytes.
struct SixBitScales {
  __m256 d, minus_dmin;
  __m256i scales[2], mins[2];  // of sub-blocks 0..3, 4..7, a byte each
  JQ_INLINE explicit SixBitScales(const uint8_t* bytes) {
    const TwoFloats halves = HalvesToFloat(Load(bytes));
    d = halves.low;
    minus_dmin = Negated(halves.high);
    const __m256i a = Load(bytes + 32), b = Load(bytes + 64), c = Load(bytes + 96);
    scales[0] = And(a, 63);
    mins[0] = And(b, 63);
    scales[1] = _mm256_or_si256(And(c, 15), Raised(Field(a, 6, 3), 4));
    mins[1] = _mm256_or_si256(Field(c, 4, 15), Raised(Field(b, 6, 3), 4));
  }
  JQ_INLINE __m256 Scale(int s, int) const { return Times(d, ByteOf(scales[s / 4], s % 4)); }
  JQ_INLINE __m256 Offset(int s, int) const { return Times(minus_dmin, ByteOf(mins[s / 4], s % 4)); }
};
template <>
struct Lanes<Q4_K> : SixBitScales {
  const uint8_t* at;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : SixBitScales(bytes), at(bytes + 128) {}
  JQ_INLINE __m256i Code(int s, int i) const { return Field(Load(at + 32 * (s / 2 * 8 + i)), s % 2 * 4, 15); }
};
template <>
struct Lanes<Q5_K> : SixBitScales {
  const uint8_t* at;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : SixBitScales(bytes), at(bytes + 128) {}
  JQ_INLINE __m256i Code(int s, int i) const {
    const __m256i high = Load(at + 32 * i);
    const __m256i low = Field(Load(at + 256 + 32 * (s / 2 * 8 + i)), s % 2 * 4, 15);
    return _mm256_or_si256(low, s < 4 ? And(Raised(high, s < 4 ? 4 - s : 0), 16) : Field(high, s < 4 ? 0 : s - 4, 16));
  }
};
template <>
struct Lanes<Q6_K> {
  const uint8_t* at;
  __m256 d;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : at(bytes), d(HalvesToFloat(bytes + 8 * 208)) {}
  JQ_INLINE __m256i Code(int s, int i) const {
    const __m256i low = Field(Load(at + 32 * (s / 4 * 16 + s % 2 * 8 + i)), s % 4 / 2 * 4, 15);
    const __m256i high = Load(at + 8 * 128 + 32 * (s / 4 * 8 + i));
    const int q = s % 4;
    const __m256i raised = q == 0   ? Raised(And(high, 3), 4)
                           : q == 1 ? Raised(And(high, 12), 2)
                           : q == 2 ? And(high, 48)
                                    : Field(high, 2, 48);
    return _mm256_or_si256(low, raised);
  }
  JQ_INLINE __m256i IntegerScale(int s, int h) const {
    const int g = 2 * s + h;
    return Widened(Load(at + 8 * 192 + 32 * (g / 4)), g % 4);
  }
  JQ_INLINE __m256 Factor() const { return d; }
};
template <>
struct Lanes<Q2_K> {
  const uint8_t* at;
  __m256 d, minus_dmin;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : at(bytes) {
    const TwoFloats halves = HalvesToFloat(Load(bytes + 8 * 80));
    d = halves.low;
    minus_dmin = Negated(halves.high);
  }
  JQ_INLINE __m256i Code(int s, int i) const { return Field(Load(at + 8 * 16 + 32 * (s / 4 * 8 + i)), s % 4 * 2, 3); }
  JQ_INLINE __m256i Scales(int s, int h) const { return ByteOf(Load(at + 32 * (s / 2)), (2 * s + h) % 4); }
  JQ_INLINE __m256 Scale(int s, int h) const { return Times(d, _mm256_and_si256(Scales(s, h), _mm256_set1_epi32(15))); }
  JQ_INLINE __m256 Offset(int s, int h) const { return Times(minus_dmin, _mm256_srli_epi32(Scales(s, h), 4)); }
};
template <>
struct Lanes<Q3_K> {
  const uint8_t* at;
  __m256 d;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : at(bytes), d(HalvesToFloat(bytes + 8 * 108)) {}
  JQ_INLINE __m256i Code(int s, int i) const {
    const __m256i low = Field(Load(at + 8 * 32 + 32 * (s / 4 * 8 + i)), s % 4 * 2, 3);
    const __m256i high = Load(at + 32 * i);
    return _mm256_or_si256(low, s < 2 ? And(Raised(high, s < 2 ? 2 - s : 0), 4) : Field(high, s < 2 ? 0 : s - 2, 4));
  }
  JQ_INLINE __m256i IntegerScale(int s, int h) const {
    const int g = 2 * s + h, word = g / 4;
    const uint8_t* scales = at + 8 * 96;
    const __m256i low = Field(Load(scales + 32 * (word % 2)), word / 2 * 4, 15);
    const __m256i high = Raised(Field(Load(scales + 64), 2 * word, 3), 4);
    return Widened(_mm256_sub_epi8(_mm256_or_si256(low, high), Bytes(32)), g % 4);
  }
  JQ_INLINE __m256 Factor() const { return d; }
};
template <>
struct Lanes<Q8_K> {
  const uint8_t* at;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : at(bytes) {}
  JQ_INLINE __m256i Code(int s, int i) const { return SignedCode<Q8_K>(at + 32 + 32 * (8 * s + i)); }
  JQ_INLINE __m256 Scale(int, int) const { return _mm256_castsi256_ps(Load(at)); }
};
template <>
struct Lanes<IQ4_XS> {
  const uint8_t* at;
  __m256 d;
  __m256i high;
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : at(bytes) {
    d = HalvesToFloat(Load(bytes)).low;
    high = _mm256_srli_epi32(Load(bytes), 16);
  }
  JQ_INLINE __m256i Code(int s, int i) const {
    return _mm256_shuffle_epi8(Table(kValuesIQ4, Coding<IQ4_XS>::kZero), SplitNibble(at + 64 + 128 * s, i));
  }
  JQ_INLINE __m256 Scale(int s, int) const {
    const __m256i low4 = _mm256_and_si256(_mm256_srli_epi32(Load(at + 32), 4 * s), _mm256_set1_epi32(15));
    const __m256i high2 = _mm256_and_si256(_mm256_srli_epi32(high, 2 * s), _mm256_set1_epi32(3));
    const __m256i scale = _mm256_or_si256(low4, _mm256_slli_epi32(high2, 4));
    return Times(d, _mm256_sub_epi32(scale, _mm256_set1_epi32(32)));
  }
};
template <>
struct Lanes<TQ2_0> : HalfScale<TQ2_0> {
  JQ_INLINE explicit Lanes(const uint8_t* bytes) : HalfScale(bytes + 8 * 64), codes(bytes) {}
  const uint8_t* codes;
  JQ_INLINE __m256i Code(int s, int i) const { return Field(Load(codes + 32 * (s / 4 * 8 + i)), s % 4 * 2, 3); }
};

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq

#endif  // __AVX2__
