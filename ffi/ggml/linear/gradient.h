// The gradient in x: dx[p][k] = sum over j of dy[p][j] * w[j][k], in float32, from blocks that are decoded for a stretch
// of k and sixteen rows at a time. Sums run over j in ascending order, by sixteens.
#pragma once

#include <cstdint>

#include "ffi/ggml/linear/activations.h"
#include "ffi/ggml/linear/micro.h"

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

constexpr int kGradientRows = 16;

struct alignas(64) Weights {
  float at[kGradientRows][kStretch];
};

// Values [first, first + count) of row i; first is a multiple of kStretch.
template <typename F>
JQ_INLINE void DecodeRow(const Rows<F>& rows, int i, int64_t first, int count, float* values) {
  if constexpr (kIsFloat<F>) {
    for (int j = 0; j < count; ++j) {
      F value;
      memcpy(&value, rows.Row(i) + (first + j) * sizeof(F), sizeof(F));
      values[j] = LoadValue(value);
    }
  } else {
    constexpr int kGroup = Decoder<F>::kGroup;
    for (int at = 0; at < count; at += F::kBlock) {
      const F block = rows.Block(i, (first + at) / F::kBlock);
      for (int g = 0; g < F::kBlock / kGroup; ++g) DecodeValues(block, g, values + at + g * kGroup);
    }
  }
}

// dx[t] += dy[t] * w for T positions; dy holds kGradientRows values of each.
template <int T>
__attribute__((noinline)) void Accumulate(const Weights& w, int rows, int count, const float (*dy)[kGradientRows],
                                          float (*dx)[kStretch]) {
  for (int k = 0; k < count; k += kLanes) {
    Floats partial[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) partial[t] = Floats{};
    for (int j = 0; j < rows; ++j) {
      const Floats values = *reinterpret_cast<const Floats*>(w.at[j] + k);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) partial[t] = partial[t] + values * dy[t][j];
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      Floats* out = reinterpret_cast<Floats*>(dx[t] + k);
      *out = *out + partial[t];
    }
  }
}

// Columns [first, first + count) of dx at `positions` positions, whose rows of dy and dx are given.
template <typename F, typename Real>
void Gradient(const GroupedArguments& a, const uint8_t* w, int64_t first, int count, int positions,
              const Real* const* dy, Real* const* dx) {
  alignas(64) float sums[kGradientPositions][kStretch];
  memset(sums, 0, positions * sizeof(sums[0]));
  Weights weights{};
  for (int64_t row = 0; row < a.n; row += kGradientRows) {
    const int rows = static_cast<int>(a.n - row < kGradientRows ? a.n - row : kGradientRows);
    for (int eight = 0; eight < rows; eight += kLanes) {
      const Rows<F> of(w, a.layout, a.n, a.k, row + eight);
      for (int i = 0; i < kLanes && eight + i < rows; ++i) DecodeRow(of, i, first, count, weights.at[eight + i]);
    }
    for (int t = 0; t < positions; t += 4) {
      const int here = positions - t < 4 ? positions - t : 4;
      float values[4][kGradientRows];
      for (int i = 0; i < here; ++i) LoadFloats(dy[t + i] + row, rows, values[i]);
      if (here == 4) {
        Accumulate<4>(weights, rows, count, values, sums + t);
      } else {
        for (int i = 0; i < here; ++i) Accumulate<1>(weights, rows, count, values + i, sums + t + i);
      }
    }
  }
  for (int t = 0; t < positions; ++t) {
    for (int k = 0; k < count; ++k) dx[t][first + k] = Convert<Real>(sums[t][k]);
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq
