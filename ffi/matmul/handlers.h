// The FFI handlers of integer products, written once for every platform: read and check the operands, then hand plain
// arguments to Platform, which launches. Python has checked what it can see; everything is checked again here.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/common/checks.h"
#include "ffi/common/handler.h"
#include "ffi/matmul/arguments.h"
#include "ffi/matmul/layout.h"

namespace jq {
namespace matmul {

// Checks that the weight-only products share.
inline ffi::Error CheckRank(const char* name, const char* operand, ffi::AnyBuffer buffer, size_t rank) {
  return buffer.dimensions().size() == rank ? ffi::Error::Success()
                                            : Refuse(name, operand, std::to_string(rank) + " axes", Shape(buffer));
}

inline ffi::Error CheckBits(const char* name, int64_t bits) {
  return bits == 8 || bits == 4 || bits == 2 ? ffi::Error::Success() : Refuse(name, "bits", "8, 4 or 2", bits);
}

// w [b, k, n] of 8 bits, [b, k, ceil(n * bits / 8)], or prepared [b, panels, words, 64]: for k by n codes.
inline ffi::Error ReadWeights(const char* name, ffi::AnyBuffer w, int64_t bits, int64_t is_signed, int64_t prepared,
                              int64_t k, int64_t n, Weights* out, const char* operand = "w") {
  JQ_RETURN_IF_ERROR(CheckBits(name, bits));
  const ffi::DataType type = w.element_type();
  if (type != ffi::DataType::U8 && (type != ffi::DataType::S8 || bits != 8 || prepared != 0)) {
    return Refuse(name, operand, "uint8 bytes (or int8 codes)",
                  "XLA element type " + std::to_string(static_cast<int>(type)));
  }
  JQ_RETURN_IF_ERROR(CheckRank(name, operand, w, prepared != 0 ? 4 : 3));
  const auto d = w.dimensions();
  const int width = static_cast<int>(bits);
  const bool fits = prepared != 0 ? d[1] == PanelCount(n) && d[2] == WordCount(k, width) && d[3] == kPanelBytes
                                  : d[1] == k && d[2] == PlainRowBytes(n, width);
  if (!fits) {
    return Refuse(name, operand,
                  std::string(prepared != 0 ? "prepared " : "") + "codes of " + std::to_string(bits) + " bits, " +
                      std::to_string(k) + " by " + std::to_string(n),
                  Shape(w));
  }
  *out = {static_cast<const uint8_t*>(w.untyped_data()), width, is_signed != 0, prepared != 0};
  return ffi::Error::Success();
}

// w_scale [b, groups, n or 1]
inline ffi::Error CheckGroups(const char* name, ffi::AnyBuffer w_scale, int64_t b, int64_t k, int64_t n) {
  JQ_RETURN_IF_ERROR(CheckType(name, "w_scale", w_scale, ffi::DataType::F32));
  JQ_RETURN_IF_ERROR(CheckRank(name, "w_scale", w_scale, 3));
  const auto d = w_scale.dimensions();
  if (d[0] == b && d[1] >= 1 && k % d[1] == 0 && (d[2] == n || d[2] == 1)) return ffi::Error::Success();
  return Refuse(name, "w_scale",
                "[" + std::to_string(b) + ", a divisor of " + std::to_string(k) + ", " + std::to_string(n) + " or 1]",
                Shape(w_scale));
}

// Of `like`'s shape, or nothing at all: null then.
inline ffi::Error ReadOptional(const char* name, const char* operand, ffi::AnyBuffer given, ffi::AnyBuffer like,
                               const float** out) {
  *out = nullptr;
  JQ_RETURN_IF_ERROR(CheckType(name, operand, given, ffi::DataType::F32));
  if (given.dimensions().size() == 1 && given.element_count() == 0) return ffi::Error::Success();
  JQ_RETURN_IF_ERROR(CheckShape(name, operand, given, like));
  *out = static_cast<const float*>(given.untyped_data());
  return ffi::Error::Success();
}

inline ffi::Error ReadBias(const char* name, ffi::AnyBuffer bias, int64_t n, const float** out) {
  *out = nullptr;
  JQ_RETURN_IF_ERROR(CheckType(name, "bias", bias, ffi::DataType::F32));
  JQ_RETURN_IF_ERROR(CheckRank(name, "bias", bias, 1));
  if (bias.element_count() == 0) return ffi::Error::Success();
  if (bias.dimensions()[0] != n) return Refuse(name, "bias", std::to_string(n) + " values or none", Shape(bias));
  *out = static_cast<const float*>(bias.untyped_data());
  return ffi::Error::Success();
}

template <typename Platform>
class Handlers {
  using Context = typename Platform::Context;
  using Any = ffi::AnyBuffer;
  using Result = ffi::Result<ffi::AnyBuffer>;

