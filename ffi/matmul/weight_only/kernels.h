// Products of floating-point rows with matrices of integer codes, once per instruction set; all give the same bits.
//
//   product:   out[b][i] = x[b][i] @ w[b]       sums over k: exact within spans (math.h), spans of a group in ascending
//                                               order in float32, then groups in ascending order
//   gradient:  out[b][i] = x[b][i] @ w[b].T     sums over n: sixteen lanes of float32 in stretches of 512, a tree over
//                                               the lanes, stretches in ascending order
//
// A handler makes a Plan, then runs prepare() over [0, x_batch * rows) and, when all of it is done, product() over
// [0, units), in pieces and from any threads. gradient() needs no prepare().
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"
#include "ffi/matmul/weight_only/math.h"

namespace jq {
namespace weight_only {

struct Arguments {
  Codes codes;  // of the first of `batch` matrices
  int64_t batch, groups;
  const float* scale;       // [batch, groups, scale_columns]
  const float* zero_point;  // the same, or null
  int64_t scale_columns;    // n or 1
  const void* x;            // [x_batch, rows, k], or n in a gradient
  DType type;               // of x and out: kF32, kF16 or kBF16
  int64_t x_batch, rows;
  void* out;

  JQ_HOST_DEVICE Codes Matrix(int64_t b) const {
    Codes own = codes;
    own.data += b * codes.Bytes();
    return own;
  }
  JQ_HOST_DEVICE int64_t Group() const { return groups == 0 ? 0 : codes.k / groups; }
};

// How the work is cut into units. Results do not depend on it.
struct Plan {
  int64_t rows_per_unit, columns_per_unit, row_units, column_units, units;
};
Plan PlanProduct(const Arguments& arguments, int64_t threads);
Plan PlanGradient(const Arguments& arguments, int64_t threads);

constexpr int64_t kSpanBytes = 256;  // what prepare() writes for a span
constexpr int64_t kUnitRows = 64;

JQ_HOST_DEVICE int64_t SpansOfGroup(const Arguments& a) { return (a.Group() + kSpan - 1) / kSpan; }
JQ_HOST_DEVICE int64_t ScratchBytes(const Arguments& a) {
  return a.x_batch * a.rows * a.groups * SpansOfGroup(a) * kSpanBytes;
}

struct Kernels {
  void (*prepare)(const Arguments& arguments, void* scratch, int64_t begin, int64_t end);
  void (*product)(const Arguments& arguments, const Plan& plan, const void* scratch, int64_t begin, int64_t end);
  void (*gradient)(const Arguments& arguments, const Plan& plan, int64_t begin, int64_t end);
};

#if defined(JQ_ISA)
namespace JQ_ISA {
extern const Kernels weight_only_kernels;
}
#endif

}  // namespace weight_only
}  // namespace jq
