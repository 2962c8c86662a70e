// Weights as the micro-kernels read them: the codes or values of two eights of rows, decoded for a stretch of k.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/ggml/linear/kernels.h"
#include "ffi/ggml/linear/lanes.h"
#include "ffi/ggml/linear/row_codes.h"

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

// codes[s][i][v]: values 32 s + 4 i ... + 3 of each row of eight v, plus Coding<F>::kZero.
struct alignas(64) Panel {
  uint8_t codes[kSpans][kSpan / 4][kEights][kLanes * 4];
  union {
    float scales[kSpans][2][kEights][kLanes];  // the second one where groups are of 16
    int32_t integer_scales[kSpans][2][kEights][kLanes];
  };
  union {
    float offsets[kSpans][2][kEights][kLanes];
    float factor[kEights][kLanes];  // of integer_scales, in formats whose blocks fill a panel
  };
};
// at[k][v]: value k of each row of eight v.
struct alignas(64) ValuePanel {
  float at[kStretch][kEights][kLanes];
};

#if defined(__AVX2__)
template <typename F>
constexpr bool kHasLanes = kUnits<F>.interleaved;
template <typename F>
constexpr bool kHasRowCodes = RowCodes<F>::kKnown;
#else
template <typename F>
constexpr bool kHasLanes = false;
template <typename F>
constexpr bool kHasRowCodes = false;
#endif

#if defined(__AVX2__)
// 16 bytes of eight rows, as four vectors of the same four bytes of all, one every `stride` bytes.
JQ_INLINE void Interleave(const uint8_t* const (&rows)[kLanes], int64_t at, uint8_t* to, int64_t stride = 4 * kLanes) {
  __m256i pair[4];
  for (int i = 0; i < 4; ++i) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 4] + at));
    pair[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  const __m256i a = _mm256_unpacklo_epi32(pair[0], pair[1]), b = _mm256_unpackhi_epi32(pair[0], pair[1]);
  const __m256i c = _mm256_unpacklo_epi32(pair[2], pair[3]), d = _mm256_unpackhi_epi32(pair[2], pair[3]);
  const auto store = [&](int i, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + stride * i), v); };
  store(0, _mm256_unpacklo_epi64(a, c));
  store(1, _mm256_unpackhi_epi64(a, c));
  store(2, _mm256_unpacklo_epi64(b, d));
  store(3, _mm256_unpackhi_epi64(b, d));
}
#else
JQ_INLINE void Interleave(const uint8_t* const (&rows)[kLanes], int64_t at, uint8_t* to, int64_t stride = 4 * kLanes) {
  for (int i = 0; i < 4; ++i) {
    for (int row = 0; row < kLanes; ++row) memcpy(to + stride * i + 4 * row, rows[row] + at + 4 * i, 4);
  }
}
#endif

// Up to eight rows of blocks. Where there are fewer, the last one stands for the missing.
template <typename F>
class Rows {
 public:
  JQ_INLINE Rows(const uint8_t* w, Layout layout, int64_t n, int64_t k, int64_t row)
      : interleaved_(kUnits<F>.interleaved && layout == Layout::kPrepared) {
    const int64_t row_bytes = k / F::kBlock * static_cast<int64_t>(sizeof(F));
    next_ = kLanes * row_bytes;
    if (interleaved_) n = StoredRows(n, true);
    for (int i = 0; i < kLanes; ++i) rows_[i] = w + (row + i < n ? row + i : n - 1) * row_bytes;
  }

