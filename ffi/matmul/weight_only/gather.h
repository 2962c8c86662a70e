// Codes of sixteen columns of either layout, as rows of bytes: what the micro-kernels do not read in place.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/matmul/interleave.h"
#include "ffi/matmul/weight_only/math.h"

namespace jq {
namespace weight_only {
namespace JQ_ISA {
namespace {

// Four rows of sixteen codes, plus the offset where they are signed.
struct alignas(64) FourRows {
  uint8_t at[kWordCodes][kPanel];
};

// Rows [row, row + count), count at most 4, of columns [column, column + columns); the rest is not to be looked at.
template <int bits>
JQ_INLINE void Gather(const Codes& codes, int64_t row, int count, int64_t column, int columns, FourRows* out) {
#if defined(__SSE2__)
  const __m128i flip = _mm_set1_epi8(static_cast<char>(codes.is_signed ? codes.Offset() : 0));
  __m128i* to = reinterpret_cast<__m128i*>(out->at[0]);
  if (!codes.prepared) {
    const uint8_t* from = codes.data + row * codes.RowBytes() + column * bits / 8;
    for (int i = 0; i < count; ++i) {
      _mm_store_si128(to + i,
                      _mm_xor_si128(matmul::JQ_ISA::PlainRow<bits>(from + i * codes.RowBytes(), columns), flip));
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

// As words, a column each.
JQ_INLINE void Interleave(const FourRows& rows, uint8_t* to) {
  const uint8_t* const from[4] = {rows.at[0], rows.at[1], rows.at[2], rows.at[3]};
  matmul::JQ_ISA::InterleavePanel<8>(from, kPanel, 0, to);
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace weight_only
}  // namespace jq
