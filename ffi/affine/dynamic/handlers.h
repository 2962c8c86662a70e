// The FFI handlers of dynamic quantisation, for every platform. A Platform has, besides those of the affine operations,
//   Range(context, RangeArguments)
//   Dynamic(context, Op, DynamicArguments)
#pragma once

#include "ffi/affine/dynamic/arguments.h"
#include "ffi/affine/handlers.h"

namespace jq {

constexpr const char* DynamicNameOf(Op op) {
  return op == Op::kFakeQuantize ? "dynamic_fake_quantize" : "dynamic_quantize";
}

template <typename Platform>
class DynamicHandlers {
  using Context = typename Platform::Context;
  using Any = ffi::AnyBuffer;
  using Result = ffi::Result<ffi::AnyBuffer>;

 public:
  // x -> low (empty where absolute), high. Their shape tells the blocks.
  static ffi::Error Range(Context context, Any x, Result low, Result high, int64_t absolute) {
    const char* name = "range";
    ScaleView view;
    RangeArguments a{};
    JQ_RETURN_IF_ERROR(ReadScaleView(name, x, *high, *high, &view));
    JQ_RETURN_IF_ERROR(ReadFloat(name, x, &a.type));
    JQ_RETURN_IF_ERROR(CheckType(name, "high", *high, ffi::DataType::F32));
    a.absolute = absolute != 0;
    if (!a.absolute) {
      JQ_RETURN_IF_ERROR(CheckType(name, "low", *low, ffi::DataType::F32));
      JQ_RETURN_IF_ERROR(CheckShape(name, "low", *low, *high));
      a.low = static_cast<float*>(low->untyped_data());
    }
    a.view = &view;
    a.x = x.untyped_data();
    a.high = static_cast<float*>(high->untyped_data());
    return view.scale_size == 0 ? ffi::Error::Success() : Platform::Range(context, a);
  }

  // x -> out, scale, zero_point: scale and zero point in the arithmetic type, of a shape that tells the blocks.
  template <Op op>
  static ffi::Error Dynamic(Context context, Any x, Result out, Result scale, Result zero_point, int64_t qmin,
                            int64_t qmax, int64_t symmetric, int64_t packed_bits) {
    const char* name = DynamicNameOf(op);
    ScaleView view;
    DynamicArguments d{};
    MapArguments& a = d.map;
    JQ_RETURN_IF_ERROR(CheckShape(name, "zero_point", *zero_point, *scale));
    JQ_RETURN_IF_ERROR(ReadScaleView(name, x, *scale, *zero_point, &view));
    JQ_RETURN_IF_ERROR(ReadFloat(name, x, &a.x_type));
    JQ_RETURN_IF_ERROR(ReadDType(name, "result", *out, &a.out_type));
    a.wide = a.x_type == DType::kF64;
    JQ_RETURN_IF_ERROR(Handlers<Platform>::CheckParameters(name, *scale, *zero_point, a.wide));
    if (op == Op::kFakeQuantize && a.x_type != a.out_type) return Refuse(name, "result", "x's type", "another");
    if (qmin >= qmax) return Refuse(name, "qmax", "more than qmin", qmax);
    if (symmetric != 0 && qmax <= 0) return Refuse(name, "qmax", "a positive code where symmetric", qmax);
    a.view = &view;
    a.x = x.untyped_data();
    a.scale = d.scale = scale->untyped_data();
    a.zero_point = d.zero_point = zero_point->untyped_data();
    a.out = out->untyped_data();
    a.qmin = static_cast<double>(qmin);
    a.qmax = static_cast<double>(qmax);
    d.symmetric = symmetric != 0;
    PackArguments p{};
    if (packed_bits == 0) {
      JQ_RETURN_IF_ERROR(CheckShape(name, "result", *out, x));
    } else {
      JQ_RETURN_IF_ERROR(Handlers<Platform>::ReadPacking(name, x.dimensions(), *out, packed_bits, &p));
      a.out_type = DType::kI8;
      p.out = a.out;
      d.packing = &p;
    }
    return view.scale_size == 0 ? ffi::Error::Success() : Platform::Dynamic(context, op, d);
  }

 private:
  static ffi::Error ReadFloat(const char* name, Any x, DType* type) {
    JQ_RETURN_IF_ERROR(ReadDType(name, "x", x, type));
    const bool is_float = *type == DType::kF32 || *type == DType::kF64 || *type == DType::kF16 || *type == DType::kBF16;
    return is_float ? ffi::Error::Success() : Refuse(name, "x", "a floating type", static_cast<int>(x.element_type()));
  }
};

template <typename Platform, typename F>
void ForEachDynamicTarget(const F& f) {
  f("range", JQ_HANDLER(DynamicHandlers<Platform>::Range, "absolute"));
  f("dynamic_quantize",
    JQ_HANDLER(DynamicHandlers<Platform>::template Dynamic<Op::kQuantize>, "qmin", "qmax", "symmetric", "packed_bits"));
  f("dynamic_fake_quantize", JQ_HANDLER(DynamicHandlers<Platform>::template Dynamic<Op::kFakeQuantize>, "qmin", "qmax",
                                        "symmetric", "packed_bits"));
}

}  // namespace jq
