// What the bytes of a block mean: integer codes, and a scale (and offset) for each group of 16 or 32 of them,
//
//   value = scale * code                     for codes of at most 8 bits, in float32
//   value = scale * code + offset            where Decoder<Format>::kOffset: two roundings
//
// For every format but F32, F16 and BF16, whose values have no codes (LoadValue). It is the one definition that
// dequantisation, products and gathers share, on host and device. The products are exact or round as ggml's do, so that
// float32 values are ggml's bit for bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/common/numeric.h"
#include "ffi/ggml/bytes.h"
#include "ffi/ggml/formats.h"
#include "ffi/ggml/tables.h"

namespace jq {
namespace ggml {

// ---- Lattice points, a byte a coordinate

template <int kCount, int kDims>
struct Points {
  alignas(kDims) int8_t at[kCount][kDims];
};

// value(code) of each coordinate.
template <int kDims, int kCount, typename Value>
constexpr Points<kCount, kDims> Expand(const uint16_t (&words)[kCount], Value value) {
  constexpr int kBits = kDims == 8 ? 2 : 3;
  Points<kCount, kDims> points{};
  for (int i = 0; i < kCount; ++i) {
    for (int j = 0; j < kDims; ++j) points.at[i][j] = value(words[i] >> (kBits * j) & ((1 << kBits) - 1));
  }
  return points;
}
struct ValueIQ2 {
  constexpr int8_t operator()(int code) const { return static_cast<int8_t>(code == 0 ? 8 : code == 1 ? 25 : 43); }
};
struct ValueIQ1 {
  constexpr int8_t operator()(int code) const { return static_cast<int8_t>(code - 1); }
};
struct ValueIQ3XXS {
  constexpr int8_t operator()(int code) const { return static_cast<int8_t>(code == 7 ? 62 : 4 + 8 * code); }
};
struct ValueIQ3S {
  constexpr int8_t operator()(int code) const { return static_cast<int8_t>(1 + 2 * code); }
};

#if defined(__CUDACC__)
#define JQ_POINTS(name, dims, grid, value) __device__ static const auto name = Expand<dims>(grid, value())
#else
#define JQ_POINTS(name, dims, grid, value) static constexpr auto name = Expand<dims>(grid, value())
#endif
JQ_POINTS(kPointsIQ2_XXS, 8, kGridIQ2_XXS, ValueIQ2);
JQ_POINTS(kPointsIQ2_XS, 8, kGridIQ2_XS, ValueIQ2);
JQ_POINTS(kPointsIQ2_S, 8, kGridIQ2_S, ValueIQ2);
JQ_POINTS(kPointsIQ3_XXS, 4, kGridIQ3_XXS, ValueIQ3XXS);
JQ_POINTS(kPointsIQ3_S, 4, kGridIQ3_S, ValueIQ3S);
JQ_POINTS(kPointsIQ1, 8, kGridIQ1_S, ValueIQ1);

template <typename Format>
struct Decoder;

// ---- 4-bit codes: 16 bytes hold 32, the low nibbles first

template <typename F, int kZero>
struct NibbleDecoder {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const F& b, int, int8_t* codes, float* scale, float*) {
    const Bytes<16> packed = LoadBytes<16>(b.qs);
    StoreBytes<16>((packed & Spread<16>(15)) - Spread<16>(kZero), codes);
    StoreBytes<16>((packed >> 4) - Spread<16>(kZero), codes + 16);
    *scale = HalfToFloat(b.d);
  }
};
template <>
struct Decoder<Q4_0> : NibbleDecoder<Q4_0, 8> {};
template <>
struct Decoder<Q4_1> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = true;
  JQ_DECODE void Group(const Q4_1& b, int g, int8_t* codes, float* scale, float* offset) {
    NibbleDecoder<Q4_1, 0>::Group(b, g, codes, scale, offset);
    *offset = HalfToFloat(b.m);
  }
};

template <typename F, int kZero>
struct FiveBitDecoder {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = kZero == 0;
  JQ_DECODE void Group(const F& b, int, int8_t* codes, float* scale, float* offset) {
    const Bytes<16> packed = LoadBytes<16>(b.qs), zero = Spread<16>(kZero);
    StoreBytes<16>(((packed & Spread<16>(15)) | SpreadBits(b.qh, 16)) - zero, codes);
    StoreBytes<16>(((packed >> 4) | SpreadBits(b.qh + 2, 16)) - zero, codes + 16);
    *scale = HalfToFloat(b.d);
    if constexpr (kOffset) *offset = HalfToFloat(b.m);
  }
};
template <>
struct Decoder<Q5_0> : FiveBitDecoder<Q5_0, 16> {};
template <>
struct Decoder<Q5_1> : FiveBitDecoder<Q5_1, 0> {};

