// The int8 products of many positions, in the tile unit (ffi/common/cpu_tiles.h): sixteen positions with the sixteen
// rows of a panel. The unit gives the integer products; scales are applied as in micro.h, in the same order.
#pragma once

#if defined(JQ_TILES)

#include "ffi/common/cpu_tiles.h"
#include "ffi/ggml/linear/wide.h"

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

static_assert(kPanelRows == kTileSide && kTilePositions == kTileSide, "a panel is the columns of a tile");

using TileSums = int32_t[kTilePositions][kPanelRows];

JQ_INLINE void Put(const ActivationSpan& span, int lane, int64_t s, ActivationTile* to) {
  memcpy(to->codes[s][lane], span.codes, kSpan);
  to->scale[s][lane] = span.scale;
  for (int h = 0; h < 2; ++h) to->scaled[s][h][lane] = span.sums.scaled[h];
}

// Codes without their zeros: the unit multiplies signed ones as well.
template <typename K>
JQ_INLINE void TakeBackZeros(int zero, int spans, Panel* panel) {
  if constexpr (K::kTakenBack == Zero::kNone) return;
  const __m512i zeros = _mm512_set1_epi8(static_cast<char>(zero));
  for (int s = 0; s < spans; ++s) {
#pragma GCC unroll 8
    for (int i = 0; i < kSpan / 4; ++i) {
      uint8_t* codes = panel->codes[s][i][0];
      _mm512_store_si512(codes, _mm512_sub_epi8(_mm512_load_si512(codes), zeros));
    }
  }
}

// Shapes for groups of K. Tiles 0 and 1 hold sums, 2 and 3 codes of activations, 4 and 5 those of weights; 6 and 7 sums
// and codes of eight positions.
template <typename K>
JQ_TILE_TARGET void ShapeTiles() {
  TileShapes shapes;
  for (int i = 0; i < 2; ++i) {
    shapes.Set(i, kTilePositions, sizeof(TileSums) / kTilePositions);
    shapes.Set(2 + i, kTilePositions, K::kGroup);
    shapes.Set(4 + i, K::kGroup / 4, 4 * kPanelRows);
  }
  shapes.Set(6, kTilePositions / 2, sizeof(TileSums) / kTilePositions);
  shapes.Set(7, kTilePositions / 2, K::kGroup);
  shapes.Load();
}

// The products of a group. Sixteen positions take tiles by turns, so that two groups are under way at once. A tile's
// number is part of the instruction.
#define JQ_TILE_PRODUCT(sum, a, w)         \
  _tile_zero(sum);                         \
  _tile_loadd(a, codes, kSpan);            \
  _tile_loadd(w, weights, 4 * kPanelRows); \
  if constexpr (kSigned) {                 \
    _tile_dpbssd(sum, a, w);               \
  } else {                                 \
    _tile_dpbsud(sum, a, w);               \
  }                                        \
  _tile_stored(sum, sums, sizeof(TileSums) / kTilePositions)

template <bool kSigned, int kPositions>
JQ_TILE_TARGET JQ_INLINE void TileProduct(int turn, const int8_t* codes, const uint8_t* weights, TileSums& sums) {
  if constexpr (kPositions != kTilePositions) {
    JQ_TILE_PRODUCT(6, 7, 4);
  } else if (turn == 0) {
    JQ_TILE_PRODUCT(0, 2, 4);
  } else {
    JQ_TILE_PRODUCT(1, 3, 5);
  }
}
#undef JQ_TILE_PRODUCT

template <typename K>
using TileProducts = TileSums[kSpans][kSpan / K::kGroup];

template <typename K, int kPositions>
JQ_TILE_TARGET JQ_INLINE void MakeProducts(const Panel& panel, int s, const ActivationTile& x,
                                           TileProducts<K>& products) {
  constexpr int kGroups = kSpan / K::kGroup;
  for (int h = 0; h < kGroups; ++h) {
    TileProduct<K::kTakenBack != Zero::kNone, kPositions>(kGroups == 1 ? s % 2 : h, x.codes[s][0] + h * K::kGroup,
                                                          panel.codes[s][h * K::kGroup / 4][0], products[s][h]);
  }
}

// Makes the products of the first kMade positions of a tile and, by turns, adds those of the tile before with their
// scales to the sums of its kScaled positions: no load waits for the tile unit's stores. 0: none. !add: from zero.
template <typename K, int kMade, int kScaled>
JQ_TILE_TARGET __attribute__((noinline)) void MultiplyTile(const Panel& panel, int spans, const ActivationTile* made,
                                                           TileProducts<K>& products, const TileProducts<K>& ready,
                                                           bool add, float* sums) {
  __m512 out[kScaled == 0 ? 1 : kScaled];
#pragma GCC unroll 16
  for (int t = 0; t < kScaled; ++t) out[t] = add ? _mm512_load_ps(sums + t * kPanelRows) : _mm512_setzero_ps();
  for (int s = 0; s < spans; ++s) {
    if constexpr (kMade != 0) MakeProducts<K, kMade>(panel, s, *made, products);
    if constexpr (kScaled != 0) {
      const float *const scale = made[-1].scale[s], *const scaled = made[-1].scaled[s][0];
      const int32_t* const sums_of_span = ready[s][0][0];
      AddScaled<K>(
          panel, s,
          [=](int h, int t) { return _mm512_load_si512(sums_of_span + (h * kTilePositions + t) * kPanelRows); },
          [=](int t) { return scale[t]; }, [=](int h, int t) { return scaled[h * kTilePositions + t]; }, out);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < kScaled; ++t) _mm512_store_ps(sums + t * kPanelRows, out[t]);
}

// sums[t] = x[t] * panel for all positions, added to those before where `add`.
template <typename K>
void MultiplyTiles(const Panel& panel, int spans, const ActivationTile* x, int positions, bool add,
                   float (*sums)[kPanelRows]) {
  constexpr int kAll = kTilePositions, kHalf = kTilePositions / 2;
  alignas(64) TileProducts<K> products[2];
  int tile = 0;
  for (int left = positions; left > -kAll; left -= kAll, ++tile) {
    float* before = tile == 0 ? nullptr : sums[(tile - 1) * kAll];
    const bool few = left <= kHalf;
    const auto multiply = tile == 0              ? (few ? MultiplyTile<K, kHalf, 0> : MultiplyTile<K, kAll, 0>)
                          : left > 0             ? (few ? MultiplyTile<K, kHalf, kAll> : MultiplyTile<K, kAll, kAll>)
                          : left + kAll <= kHalf ? MultiplyTile<K, 0, kHalf>
                                                 : MultiplyTile<K, 0, kAll>;
    multiply(panel, spans, x + tile, products[tile % 2], products[(tile + 1) % 2], add, before);
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq

#endif
