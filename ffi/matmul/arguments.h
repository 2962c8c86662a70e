// What a handler hands to the integer products, on every platform. Plain data.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"

namespace jq {
namespace matmul {

enum class ResultType : int { kInt32, kF32, kF16, kBF16 };

constexpr int64_t SizeOf(ResultType type) { return type == ResultType::kInt32 || type == ResultType::kF32 ? 4 : 2; }

// Codes of a matrix [k, n] with 8, 4 or 2 bits: row-major (below 8 bits packed along n), or prepared (layout.h).
struct Weights {
  const uint8_t* data;
  int bits;
  bool is_signed, prepared;
};

// out [batch, m, n] = a [batch, m, k] @ w [batch, k, n]; see math.h.
struct ProductArguments {
  int64_t batch, m, n, k;
  bool one_a, one_w;  // one matrix for the whole batch
  const uint8_t* a;   // int8 or uint8
  bool a_signed;
  Weights w;
  int64_t groups;  // along k
  // Null in products without scales, which give integers. Strides are 0 where a scale is shared.
  const float* a_scale;
  int64_t a_scale_of_matrix, a_scale_of_row;
  const float* a_zero_point;  // null, or as a_scale
  const float* w_scale;       // [batch, groups, n or 1]
  bool per_column;
  const float* w_zero_point;  // null, or as w_scale
  const float* bias;          // null, or [n]
  void* out;
  ResultType out_type;
};

// Between the two layouts of `matrices` matrices of k by n codes.
struct ArrangeArguments {
  int64_t matrices, k, n;
  int bits;
  const uint8_t* in;
  uint8_t* out;
};

}  // namespace matmul
}  // namespace jq
