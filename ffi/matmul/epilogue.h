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

// A block of sums: rows from `row`, `columns` columns from `column` of a matrix, in `panels` panels.
struct Place {
  int64_t matrix, row, column;
  int rows, columns, panels;
};

// Of a block: its integers and, in products of several groups, what the groups before came to.
struct Block {
  const int32_t* sums;
  float* totals;
  int stride;  // of rows, in elements
};

// What the rows of a block have in a group, where sums need it.
struct RowValues {
  const uint32_t* zero;  // A of math.h
  const uint32_t* rest;  // row_rest; where all columns have one W, multiplied with it
};

// What its columns have, each padded to whole panels.
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
      for (int64_t c = 0; c < count; ++c) zero[c] = ZeroPoint(a.w_zero_point[first + c * step]) - plan.w_shift;
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

  void LoadRowZeros(int64_t matrix, int64_t row, int rows, uint32_t* zero) const {
    for (int r = 0; r < rows; ++r) zero[r] = static_cast<uint32_t>(AZero(matrix, row + r));
  }
  void LoadRowRests(int64_t matrix, int64_t row, int rows, int64_t group, const uint32_t* zero, uint32_t* rest) const {
    const int32_t* sums = row_sums + ((a.one_a ? 0 : matrix) * a.m + row) * a.groups + group;
    for (int r = 0; r < rows; ++r) {
      rest[r] = static_cast<uint32_t>(sums[r * a.groups]) - static_cast<uint32_t>(plan.group_size) * zero[r];
      if (a.w_zero_point == nullptr) rest[r] *= static_cast<uint32_t>(-plan.w_shift);
    }
  }

  // After a group's last sums: its integers go to out, or to totals, and with the last group totals go to out.
  void Finish(const Place& at, int64_t group, const RowValues& rows, const ColumnValues& columns,
              const Block& block) const {
    if (a.w_zero_point != nullptr) {
      plan.column_sums ? Finish<kZeros, true>(at, group, rows, columns, block)
                       : Finish<kZeros, false>(at, group, rows, columns, block);
    } else if (plan.row_sums) {
      plan.column_sums ? Finish<kRests, true>(at, group, rows, columns, block)
                       : Finish<kRests, false>(at, group, rows, columns, block);
    } else {
      plan.column_sums ? Finish<kNothing, true>(at, group, rows, columns, block)
                       : Finish<kNothing, false>(at, group, rows, columns, block);
    }
  }

 private:
  // What sums of rows are multiplied with.
  enum Rests { kNothing, kRests, kZeros };

  template <Rests rests, bool column_sums>
  void Finish(const Place& at, int64_t group, const RowValues& rows, const ColumnValues& columns,
              const Block& block) const {
    const auto correct = [&](int r, int c, Integers& v) {
      v = IntegersAt(block.sums + r * block.stride + c);
      if (rests == kZeros) v -= IntegersAt(columns.zero + c) * rows.rest[r];
      if (rests == kRests) v -= rows.rest[r];
      if (column_sums) v -= IntegersAt(columns.sum + c) * rows.zero[r];
    };
    if (a.out_type == ResultType::kInt32) {
      int32_t* const out = static_cast<int32_t*>(a.out) + (at.matrix * a.m + at.row) * a.n + at.column;
      for (int r = 0; r < at.rows; ++r) {
        for (int c = 0; c < at.panels * kPanel; c += kPanel) {
          Integers v;
          correct(r, c, v);
          StorePanel(v, at.columns - c, out + r * a.n + c);
        }
      }
      return;
    }
    const auto run = [&](auto first, auto last) {
      for (int r = 0; r < at.rows; ++r) {
        const float a_scale = last.value ? AScale(at, r) : 0.0f;
        for (int c = 0; c < at.panels * kPanel; c += kPanel) {
          Integers v;
          correct(r, c, v);
          Floats t = __builtin_convertvector((Signed)v, Floats) * FloatsAt(columns.scale + c);
          float* const total = block.totals + r * block.stride + c;
          if (!first.value) t = FloatsAt(total) + t;
          if (last.value) {
            t = t * a_scale;
            StoreResult(at, r, c, t);
          } else {
            FloatsAt(total) = t;
          }
        }
      }
    };
    const bool last = group + 1 == a.groups;
    if (group == 0) {
      last ? run(std::true_type(), std::true_type()) : run(std::true_type(), std::false_type());
    } else {
      last ? run(std::false_type(), std::true_type()) : run(std::false_type(), std::false_type());
    }
  }

  int32_t AZero(int64_t matrix, int64_t row) const {
    if (a.a_zero_point == nullptr) return -plan.a_shift;
    return ZeroPoint(a.a_zero_point[matrix * a.a_scale_of_matrix + row * a.a_scale_of_row]) - plan.a_shift;
  }

  float AScale(const Place& at, int r) const {
    return a.a_scale[at.matrix * a.a_scale_of_matrix + (at.row + r) * a.a_scale_of_row];
  }

  // Up to a panel's columns.
  template <typename V>
  static void StorePanel(const V& v, int columns, void* out) {
    if (columns >= kPanel) {
      memcpy(out, &v, sizeof(v));
    } else {
      memcpy(out, &v, static_cast<size_t>(columns) * sizeof(v) / kPanel);
    }
  }

  void StoreResult(const Place& at, int r, int c, Floats& t) const {
    const int columns = std::min(at.columns - c, kPanel);
    if (a.bias != nullptr) {
      Floats bias{};
      memcpy(&bias, a.bias + at.column + c, static_cast<size_t>(columns) * sizeof(float));
      t = t + bias;
    }
    const int64_t to = (at.matrix * a.m + at.row + r) * a.n + at.column + c;
    switch (a.out_type) {
      case ResultType::kF16: return Store(t, columns, static_cast<Float16*>(a.out) + to);
      case ResultType::kBF16: return Store(t, columns, static_cast<BFloat16*>(a.out) + to);
      default: StorePanel(t, columns, static_cast<float*>(a.out) + to);
    }
  }

  template <typename T>
  static void Store(const Floats& t, int columns, T* out) {
    float values[kPanel];
    memcpy(values, &t, sizeof(values));
    if (columns == kPanel) {
      for (int c = 0; c < kPanel; ++c) out[c] = Convert<T>(values[c]);
    } else {
      for (int c = 0; c < columns; ++c) out[c] = Convert<T>(values[c]);
    }
  }
};

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