template <typename F>
struct ByteDecoder {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE float Scale(Float16 d) { return HalfToFloat(d); }
  JQ_DECODE float Scale(float d) { return d; }
  JQ_DECODE void Group(const F& b, int g, int8_t* codes, float* scale, float*) {
    memcpy(codes, b.qs + 32 * g, 32);
    *scale = Scale(b.d);
  }
};
template <>
struct Decoder<Q8_0> : ByteDecoder<Q8_0> {};
template <>
struct Decoder<Q8_1> : ByteDecoder<Q8_1> {};
template <>
struct Decoder<Q8_K> : ByteDecoder<Q8_K> {};

// ---- One bit, two bits, ternary

template <>
struct Decoder<Q1_0> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const Q1_0& b, int g, int8_t* codes, float* scale, float*) {
    StoreBytes<16>(SpreadBits(b.qs + 4 * g, 2) - Spread<16>(1), codes);
    StoreBytes<16>(SpreadBits(b.qs + 4 * g + 2, 2) - Spread<16>(1), codes + 16);
    *scale = HalfToFloat(b.d);
  }
};

template <>
struct Decoder<Q2_0> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const Q2_0& b, int g, int8_t* codes, float* scale, float*) {
    for (int i = 0; i < 8; i += 2) {
      uint64_t four = b.qs[8 * g + i] | static_cast<uint64_t>(b.qs[8 * g + i + 1]) << 32;
      four = (four | four << 6 | four << 12 | four << 18) & 0x0303030303030303u;
      StoreBytes<8>(LoadBytes<8>(&four) - Spread<8>(1), codes + 4 * i);
    }
    *scale = HalfToFloat(b.d);
  }
};

template <>
struct Decoder<TQ1_0> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  // Digit n of bytes, which hold fractions of 3^5 in 256ths: the most significant digit first. What is left of a
  // fraction, tripled, carries the next digit over 256. powers: of 3, the n-th.
  JQ_DECODE Bytes<16> Digits(Bytes<16> fractions, Bytes<16> powers) {
    const Bytes<16> left = fractions * powers;
    // 0 less two masks of -1
    const Bytes<16> first = (Bytes<16>)(left >= Spread<16>(86)), second = (Bytes<16>)(left >= Spread<16>(171));
    return Spread<16>(-1) - first - second;
  }
  JQ_DECODE Bytes<16> Digit(const uint8_t* fractions, int n) {
    return Digits(LoadBytes<16>(fractions), Spread<16>(kPowersOf3[n]));
  }
  JQ_DECODE void Group(const TQ1_0& b, int g, int8_t* codes, float* scale, float*) {
    if (g < 5) {
      StoreBytes<16>(Digit(b.qs, g), codes);
      StoreBytes<16>(Digit(b.qs + 16, g), codes + 16);
    } else if (g < 7) {
      StoreBytes<16>(Digit(b.qs + 32, 2 * (g - 5)), codes);
      StoreBytes<16>(Digit(b.qs + 32, 2 * (g - 5) + 1), codes + 16);
    } else {
      StoreBytes<16>(Digit(b.qs + 32, 4), codes);
      // Four digits of the last four bytes.
      const uint8_t powers[16] = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
      const uint32_t four = Word(b.qh), fours[4] = {four, four, four, four};
      StoreBytes<16>(Digits(LoadBytes<16>(fours), LoadBytes<16>(powers)), codes + 16);
    }
    *scale = HalfToFloat(b.d);
  }
};

template <>
struct Decoder<TQ2_0> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const TQ2_0& b, int g, int8_t* codes, float* scale, float*) {
    for (int j = 0; j < 32; ++j) codes[j] = static_cast<int8_t>((b.qs[g / 4 * 32 + j] >> (g % 4 * 2) & 3) - 1);
    *scale = HalfToFloat(b.d);
  }
};

// ---- K-quants

