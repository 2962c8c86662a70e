// Panels of unsigned 8-bit codes from w as it lies, where the kernels cannot read it so.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/matmul/layout.h"
#include "ffi/matmul/math.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

// Four rows of 16 codes to the words of a panel.
inline void Interleave(const uint8_t* const (&rows)[4], unsigned flip, uint8_t* to) {
#if defined(__SSE2__)
  __m128i r[4];
  const __m128i flips = _mm_set1_epi8(static_cast<char>(flip));
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[j])), flips);
  }
  const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpackhi_epi8(r[0], r[1]);
  const __m128i c = _mm_unpacklo_epi8(r[2], r[3]), d = _mm_unpackhi_epi8(r[2], r[3]);
  __m128i* out = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(out, _mm_unpacklo_epi16(a, c));
  _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(a, c));
  _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(b, d));
  _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(b, d));
#else
  for (int c = 0; c < kPanel; ++c) {
    for (int j = 0; j < 4; ++j) to[4 * c + j] = static_cast<uint8_t>(rows[j][c] ^ flip);
  }
#endif
}

// 16 codes of a row from column `first` on, which is a multiple of 16; what lies beyond n is anything.
inline void LoadCodes(const uint8_t* row, int64_t first, int64_t n, int bits, uint8_t* to) {
  const int count = static_cast<int>(std::min<int64_t>(kPanel, n - first));
  if (bits == 8) {
    memcpy(to, row + first, static_cast<size_t>(count));
    return;
  }
  const int each = 8 / bits;
  const uint8_t* bytes = row + first / each;
  for (int c = 0; c < count; ++c) to[c] = bytes[c / each] >> (c % each * bits) & ((1 << bits) - 1);
}

// Codes [first, first + count) of a group, `group` rows into w, for `panels` panels from `panel` on. To: panels of
// `words` words each.
inline void PackRows(const ProductArguments& a, const uint8_t* w, int64_t group, int64_t group_size, int64_t first,
                     int64_t words, int64_t panel, int64_t panels, uint8_t* to, int64_t panel_stride) {
  const int64_t row_bytes = PlainRowBytes(a.n, a.w.bits);
  const unsigned flip = a.w.is_signed ? 1u << (a.w.bits - 1) : 0;
  for (int64_t i = 0; i < words; ++i) {
    const uint8_t* rows[4];
    const int present = static_cast<int>(std::clamp<int64_t>(group_size - first - 4 * i, 0, 4));
    for (int j = 0; j < 4; ++j) {
      // Rows beyond the group meet zeros of a.
      rows[j] = w + (group + first + 4 * i + (j < present ? j : 0)) * row_bytes;
    }
    const bool more = first + 4 * i + 8 <= group_size;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t column = (panel + p) * kPanel;
      if (more && p % 4 == 0) {
        // Each row is a page of its own, or nearly: no prefetcher foresees the next one.
        for (int j = 0; j < 4; ++j) __builtin_prefetch(rows[j] + 4 * row_bytes + column);
      }
      uint8_t* out = to + p * panel_stride + i * kPanelBytes;
      if (a.w.bits == 8 && column + kPanel <= a.n) {
        const uint8_t* const here[4] = {rows[0] + column, rows[1] + column, rows[2] + column, rows[3] + column};
        Interleave(here, flip, out);
      } else {
        alignas(16) uint8_t codes[4][kPanel] = {};
        for (int j = 0; j < 4; ++j) LoadCodes(rows[j], column, a.n, a.w.bits, codes[j]);
        const uint8_t* const here[4] = {codes[0], codes[1], codes[2], codes[3]};
        Interleave(here, flip, out);
      }
    }
  }
}

// The same from the prepared layout, for groups that begin within a word.
inline void PackPrepared(const ProductArguments& a, const uint8_t* w, int64_t group, int64_t group_size, int64_t first,
                         int64_t words, int64_t panel, int64_t panels, uint8_t* to, int64_t panel_stride) {
  const int64_t all_words = WordCount(a.k, a.w.bits);
  const unsigned flip = a.w.is_signed ? 1u << (a.w.bits - 1) : 0;
  for (int64_t p = 0; p < panels; ++p) {
    for (int64_t i = 0; i < words; ++i) {
      uint8_t* out = to + p * panel_stride + i * kPanelBytes;
      for (int j = 0; j < 4; ++j) {
        const int64_t row = first + 4 * i + j;
        for (int c = 0; c < kPanel; ++c) {
          const CodePlace at =
              PreparedPlace(group + std::min(row, group_size - 1), (panel + p) * kPanel + c, all_words, a.w.bits);
          out[4 * c + j] = static_cast<uint8_t>((w[at.byte] >> at.shift & ((1 << a.w.bits) - 1)) ^ flip);
        }
      }
    }
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
