// The arithmetic of integer products, once for host and device.
//
//   acc[g] = the sum over group g of (a - za) * (w - zw), in int32, which wraps
//   t = float(acc[0]) * w_scale[0], then t + float(acc[g]) * w_scale[g] for g = 1, 2, ...
//   y = t * a_scale; y + bias
//
// Kernels multiply shifted codes, a = x + a_shift and w = u + w_shift, and take back what that adds: with
// A = za - a_shift and W = zw - w_shift
//
//   acc = sum(x * u) - A * sum(u) - W * (sum(x) - count * A)
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"
#include "ffi/matmul/arguments.h"

namespace jq {
namespace matmul {

// A zero point as an integer. Far beyond every code type's range it is cut, so that no conversion depends on the
// platform; NaN counts as 0.
JQ_HOST_DEVICE int32_t ZeroPoint(float value) {
  value = value == value ? value : 0.0f;
  value = value < -65536.0f ? -65536.0f : value;
  value = value > 65536.0f ? 65536.0f : value;
  return static_cast<int32_t>(RoundHalfToEven(value));
}

// Signed codes are stored as unsigned ones with the top bit flipped: u = code - shift.
JQ_HOST_DEVICE int32_t WeightShift(const Weights& w) { return w.is_signed ? -(1 << (w.bits - 1)) : 0; }
// What flips the top bit of every code of a byte.
JQ_HOST_DEVICE unsigned WeightFlip(const Weights& w) {
  if (!w.is_signed) return 0;
  return w.bits == 8 ? 0x80u : w.bits == 4 ? 0x88u : 0xaau;
}

JQ_HOST_DEVICE int32_t WrappingProduct(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
}
JQ_HOST_DEVICE int32_t WrappingSum(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
JQ_HOST_DEVICE int32_t WrappingDifference(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

// row_rest = sum(x) - count * A
JQ_HOST_DEVICE int32_t Corrected(int32_t sum, int32_t a_zero, int32_t column_sum, int32_t w_zero, int32_t row_rest) {
  return WrappingDifference(WrappingDifference(sum, WrappingProduct(a_zero, column_sum)),
                            WrappingProduct(w_zero, row_rest));
}

}  // namespace matmul
}  // namespace jq
