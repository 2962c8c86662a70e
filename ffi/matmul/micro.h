// The innermost products: R rows of a with C panels of w, sums in a tile of the stack. Codes of w are unsigned here
// (math.h), those of a signed bytes or 16 bits.
//
// No instruction may sum pairs into 16 bits: 255 * 127 twice does not fit.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/matmul/layout.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

constexpr int kTileRows = 8, kTilePanels = 4, kTileColumns = kTilePanels * kPanel;
using Tile = int32_t[kTileRows][kTileColumns];
using FloatTile = float[kTileRows][kTileColumns];

#if defined(__AVX512VNNI__)
using Code = int8_t;
#else
using Code = int16_t;
#endif

// A stretch of k.
struct Stretch {
  const Code* rows[kTileRows];
  const uint8_t* panels;
  int64_t panel_stride;
  int64_t words;  // of w
  unsigned flip;  // of the bits of each byte of w
};

inline uint32_t LoadWord(const void* from) {
  uint32_t word;
  memcpy(&word, from, sizeof(word));
  return word;
}

#if defined(__AVX512VNNI__)

template <int kBits>
inline __m512i Field(__m512i word, int t) {
  if constexpr (kBits == 8) return word;
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1);
  return _mm512_and_si512(t == 0 ? word : _mm512_srli_epi16(word, kBits * t), mask);
}

template <int kBits, int R, int C>
void Multiply(const Stretch& s, Tile& tile, bool add) {
  constexpr int kParts = 8 / kBits;
  __m512i sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = add ? _mm512_loadu_si512(tile[r] + kPanel * c) : _mm512_setzero_si512();
  }
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(s.flip));
  const int8_t* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) rows[r] = s.rows[r];
  const uint8_t* panel = s.panels;
  for (int64_t i = 0; i < s.words; ++i) {
    __m512i words[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      words[c] = _mm512_xor_si512(_mm512_loadu_si512(panel + c * s.panel_stride), flip);
    }
#pragma GCC unroll 4
    for (int t = 0; t < kParts; ++t) {
      __m512i codes[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) codes[c] = Field<kBits>(words[c], t);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i word = _mm512_set1_epi32(static_cast<int>(LoadWord(rows[r] + 4 * t)));
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], codes[c], word);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] += 4 * kParts;
    panel += kPanelBytes;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) _mm512_storeu_si512(tile[r] + kPanel * c, sums[r][c]);
  }
}

// Below 8 bits a panel less: the fields need the registers.
template <int kBits>
constexpr int PanelsAtOnce(int rows) {
  return rows <= 4 ? 4 : kBits == 8 ? 3 : 2;
}
constexpr int kRowsAtOnce = 8;

#elif defined(__AVX2__)

// Each 64 bits of a sum belong to a column: the products of codes 0, 1 and of codes 2, 3.
template <int kBits, int R, int C>
void Multiply(const Stretch& s, Tile& tile, bool add) {
  static_assert(C == 1, "one panel takes the registers");
  constexpr int kParts = 8 / kBits;
  __m256i sums[R][4];
  for (int r = 0; r < R; ++r) {
    for (int q = 0; q < 4; ++q) sums[r][q] = _mm256_setzero_si256();
  }
  const __m128i flip = _mm_set1_epi8(static_cast<char>(s.flip)), mask = _mm_set1_epi8((1 << (kBits & 7)) - 1);
  for (int64_t i = 0; i < s.words; ++i) {
#pragma GCC unroll 4
    for (int t = 0; t < kParts; ++t) {
      __m256i codes[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int64_t four;
        memcpy(&four, s.rows[r] + 4 * (kParts * i + t), sizeof(four));
        codes[r] = _mm256_set1_epi64x(four);
      }
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const uint8_t* at = s.panels + kPanelBytes * i + 16 * q;
        __m128i bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)), flip);
        if constexpr (kBits != 8) bytes = _mm_and_si128(_mm_srli_epi16(bytes, kBits * t), mask);
        const __m256i wide = _mm256_cvtepu8_epi16(bytes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][q] = _mm256_add_epi32(sums[r][q], _mm256_madd_epi16(wide, codes[r]));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int half = 0; half < 2; ++half) {
      const __m256i pairs = _mm256_hadd_epi32(sums[r][2 * half], sums[r][2 * half + 1]);
      __m256i* to = reinterpret_cast<__m256i*>(tile[r] + 8 * half);
      const __m256i columns = _mm256_permute4x64_epi64(pairs, 0xd8);
      _mm256_storeu_si256(to, add ? _mm256_add_epi32(columns, _mm256_loadu_si256(to)) : columns);
    }
  }
}