template <>
struct Decoder<Q2_K> {
  static constexpr int kGroup = 16;
  static constexpr bool kOffset = true;
  JQ_DECODE void Group(const Q2_K& b, int g, int8_t* codes, float* scale, float* offset) {
    const uint8_t* qs = b.qs + g / 8 * 32 + g % 2 * 16;
    const int shift = g % 8 / 2 * 2;
    for (int j = 0; j < 16; ++j) codes[j] = static_cast<int8_t>(qs[j] >> shift & 3);
    *scale = HalfToFloat(b.d) * static_cast<float>(b.scales[g] & 15);
    *offset = -(HalfToFloat(b.dmin) * static_cast<float>(b.scales[g] >> 4));
  }
};

template <>
struct Decoder<Q3_K> {
  static constexpr int kGroup = 16;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const Q3_K& b, int g, int8_t* codes, float* scale, float*) {
    const uint8_t* qs = b.qs + g / 8 * 32 + g % 2 * 16;
    const uint8_t* high = b.hmask + g % 2 * 16;
    const int shift = g % 8 / 2 * 2, bit = g / 2;
    for (int j = 0; j < 16; ++j) {
      codes[j] = static_cast<int8_t>(((qs[j] >> shift & 3) | (high[j] >> bit & 1) << 2) - 4);
    }
    const int low = g < 8 ? b.scales[g] & 15 : b.scales[g - 8] >> 4;
    *scale = HalfToFloat(b.d) * static_cast<float>((low | (b.scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4) - 32);
  }
};

// The 6-bit scale and min of sub-block g of a Q4_K or Q5_K block.
struct ScaleAndMin {
  int scale, min;
};
JQ_DECODE ScaleAndMin UnpackScaleAndMin(const uint8_t* scales, int g) {
  if (g < 4) return {scales[g] & 63, scales[g + 4] & 63};
  return {(scales[g + 4] & 15) | scales[g - 4] >> 6 << 4, scales[g + 4] >> 4 | scales[g] >> 6 << 4};
}

template <>
struct Decoder<Q4_K> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = true;
  JQ_DECODE void Group(const Q4_K& b, int g, int8_t* codes, float* scale, float* offset) {
    for (int j = 0; j < 32; ++j) codes[j] = static_cast<int8_t>(b.qs[g / 2 * 32 + j] >> (g % 2 * 4) & 15);
    const ScaleAndMin s = UnpackScaleAndMin(b.scales, g);
    *scale = HalfToFloat(b.d) * static_cast<float>(s.scale);
    *offset = -(HalfToFloat(b.dmin) * static_cast<float>(s.min));
  }
};

template <>
struct Decoder<Q5_K> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = true;
  JQ_DECODE void Group(const Q5_K& b, int g, int8_t* codes, float* scale, float* offset) {
    for (int j = 0; j < 32; ++j) {
      codes[j] = static_cast<int8_t>((b.qs[g / 2 * 32 + j] >> (g % 2 * 4) & 15) | (b.qh[j] >> g & 1) << 4);
    }
    const ScaleAndMin s = UnpackScaleAndMin(b.scales, g);
    *scale = HalfToFloat(b.d) * static_cast<float>(s.scale);
    *offset = -(HalfToFloat(b.dmin) * static_cast<float>(s.min));
  }
};

template <>
struct Decoder<Q6_K> {
  static constexpr int kGroup = 16;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const Q6_K& b, int g, int8_t* codes, float* scale, float*) {
    const int half = g / 8, quarter = g % 8 / 2, at = g % 2 * 16;
    const uint8_t* low = b.ql + half * 64 + quarter % 2 * 32 + at;
    const uint8_t* high = b.qh + half * 32 + at;
    const Bytes<16> nibbles = LoadBytes<16>(low) >> (quarter / 2 * 4) & Spread<16>(15);
    const Bytes<16> pairs = LoadBytes<16>(high) >> (quarter * 2) & Spread<16>(3);
    StoreBytes<16>((nibbles | pairs << 4) - Spread<16>(32), codes);
    *scale = HalfToFloat(b.d) * static_cast<float>(b.scales[g]);
  }
};

// ---- IQ

template <>
struct Decoder<IQ2_XXS> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ2_XXS& b, int g, int8_t* codes, float* scale, float*) {
    const uint32_t indices = Word(b.qs + 4 * g), rest = Word(b.qs + 4 * g + 2);
    for (int l = 0; l < 4; ++l) {
      Signed(kPointsIQ2_XXS.at[indices >> (8 * l) & 255], EvenSigns(rest >> (7 * l) & 127), codes + 8 * l);
    }
    *scale = HalfToFloat(b.d) * (0.5f + static_cast<float>(rest >> 28)) * 0.25f;
  }
};

