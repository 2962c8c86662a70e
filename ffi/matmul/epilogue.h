// From the sums of a tile to results, a panel's 16 columns at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/matmul/kernels.h"
#include "ffi/matmul/math.h"
#include "ffi/matmul/micro.h"

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

// A panel's columns, for every instruction set. Unsigned: sums wrap.
typedef uint32_t Integers __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Signed __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));

// Named for each type: as a template's argument it would lose its attributes.
inline const Integers& IntegersAt(const int32_t* from) { return *reinterpret_cast<const Integers*>(from); }
inline const Floats& FloatsAt(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline Floats& FloatsAt(float* from) { return *reinterpret_cast<Floats*>(from); }

using FloatTile = float[kTileRows][kTileColumns];

// A tile's place: rows from `row`, `columns` columns from `column` of a matrix, in `panels` panels.
struct Place {
  int64_t matrix, row, column;
  int rows, columns, panels;
};

// What the columns of a tile have, each padded to whole panels.
struct ColumnValues {
  const float* scale;
  const int32_t* zero;  // W of math.h
  const int32_t* sum;
};

struct Epilogue {
  const ProductArguments& a;
  const Plan& plan;
  const int32_t* row_sums;  // null where not needed

  // Scales and zero points of a group for `columns` columns from `column`; what pads them is 0.
  void Load(int64_t matrix, int64_t group, int64_t column, int64_t columns, int64_t padded, float* scale,
            int32_t* zero) const {
    const int64_t count = std::min(columns, a.n - column);
    const int64_t of_group = (a.one_w ? 0 : matrix) * a.groups + group;
    const int64_t first = a.per_column ? of_group * a.n + column : of_group, step = a.per_column ? 1 : 0;
    if (a.w_zero_point != nullptr) {
      const int32_t shift = WeightShift(a.w);
      for (int64_t c = 0; c < count; ++c) zero[c] = ZeroPoint(a.w_zero_point[first + c * step]) - shift;
      for (int64_t c = count; c < padded; ++c) zero[c] = 0;
    }
    if (a.w_scale == nullptr) return;
    if (a.per_column) {
      memcpy(scale, a.w_scale + first, static_cast<size_t>(count) * sizeof(float));
    } else {
      for (int64_t c = 0; c < count; ++c) scale[c] = a.w_scale[first];
    }
    for (int64_t c = count; c < padded; ++c) scale[c] = 0.0f;
  }

  // After a group's last sums: its integers go to out, or to t, and with the last group t goes to out.
  void Finish(const Place& at, int64_t group, const ColumnValues& columns, const Tile& tile, FloatTile& t) const {
    uint32_t a_zero[kTileRows], rest[kTileRows];
    for (int r = 0; r < at.rows; ++r) {
      a_zero[r] = static_cast<uint32_t>(AZero(at.matrix, at.row + r));
      rest[r] = 0;
      if (!plan.row_sums) continue;
      const int64_t row = (a.one_a ? 0 : at.matrix) * a.m + at.row + r;
      rest[r] =
          static_cast<uint32_t>(row_sums[row * a.groups + group]) - static_cast<uint32_t>(plan.group_size) * a_zero[r];
      // All columns alike, where w has no zero points of its own.
      if (a.w_zero_point == nullptr) rest[r] *= static_cast<uint32_t>(-WeightShift(a.w));
    }
    const auto run = [&](auto zeros, auto sums) {
      if (a.out_type == ResultType::kInt32) {
        ForEachPanel(at, [&](int r, int c) {
          Integers v;
          Correct<zeros.value, sums.value>(columns, c, tile[r] + c, a_zero[r], rest[r], v);
          StoreIntegers(at, r, c, v);
        });
      } else if (group == 0) {
        ForEachPanel(at, [&](int r, int c) {
          Integers v;
          Correct<zeros.value, sums.value>(columns, c, tile[r] + c, a_zero[r], rest[r], v);
          FloatsAt(t[r] + c) = __builtin_convertvector((Signed)v, Floats) * FloatsAt(columns.scale + c);
        });
      } else {
        ForEachPanel(at, [&](int r, int c) {
          Integers v;
          Correct<zeros.value, sums.value>(columns, c, tile[r] + c, a_zero[r], rest[r], v);
          const Floats product = __builtin_convertvector((Signed)v, Floats) * FloatsAt(columns.scale + c);
          FloatsAt(t[r] + c) = FloatsAt(t[r] + c) + product;
        });
      }
    };
    const bool zeros = a.w_zero_point != nullptr;
    if (zeros) {
      plan.column_sums ? run(std::true_type(), std::true_type()) : run(std::true_type(), std::false_type());
    } else {
      plan.column_sums ? run(std::false_type(), std::true_type()) : run(std::false_type(), std::false_type());
    }
    if (a.out_type != ResultType::kInt32 && group + 1 == a.groups) StoreFloats(at, t);
  }

 private:
  template <typename F>
  static void ForEachPanel(const Place& at, const F& f) {
    for (int c = 0; c < at.panels * kPanel; c += kPanel) {
      for (int r = 0; r < at.rows; ++r) f(r, c);
    }
  }

  template <bool kZeros, bool kColumnSums>
  static void Correct(const ColumnValues& columns, int c, const int32_t* sums, uint32_t a_zero, uint32_t rest,
                      Integers& v) {
    v = IntegersAt(sums);
    if (kZeros) {
      v -= IntegersAt(columns.zero + c) * rest;
    } else {
      v -= rest;
    }
    if (kColumnSums) v -= IntegersAt(columns.sum + c) * a_zero;
  }

  int32_t AZero(int64_t matrix, int64_t row) const {
    if (a.a_zero_point == nullptr) return -plan.a_shift;
    return ZeroPoint(a.a_zero_point[matrix * a.a_scale_of_matrix + row * a.a_scale_of_row]) - plan.a_shift;
  }

  void StoreIntegers(const Place& at, int r, int c, const Integers& v) const {
    int32_t* out = static_cast<int32_t*>(a.out) + (at.matrix * a.m + at.row + r) * a.n + at.column + c;
    if (at.columns - c >= kPanel) {
      memcpy(out, &v, sizeof(v));
    } else {
      memcpy(out, &v, static_cast<size_t>(at.columns - c) * sizeof(int32_t));
    }
  }

  void StoreFloats(const Place& at, FloatTile& t) const {
    for (int r = 0; r < at.rows; ++r) {
      const float scale = a.a_scale[at.matrix * a.a_scale_of_matrix + (at.row + r) * a.a_scale_of_row];
      for (int c = 0; c < at.panels * kPanel; ++c) t[r][c] = t[r][c] * scale;
      if (a.bias != nullptr) {
        for (int c = 0; c < at.columns; ++c) t[r][c] = t[r][c] + a.bias[at.column + c];
      }
      const int64_t to = (at.matrix * a.m + at.row + r) * a.n + at.column;
      switch (a.out_type) {
        case ResultType::kF16: Store(t[r], at.columns, static_cast<Float16*>(a.out) + to); break;
        case ResultType::kBF16: Store(t[r], at.columns, static_cast<BFloat16*>(a.out) + to); break;
        default: memcpy(static_cast<float*>(a.out) + to, t[r], static_cast<size_t>(at.columns) * sizeof(float));
      }
    }
  }

  template <typename T>
  static void Store(const float* t, int columns, T* out) {
    for (int c = 0; c < columns; ++c) out[c] = Convert<T>(t[c]);
  }
};

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
