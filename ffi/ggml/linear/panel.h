// Weights as the micro-kernels read them: the codes (or values) of eight rows, decoded for a stretch of k.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/ggml/linear/lanes.h"

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

// codes[s][i]: values 32 s + 4 i ... + 3 of each row, plus Coding<F>::kZero.
struct alignas(64) Panel {
  uint8_t codes[kSpans][kSpan / 4][kLanes * 4];
  float scales[kSpans][2][kLanes];  // the second one where groups are of 16
  float offsets[kSpans][2][kLanes];
};
// at[k]: value k of each row.
struct alignas(64) ValuePanel {
  float at[kStretch][kLanes];
};

#if defined(__AVX2__)
template <typename F>
constexpr bool kHasLanes = kUnits<F>.interleaved;
#else
template <typename F>
constexpr bool kHasLanes = false;
#endif

#if defined(__AVX2__)
// 16 bytes of eight rows, as four vectors of the same four bytes of all.
JQ_INLINE void Interleave(const uint8_t* const (&rows)[kLanes], int64_t at, uint8_t* to) {
  __m256i pair[4];
  for (int i = 0; i < 4; ++i) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 4] + at));
    pair[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  const __m256i a = _mm256_unpacklo_epi32(pair[0], pair[1]), b = _mm256_unpackhi_epi32(pair[0], pair[1]);
  const __m256i c = _mm256_unpacklo_epi32(pair[2], pair[3]), d = _mm256_unpackhi_epi32(pair[2], pair[3]);
  __m256i* target = reinterpret_cast<__m256i*>(to);
  _mm256_storeu_si256(target, _mm256_unpacklo_epi64(a, c));
  _mm256_storeu_si256(target + 1, _mm256_unpackhi_epi64(a, c));
  _mm256_storeu_si256(target + 2, _mm256_unpacklo_epi64(b, d));
  _mm256_storeu_si256(target + 3, _mm256_unpackhi_epi64(b, d));
}
#else
JQ_INLINE void Interleave(const uint8_t* const (&rows)[kLanes], int64_t at, uint8_t* to) {
  for (int i = 0; i < 4; ++i) {
    for (int row = 0; row < kLanes; ++row) memcpy(to + 32 * i + 4 * row, rows[row] + at + 4 * i, 4);
  }
}
#endif

// Up to eight rows of blocks. Where there are fewer, the last one stands for the missing.
template <typename F>
class Rows {
 public:
  JQ_INLINE Rows(const uint8_t* w, Layout layout, int64_t n, int64_t k, int64_t row)
      : interleaved_(layout == Layout::kPrepared && kUnits<F>.interleaved && row + kLanes <= n) {
    const int64_t row_bytes = k / F::kBlock * static_cast<int64_t>(sizeof(F));
    for (int i = 0; i < kLanes; ++i) rows_[i] = w + (row + i < n ? row + i : n - 1) * row_bytes;
  }

  // Block b of row i.
  JQ_INLINE F Block(int i, int64_t b) const {
    F block;
    if (!interleaved_) {
      memcpy(&block, rows_[i] + b * sizeof(F), sizeof(F));
      return block;
    }
    constexpr Units kOf = kUnits<F>;
    const uint8_t* from = rows_[0] + b * kLanes * sizeof(F);
    uint8_t* to = reinterpret_cast<uint8_t*>(&block);
    if constexpr (kOf.lead != 0) memcpy(to, from + i * kOf.lead, kOf.lead);
    for (int word = 0; word < kOf.words; ++word) {
      memcpy(to + kOf.lead + 4 * word, from + kLanes * (kOf.lead + 4 * word) + 4 * i, 4);
    }
    constexpr int kRest = kOf.lead + 4 * kOf.words;
    if constexpr (kOf.tail != 0) memcpy(to + kRest, from + kLanes * kRest + i * kOf.tail, kOf.tail);
    return block;
  }

  // Block b of all rows in the prepared form: in place, or written to `buffer`.
  JQ_INLINE const uint8_t* Prepared(int64_t b, uint8_t* buffer) const {
    if (interleaved_) return rows_[0] + b * kLanes * sizeof(F);
    constexpr Units kOf = kUnits<F>;
    const int64_t at = b * static_cast<int64_t>(sizeof(F));
    if constexpr (kOf.lead != 0) MoveUnit<kOf.lead>(at, buffer);
    constexpr int kFours = kOf.words / 4 * 4;
    for (int word = 0; word < kFours; word += 4) {
      const int byte = kOf.lead + 4 * word;
      Interleave(rows_, at + byte, buffer + kLanes * byte);
    }
    for (int word = kFours; word < kOf.words; ++word) {
      const int byte = kOf.lead + 4 * word;
      MoveUnit<4>(at + byte, buffer + kLanes * byte);
    }
    constexpr int kRest = kOf.lead + 4 * kOf.words;
    if constexpr (kOf.tail != 0) MoveUnit<kOf.tail>(at + kRest, buffer + kLanes * kRest);
    return buffer;
  }