  // Block b of row i: in place, or written to `buffer`.
  JQ_INLINE const F& Block(int i, int64_t b, F* buffer) const {
    if (!interleaved_) return reinterpret_cast<const F*>(rows_[i])[b];
    constexpr Units kOf = kUnits<F>;
    const uint8_t* from = rows_[0] + b * kLanes * sizeof(F);
    uint8_t* to = reinterpret_cast<uint8_t*>(buffer);
    if constexpr (kOf.lead != 0) memcpy(to, from + i * kOf.lead, kOf.lead);
    for (int word = 0; word < kOf.words; ++word) {
      memcpy(to + kOf.lead + 4 * word, from + kLanes * (kOf.lead + 4 * word) + 4 * i, 4);
    }
    constexpr int kRest = kOf.lead + 4 * kOf.words;
    if constexpr (kOf.tail != 0) memcpy(to + kRest, from + kLanes * kRest + i * kOf.tail, kOf.tail);
    return *buffer;
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

  // Asks for what will be read some time after block b; interleaved: `ahead` bytes behind it, or nothing where that is
  // 0. The hardware does not foresee the order in which a block is read whose scale comes last, two eights of rows that
  // are read by turns with long work between, or rows that end before it has seen the pattern. To the second cache: the
  // first one has too few lines in flight to keep the memory busy.
  JQ_INLINE void Prefetch(int64_t b, int64_t ahead) const {
    constexpr int64_t kLine = 64, kBytes = sizeof(F);
    if (interleaved_) {
      if (ahead == 0) return;
      const uint8_t* at = rows_[0] + b * kLanes * kBytes + ahead;
      for (int64_t byte = 0; byte < kLanes * kBytes; byte += kLine) __builtin_prefetch(at + byte, 0, 2);
      return;
    }
    // Once for each line, where blocks are shorter.
    constexpr int64_t kBlocks = kBytes < kLine ? kLine / kBytes : 1;
    if (b % kBlocks != 0) return;
    for (int row = 0; row < kLanes; ++row) {
      const uint8_t* at = rows_[row] + b * kBytes + next_;
      for (int64_t byte = 0; byte < kBytes; byte += kLine) __builtin_prefetch(at + byte);
    }
  }

  // Value k of row i of a float format.
  JQ_INLINE const F& Value(int i, int64_t k) const { return reinterpret_cast<const F*>(rows_[i])[k]; }

 private:
  template <int size>
  JQ_INLINE void MoveUnit(int64_t at, uint8_t* to) const {
    for (int row = 0; row < kLanes; ++row) memcpy(to + size * row, rows_[row] + at, size);
  }

  const uint8_t* rows_[kLanes];
  int64_t next_;  // from a row to that of the next eight
  bool interleaved_;
};

#if defined(__AVX2__)
JQ_INLINE __m256 LoadEight(const F32* values) { return _mm256_loadu_ps(reinterpret_cast<const float*>(values)); }
JQ_INLINE __m256 LoadEight(const F16* values) { return HalvesToFloat(reinterpret_cast<const uint8_t*>(values)); }
JQ_INLINE __m256 LoadEight(const BF16* values) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
// Column i to `to` + i * stride.
JQ_INLINE void Transpose(const __m256 (&rows)[kLanes], float* to, int stride) {
  __m256 fours[kLanes];  // of four rows each: columns 0 and 4, 1 and 5, 2 and 6, 3 and 7
  for (int half = 0; half < 2; ++half) {
    const __m256* r = rows + 4 * half;
    const __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
    const __m256 c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
    fours[4 * half] = _mm256_shuffle_ps(a, c, 0x44);
    fours[4 * half + 1] = _mm256_shuffle_ps(a, c, 0xee);
    fours[4 * half + 2] = _mm256_shuffle_ps(b, d, 0x44);
    fours[4 * half + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + stride * i, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_ps(to + stride * (i + 4), _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
  }
}
#endif

constexpr int64_t kPanelAhead = 4096, kDirectAhead = 8192;  // bytes

// Values [first, first + 32 spans) of each row of eight v; first is a multiple of kStretch.
template <typename F>
void Fill(const Rows<F>& rows, int64_t first, int spans, int v, Panel* panel) {
  using C = Coding<F>;
  constexpr int kBlockSpans = F::kBlock / kSpan, kGroups = kSpan / C::kGroup;
  for (int span = 0; span < spans; span += kBlockSpans) {
    const int64_t b = first / F::kBlock + span / kBlockSpans;
    rows.Prefetch(b, kPanelAhead);
#if defined(__AVX2__)
    if constexpr (kHasLanes<F>) {
      alignas(64) uint8_t buffer[kLanes * sizeof(F)];
      const Lanes<F> block(rows.Prepared(b, buffer));
#pragma GCC unroll 8
      for (int s = 0; s < kBlockSpans; ++s) {
#pragma GCC unroll 8
        for (int i = 0; i < kSpan / 4; ++i) {
          _mm256_store_si256(reinterpret_cast<__m256i*>(panel->codes[span + s][i][v]), block.Code(s, i));
        }
#pragma GCC unroll 2
        for (int h = 0; h < kGroups; ++h) {
          if constexpr (kIntegerScales<F>) {
            __m256i* scales = reinterpret_cast<__m256i*>(panel->integer_scales[s][h][v]);
            _mm256_store_si256(scales, block.IntegerScale(s, h));
          } else {
            _mm256_store_ps(panel->scales[span + s][h][v], block.Scale(s, h));
          }
          if constexpr (C::kOffset) _mm256_store_ps(panel->offsets[span + s][h][v], block.Offset(s, h));
        }
      }
      if constexpr (kIntegerScales<F>) _mm256_store_ps(panel->factor[v], block.Factor());
      continue;
    }
#endif
    int8_t codes[kBlockSpans][kLanes][kSpan];
    for (int row = 0; row < kLanes; ++row) {
      F buffer;
      const F& block = rows.Block(row, b, &buffer);
      for (int s = 0; s < kBlockSpans; ++s) {
        for (int h = 0; h < kGroups; ++h) {
          const int g = s * kGroups + h;
          int8_t group[C::kGroup];
          float scale, offset;
          Decoder<F>::Group(block, g, group, &scale, &offset);
          if constexpr (kIntegerScales<F>) {
            panel->integer_scales[span + s][h][v][row] = IntegerScale(block, g);
            panel->factor[v][row] = ToFloat(block.d);
          } else {
            panel->scales[span + s][h][v][row] = scale;
          }
          if constexpr (C::kOffset) panel->offsets[span + s][h][v][row] = offset;
          if constexpr (!kHasRowCodes<F>) {
            for (int j = 0; j < C::kGroup; ++j) {
              codes[s][row][h * C::kGroup + j] = static_cast<int8_t>(group[j] + C::kZero);
            }
          }
        }
#if defined(__AVX2__)
        if constexpr (kHasRowCodes<F>) {
          const __m256i span_codes = _mm256_add_epi8(RowCodes<F>::Span(block, s), Bytes(C::kZero));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes[s][row]), span_codes);
        }
#endif
      }
    }
    for (int s = 0; s < kBlockSpans; ++s) {
      const uint8_t* of_row[kLanes];
      for (int row = 0; row < kLanes; ++row) of_row[row] = reinterpret_cast<const uint8_t*>(codes[s][row]);
      Interleave(of_row, 0, panel->codes[span + s][0][v], sizeof(panel->codes[0][0]));
      Interleave(of_row, 16, panel->codes[span + s][4][v], sizeof(panel->codes[0][0]));
    }
  }
}

// Of a row of the first eight.
template <typename F>
JQ_INLINE float ScaleOf(const Panel& panel, int s, int h, int row) {
  if constexpr (kIntegerScales<F>) {
    // The low half alone: both may hold it.
    return panel.factor[0][row] * static_cast<float>(static_cast<int16_t>(panel.integer_scales[s][h][0][row]));
  }
  return panel.scales[s][h][0][row];
}

// Values [first, first + count) of each row of eight v as float32; first is a multiple of kStretch.
template <typename F>
void Fill(const Rows<F>& rows, int64_t first, int count, int v, ValuePanel* panel) {
  if constexpr (kIsFloat<F>) {
    int done = 0;
#if defined(__AVX2__)
    for (; done + kLanes <= count; done += kLanes) {
      __m256 of_row[kLanes];
      for (int row = 0; row < kLanes; ++row) of_row[row] = LoadEight(&rows.Value(row, first + done));
      Transpose(of_row, panel->at[done][v], kPanelRows);
    }
#endif
    for (int row = 0; row < kLanes; ++row) {
      for (int j = done; j < count; ++j) panel->at[j][v][row] = LoadValue(rows.Value(row, first + j));
    }
  } else {
    Panel codes;
    using C = Coding<F>;
    Fill(rows, first, count / kSpan, 0, &codes);
    for (int s = 0; s < count / kSpan; ++s) {
#pragma GCC unroll 8
      for (int i = 0; i < kSpan / 4; ++i) {
        const int h = i * 4 / C::kGroup;
        for (int j = 0; j < 4; ++j) {
          for (int row = 0; row < kLanes; ++row) {
            int32_t word;
            memcpy(&word, codes.codes[s][i][0] + 4 * row, sizeof(word));
            // Unsigned where a zero is added.
            const int32_t raw = C::kZero == 0 && kCodes<F>.lowest < 0
                                    ? static_cast<int32_t>(static_cast<uint32_t>(word) << (24 - 8 * j)) >> 24
                                    : (word >> (8 * j) & 255) - C::kZero;
            float value = ScaleOf<F>(codes, s, h, row) * static_cast<float>(raw);
            if constexpr (C::kOffset) value = value + codes.offsets[s][h][0][row];
            panel->at[s * kSpan + i * 4 + j][v][row] = value;
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