 public:
  // w [b, k, n] of 8 bits or [b, k, ceil(n * bits / 8)] -> [b, panels, words, 64]
  static ffi::Error Prepare(Context context, Any w, Result out, int64_t bits, int64_t n) {
    const char* name = "prepare";
    ArrangeArguments a{};
    JQ_RETURN_IF_ERROR(CheckRank(name, "w", w, 3));
    JQ_RETURN_IF_ERROR(CheckRank(name, "result", *out, 4));
    JQ_RETURN_IF_ERROR(CheckBits(name, bits));
    // A shard has fewer columns than the attribute says: as many as its bytes hold.
    a.n = std::min(n, w.dimensions()[2] * (8 / bits));
    Weights plain, prepared;
    JQ_RETURN_IF_ERROR(ReadWeights(name, w, bits, 0, 0, w.dimensions()[1], a.n, &plain));
    JQ_RETURN_IF_ERROR(ReadWeights(name, *out, bits, 0, 1, w.dimensions()[1], a.n, &prepared));
    if (out->dimensions()[0] != w.dimensions()[0]) return Refuse(name, "result", "w's first axis", Shape(*out));
    a.matrices = w.dimensions()[0];
    a.k = w.dimensions()[1];
    a.bits = static_cast<int>(bits);
    a.in = plain.data;
    a.out = static_cast<uint8_t*>(out->untyped_data());
    return a.matrices * a.k * a.n == 0 ? ffi::Error::Success() : Platform::Prepare(context, a);
  }

  // The reverse; the result's rows tell k.
  static ffi::Error Plain(Context context, Any w, Result out, int64_t bits, int64_t n) {
    const char* name = "plain";
    ArrangeArguments a{};
    JQ_RETURN_IF_ERROR(CheckRank(name, "w", w, 4));
    JQ_RETURN_IF_ERROR(CheckRank(name, "result", *out, 3));
    JQ_RETURN_IF_ERROR(CheckBits(name, bits));
    a.k = out->dimensions()[1];
    a.n = std::min(n, w.dimensions()[1] * kPanel);
    Weights plain, prepared;
    JQ_RETURN_IF_ERROR(ReadWeights(name, w, bits, 0, 1, a.k, a.n, &prepared));
    JQ_RETURN_IF_ERROR(ReadWeights(name, *out, bits, 0, 0, a.k, a.n, &plain));
    if (out->dimensions()[0] != w.dimensions()[0]) return Refuse(name, "result", "w's first axis", Shape(*out));
    a.matrices = w.dimensions()[0];
    a.bits = static_cast<int>(bits);
    a.in = prepared.data;
    a.out = static_cast<uint8_t*>(out->untyped_data());
    return a.matrices * a.k * a.n == 0 ? ffi::Error::Success() : Platform::Plain(context, a);
  }

  // (a [b or 1, m, k], b [b or 1, k, n]) -> [b, m, n] int32
  static ffi::Error IntMatmul(Context context, Any a, Any b, Result out) {
    const char* name = "int_matmul";
    ProductArguments p{};
    JQ_RETURN_IF_ERROR(CheckRank(name, "b", b, 3));
    JQ_RETURN_IF_ERROR(ReadRows(name, a, *out, &p));
    JQ_RETURN_IF_ERROR(CheckType(name, "result", *out, ffi::DataType::S32));
    const bool is_signed = b.element_type() == ffi::DataType::S8;
    JQ_RETURN_IF_ERROR(ReadWeights(name, b, 8, is_signed, 0, p.k, p.n, &p.w, "b"));
    p.one_w = b.dimensions()[0] == 1;
    if (!p.one_w && b.dimensions()[0] != p.batch) {
      return Refuse(name, "b", "1 or " + std::to_string(p.batch) + " matrices", Shape(b));
    }
    p.groups = 1;
    p.out_type = ResultType::kInt32;
    return p.batch * p.m * p.n == 0 ? ffi::Error::Success() : Platform::Product(context, name, p);
  }

  // (a [b or 1, m, k], a_scale and a_zero_point [b or 1, m or 1, 1], w [b, ...], w_scale and w_zero_point
  // [b, groups, n or 1], bias [n]) -> [b, m, n]; zero points and bias may be empty. Integers: a product of one group
  // before it is scaled.
  static ffi::Error ScaledMatmul(Context context, Any a, Any a_scale, Any a_zero_point, Any w, Any w_scale,
                                 Any w_zero_point, Any bias, Result out, int64_t bits, int64_t is_signed,
                                 int64_t prepared) {
    const char* name = "scaled_matmul";
    ProductArguments p{};
    JQ_RETURN_IF_ERROR(ReadRows(name, a, *out, &p));
    JQ_RETURN_IF_ERROR(ReadWeights(name, w, bits, is_signed, prepared, p.k, p.n, &p.w));
    if (w.dimensions()[0] != p.batch) return Refuse(name, "w", std::to_string(p.batch) + " matrices", Shape(w));
    JQ_RETURN_IF_ERROR(CheckGroups(name, w_scale, p.batch, p.k, p.n));
    p.groups = w_scale.dimensions()[1];
    p.per_column = w_scale.dimensions()[2] != 1;
    p.w_scale = static_cast<const float*>(w_scale.untyped_data());
    JQ_RETURN_IF_ERROR(ReadOptional(name, "w_zero_point", w_zero_point, w_scale, &p.w_zero_point));
    JQ_RETURN_IF_ERROR(CheckType(name, "a_scale", a_scale, ffi::DataType::F32));
    JQ_RETURN_IF_ERROR(CheckRank(name, "a_scale", a_scale, 3));
    const auto s = a_scale.dimensions();
    if ((s[0] != 1 && s[0] != p.batch) || (s[1] != 1 && s[1] != p.m) || s[2] != 1) {
      return Refuse(name, "a_scale", "[b or 1, m or 1, 1] for a of shape " + Shape(a), Shape(a_scale));
    }
    p.a_scale = static_cast<const float*>(a_scale.untyped_data());
    p.a_scale_of_matrix = s[0] == 1 ? 0 : s[1];
    p.a_scale_of_row = s[1] == 1 ? 0 : 1;
    JQ_RETURN_IF_ERROR(ReadOptional(name, "a_zero_point", a_zero_point, a_scale, &p.a_zero_point));
    JQ_RETURN_IF_ERROR(ReadBias(name, bias, p.n, &p.bias));
    switch (out->element_type()) {
      case ffi::DataType::F32: p.out_type = ResultType::kF32; break;
      case ffi::DataType::F16: p.out_type = ResultType::kF16; break;
      case ffi::DataType::BF16: p.out_type = ResultType::kBF16; break;
      case ffi::DataType::S32: p.out_type = ResultType::kInt32; break;
      default: return Refuse(name, "result", "float32, float16, bfloat16 or int32", "another type");
    }
    if (p.out_type == ResultType::kInt32 && p.groups != 1) {
      return Refuse(name, "w_scale", "one group for a product in integers", Shape(w_scale));
    }
    return p.batch * p.m * p.n == 0 ? ffi::Error::Success() : Platform::Product(context, name, p);
  }

 private:
  static ffi::Error ReadRows(const char* name, Any a, Any out, ProductArguments* p) {
    JQ_RETURN_IF_ERROR(CheckRank(name, "a", a, 3));
    JQ_RETURN_IF_ERROR(CheckRank(name, "result", out, 3));
    const ffi::DataType type = a.element_type();
    if (type != ffi::DataType::S8 && type != ffi::DataType::U8) {
      return Refuse(name, "a", "int8 or uint8", "XLA element type " + std::to_string(static_cast<int>(type)));
    }
    const auto x = a.dimensions(), y = out.dimensions();
    p->batch = y[0];
    p->m = y[1];
    p->n = y[2];
    p->k = x[2];
    p->one_a = x[0] == 1;
    p->a = static_cast<const uint8_t*>(a.untyped_data());
    p->a_signed = type == ffi::DataType::S8;
    p->out = out.untyped_data();
    if ((!p->one_a && x[0] != p->batch) || x[1] != p->m) {
      return Refuse(name, "a", "[b or 1, m, k] for a result of shape " + Shape(out), Shape(a));
    }
    return ffi::Error::Success();
  }
};

// f(target name, handler) for every target of a platform.
template <typename Platform, typename F>
void ForEachTarget(F&& f) {
  f("prepare", JQ_HANDLER(Handlers<Platform>::Prepare, "bits", "n"));
  f("plain", JQ_HANDLER(Handlers<Platform>::Plain, "bits", "n"));
  f("int_matmul", JQ_HANDLER(Handlers<Platform>::IntMatmul));
  f("scaled_matmul", JQ_HANDLER(Handlers<Platform>::ScaledMatmul, "bits", "is_signed", "prepared"));
}

}  // namespace matmul
}  // namespace jq
