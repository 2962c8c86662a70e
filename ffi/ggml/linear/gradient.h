// The gradient in x: dx[p][k] = sum over j of dy[p][j] * w[j][k], in float32, from blocks that are decoded for a
// stretch of k and sixteen rows at a time. Sums run over j in ascending order, by sixteens.
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

// Values [first, first + count) of each of eight rows; first is a multiple of kStretch.
template <typename F>
void DecodeRows(const Rows<F>& rows, int64_t first, int count, float (*values)[kStretch]) {
  if constexpr (kIsFloat<F>) {
    for (int row = 0; row < kLanes; ++row) {
      int done = 0;
#if defined(__AVX2__)
      for (; done + kLanes <= count; done += kLanes) {
        _mm256_storeu_ps(values[row] + done, LoadEight(&rows.Value(row, first + done)));
      }
#endif
      for (int j = done; j < count; ++j) values[row][j] = LoadValue(rows.Value(row, first + j));
    }
  } else {
#if defined(__AVX2__)
    ValuePanel panel;
    Fill(rows, first, count, 0, &panel);
    for (int k = 0; k < count; k += kLanes) {
      __m256 columns[kLanes];
      for (int i = 0; i < kLanes; ++i) columns[i] = _mm256_load_ps(panel.at[k + i][0]);
      Transpose(columns, &values[0][k], kStretch);
    }
#else
    constexpr int kGroup = Decoder<F>::kGroup;
    for (int row = 0; row < kLanes; ++row) {
      for (int at = 0; at < count; at += F::kBlock) {
        F buffer;
        const F& block = rows.Block(row, (first + at) / F::kBlock, &buffer);
        for (int g = 0; g < F::kBlock / kGroup; ++g) DecodeValues(block, g, values[row] + at + g * kGroup);
      }
    }
#endif
  }
}

// dx[t] += dy[t] * w for T positions; dy holds kGradientRows values of each.
template <int T>
__attribute__((noinline)) void Accumulate(const Weights& w, int rows, int count, const float (*dy)[kGradientRows],
                                          float (*dx)[kStretch]) {
  constexpr int kVectors = 2;  // so that a value of dy serves twice
  constexpr int kStep = kVectors * kWidest;
  static_assert(kStretch % kStep == 0, "what is beyond count is there, and not used");
  for (int k = 0; k < count; k += kStep) {
    typename Floats<kWidest>::Vector partial[T][kVectors];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) partial[t][v] = typename Floats<kWidest>::Vector{};
    }
    for (int j = 0; j < rows; ++j) {
      typename Floats<kWidest>::Vector values[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) LoadVector(w.at[j] + k + v * kWidest, values[v]);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) partial[t][v] = partial[t][v] + values[v] * dy[t][j];
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) AddTo(dx[t] + k + v * kWidest, partial[t][v]);
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
      DecodeRows(Rows<F>(w, a.layout, a.n, a.k, row + eight), first, count, weights.at + eight);
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
