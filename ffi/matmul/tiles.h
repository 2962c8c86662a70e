// The innermost products on the tile unit (ffi/common/cpu_tiles.h): a panel's words are its second operand as they lie.
// All four pairs of signs have an instruction, so no code is shifted.
#pragma once

#if defined(JQ_TILES)

#include <cstdint>

#include "ffi/common/cpu_tiles.h"
#include "ffi/matmul/layout.h"

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

// 32 rows with 2 panels, or up to 16 with 4: four tiles of sums, since each must wait for the one before.
constexpr int kBlockRows = 2 * kTileSide;
constexpr int BlockPanels(int rows) { return rows > kTileSide ? 2 : 4; }

// A stretch of k, in steps of as many codes as a row of a tile has.
struct TileStretch {
  const uint8_t* rows;  // [steps][kBlockRows][row_bytes]
  int64_t row_bytes;
  const uint8_t* panels;
  int64_t panel_stride;
  int64_t steps;
  int64_t last;         // where the last step's words are in a panel
  const int32_t* from;  // sums so far; null: none
  int32_t* to;
  int64_t from_stride, to_stride;  // in bytes
};

#define JQ_PRODUCT(sums, rows, words)   \
  if constexpr (signed_a && signed_w) { \
    _tile_dpbssd(sums, rows, words);    \
  } else if constexpr (signed_a) {      \
    _tile_dpbsud(sums, rows, words);    \
  } else if constexpr (signed_w) {      \
    _tile_dpbusd(sums, rows, words);    \
  } else {                              \
    _tile_dpbuud(sums, rows, words);    \
  }

// Tiles 0 and 1 are sums of the first rows, 2 and 3 of the others; 4 and 5 rows, 6 and 7 panels.
template <bool signed_a, bool signed_w, int panels>
JQ_TILE_TARGET void MultiplyTall(const TileStretch& s) {
  if (s.from != nullptr) {
    const char *upper = reinterpret_cast<const char*>(s.from), *lower = upper + kTileSide * s.from_stride;
    _tile_loadd(0, upper, s.from_stride);
    _tile_loadd(2, lower, s.from_stride);
    if constexpr (panels == 2) {
      _tile_loadd(1, upper + kPanelBytes, s.from_stride);
      _tile_loadd(3, lower + kPanelBytes, s.from_stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const uint8_t* rows = s.rows;
  for (int64_t i = 0; i < s.steps; ++i, rows += kBlockRows * s.row_bytes) {
    const uint8_t* words = s.panels + (i + 1 < s.steps ? i * kTileSide * s.row_bytes : s.last);
    _tile_loadd(6, words, kPanelBytes);
    _tile_loadd(4, rows, s.row_bytes);
    JQ_PRODUCT(0, 4, 6);
    _tile_loadd(5, rows + kTileSide * s.row_bytes, s.row_bytes);
    JQ_PRODUCT(2, 5, 6);
    if constexpr (panels == 2) {
      _tile_loadd(7, words + s.panel_stride, kPanelBytes);
      JQ_PRODUCT(1, 4, 7);
      JQ_PRODUCT(3, 5, 7);
    }
  }
  char *upper = reinterpret_cast<char*>(s.to), *lower = upper + kTileSide * s.to_stride;
  _tile_stored(0, upper, s.to_stride);
  _tile_stored(2, lower, s.to_stride);
  if constexpr (panels == 2) {
    _tile_stored(1, upper + kPanelBytes, s.to_stride);
    _tile_stored(3, lower + kPanelBytes, s.to_stride);
  }
}

// Tiles 0 to 3 are sums of four panels; 4 rows, 6 and 7 panels.
template <bool signed_a, bool signed_w, int panels>
JQ_TILE_TARGET void MultiplyWide(const TileStretch& s) {
  if (s.from != nullptr) {
    const char* from = reinterpret_cast<const char*>(s.from);
    _tile_loadd(0, from, s.from_stride);
    if constexpr (panels > 1) _tile_loadd(1, from + kPanelBytes, s.from_stride);
    if constexpr (panels > 2) _tile_loadd(2, from + 2 * kPanelBytes, s.from_stride);
    if constexpr (panels > 3) _tile_loadd(3, from + 3 * kPanelBytes, s.from_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const uint8_t* rows = s.rows;
  for (int64_t i = 0; i < s.steps; ++i, rows += kBlockRows * s.row_bytes) {
    const uint8_t* words = s.panels + (i + 1 < s.steps ? i * kTileSide * s.row_bytes : s.last);
    _tile_loadd(4, rows, s.row_bytes);
    _tile_loadd(6, words, kPanelBytes);
    JQ_PRODUCT(0, 4, 6);
    if constexpr (panels > 1) {
      _tile_loadd(7, words + s.panel_stride, kPanelBytes);
      JQ_PRODUCT(1, 4, 7);
    }
    if constexpr (panels > 2) {
      _tile_loadd(6, words + 2 * s.panel_stride, kPanelBytes);
      JQ_PRODUCT(2, 4, 6);
    }
    if constexpr (panels > 3) {
      _tile_loadd(7, words + 3 * s.panel_stride, kPanelBytes);
      JQ_PRODUCT(3, 4, 7);
    }
  }
  char* to = reinterpret_cast<char*>(s.to);
  _tile_stored(0, to, s.to_stride);
  if constexpr (panels > 1) _tile_stored(1, to + kPanelBytes, s.to_stride);
  if constexpr (panels > 2) _tile_stored(2, to + 2 * kPanelBytes, s.to_stride);
  if constexpr (panels > 3) _tile_stored(3, to + 3 * kPanelBytes, s.to_stride);
}

#undef JQ_PRODUCT

template <bool signed_a, bool signed_w>
void MultiplyBlock(int rows, int panels, const TileStretch& s) {
  if (rows > kTileSide) {
    return panels == 1 ? MultiplyTall<signed_a, signed_w, 1>(s) : MultiplyTall<signed_a, signed_w, 2>(s);
  }
  switch (panels) {
    case 1: return MultiplyWide<signed_a, signed_w, 1>(s);
    case 2: return MultiplyWide<signed_a, signed_w, 2>(s);
    case 3: return MultiplyWide<signed_a, signed_w, 3>(s);
    default: return MultiplyWide<signed_a, signed_w, 4>(s);
  }
}
using BlockFunction = void (*)(int rows, int panels, const TileStretch& s);
inline BlockFunction BlockFunctionOf(bool signed_a, bool signed_w) {
  if (signed_a) return signed_w ? MultiplyBlock<true, true> : MultiplyBlock<true, false>;
  return signed_w ? MultiplyBlock<false, true> : MultiplyBlock<false, false>;
}

// The shapes a thread has loaded.
class BlockShapes {
 public:
  // For blocks of `rows` rows, whose tiles have rows of `row_bytes` bytes.
  void Need(int rows, int row_bytes) {
    if (rows == rows_ && row_bytes == row_bytes_) return;
    rows_ = rows;
    row_bytes_ = row_bytes;
    const bool tall = rows > kTileSide;
    const int upper = tall ? kTileSide : rows, lower = tall ? rows - kTileSide : rows;
    TileShapes shapes;
    for (int tile = 0; tile < 4; ++tile) shapes.Set(tile, tile < 2 ? upper : lower, kPanelBytes);
    shapes.Set(4, upper, row_bytes);
    shapes.Set(5, lower, row_bytes);
    for (int tile = 6; tile < 8; ++tile) shapes.Set(tile, row_bytes / 4, kPanelBytes);
    shapes.Load();
  }

 private:
  int rows_ = 0, row_bytes_ = 0;
  TileScope scope_;
};

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq

#endif
