// Codes of sixteen columns of either layout, as rows of bytes: what the micro-kernels do not read in place.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/matmul/weight_only/math.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jq {
namespace weight_only {
namespace JQ_ISA {
namespace {

#define JQ_INLINE inline __attribute__((always_inline))

// Four rows of sixteen codes, plus the offset where they are signed.
struct alignas(64) FourRows {
  uint8_t at[kWordCodes][kPanel];
};

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

#endif

// Rows [row, row + count), count at most 4, of columns [column, column + columns); the rest is not to be looked at.
template <int bits>
JQ_INLINE void Gather(const Codes& codes, int64_t row, int count, int64_t column, int columns, FourRows* out) {
#if defined(__SSE2__)
  const __m128i flip = _mm_set1_epi8(static_cast<char>(codes.is_signed ? codes.Offset() : 0));
  __m128i* to = reinterpret_cast<__m128i*>(out->at[0]);
  if (!codes.prepared) {
    const uint8_t* from = codes.data + row * codes.RowBytes() + column * bits / 8;
    for (int i = 0; i < count; ++i) {
      _mm_store_si128(to + i, _mm_xor_si128(PlainRow<bits>(from + i * codes.RowBytes(), columns), flip));
    }
    return;
  }
  if (row % kWordCodes == 0) {
    constexpr int kPer = 8 / bits;
    const int64_t word = row / kWordCodes;
    const int shift = static_cast<int>(word % kPer) * bits;
    const uint8_t* from = codes.data + column / kPanel * codes.PanelBytes() + word / kPer * (4 * kPanel);
    __m128i in[4];
    for (int i = 0; i < 4; ++i) in[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    for (int j = 0; j < kWordCodes; ++j) {
      __m128i byte[4];
      for (int i = 0; i < 4; ++i) {
        byte[i] =
            _mm_and_si128(_mm_srl_epi32(in[i], _mm_cvtsi32_si128(8 * j + shift)), _mm_set1_epi32((1 << bits) - 1));
      }
      const __m128i all = _mm_packus_epi16(_mm_packs_epi32(byte[0], byte[1]), _mm_packs_epi32(byte[2], byte[3]));
      _mm_store_si128(to + j, _mm_xor_si128(all, flip));
    }
    return;
  }
#endif
  for (int i = 0; i < count; ++i) {
    for (int c = 0; c < columns; ++c) out->at[i][c] = static_cast<uint8_t>(codes.At(row + i, column + c));
  }
}

// Four rows as words, a column each.
#if defined(__SSE2__)
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
JQ_INLINE void Interleave(const FourRows& rows, uint8_t* to) {
#if defined(__SSE2__)
  const __m128i* from = reinterpret_cast<const __m128i*>(rows.at[0]);
  StoreWords(_mm_load_si128(from), _mm_load_si128(from + 1), _mm_load_si128(from + 2), _mm_load_si128(from + 3), to);
#else
  for (int c = 0; c < kPanel; ++c) {
    for (int j = 0; j < kWordCodes; ++j) to[4 * c + j] = rows.at[j][c];
  }
#endif
}

// Four plain rows of four whole panels as words, a panel every `stride` bytes.
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
template <int bits>
JQ_INLINE void InterleaveFourPanels(const uint8_t* from, int64_t row_bytes, int flip, uint8_t* to, int64_t stride) {
  const __m512i added = _mm512_set1_epi8(static_cast<char>(flip));
  __m512i rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) rows[i] = _mm512_xor_si512(WideRow<bits>(from + i * row_bytes), added);
  const __m512i a = _mm512_unpacklo_epi8(rows[0], rows[1]), b = _mm512_unpackhi_epi8(rows[0], rows[1]);
  const __m512i c = _mm512_unpacklo_epi8(rows[2], rows[3]), d = _mm512_unpackhi_epi8(rows[2], rows[3]);
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
#elif defined(__SSE2__)
template <int bits>
JQ_INLINE void InterleaveFourPanels(const uint8_t* from, int64_t row_bytes, int flip, uint8_t* to, int64_t stride) {
  const __m128i added = _mm_set1_epi8(static_cast<char>(flip));
  for (int p = 0; p < 4; ++p) {
    __m128i rows[4];
    for (int i = 0; i < 4; ++i) {
      rows[i] = _mm_xor_si128(PlainRow<bits>(from + i * row_bytes + p * kPanel * bits / 8, kPanel), added);
    }
    StoreWords(rows[0], rows[1], rows[2], rows[3], to + p * stride);
  }
}
#endif

}  // namespace
}  // namespace JQ_ISA
}  // namespace weight_only
}  // namespace jq
