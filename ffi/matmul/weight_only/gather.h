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
        byte[i] = _mm_and_si128(_mm_srl_epi32(in[i], _mm_cvtsi32_si128(8 * j + shift)), _mm_set1_epi32((1 << bits) - 1));
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

// As words of four rows, a column each.
JQ_INLINE void Interleave(const FourRows& rows, uint8_t* to) {
#if defined(__SSE2__)
  const __m128i* from = reinterpret_cast<const __m128i*>(rows.at[0]);
  const __m128i a = _mm_load_si128(from), b = _mm_load_si128(from + 1);
  const __m128i c = _mm_load_si128(from + 2), d = _mm_load_si128(from + 3);
  const __m128i low[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
  const __m128i high[2] = {_mm_unpacklo_epi8(c, d), _mm_unpackhi_epi8(c, d)};
  __m128i* target = reinterpret_cast<__m128i*>(to);
  for (int i = 0; i < 2; ++i) {
    _mm_store_si128(target + 2 * i, _mm_unpacklo_epi16(low[i], high[i]));
    _mm_store_si128(target + 2 * i + 1, _mm_unpackhi_epi16(low[i], high[i]));
  }
#else
  for (int c = 0; c < kPanel; ++c) {
    for (int j = 0; j < kWordCodes; ++j) to[4 * c + j] = rows.at[j][c];
  }
#endif
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace weight_only
}  // namespace jq
