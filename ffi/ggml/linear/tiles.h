// The int8 products of many positions, in the tile unit (ffi/common/cpu_tiles.h): sixteen positions with the sixteen
// rows of a panel. The unit gives the integer products; scales are applied as in micro.h, in the same order.
#pragma once

#if defined(JQ_TILES)

#include "ffi/common/cpu_tiles.h"
#include "ffi/ggml/linear/panel.h"

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

// sums[t] = x[t] * panel for the first kPositions positions, added to those before where `add`.
template <typename K, int kPositions>
JQ_TILE_TARGET __attribute__((noinline)) void MultiplyTile(const Panel& panel, int spans, const ActivationTile& x,
                                                           bool add, float* sums) {
  constexpr int kGroups = kSpan / K::kGroup;
  constexpr bool kSigned = K::kTakenBack != Zero::kNone;
  // All of them before the first is read again: loads would wait for the unit's stores.
  alignas(64) TileSums products[kSpans][kGroups];
  for (int s = 0; s < spans; ++s) {
    for (int h = 0; h < kGroups; ++h) {
      TileProduct<kSigned, kPositions>(kGroups == 1 ? s % 2 : h, x.codes[s][0] + h * K::kGroup,
                                       panel.codes[s][h * K::kGroup / 4][0], products[s][h]);
    }
  }
  __m512 out[kPositions];
#pragma GCC unroll 16
  for (int t = 0; t < kPositions; ++t) out[t] = add ? _mm512_load_ps(sums + t * kPanelRows) : _mm512_setzero_ps();
  const auto product = [&](int s, int h, int t) {
    return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_load_si512(products[s][h][t]));
  };
  for (int s = 0; s < spans; ++s) {
    if constexpr (K::kIntegerScales) {
      // Products with their scales have at most 24 bits, and so have the sums of two: float32 holds them all.
      const __m512 scales[2] = {_mm512_maskz_cvtepi32_ps(0xffff, _mm512_load_si512(panel.integer_scales[s][0])),
                                _mm512_maskz_cvtepi32_ps(0xffff, _mm512_load_si512(panel.integer_scales[s][1]))};
      const __m512 factor = _mm512_load_ps(panel.factor[0]);
#pragma GCC unroll 16
      for (int t = 0; t < kPositions; ++t) {
        const __m512 both = _mm512_fmadd_ps(product(s, 1, t), scales[1], _mm512_mul_ps(product(s, 0, t), scales[0]));
        const __m512 scale = _mm512_mul_ps(factor, _mm512_set1_ps(x.scale[s][t]));
        out[t] = _mm512_add_ps(out[t], _mm512_mul_ps(scale, both));
      }
    } else {
#pragma GCC unroll 2
      for (int h = 0; h < kGroups; ++h) {
        const __m512 scale = _mm512_load_ps(panel.scales[s][h][0]);
#pragma GCC unroll 16
        for (int t = 0; t < kPositions; ++t) {
          const __m512 scales = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale[s][t]));
          out[t] = _mm512_add_ps(out[t], _mm512_mul_ps(scales, product(s, h, t)));
        }
        if constexpr (K::kOffset) {
          const __m512 offset = _mm512_load_ps(panel.offsets[s][h][0]);
#pragma GCC unroll 16
          for (int t = 0; t < kPositions; ++t) {
            out[t] = _mm512_add_ps(out[t], _mm512_mul_ps(offset, _mm512_set1_ps(x.scaled[s][h][t])));
          }
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < kPositions; ++t) _mm512_store_ps(sums + t * kPanelRows, out[t]);
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq

#endif
