// Rows of codes to words of a panel: four codes along k of each of 16 columns.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/matmul/layout.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

#define JQ_INLINE inline __attribute__((always_inline))

#if defined(__SSE2__)
JQ_INLINE __m128i LoadAt(const uint8_t* from, int bytes) {
  if (bytes == 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if (bytes == 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  alignas(16) uint8_t padded[16] = {};
  memcpy(padded, from, bytes);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(padded));
}
JQ_INLINE __m128i Mask(__m128i bytes, int mask) { return _mm_and_si128(bytes, _mm_set1_epi8(static_cast<char>(mask))); }
JQ_INLINE __m128i Halves(__m128i bytes, int bits) {
  const int mask = (1 << bits) - 1;
  return _mm_unpacklo_epi8(Mask(bytes, mask), Mask(_mm_srli_epi16(bytes, bits), mask));
}
// The codes of up to sixteen columns of a plain row.
template <int bits>
JQ_INLINE __m128i PlainRow(const uint8_t* from, int columns) {
  __m128i row = LoadAt(from, (columns * bits + 7) / 8);
  if constexpr (bits == 2) row = Halves(row, 4);
  if constexpr (bits < 8) row = Halves(row, bits);
  return row;
}

JQ_INLINE void StoreWords(__m128i a, __m128i b, __m128i c, __m128i d, uint8_t* to) {
  const __m128i low[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
  const __m128i high[2] = {_mm_unpacklo_epi8(c, d), _mm_unpackhi_epi8(c, d)};
  __m128i* target = reinterpret_cast<__m128i*>(to);
  for (int i = 0; i < 2; ++i) {
    _mm_store_si128(target + 2 * i, _mm_unpacklo_epi16(low[i], high[i]));
    _mm_store_si128(target + 2 * i + 1, _mm_unpackhi_epi16(low[i], high[i]));
  }
}
#endif

// Four plain rows of up to 16 columns. flip: of the bits of each code, which has a byte of its own now; extend: the bit
// that flips is a sign, and the byte becomes signed; a byte that was one remains as it is.
template <int bits, bool extend = false>
JQ_INLINE void InterleavePanel(const uint8_t* const (&rows)[4], int columns, int flip, uint8_t* to) {
#if defined(__SSE2__)
  const __m128i flips = _mm_set1_epi8(static_cast<char>(flip));
  __m128i r[4];
  for (int j = 0; j < 4; ++j) {
    r[j] = PlainRow<bits>(rows[j], columns);
    if constexpr (!(extend && bits == 8)) r[j] = _mm_xor_si128(r[j], flips);
    if constexpr (extend && bits < 8) r[j] = _mm_sub_epi8(r[j], flips);
  }
  StoreWords(r[0], r[1], r[2], r[3], to);
#else
  constexpr int kEach = 8 / bits;
  for (int c = 0; c < columns; ++c) {
    for (int j = 0; j < 4; ++j) {
      int code = rows[j][c / kEach] >> (c % kEach * bits) & ((1 << bits) - 1);
      if (!(extend && bits == 8)) code ^= flip;
      to[4 * c + j] = static_cast<uint8_t>(extend && bits < 8 ? code - flip : code);
    }
  }
#endif
}

// The same of four whole panels, one every `stride` bytes.
#if defined(__AVX512BW__)
// Not the form without a mask, of which gcc 12 says that it uses an uninitialised value.
template <int select>
JQ_INLINE __m512i Lanes(__m512i a, __m512i b) {
  return _mm512_maskz_shuffle_i32x4(0xffff, a, b, select);
}
template <int bits>
JQ_INLINE __m512i WideRow(const uint8_t* from) {
  if constexpr (bits == 8) return _mm512_loadu_si512(from);
  if constexpr (bits == 4) {
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi16(bytes, 4)), _mm512_set1_epi8(15));
  }
  const __m512i bytes = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m512i pairs = _mm512_or_si512(bytes, _mm512_maskz_slli_epi32(0xffff, bytes, 6));
  return _mm512_and_si512(_mm512_or_si512(pairs, _mm512_maskz_slli_epi32(0xffff, pairs, 12)), _mm512_set1_epi8(3));
}
template <int bits, bool extend = false>
JQ_INLINE void InterleaveFourPanels(const uint8_t* const (&rows)[4], int flip, uint8_t* to, int64_t stride) {
  const __m512i flips = _mm512_set1_epi8(static_cast<char>(flip));
  __m512i r[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    r[j] = WideRow<bits>(rows[j]);
    if constexpr (!(extend && bits == 8)) r[j] = _mm512_xor_si512(r[j], flips);
    if constexpr (extend && bits < 8) r[j] = _mm512_sub_epi8(r[j], flips);
  }
  const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  // Four columns of each panel to a vector; then four vectors of a panel.
  const __m512i w = _mm512_unpacklo_epi16(a, c), x = _mm512_unpackhi_epi16(a, c);
  const __m512i y = _mm512_unpacklo_epi16(b, d), z = _mm512_unpackhi_epi16(b, d);
  const __m512i wx = Lanes<0x44>(w, x), wx2 = Lanes<0xee>(w, x);
  const __m512i yz = Lanes<0x44>(y, z), yz2 = Lanes<0xee>(y, z);
  _mm512_store_si512(to, Lanes<0x88>(wx, yz));
  _mm512_store_si512(to + stride, Lanes<0xdd>(wx, yz));
  _mm512_store_si512(to + 2 * stride, Lanes<0x88>(wx2, yz2));
  _mm512_store_si512(to + 3 * stride, Lanes<0xdd>(wx2, yz2));
}
#else
template <int bits, bool extend = false>
JQ_INLINE void InterleaveFourPanels(const uint8_t* const (&rows)[4], int flip, uint8_t* to, int64_t stride) {
  for (int p = 0; p < 4; ++p, to += stride) {
    const int at = p * kPanel * bits / 8;
    const uint8_t* const here[4] = {rows[0] + at, rows[1] + at, rows[2] + at, rows[3] + at};
    InterleavePanel<bits, extend>(here, kPanel, flip, to);
  }
}
#endif

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
