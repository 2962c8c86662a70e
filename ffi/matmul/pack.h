// Panels of 8-bit codes from w as it lies, where the kernels cannot read it so: of unsigned ones (math.h), or, with
// `extend`, of the codes themselves.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/matmul/interleave.h"
#include "ffi/matmul/math.h"

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

// Codes [first, first + count) of a group, `group` rows into w, for `panels` panels from `panel` on. To: panels of
// `words` words each.
template <int bits, bool extend>
void PackRows(const ProductArguments& a, const uint8_t* w, int64_t group, int64_t group_size, int64_t first,
              int64_t words, int64_t panel, int64_t panels, uint8_t* to, int64_t panel_stride) {
  // Each row is a page of its own, or nearly: no prefetcher foresees the next ones. They have too few places in the
  // first cache.
  constexpr int64_t kAhead = 32;
  constexpr int kBytes = kPanel * bits / 8;
  const int64_t row_bytes = PlainRowBytes(a.n, bits);
  const int flip = a.w.is_signed ? 1 << (bits - 1) : 0;
  const int64_t whole = std::min(panels, a.n / kPanel - panel);
  for (int64_t i = 0; i < words; ++i, to += kPanelBytes) {
    const uint8_t* rows[4];
    const int present = static_cast<int>(std::clamp<int64_t>(group_size - first - 4 * i, 0, 4));
    for (int j = 0; j < 4; ++j) {
      // Rows beyond the group meet zeros of a.
      rows[j] = w + (group + first + 4 * i + (j < present ? j : 0)) * row_bytes + panel * kBytes;
    }
    const bool more = first + 4 * i + 4 + kAhead <= group_size;
    int64_t p = 0;
    for (; p + 4 <= whole; p += 4) {
      for (int j = 0; more && j < 4; ++j) __builtin_prefetch(rows[j] + kAhead * row_bytes, 0, 2);
      InterleaveFourPanels<bits, extend>(rows, flip, to + p * panel_stride, panel_stride);
      for (int j = 0; j < 4; ++j) rows[j] += 4 * kBytes;
    }
    for (; p < panels; ++p) {
      const int64_t left = a.n - (panel + p) * kPanel;
      InterleavePanel<bits, extend>(rows, static_cast<int>(std::min<int64_t>(left, kPanel)), flip,
                                    to + p * panel_stride);
      for (int j = 0; j < 4; ++j) rows[j] += kBytes;
    }
  }
}

// The same from the prepared layout, for groups that begin within a word.
template <bool extend>
void PackPrepared(const ProductArguments& a, const uint8_t* w, int64_t group, int64_t group_size, int64_t first,
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
          const unsigned code = (w[at.byte] >> at.shift & ((1u << a.w.bits) - 1)) ^ flip;
          out[4 * c + j] = static_cast<uint8_t>(extend ? code - flip : code);
        }
      }
    }
  }
}

// The same where they begin with one: a word of each field of a word.
template <int bits, bool extend>
void SpreadPrepared(const ProductArguments& a, const uint8_t* w, int64_t group, int64_t /*group_size*/, int64_t first,
                    int64_t words, int64_t panel, int64_t panels, uint8_t* to, int64_t panel_stride) {
  typedef uint8_t Bytes __attribute__((vector_size(kPanelBytes), aligned(1), may_alias));
  constexpr int kParts = 8 / bits;
  const int64_t stride = WordCount(a.k, bits) * kPanelBytes;
  const uint8_t* from = w + panel * stride + (group + first) / CodesPerWord(bits) * kPanelBytes;
  const uint8_t flip = a.w.is_signed ? 1 << (bits - 1) : 0, mask = (1 << bits) - 1;
  for (int64_t p = 0; p < panels; ++p) {
    for (int64_t i = 0; i < words; i += kParts) {
      const Bytes word = *reinterpret_cast<const Bytes*>(from + p * stride + i / kParts * kPanelBytes);
      for (int t = 0; t < kParts && i + t < words; ++t) {
        Bytes codes = (word >> static_cast<uint8_t>(bits * t) & mask) ^ flip;
        if (extend) codes -= flip;
        *reinterpret_cast<Bytes*>(to + p * panel_stride + (i + t) * kPanelBytes) = codes;
      }
    }
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
