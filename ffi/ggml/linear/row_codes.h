// 32 codes of one row at once, for the formats that have no prepared form: RowCodes<F>::Span(block, s) holds codes 32 s
// ... 32 s + 31 of the block, decode.h's.
#pragma once

#include "ffi/ggml/linear/coding.h"

#if defined(__AVX2__)

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

template <typename F>
struct RowCodes {
  static constexpr bool kKnown = false;
};
struct Known {
  static constexpr bool kKnown = true;
};

// 255 in byte i where bit i is set.
JQ_INLINE __m256i BytesOfBits(uint32_t bits) {
  const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i select = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(bits)), byte);
  return _mm256_cmpeq_epi8(_mm256_and_si256(all, select), select);
}
JQ_INLINE __m256i Negate(__m256i codes, uint32_t signs) {
  const __m256i negative = BytesOfBits(signs);
  return _mm256_sub_epi8(_mm256_xor_si256(codes, negative), negative);
}
// EvenSigns of four times seven bits.
JQ_INLINE uint32_t EvenSignsOfFour(uint32_t bits) {
  const uint32_t bytes = (bits & 0x7f) | (bits << 1 & 0x7f00) | (bits << 2 & 0x7f0000) | (bits << 3 & 0x7f000000);
  uint32_t parity = bytes ^ bytes >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return bytes | (parity & 0x01010101) << 7;
}

JQ_INLINE int64_t EightOf(const int8_t* point) {
  int64_t bytes;
  memcpy(&bytes, point, sizeof(bytes));
  return bytes;
}
JQ_INLINE int32_t FourOf(const int8_t* point) { return static_cast<int32_t>(Word(point)); }

// The points of eight coordinates that index(0) ... index(3) name; of four, index(0) ... index(7).
template <int kCount, typename Index>
JQ_INLINE __m256i Gather(const Points<kCount, 8>& points, const Index& index) {
  return _mm256_setr_epi64x(EightOf(points.at[index(0)]), EightOf(points.at[index(1)]), EightOf(points.at[index(2)]),
                            EightOf(points.at[index(3)]));
}
template <int kCount, typename Index>
JQ_INLINE __m256i Gather(const Points<kCount, 4>& points, const Index& index) {
  return _mm256_setr_epi32(FourOf(points.at[index(0)]), FourOf(points.at[index(1)]), FourOf(points.at[index(2)]),
                           FourOf(points.at[index(3)]), FourOf(points.at[index(4)]), FourOf(points.at[index(5)]),
                           FourOf(points.at[index(6)]), FourOf(points.at[index(7)]));
}

template <>
struct RowCodes<IQ2_XXS> : Known {
  static JQ_INLINE __m256i Span(const IQ2_XXS& b, int s) {
    const uint32_t indices = Word(b.qs + 4 * s), rest = Word(b.qs + 4 * s + 2);
    return Negate(Gather(kPointsIQ2_XXS, [&](int l) { return indices >> (8 * l) & 255; }), EvenSignsOfFour(rest));
  }
};
template <>
struct RowCodes<IQ2_XS> : Known {
  static JQ_INLINE __m256i Span(const IQ2_XS& b, int s) {
    uint32_t q[4];
    for (int l = 0; l < 4; ++l) q[l] = b.qs[4 * s + l];
    const uint32_t signs = q[0] >> 9 | q[1] >> 9 << 7 | q[2] >> 9 << 14 | q[3] >> 9 << 21;
    return Negate(Gather(kPointsIQ2_XS, [&](int l) { return q[l] & 511; }), EvenSignsOfFour(signs));
  }
};
template <>
struct RowCodes<IQ2_S> : Known {
  static JQ_INLINE __m256i Span(const IQ2_S& b, int s) {
    const uint32_t high = b.qh[s];
    const auto index = [&](int l) { return b.qs[4 * s + l] | (high >> (2 * l) & 3) << 8; };
    return Negate(Gather(kPointsIQ2_S, index), Word(b.qs + 32 + 4 * s));
  }
};
template <>
struct RowCodes<IQ3_XXS> : Known {
  static JQ_INLINE __m256i Span(const IQ3_XXS& b, int s) {
    const auto index = [&](int l) { return b.qs[8 * s + l]; };
    return Negate(Gather(kPointsIQ3_XXS, index), EvenSignsOfFour(Word(b.qs + 64 + 4 * s)));
  }
};
template <>
struct RowCodes<IQ3_S> : Known {
  static JQ_INLINE __m256i Span(const IQ3_S& b, int s) {
    const uint32_t high = b.qh[s];
    const auto index = [&](int l) { return b.qs[8 * s + l] | (high >> l & 1) << 8; };
    return Negate(Gather(kPointsIQ3_S, index), Word(b.signs + 4 * s));
  }
};