template <>
struct Decoder<IQ2_XS> {
  static constexpr int kGroup = 16;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ2_XS& b, int g, int8_t* codes, float* scale, float*) {
    for (int l = 0; l < 2; ++l) {
      const uint32_t q = b.qs[2 * g + l];
      Signed(kPointsIQ2_XS.at[q & 511], EvenSigns(static_cast<uint8_t>(q >> 9)), codes + 8 * l);
    }
    *scale = HalfToFloat(b.d) * (0.5f + static_cast<float>(b.scales[g / 2] >> (g % 2 * 4) & 15)) * 0.25f;
  }
};

template <>
struct Decoder<IQ2_S> {
  static constexpr int kGroup = 16;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ2_S& b, int g, int8_t* codes, float* scale, float*) {
    for (int l = 0; l < 2; ++l) {
      const int at = 2 * g + l;
      const int index = b.qs[at] | (b.qh[g / 2] >> (at % 4 * 2) & 3) << 8;
      Signed(kPointsIQ2_S.at[index], b.qs[32 + at], codes + 8 * l);
    }
    *scale = HalfToFloat(b.d) * (0.5f + static_cast<float>(b.scales[g / 2] >> (g % 2 * 4) & 15)) * 0.25f;
  }
};

template <>
struct Decoder<IQ3_XXS> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ3_XXS& b, int g, int8_t* codes, float* scale, float*) {
    const uint32_t rest = Word(b.qs + 64 + 4 * g);
    for (int l = 0; l < 4; ++l) {
      const uint8_t* qs = b.qs + 8 * g + 2 * l;
      const uint32_t points[2] = {Word(kPointsIQ3_XXS.at[qs[0]]), Word(kPointsIQ3_XXS.at[qs[1]])};
      Signed(points, EvenSigns(rest >> (7 * l) & 127), codes + 8 * l);
    }
    *scale = HalfToFloat(b.d) * (0.5f + static_cast<float>(rest >> 28)) * 0.5f;
  }
};

template <>
struct Decoder<IQ3_S> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ3_S& b, int g, int8_t* codes, float* scale, float*) {
    for (int l = 0; l < 4; ++l) {
      const uint8_t* qs = b.qs + 8 * g + 2 * l;
      const int high = b.qh[g] >> (2 * l);
      const uint32_t points[2] = {Word(kPointsIQ3_S.at[qs[0] | (high & 1) << 8]),
                                  Word(kPointsIQ3_S.at[qs[1] | (high & 2) << 7])};
      Signed(points, b.signs[4 * g + l], codes + 8 * l);
    }
    *scale = HalfToFloat(b.d) * static_cast<float>(1 + 2 * (b.scales[g / 2] >> (g % 2 * 4) & 15));
  }
};

// Points of -1, 0, 1, shifted by an eighth up or down: codes are eighths.
JQ_DECODE void Shifted(const int8_t* point, bool down, int8_t* codes) {
  const Bytes<8> p = LoadBytes<8>(point), p2 = p + p, p4 = p2 + p2;
  StoreBytes<8>(p4 + p4 + Spread<8>(down ? -1 : 1), codes);
}

template <>
struct Decoder<IQ1_S> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ1_S& b, int g, int8_t* codes, float* scale, float*) {
    const uint32_t high = b.qh[g];
    for (int l = 0; l < 4; ++l) {
      Shifted(kPointsIQ1.at[b.qs[4 * g + l] | (high >> (3 * l) & 7) << 8], high >> 15 != 0, codes + 8 * l);
    }
    *scale = HalfToFloat(b.d) * static_cast<float>(2 * (high >> 12 & 7) + 1) * 0.125f;
  }
};

template <>
struct Decoder<IQ1_M> {
  static constexpr int kGroup = 16;
  static constexpr bool kOffset = false;
  JQ_DECODE uint32_t Scales(const IQ1_M& b, int i) {
    return b.scales[2 * i] | static_cast<uint32_t>(b.scales[2 * i + 1]) << 8;
  }
  JQ_DECODE void Group(const IQ1_M& b, int g, int8_t* codes, float* scale, float*) {
    const uint32_t high = b.qh[g];
    for (int l = 0; l < 2; ++l) {
      const uint32_t nibble = high >> (4 * l);
      Shifted(kPointsIQ1.at[b.qs[2 * g + l] | (nibble & 7) << 8], (nibble & 8) != 0, codes + 8 * l);
    }
    const uint32_t d =
        Scales(b, 0) >> 12 | (Scales(b, 1) >> 8 & 0xf0) | (Scales(b, 2) >> 4 & 0xf00) | (Scales(b, 3) & 0xf000);
    *scale = HalfToFloat(Float16{static_cast<uint16_t>(d)}) *
             static_cast<float>(2 * (Scales(b, g / 4) >> (g % 4 * 3) & 7) + 1) * 0.125f;
  }
};