  // Asks for what will be read some blocks after b. Prepared blocks are read in an order that the hardware does not
  // foresee; plain rows end before it has seen the pattern, so that they must fetch the next eight rows too.
  JQ_INLINE void Prefetch(int64_t b) const {
    constexpr int64_t kLine = 64, kAhead = 2048;
    if (interleaved_) {
      const uint8_t* at = rows_[0] + b * kLanes * sizeof(F) + kAhead;
      for (int64_t byte = 0; byte < static_cast<int64_t>(kLanes * sizeof(F)); byte += kLine) __builtin_prefetch(at + byte);
      return;
    }
  }

  JQ_INLINE const uint8_t* Row(int i) const { return rows_[i]; }

 private:
  template <int size>
  JQ_INLINE void MoveUnit(int64_t at, uint8_t* to) const {
    for (int row = 0; row < kLanes; ++row) memcpy(to + size * row, rows_[row] + at, size);
  }

  const uint8_t* rows_[kLanes];
  bool interleaved_;
};

// Values [first, first + 32 spans) of each row; first is a multiple of kStretch.
template <typename F>
void Fill(const Rows<F>& rows, int64_t first, int spans, Panel* panel) {
  using C = Coding<F>;
  constexpr int kBlockSpans = F::kBlock / kSpan, kGroups = kSpan / C::kGroup;
  for (int span = 0; span < spans; span += kBlockSpans) {
    const int64_t b = first / F::kBlock + span / kBlockSpans;
#if defined(__AVX2__)
    if constexpr (kHasLanes<F>) {
      alignas(64) uint8_t buffer[kLanes * sizeof(F)];
      const Lanes<F> block(rows.Prepared(b, buffer));
#pragma GCC unroll 8
      for (int s = 0; s < kBlockSpans; ++s) {
#pragma GCC unroll 8
        for (int i = 0; i < kSpan / 4; ++i) {
          _mm256_store_si256(reinterpret_cast<__m256i*>(panel->codes[span + s][i]), block.Code(s, i));
        }
#pragma GCC unroll 2
        for (int h = 0; h < kGroups; ++h) {
          _mm256_store_ps(panel->scales[span + s][h], block.Scale(s, h));
          if constexpr (C::kOffset) _mm256_store_ps(panel->offsets[span + s][h], block.Offset(s, h));
        }
      }
      continue;
    }
#endif
    int8_t codes[kBlockSpans][kLanes][kSpan];
    for (int row = 0; row < kLanes; ++row) {
      const F block = rows.Block(row, b);
      for (int s = 0; s < kBlockSpans; ++s) {
        for (int h = 0; h < kGroups; ++h) {
          Decoder<F>::Group(block, s * kGroups + h, codes[s][row] + h * C::kGroup, &panel->scales[span + s][h][row],
                            &panel->offsets[span + s][h][row]);
        }
        for (int j = 0; j < kSpan; ++j) codes[s][row][j] = static_cast<int8_t>(codes[s][row][j] + C::kZero);
      }
    }
    for (int s = 0; s < kBlockSpans; ++s) {
      const uint8_t* of_row[kLanes];
      for (int row = 0; row < kLanes; ++row) of_row[row] = reinterpret_cast<const uint8_t*>(codes[s][row]);
      Interleave(of_row, 0, panel->codes[span + s][0]);
      Interleave(of_row, 16, panel->codes[span + s][4]);
    }
  }
}

// Values [first, first + count) of each row as float32; first is a multiple of kStretch.
template <typename F>
void Fill(const Rows<F>& rows, int64_t first, int count, ValuePanel* panel) {
  if constexpr (kIsFloat<F>) {
    for (int row = 0; row < kLanes; ++row) {
      const uint8_t* from = rows.Row(row) + first * sizeof(F);
      for (int j = 0; j < count; ++j) {
        F value;
        memcpy(&value, from + j * sizeof(F), sizeof(F));
        panel->at[j][row] = LoadValue(value);
      }
    }
  } else {
    Panel codes;
    using C = Coding<F>;
    Fill(rows, first, count / kSpan, &codes);
    for (int s = 0; s < count / kSpan; ++s) {
#pragma GCC unroll 8
      for (int i = 0; i < kSpan / 4; ++i) {
        const int h = i * 4 / C::kGroup;
        for (int j = 0; j < 4; ++j) {
          for (int row = 0; row < kLanes; ++row) {
            int32_t word;
            memcpy(&word, codes.codes[s][i] + 4 * row, sizeof(word));
            // Unsigned where a zero is added.
            const int32_t raw = C::kZero == 0 && kCodes<F>.lowest < 0
                                    ? static_cast<int32_t>(static_cast<uint32_t>(word) << (24 - 8 * j)) >> 24
                                    : (word >> (8 * j) & 255) - C::kZero;
            float value = codes.scales[s][h][row] * static_cast<float>(raw);
            if constexpr (C::kOffset) value = value + codes.offsets[s][h][row];
            panel->at[s * kSpan + i * 4 + j][row] = value;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq
