// Checks of a handler's operands. Python refuses what it can at trace time; these refuse the rest, so that no call from
// anywhere (a serialised module, another language) reads or writes out of bounds.
// Messages: "operation: operand: expected ..., got ...".
#pragma once

#include <sstream>
#include <string>

#include "ffi/common/numeric.h"
#include "ffi/common/scale_view.h"
#include "xla/ffi/api/ffi.h"

namespace jq {

namespace ffi = xla::ffi;

#define JQ_RETURN_IF_ERROR(expression)         \
  do {                                         \
    ::xla::ffi::Error jq_error = (expression); \
    if (jq_error.failure()) return jq_error;   \
  } while (0)

inline std::string Shape(const int64_t* dims, size_t rank) {
  std::ostringstream out;
  out << "(";
  for (size_t i = 0; i < rank; ++i) out << (i ? ", " : "") << dims[i];
  out << (rank == 1 ? ",)" : ")");
  return out.str();
}
inline std::string Shape(ffi::AnyBuffer buffer) {
  return Shape(buffer.dimensions().begin(), buffer.dimensions().size());
}

template <typename Expected, typename Got>
ffi::Error Refuse(const char* operation, const char* operand, const Expected& expected, const Got& got) {
  std::ostringstream out;
  out << operation << ": " << operand << ": expected " << expected << ", got " << got << ".";
  return ffi::Error::InvalidArgument(out.str());
}

inline bool ToDType(ffi::DataType type, DType* out) {
  switch (type) {
    case ffi::DataType::F32: *out = DType::kF32; return true;
    case ffi::DataType::F64: *out = DType::kF64; return true;
    case ffi::DataType::F16: *out = DType::kF16; return true;
    case ffi::DataType::BF16: *out = DType::kBF16; return true;
    case ffi::DataType::S8: *out = DType::kI8; return true;
    case ffi::DataType::U8: *out = DType::kU8; return true;
    case ffi::DataType::S16: *out = DType::kI16; return true;
    case ffi::DataType::U16: *out = DType::kU16; return true;
    default: return false;
  }
}

inline ffi::Error ReadDType(const char* operation, const char* operand, ffi::AnyBuffer buffer, DType* out) {
  if (ToDType(buffer.element_type(), out)) return ffi::Error::Success();
  return Refuse(operation, operand, "a float32, float64, float16, bfloat16 or 8/16-bit integer array",
                "XLA element type " + std::to_string(static_cast<int>(buffer.element_type())));
}

inline ffi::Error CheckType(const char* operation, const char* operand, ffi::AnyBuffer buffer, ffi::DataType type) {
  if (buffer.element_type() == type) return ffi::Error::Success();
  return Refuse(operation, operand, "XLA element type " + std::to_string(static_cast<int>(type)),
                std::to_string(static_cast<int>(buffer.element_type())));
}

inline ffi::Error CheckShape(const char* operation, const char* operand, ffi::AnyBuffer buffer, ffi::AnyBuffer like) {
  const auto a = buffer.dimensions(), b = like.dimensions();
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = a[i] == b[i];
  return same ? ffi::Error::Success() : Refuse(operation, operand, "shape " + Shape(like), Shape(buffer));
}

inline ffi::Error CheckSize(const char* operation, const char* operand, ffi::AnyBuffer buffer, int64_t least) {
  const int64_t size = static_cast<int64_t>(buffer.element_count());
  return size >= least ? ffi::Error::Success()
                       : Refuse(operation, operand, "at least " + std::to_string(least) + " elements", size);
}

inline ffi::Error ReadScaleView(const char* operation, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                ffi::AnyBuffer zero_point, ScaleView* view) {
  const auto xs = x.dimensions(), ss = scale.dimensions(), zs = zero_point.dimensions();
  int axis = 0;
  switch (MakeScaleView(xs.begin(), static_cast<int>(xs.size()), ss.begin(), static_cast<int>(ss.size()), zs.begin(),
                        static_cast<int>(zs.size()), view, &axis)) {
    case ScaleViewError::kOk: return ffi::Error::Success();
    case ScaleViewError::kRank:
      return Refuse(operation, "scale and zero_point", "x's rank, for x of shape " + Shape(x),
                    Shape(scale) + " and " + Shape(zero_point));
    case ScaleViewError::kTooManyDims:
      return Refuse(operation, "scale", "a layout that folds into 16 dimensions over x of shape " + Shape(x),
                    Shape(scale));
    case ScaleViewError::kScale:
      return Refuse(operation, "scale",
                    "1, x's size or a divisor of it on axis " + std::to_string(axis) + ", for x of shape " + Shape(x),
                    Shape(scale));
    case ScaleViewError::kZeroPoint:
      return Refuse(operation, "zero_point",
                    "1 or the scale's size on axis " + std::to_string(axis) + ", for a scale of shape " + Shape(scale),
                    Shape(zero_point));
  }
  return ffi::Error::Internal("unreachable");
}

}  // namespace jq
