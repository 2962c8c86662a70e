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
#include "ffi/ggml/formats.h"
#include "ffi/ggml/tables.h"

#if defined(__CUDACC__)
#define JQ_DECODE static __device__ __forceinline__
#else
#define JQ_DECODE static inline __attribute__((always_inline))
#endif

namespace jq {
namespace ggml {

// ---- Lattice points, a byte a coordinate

template <int kCount, int kDims>
struct Points {
  int8_t at[kCount][kDims];
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

// codes[j] = point[j], negated where bit j of signs is set.
template <int kDims>
JQ_DECODE void Signed(const int8_t* point, uint32_t signs, int8_t* codes) {
  for (int j = 0; j < kDims; ++j) {
    const int negative = -static_cast<int>(signs >> j & 1);
    codes[j] = static_cast<int8_t>((point[j] ^ negative) - negative);
  }
}

JQ_DECODE uint32_t Word(const void* bytes) {
  uint32_t word;
  memcpy(&word, bytes, sizeof(word));
  return word;
}

template <typename Format>
struct Decoder;

// ---- 4-bit codes: 16 bytes hold 32, the low nibbles first

template <typename F, int kZero>
struct NibbleDecoder {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const F& b, int, int8_t* codes, float* scale, float*) {
    for (int j = 0; j < 16; ++j) codes[j] = static_cast<int8_t>((b.qs[j] & 15) - kZero);
    for (int j = 0; j < 16; ++j) codes[j + 16] = static_cast<int8_t>((b.qs[j] >> 4) - kZero);
    *scale = ToFloat(b.d);
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
    *offset = ToFloat(b.m);
  }
};

template <typename F, int kZero>
struct FiveBitDecoder {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = kZero == 0;
  JQ_DECODE void Group(const F& b, int, int8_t* codes, float* scale, float* offset) {
    const uint32_t high = Word(b.qh);
    for (int j = 0; j < 16; ++j) {
      codes[j] = static_cast<int8_t>(((b.qs[j] & 15) | (high >> j & 1) << 4) - kZero);
      codes[j + 16] = static_cast<int8_t>(((b.qs[j] >> 4) | (high >> (j + 16) & 1) << 4) - kZero);
    }
    *scale = ToFloat(b.d);
    if constexpr (kOffset) *offset = ToFloat(b.m);
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
  JQ_DECODE float Scale(Float16 d) { return ToFloat(d); }
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
    const uint32_t bits = Word(b.qs + 4 * g);
    for (int j = 0; j < 32; ++j) codes[j] = static_cast<int8_t>(2 * static_cast<int>(bits >> j & 1) - 1);
    *scale = ToFloat(b.d);
  }
};

template <>
struct Decoder<Q2_0> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const Q2_0& b, int g, int8_t* codes, float* scale, float*) {
    for (int j = 0; j < 32; ++j) codes[j] = static_cast<int8_t>((b.qs[8 * g + j / 4] >> (j % 4 * 2) & 3) - 1);
    *scale = ToFloat(b.d);
  }
};

template <>
struct Decoder<TQ1_0> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  // Digit n of a byte, which holds a fraction of 3^5 in 256ths: the most significant digit first.
  JQ_DECODE int8_t Digit(uint8_t byte, int n) {
    const uint32_t powers[5] = {1, 3, 9, 27, 81};
    return static_cast<int8_t>(((byte * powers[n] & 255) * 3 >> 8) - 1);
  }
  JQ_DECODE void Group(const TQ1_0& b, int g, int8_t* codes, float* scale, float*) {
    if (g < 5) {
      for (int j = 0; j < 32; ++j) codes[j] = Digit(b.qs[j], g);
    } else if (g < 7) {
      for (int j = 0; j < 32; ++j) codes[j] = Digit(b.qs[32 + j % 16], 2 * (g - 5) + j / 16);
    } else {
      for (int j = 0; j < 16; ++j) {
        codes[j] = Digit(b.qs[32 + j], 4);
        codes[j + 16] = Digit(b.qh[j % 4], j / 4);
      }
    }
    *scale = ToFloat(b.d);
  }
};

template <>
struct Decoder<TQ2_0> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const TQ2_0& b, int g, int8_t* codes, float* scale, float*) {
    for (int j = 0; j < 32; ++j) codes[j] = static_cast<int8_t>((b.qs[g / 4 * 32 + j] >> (g % 4 * 2) & 3) - 1);
    *scale = ToFloat(b.d);
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
    *scale = ToFloat(b.d) * static_cast<float>(b.scales[g] & 15);
    *offset = -(ToFloat(b.dmin) * static_cast<float>(b.scales[g] >> 4));
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
    *scale = ToFloat(b.d) * static_cast<float>((low | (b.scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4) - 32);
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
    *scale = ToFloat(b.d) * static_cast<float>(s.scale);
    *offset = -(ToFloat(b.dmin) * static_cast<float>(s.min));
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
    *scale = ToFloat(b.d) * static_cast<float>(s.scale);
    *offset = -(ToFloat(b.dmin) * static_cast<float>(s.min));
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
    const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
    for (int j = 0; j < 16; ++j) {
      codes[j] = static_cast<int8_t>(((low[j] >> low_shift & 15) | (high[j] >> high_shift & 3) << 4) - 32);
    }
    *scale = ToFloat(b.d) * static_cast<float>(b.scales[g]);
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
      Signed<8>(kPointsIQ2_XXS.at[indices >> (8 * l) & 255], EvenSigns(rest >> (7 * l) & 127), codes + 8 * l);
    }
    *scale = ToFloat(b.d) * (0.5f + static_cast<float>(rest >> 28)) * 0.25f;
  }
};

