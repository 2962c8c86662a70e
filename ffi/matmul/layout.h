// The prepared layout of a matrix of codes [k, n], which jaxquant/affine/layout.py describes: panels of 16 columns,
// each a sequence of 64 bytes; bytes 4 c ... 4 c + 3 of them are a word of column c, which holds 32 / bits codes along
// k.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"

namespace jq {
namespace matmul {

constexpr int kPanel = 16;               // columns
constexpr int kPanelBytes = 4 * kPanel;  // of a word of each

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int CodesPerWord(int bits) { return 32 / bits; }
constexpr int64_t PanelCount(int64_t n) { return CeilDivide(n, kPanel); }
constexpr int64_t WordCount(int64_t k, int bits) { return CeilDivide(k, CodesPerWord(bits)); }
constexpr int64_t PreparedBytes(int64_t k, int64_t n, int bits) {
  return PanelCount(n) * WordCount(k, bits) * kPanelBytes;
}
constexpr int64_t PlainRowBytes(int64_t n, int bits) { return CeilDivide(n * bits, 8); }
constexpr int64_t PlainBytes(int64_t k, int64_t n, int bits) { return k * PlainRowBytes(n, bits); }

// Where the code of row k, column n lies: its byte, and how far its lowest bit is from the byte's.
struct CodePlace {
  int64_t byte;
  int shift;
};
JQ_HOST_DEVICE CodePlace PreparedPlace(int64_t row, int64_t column, int64_t words, int bits) {
  const int64_t each = 32 / bits, word = row / each, within = row % each;
  return {(column / kPanel * words + word) * kPanelBytes + column % kPanel * 4 + within % 4,
          static_cast<int>(within / 4) * bits};
}
JQ_HOST_DEVICE CodePlace PlainPlace(int64_t row, int64_t column, int64_t row_bytes, int bits) {
  const int64_t each = 8 / bits;
  return {row * row_bytes + column / each, static_cast<int>(column % each) * bits};
}

// Byte `at` of the prepared matrix, from the plain one.
JQ_HOST_DEVICE uint8_t PreparedByte(const uint8_t* plain, int64_t at, int64_t k, int64_t n, int bits) {
  const int64_t words = (k + 32 / bits - 1) / (32 / bits), row_bytes = (n * bits + 7) / 8;
  const int64_t panel = at / (words * kPanelBytes), rest = at % (words * kPanelBytes);
  const int64_t column = panel * kPanel + rest % kPanelBytes / 4;
  int64_t row = rest / kPanelBytes * (32 / bits) + rest % 4;
  unsigned byte = 0;
  for (int shift = 0; shift < 8; shift += bits, row += 4) {
    if (row >= k || column >= n) continue;
    const CodePlace from = PlainPlace(row, column, row_bytes, bits);
    byte |= (static_cast<unsigned>(plain[from.byte]) >> from.shift & ((1u << bits) - 1)) << shift;
  }
  return static_cast<uint8_t>(byte);
}
// The reverse.
JQ_HOST_DEVICE uint8_t PlainByte(const uint8_t* prepared, int64_t at, int64_t k, int64_t n, int bits) {
  const int64_t words = (k + 32 / bits - 1) / (32 / bits), row_bytes = (n * bits + 7) / 8;
  int64_t column = at % row_bytes * (8 / bits);
  unsigned byte = 0;
  for (int shift = 0; shift < 8; shift += bits, ++column) {
    if (column >= n) continue;
    const CodePlace from = PreparedPlace(at / row_bytes, column, words, bits);
    byte |= (static_cast<unsigned>(prepared[from.byte]) >> from.shift & ((1u << bits) - 1)) << shift;
  }
  return static_cast<uint8_t>(byte);
}

}  // namespace matmul
}  // namespace jq