template <int kBits>
constexpr int PanelsAtOnce(int) {
  return 1;
}
constexpr int kRowsAtOnce = 3;

#else

template <int kBits, int R, int C>
void Multiply(const Stretch& s, Tile& tile, bool add) {
  constexpr int kParts = 8 / kBits;
  for (int r = 0; r < R; ++r) {
    uint32_t sums[kPanel];
    for (int c = 0; c < kPanel; ++c) sums[c] = add ? static_cast<uint32_t>(tile[r][c]) : 0;
    for (int64_t i = 0; i < s.words; ++i) {
      const uint8_t* panel = s.panels + kPanelBytes * i;
      for (int t = 0; t < kParts; ++t) {
        const Code* codes = s.rows[r] + 4 * (kParts * i + t);
        for (int c = 0; c < kPanel; ++c) {
          int32_t sum = 0;
          for (int j = 0; j < 4; ++j) {
            const unsigned code = (panel[4 * c + j] ^ s.flip) >> (kBits * t) & ((1u << kBits) - 1);
            sum += codes[j] * static_cast<int32_t>(code);
          }
          sums[c] += static_cast<uint32_t>(sum);
        }
      }
    }
    for (int c = 0; c < kPanel; ++c) tile[r][c] = static_cast<int32_t>(sums[c]);
  }
}

template <int kBits>
constexpr int PanelsAtOnce(int) {
  return 1;
}
constexpr int kRowsAtOnce = 4;

#endif

template <int kBits, int R>
void MultiplyPanels(int panels, const Stretch& s, Tile& tile, bool add) {
  constexpr int kMost = PanelsAtOnce<kBits>(R);
  switch (panels) {
    case 1: return Multiply<kBits, R, 1>(s, tile, add);
    case 2:
      if constexpr (kMost >= 2) return Multiply<kBits, R, 2>(s, tile, add);
      break;
    case 3:
      if constexpr (kMost >= 3) return Multiply<kBits, R, 3>(s, tile, add);
      break;
    default:
      if constexpr (kMost >= 4) return Multiply<kBits, R, 4>(s, tile, add);
  }
}

template <int kBits>
void MultiplyRows(int rows, int panels, const Stretch& s, Tile& tile, bool add) {
  switch (rows) {
    case 1: return MultiplyPanels<kBits, 1>(panels, s, tile, add);
    case 2: return MultiplyPanels<kBits, 2>(panels, s, tile, add);
    case 3: return MultiplyPanels<kBits, 3>(panels, s, tile, add);
    default: break;
  }
  if constexpr (kRowsAtOnce >= 4) {
    switch (rows) {
      case 4: return MultiplyPanels<kBits, 4>(panels, s, tile, add);
      default: break;
    }
  }
  if constexpr (kRowsAtOnce == 8) {
    switch (rows) {
      case 5: return MultiplyPanels<kBits, 5>(panels, s, tile, add);
      case 6: return MultiplyPanels<kBits, 6>(panels, s, tile, add);
      case 7: return MultiplyPanels<kBits, 7>(panels, s, tile, add);
      case 8: return MultiplyPanels<kBits, 8>(panels, s, tile, add);
      default: break;
    }
  }
}

// rows <= kRowsAtOnce, panels <= MostPanels(bits, rows)
inline void MultiplyTile(int bits, int rows, int panels, const Stretch& s, Tile& tile, bool add) {
  if (bits == 8) return MultiplyRows<8>(rows, panels, s, tile, add);
  if (bits == 4) return MultiplyRows<4>(rows, panels, s, tile, add);
  return MultiplyRows<2>(rows, panels, s, tile, add);
}
inline int MostPanels(int bits, int rows) { return bits == 8 ? PanelsAtOnce<8>(rows) : PanelsAtOnce<4>(rows); }

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
