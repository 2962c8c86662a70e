// Sizes that the plan and the kernels share.
#pragma once

#include <cstdint>

#include "ffi/ggml/linear/layout.h"

namespace jq {
namespace ggml {

constexpr int kSpan = 32;     // activations that share a scale
constexpr int kStretch = 256;  // values of a row that are decoded at a time
constexpr int kSpans = kStretch / kSpan;

constexpr int kPanelRows = 2 * kLanes;  // rows of weights that are decoded together
constexpr int64_t kMaxPositions = 128;
constexpr int64_t kMaxCells = 8192;  // of out in a unit: its sums stay in the cache

constexpr int64_t kGradientColumns = kStretch;
constexpr int64_t kGradientPositions = 64;

// 32 quantised activations.
struct ActivationSpan {
  int8_t codes[kSpan];
  float scale;
  // What the whole span, or each half of it where weights have a scale for 16 values, adds besides the products of
  // codes: see Correction.
  union {
    int32_t integer[2];  // -zero * (sum of codes): weights are stored as code + zero
    float scaled[2];     // scale * (sum of codes): times the offset of the weights
  } sums;
};

}  // namespace ggml
}  // namespace jq