template <>
struct Decoder<IQ4_NL> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ4_NL& b, int, int8_t* codes, float* scale, float*) {
    LookUp<16>(kValuesIQ4, b.qs, codes);
    *scale = HalfToFloat(b.d);
  }
};

template <>
struct Decoder<IQ4_XS> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ4_XS& b, int g, int8_t* codes, float* scale, float*) {
    LookUp<16>(kValuesIQ4, b.qs + 16 * g, codes);
    const int s = (b.scales_l[g / 2] >> (g % 2 * 4) & 15) | (b.scales_h >> (2 * g) & 3) << 4;
    *scale = HalfToFloat(b.d) * static_cast<float>(s - 32);
  }
};

// ---- 4-bit floats; their codes are doubled, so the scales are halves

template <>
struct Decoder<MXFP4> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const MXFP4& b, int, int8_t* codes, float* scale, float*) {
    LookUp<16>(kValuesFP4, b.qs, codes);
    *scale = BitCast<float>(b.e < 2 ? 0x00200000u << b.e : static_cast<uint32_t>(b.e - 1) << 23);
  }
};

template <>
struct Decoder<NVFP4> {
  static constexpr int kGroup = 16;
  static constexpr bool kOffset = false;
  // Unsigned E4M3; its NaN counts as 0. Seven bits in a float32's place are the value times 2^-120, subnormals too.
  JQ_DECODE float HalfOf(uint32_t e4m3) { return e4m3 == 0x7f ? 0.0f : BitCast<float>((e4m3 & 127) << 20) * 0x1p119f; }
  JQ_DECODE void Group(const NVFP4& b, int g, int8_t* codes, float* scale, float*) {
    LookUp<8>(kValuesFP4, b.qs + 8 * g, codes);
    *scale = HalfOf(b.d[g]);
  }
};

// ---- Values

JQ_DECODE float LoadValue(const F32& b) { return b.value; }
JQ_DECODE float LoadValue(const F16& b) { return ToFloat(b.value); }
JQ_DECODE float LoadValue(const BF16& b) { return ToFloat(b.value); }

template <typename F>
constexpr bool kIsFloat = F::kBlock == 1;

// values[j] = scale * codes[j] (+ offset)
template <int kCount, bool kOffset>
JQ_DECODE void Scale(const int8_t* codes, float scale, float offset, float* values) {
#if defined(__AVX512F__) && !defined(__CUDACC__)
  static_assert(kCount % 16 == 0, "whole vectors");
  for (int j = 0; j < kCount; j += 16) {
    const __m512i wide =
        _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + j)));
    __m512 product = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_maskz_cvtepi32_ps(0xffff, wide));
    if constexpr (kOffset) product = _mm512_add_ps(product, _mm512_set1_ps(offset));
    _mm512_storeu_ps(values + j, product);
  }
#elif defined(__AVX2__) && !defined(__CUDACC__)
  const __m256 scales = _mm256_set1_ps(scale), offsets = _mm256_set1_ps(offset);
  for (int j = 0; j < kCount; j += 8) {
    const __m128i few = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + j));
    __m256 product = _mm256_mul_ps(scales, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(few)));
    if constexpr (kOffset) product = _mm256_add_ps(product, offsets);
    _mm256_storeu_ps(values + j, product);
  }
#else
  for (int j = 0; j < kCount; ++j) {
    values[j] = scale * static_cast<float>(codes[j]);
    if constexpr (kOffset) values[j] = values[j] + offset;
  }
#endif
}

// The kGroup values of group g.
template <typename F>
JQ_DECODE void DecodeValues(const F& block, int g, float* values) {
  using D = Decoder<F>;
  int8_t codes[D::kGroup];
  float scale, offset = 0.0f;
  D::Group(block, g, codes, &scale, &offset);
  Scale<D::kGroup, D::kOffset>(codes, scale, offset, values);
}

}  // namespace ggml
}  // namespace jq
