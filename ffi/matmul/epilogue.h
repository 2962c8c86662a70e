// From the sums of a tile to results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/matmul/kernels.h"
#include "ffi/matmul/math.h"
#include "ffi/matmul/micro.h"

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

using FloatTile = float[kTileRows][kTileColumns];

// A tile's place: rows from `row`, `columns` columns from `column` of a matrix.
struct Place {
  int64_t matrix, row, column;
  int rows, columns;
  int width;  // columns with those that pad the last panel
};

struct Epilogue {
  const ProductArguments& a;
  const Plan& plan;
  const int32_t* row_sums;  // null where not needed

  // The scales and zero points of a group for a tile's columns.
  struct Columns {
    alignas(64) float scale[kTileColumns];
    alignas(64) int32_t zero[kTileColumns];
  };

  void Load(const Place& at, int64_t group, Columns& to) const {
    const int64_t of_group = (a.one_w ? 0 : at.matrix) * a.groups + group;
    const int64_t first = a.per_column ? of_group * a.n + at.column : of_group;
    const int32_t shift = WeightShift(a.w);
    for (int c = 0; c < at.width; ++c) to.zero[c] = -shift;
    if (a.w_zero_point != nullptr) {
      for (int c = 0; c < at.columns; ++c) {
        to.zero[c] = ZeroPoint(a.w_zero_point[first + (a.per_column ? c : 0)]) - shift;
      }
    }
    if (a.w_scale == nullptr) return;
    for (int c = 0; c < at.width; ++c) to.scale[c] = 0.0f;
    for (int c = 0; c < at.columns; ++c) to.scale[c] = a.w_scale[first + (a.per_column ? c : 0)];
  }

  int32_t AZero(const Place& at, int64_t row) const {
    if (a.a_zero_point == nullptr) return -plan.a_shift;
    return ZeroPoint(a.a_zero_point[at.matrix * a.a_scale_of_matrix + row * a.a_scale_of_row]) - plan.a_shift;
  }

  // The integers of a group.
  void Correct(const Place& at, int64_t group, const Columns& columns, const int32_t* column_sums, Tile& tile) const {
    for (int r = 0; r < at.rows; ++r) {
      const int64_t row = at.row + r;
      const int32_t a_zero = AZero(at, row);
      if (plan.row_sums) {
        const int32_t sum = row_sums[((a.one_a ? 0 : at.matrix) * a.m + row) * a.groups + group];
        const int32_t count = static_cast<int32_t>(static_cast<uint32_t>(plan.group_size));
        const int32_t rest = WrappingDifference(sum, WrappingProduct(count, a_zero));
        for (int c = 0; c < at.width; ++c) {
          tile[r][c] = WrappingDifference(tile[r][c], WrappingProduct(columns.zero[c], rest));
        }
      }
      if (plan.column_sums) {
        for (int c = 0; c < at.columns; ++c) {
          tile[r][c] = WrappingDifference(tile[r][c], WrappingProduct(a_zero, column_sums[c]));
        }
      }
    }
  }

  // t of the groups before, or nothing for the first.
  void Scale(const Place& at, const Columns& columns, bool first, const Tile& tile, FloatTile& t) const {
    for (int r = 0; r < at.rows; ++r) {
      if (first) {
        for (int c = 0; c < at.width; ++c) t[r][c] = static_cast<float>(tile[r][c]) * columns.scale[c];
      } else {
        for (int c = 0; c < at.width; ++c) t[r][c] = t[r][c] + static_cast<float>(tile[r][c]) * columns.scale[c];
      }
    }
  }

  void StoreIntegers(const Place& at, const Tile& tile) const {
    int32_t* out = static_cast<int32_t*>(a.out) + (at.matrix * a.m + at.row) * a.n + at.column;
    for (int r = 0; r < at.rows; ++r) memcpy(out + r * a.n, tile[r], static_cast<size_t>(at.columns) * 4);
  }

  void StoreFloats(const Place& at, FloatTile& t) const {
    for (int r = 0; r < at.rows; ++r) {
      const float scale = a.a_scale[at.matrix * a.a_scale_of_matrix + (at.row + r) * a.a_scale_of_row];
      for (int c = 0; c < at.width; ++c) t[r][c] = t[r][c] * scale;
      if (a.bias != nullptr) {
        for (int c = 0; c < at.columns; ++c) t[r][c] = t[r][c] + a.bias[at.column + c];
      }
      const int64_t to = (at.matrix * a.m + at.row + r) * a.n + at.column;
      switch (a.out_type) {
        case ResultType::kF16: Store(t[r], at.columns, static_cast<Float16*>(a.out) + to); break;
        case ResultType::kBF16: Store(t[r], at.columns, static_cast<BFloat16*>(a.out) + to); break;
        default: Store(t[r], at.columns, static_cast<float*>(a.out) + to);
      }
    }
  }

 private:
  template <typename T>
  static void Store(const float* t, int columns, T* out) {
    for (int c = 0; c < columns; ++c) out[c] = Convert<T>(t[c]);
  }
};

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
