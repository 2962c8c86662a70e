// The gradient in x: rows of dy [n] times the rows of w, in float32 with the values that dequantisation gives.
#pragma once

#include <cstdint>

#include "ffi/matmul/weight_only/gather.h"
#include "ffi/matmul/weight_only/kernels.h"

namespace jq {
namespace weight_only {
namespace JQ_ISA {
namespace {

constexpr int kTerms = 512;       // of a sum, in sixteen lanes
constexpr int kGradientRows = 4;  // of w at a time: a word of the prepared layout
constexpr int64_t kGradientColumns = 64;

typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));

struct alignas(64) Values {
  float at[kGradientRows][kTerms];
};

// Rows [row, row + count) and columns [first, first + terms) of w; zeros up to whole lanes.
template <int bits>
void Dequantize(const Arguments& a, const Codes& codes, int64_t b, int64_t row, int count, int64_t first, int terms,
                Values* values) {
  const int offset = codes.is_signed ? codes.Offset() : 0;
  for (int column = 0; column < terms; column += kPanel) {
    const int columns = terms - column < kPanel ? terms - column : kPanel;
    FourRows rows;
    Gather<bits>(codes, row, count, first + column, columns, &rows);
    for (int i = 0; i < count; ++i) {
      float* out = values->at[i] + column;
      const int64_t at = (b * a.groups + (row + i) / a.Group()) * a.scale_columns;
      const int64_t from = a.scale_columns == 1 ? at : at + first + column;
      float scales[kPanel], zero_points[kPanel] = {};
      const float* scale = a.scale + from;
      const float* zero_point = a.zero_point == nullptr ? zero_points : a.zero_point + from;
      if (a.scale_columns == 1 || columns < kPanel) {  // as many as there are codes
        for (int c = 0; c < kPanel; ++c) {
          const int own = a.scale_columns != 1 && c < columns ? c : 0;
          scales[c] = scale[own];
          if (a.zero_point != nullptr) zero_points[c] = zero_point[own];
        }
        scale = scales;
        zero_point = zero_points;
      }
      for (int c = 0; c < kPanel; ++c) {
        out[c] = (static_cast<float>(rows.at[i][c] - offset) - zero_point[c]) * scale[c];
      }
      for (int c = columns; c < kPanel; ++c) out[c] = 0.0f;
    }
  }
}

JQ_INLINE float SumOfLanes(const Sixteen& lanes) {
  alignas(64) float sums[kPanel];
  *reinterpret_cast<Sixteen*>(sums) = lanes;
  for (int l = 0; l < 8; ++l) sums[l] = sums[l] + sums[l + 8];
  for (int l = 0; l < 4; ++l) sums[l] = sums[l] + sums[l + 4];
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// dx[t * stride + r] += dy[t] . w[r]
template <int T, int R>
__attribute__((noinline)) void MultiplyTransposed(const float* const* dy, const float* const* w, int terms, float* dx,
                                                  int64_t stride) {
  Sixteen sums[T][R];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[t][r] = Sixteen{};
  }
  for (int at = 0; at < terms; at += kPanel) {
    Sixteen values[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) values[r] = *reinterpret_cast<const Sixteen*>(w[r] + at);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const Sixteen factor = *reinterpret_cast<const Sixteen*>(dy[t] + at);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[t][r] = sums[t][r] + values[r] * factor;
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int r = 0; r < R; ++r) dx[t * stride + r] = dx[t * stride + r] + SumOfLanes(sums[t][r]);
  }
}

#if defined(__AVX512F__)
constexpr int kTileT = 4, kTileR = 4;
#elif defined(__AVX2__)
constexpr int kTileT = 2, kTileR = 2;
#else
constexpr int kTileT = 1, kTileR = 2;
#endif

template <int R>
JQ_INLINE void MultiplyRows(const float* dy, int positions, const Values& values, int row, int terms, float* dx) {
  const float* w[R];
  for (int r = 0; r < R; ++r) w[r] = values.at[row + r];
  for (int t = 0; t < positions;) {
    const float* from[kTileT];
    const int here = positions - t < kTileT ? 1 : kTileT;
    for (int i = 0; i < here; ++i) from[i] = dy + (t + i) * kTerms;
    float* to = dx + t * kGradientColumns;
    if (here == kTileT) {
      MultiplyTransposed<kTileT, R>(from, w, terms, to, kGradientColumns);
    } else {
      MultiplyTransposed<1, R>(from, w, terms, to, kGradientColumns);
    }
    t += here;
  }
}

// dx [positions, count] of rows [row, row + count) of w, for `positions` rows of dy.
template <int bits, typename Real>
void GradientUnit(const Arguments& a, int64_t b, int64_t first_position, int positions, int64_t row, int count) {
  alignas(64) float dy[kUnitRows * kTerms];
  alignas(64) float dx[kUnitRows * kGradientColumns] = {};
  const Codes codes = a.Matrix(b);
  const int64_t n = codes.n;
  const Real* from = static_cast<const Real*>(a.x) + (b * a.rows + first_position) * n;
  Values values;
  for (int64_t first = 0; first < n; first += kTerms) {
    const int terms = static_cast<int>(n - first < kTerms ? n - first : kTerms);
    for (int t = 0; t < positions; ++t) {
      float* to = dy + t * kTerms;
      for (int j = 0; j < terms; ++j) to[j] = Convert<float>(from[t * n + first + j]);
      for (int j = terms; j % kPanel != 0; ++j) to[j] = 0.0f;
    }
    for (int at = 0; at < count; at += kGradientRows) {
      const int rows = count - at < kGradientRows ? count - at : kGradientRows;
      Dequantize<bits>(a, codes, b, row + at, rows, first, terms, &values);
      for (int r = 0; r < rows;) {
        float* to = dx + at + r;
        if (rows - r >= kTileR) {
          MultiplyRows<kTileR>(dy, positions, values, r, terms, to);
          r += kTileR;
        } else {
          MultiplyRows<1>(dy, positions, values, r, terms, to);
          ++r;
        }
      }
    }
  }
  Real* out = static_cast<Real*>(a.out) + (b * a.rows + first_position) * codes.k + row;
  for (int t = 0; t < positions; ++t) {
    for (int r = 0; r < count; ++r) out[t * codes.k + r] = Convert<Real>(dx[t * kGradientColumns + r]);
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace weight_only
}  // namespace jq