template <>
struct Decoder<IQ2_XS> {
  static constexpr int kGroup = 16;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ2_XS& b, int g, int8_t* codes, float* scale, float*) {
    for (int l = 0; l < 2; ++l) {
      const uint32_t q = b.qs[2 * g + l];
      Signed<8>(kPointsIQ2_XS.at[q & 511], EvenSigns(static_cast<uint8_t>(q >> 9)), codes + 8 * l);
    }
    *scale = ToFloat(b.d) * (0.5f + static_cast<float>(b.scales[g / 2] >> (g % 2 * 4) & 15)) * 0.25f;
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
      Signed<8>(kPointsIQ2_S.at[index], b.qs[32 + at], codes + 8 * l);
    }
    *scale = ToFloat(b.d) * (0.5f + static_cast<float>(b.scales[g / 2] >> (g % 2 * 4) & 15)) * 0.25f;
  }
};

template <>
struct Decoder<IQ3_XXS> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ3_XXS& b, int g, int8_t* codes, float* scale, float*) {
    const uint32_t rest = Word(b.qs + 64 + 4 * g);
    for (int l = 0; l < 8; ++l) {
      const uint32_t signs = EvenSigns(rest >> (l / 2 * 7) & 127);
      Signed<4>(kPointsIQ3_XXS.at[b.qs[8 * g + l]], signs >> (l % 2 * 4), codes + 4 * l);
    }
    *scale = ToFloat(b.d) * (0.5f + static_cast<float>(rest >> 28)) * 0.5f;
  }
};

template <>
struct Decoder<IQ3_S> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ3_S& b, int g, int8_t* codes, float* scale, float*) {
    for (int l = 0; l < 8; ++l) {
      const int index = b.qs[8 * g + l] | (b.qh[g] >> l & 1) << 8;
      Signed<4>(kPointsIQ3_S.at[index], b.signs[4 * g + l / 2] >> (l % 2 * 4), codes + 4 * l);
    }
    *scale = ToFloat(b.d) * static_cast<float>(1 + 2 * (b.scales[g / 2] >> (g % 2 * 4) & 15));
  }
};

// Points of -1, 0, 1, shifted by an eighth up or down: codes are eighths.
JQ_DECODE void Shifted(const int8_t* point, bool down, int8_t* codes) {
  for (int j = 0; j < 8; ++j) codes[j] = static_cast<int8_t>(8 * point[j] + (down ? -1 : 1));
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
    *scale = ToFloat(b.d) * static_cast<float>(2 * (high >> 12 & 7) + 1) * 0.125f;
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
    *scale = ToFloat(Float16{static_cast<uint16_t>(d)}) *
             static_cast<float>(2 * (Scales(b, g / 4) >> (g % 4 * 3) & 7) + 1) * 0.125f;
  }
};

// The codes of a table: n bytes hold 2 n, the low nibbles first.
template <int n>
JQ_DECODE void LookUp(const int8_t* values, const uint8_t* qs, int8_t* codes) {
  for (int j = 0; j < n; ++j) {
    codes[j] = values[qs[j] & 15];
    codes[j + n] = values[qs[j] >> 4];
  }
}

template <>
struct Decoder<IQ4_NL> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ4_NL& b, int, int8_t* codes, float* scale, float*) {
    LookUp<16>(kValuesIQ4, b.qs, codes);
    *scale = ToFloat(b.d);
  }
};

template <>
struct Decoder<IQ4_XS> {
  static constexpr int kGroup = 32;
  static constexpr bool kOffset = false;
  JQ_DECODE void Group(const IQ4_XS& b, int g, int8_t* codes, float* scale, float*) {
    LookUp<16>(kValuesIQ4, b.qs + 16 * g, codes);
    const int s = (b.scales_l[g / 2] >> (g % 2 * 4) & 15) | (b.scales_h >> (2 * g) & 3) << 4;
    *scale = ToFloat(b.d) * static_cast<float>(s - 32);
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
  // Unsigned E4M3; its NaN counts as 0.
  JQ_DECODE float HalfOf(uint32_t e4m3) {
    const uint32_t exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
    if (e4m3 == 0x7f) return 0.0f;
    if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-10f;
    return BitCast<float>((exponent + 119) << 23 | mantissa << 20);
  }
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

// The kGroup values of group g.
template <typename F>
JQ_DECODE void DecodeValues(const F& block, int g, float* values) {
  using D = Decoder<F>;
  int8_t codes[D::kGroup];
  float scale, offset = 0.0f;
  D::Group(block, g, codes, &scale, &offset);
  // By sixteens, as most codes are written: a wider load would wait for two narrower stores.
  for (int half = 0; half < D::kGroup; half += 16) {
    for (int j = half; j < half + 16; ++j) {
      values[j] = scale * static_cast<float>(codes[j]);
      if constexpr (D::kOffset) values[j] = values[j] + offset;
    }
  }
}

}  // namespace ggml
}  // namespace jq
