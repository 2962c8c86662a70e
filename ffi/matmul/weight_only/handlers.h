// The FFI handlers of weight-only products, written once for every platform: read and check the operands, then hand
// plain arguments to Platform, which launches. Operands are those of jaxquant/affine/weight_only.py.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/common/checks.h"
#include "ffi/common/handler.h"
#include "ffi/matmul/weight_only/kernels.h"

namespace jq {
namespace weight_only {

template <typename Platform>
class Handlers {
  using Context = typename Platform::Context;
  using Any = ffi::AnyBuffer;
  using Result = ffi::Result<ffi::AnyBuffer>;

 public:
  // (x [b or 1, m, k], w) -> out [b, m, n]
  static ffi::Error Matmul(Context context, Any x, Any data, Any scale, Any zero_point, Result out, int64_t bits,
                           int64_t is_signed, int64_t prepared) {
    const char* name = "weight_only_matmul";
    Arguments a{};
    JQ_RETURN_IF_ERROR(ReadRows(name, "x", x, *out, &a));
    a.codes.k = x.dimensions()[2];
    a.codes.n = out->dimensions()[2];
    JQ_RETURN_IF_ERROR(ReadMatrix(name, data, scale, zero_point, bits, is_signed, prepared, &a));
    if (a.x_batch != 1 && a.x_batch != a.batch) {
      return Refuse(name, "x", "1 or " + std::to_string(a.batch) + " along the first axis", Shape(x));
    }
    return out->element_count() == 0 ? ffi::Error::Success() : Platform::Matmul(context, a);
  }

  // (dy [b, m, n], w) -> dx [b, m, k]
  static ffi::Error Gradient(Context context, Any dy, Any data, Any scale, Any zero_point, Result dx, int64_t bits,
                             int64_t is_signed, int64_t prepared) {
    const char* name = "weight_only_gradient";
    Arguments a{};
    JQ_RETURN_IF_ERROR(ReadRows(name, "dy", dy, *dx, &a));
    a.codes.n = dy.dimensions()[2];
    a.codes.k = dx->dimensions()[2];
    JQ_RETURN_IF_ERROR(ReadMatrix(name, data, scale, zero_point, bits, is_signed, prepared, &a));
    if (a.x_batch != a.batch) {
      return Refuse(name, "dy", std::to_string(a.batch) + " along the first axis", Shape(dy));
    }
    return dx->element_count() == 0 ? ffi::Error::Success() : Platform::Gradient(context, a);
  }

 private:
  static ffi::Error CheckRank(const char* name, const char* operand, Any buffer, size_t rank) {
    return buffer.dimensions().size() == rank ? ffi::Error::Success()
                                              : Refuse(name, operand, std::to_string(rank) + " axes", Shape(buffer));
  }

  static ffi::Error ReadRows(const char* name, const char* operand, Any x, Any out, Arguments* a) {
    JQ_RETURN_IF_ERROR(CheckRank(name, operand, x, 3));
    JQ_RETURN_IF_ERROR(CheckRank(name, "result", out, 3));
    const ffi::DataType type = x.element_type();
    if (type != ffi::DataType::F32 && type != ffi::DataType::F16 && type != ffi::DataType::BF16) {
      return Refuse(name, operand, "float32, float16 or bfloat16",
                    "XLA element type " + std::to_string(static_cast<int>(type)));
    }
    JQ_RETURN_IF_ERROR(ReadDType(name, operand, x, &a->type));
    JQ_RETURN_IF_ERROR(CheckType(name, "result", out, type));
    a->x_batch = x.dimensions()[0];
    a->rows = x.dimensions()[1];
    a->batch = out.dimensions()[0];
    if (out.dimensions()[1] != a->rows) {
      return Refuse(name, "result", std::to_string(a->rows) + " rows", Shape(out));
    }
    a->x = x.untyped_data();
    a->out = out.untyped_data();
    return ffi::Error::Success();
  }

  static ffi::Error ReadMatrix(const char* name, Any data, Any scale, Any zero_point, int64_t bits, int64_t is_signed,
                               int64_t prepared, Arguments* a) {
    if (bits != 8 && bits != 4 && bits != 2) return Refuse(name, "bits", "8, 4 or 2", bits);
    Codes& codes = a->codes;
    codes.bits = static_cast<int>(bits);
    codes.is_signed = is_signed != 0;
    codes.prepared = prepared != 0;
    codes.data = static_cast<const uint8_t*>(data.untyped_data());
    const bool bytes = codes.prepared || bits < 8 || !codes.is_signed;
    JQ_RETURN_IF_ERROR(CheckType(name, "data", data, bytes ? ffi::DataType::U8 : ffi::DataType::S8));
    JQ_RETURN_IF_ERROR(CheckRank(name, "data", data, codes.prepared ? 4 : 3));
    const int64_t word = 4 * codes.Per(), panels = (codes.n + kPanel - 1) / kPanel;
    const auto d = data.dimensions();
    const bool fits = codes.prepared ? d[1] == panels && d[2] == (codes.k + word - 1) / word && d[3] == 4 * kPanel
                                     : d[1] == codes.k && d[2] == codes.RowBytes();
    if (!fits || d[0] != a->batch) {
      const std::string sizes = std::to_string(a->batch) + " matrices of " + std::to_string(codes.k) + " by " +
                                std::to_string(codes.n) + " codes of " + std::to_string(bits) + " bits";
      return Refuse(name, "data", sizes, Shape(data));
    }
    JQ_RETURN_IF_ERROR(CheckType(name, "scale", scale, ffi::DataType::F32));
    JQ_RETURN_IF_ERROR(CheckRank(name, "scale", scale, 3));
    const auto s = scale.dimensions();
    a->groups = s[1];
    a->scale_columns = s[2];
    const bool whole = codes.k == 0 || (s[1] > 0 && codes.k % s[1] == 0);
    if (s[0] != a->batch || !whole || (s[2] != 1 && s[2] != codes.n)) {
      const std::string expected = "[" + std::to_string(a->batch) + ", a divisor of " + std::to_string(codes.k) +
                                   ", 1 or " + std::to_string(codes.n) + "]";
      return Refuse(name, "scale", expected, Shape(scale));
    }
    a->scale = static_cast<const float*>(scale.untyped_data());
    JQ_RETURN_IF_ERROR(CheckType(name, "zero_point", zero_point, ffi::DataType::F32));
    if (zero_point.element_count() != 0) {
      JQ_RETURN_IF_ERROR(CheckShape(name, "zero_point", zero_point, scale));
      a->zero_point = static_cast<const float*>(zero_point.untyped_data());
    }
    return ffi::Error::Success();
  }
};

// f(target name, handler) for every target of a platform.
template <typename Platform, typename F>
void ForEachTarget(F&& f) {
  f("weight_only_matmul", JQ_HANDLER(Handlers<Platform>::Matmul, "bits", "is_signed", "prepared"));
  f("weight_only_gradient", JQ_HANDLER(Handlers<Platform>::Gradient, "bits", "is_signed", "prepared"));
}

}  // namespace weight_only
}  // namespace jq