// Eight times the points, and an eighth of that up or down.
JQ_INLINE __m256i ShiftedPoints(__m256i points, __m256i shifts) {
  return _mm256_add_epi8(_mm256_and_si256(_mm256_slli_epi16(points, 3), _mm256_set1_epi8(-8)), shifts);
}
template <>
struct RowCodes<IQ1_S> : Known {
  static JQ_INLINE __m256i Span(const IQ1_S& b, int s) {
    const uint32_t high = b.qh[s];
    const auto index = [&](int l) { return b.qs[4 * s + l] | (high >> (3 * l) & 7) << 8; };
    return ShiftedPoints(Gather(kPointsIQ1, index), _mm256_set1_epi8(high >> 15 != 0 ? -1 : 1));
  }
};
template <>
struct RowCodes<IQ1_M> : Known {
  static JQ_INLINE __m256i Span(const IQ1_M& b, int s) {
    const uint32_t high = b.qh[2 * s] | static_cast<uint32_t>(b.qh[2 * s + 1]) << 8;
    const auto index = [&](int l) { return b.qs[4 * s + l] | (high >> (4 * l) & 7) << 8; };
    const auto shift = [&](int l) { return (high >> (4 * l) & 8) != 0 ? int64_t{-1} : int64_t{0x0101010101010101}; };
    return ShiftedPoints(Gather(kPointsIQ1, index), _mm256_setr_epi64x(shift(0), shift(1), shift(2), shift(3)));
  }
};

template <>
struct RowCodes<Q1_0> : Known {
  static JQ_INLINE __m256i Span(const Q1_0& b, int s) {
    const __m256i two = _mm256_and_si256(BytesOfBits(Word(b.qs + 4 * s)), _mm256_set1_epi8(2));
    return _mm256_sub_epi8(two, _mm256_set1_epi8(1));
  }
};
template <>
struct RowCodes<Q2_0> : Known {
  static JQ_INLINE __m256i Span(const Q2_0& b, int s) {
    // The four fields of a byte to the low ends of the four bytes of its lane.
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(b.qs + 8 * s)));
    const __m256i low = _mm256_or_si256(x, _mm256_slli_epi32(x, 6));
    const __m256i fields = _mm256_or_si256(low, _mm256_slli_epi32(low, 12));
    return _mm256_sub_epi8(_mm256_and_si256(fields, _mm256_set1_epi8(3)), _mm256_set1_epi8(1));
  }
};
template <>
struct RowCodes<TQ1_0> : Known {
  // The digits of bytes, whose powers of three are given in 16 bits.
  static JQ_INLINE __m256i Digits(__m256i bytes, __m256i powers) {
    const __m256i low_byte = _mm256_set1_epi16(255), three = _mm256_set1_epi16(3);
    const __m256i even = _mm256_and_si256(_mm256_mullo_epi16(bytes, powers), low_byte);
    const __m256i odd = _mm256_and_si256(_mm256_mullo_epi16(_mm256_srli_epi16(bytes, 8), powers), low_byte);
    const __m256i even_digit = _mm256_srli_epi16(_mm256_mullo_epi16(even, three), 8);
    const __m256i odd_digit = _mm256_andnot_si256(low_byte, _mm256_mullo_epi16(odd, three));
    return _mm256_sub_epi8(_mm256_or_si256(even_digit, odd_digit), _mm256_set1_epi8(1));
  }
  static JQ_INLINE __m256i Span(const TQ1_0& b, int s) {
    const int16_t powers[5] = {1, 3, 9, 27, 81};
    if (s < 5) {
      return Digits(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.qs)), _mm256_set1_epi16(powers[s]));
    }
    const __m128i rest = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b.qs + 32));
    if (s < 7) {
      const __m128i low = _mm_set1_epi16(powers[2 * (s - 5)]), high = _mm_set1_epi16(powers[2 * (s - 5) + 1]);
      return Digits(_mm256_broadcastsi128_si256(rest), _mm256_set_m128i(high, low));
    }
    const __m128i last = _mm_set1_epi32(static_cast<int32_t>(Word(b.qh)));
    const __m128i ascending = _mm_setr_epi16(1, 1, 3, 3, 9, 9, 27, 27);
    return Digits(_mm256_set_m128i(last, rest), _mm256_set_m128i(ascending, _mm_set1_epi16(81)));
  }
};

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq

#endif  // __AVX2__
