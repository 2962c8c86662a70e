// Sizes that the plan and the kernels share.
#pragma once

#include <cstdint>

#include "ffi/ggml/linear/layout.h"

namespace jq {
namespace ggml {

constexpr int kSpan = 32;      // activations that share a scale
constexpr int kStretch = 256;  // values of a row that are decoded at a time
constexpr int kSpans = kStretch / kSpan;

constexpr int kEights = 2;
constexpr int kPanelRows = kEights * kLanes;  // rows of weights that are decoded together
constexpr int64_t kMaxPositions = 128;
constexpr int64_t kMaxCells = 8192;  // of out in a unit: its sums stay in the cache

constexpr int64_t kGradientColumns = kStretch;
constexpr int64_t kGradientPositions = 64;

// 32 quantised activations.
struct ActivationSpan {
  int8_t codes[kSpan];
  float scale;
  // Of the whole span, or of each half of it where weights have a scale for 16 values. What a format needs: -zero times
  // a sum of codes, since weights are stored as code + zero, or scale times the sum, for weights with an offset.
  union {
    int32_t wide[2];
    int16_t pairs[2][2];  // of codes 0, 1 of each four, and of codes 2, 3
    float scaled[2];
  } sums;
};

// The same of sixteen rows for a stretch, as the tile unit reads them. Where a row or its end is missing, zeros.
constexpr int kTilePositions = 16;
constexpr int64_t kMaxTilePositions = 256;
struct alignas(64) ActivationTile {
  int8_t codes[kSpans][kTilePositions][kSpan];
  float scale[kSpans][kTilePositions];
  float scaled[kSpans][2][kTilePositions];
};
constexpr int64_t TilesOf(int64_t positions) { return (positions + kTilePositions - 1) / kTilePositions; }
constexpr int64_t StretchesOf(int64_t k) { return (k + kStretch - 1) / kStretch; }
// Fewer positions are multiplied one by one before as many weights are arranged for tiles.
constexpr int64_t kLeastTilePositions = 8;

}  // namespace ggml
}  // namespace jq
