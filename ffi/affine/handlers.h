// The FFI handlers of the affine operations, written once for every platform: read and check the operands, then hand
// plain arguments to Platform, which launches. A Platform has
//   Context, Bind()                                   what XLA passes first, and the binding that asks for it
//   Map(context, Op, MapArguments, gradient)          element-wise
//   PackedMap(context, Op, MapArguments, PackArguments)   quantise straight to packed codes
//   Gradient(context, Op, GradientArguments)          dx and sums
//   Pack / Unpack(context, PackArguments)
#pragma once

#include <cstdint>

#include "ffi/affine/arguments.h"
#include "ffi/affine/histogram/handlers.h"
#include "ffi/common/checks.h"
#include "ffi/common/handler.h"

namespace jq {

enum class Op { kFakeQuantize, kQuantize, kDequantize, kStochasticFakeQuantize, kStochasticQuantize };
constexpr Op kOps[] = {Op::kFakeQuantize, Op::kQuantize, Op::kDequantize, Op::kStochasticFakeQuantize,
                       Op::kStochasticQuantize};

constexpr const char* NameOf(Op op) {
  switch (op) {
    case Op::kFakeQuantize: return "fake_quantize";
    case Op::kQuantize: return "quantize";
    case Op::kStochasticFakeQuantize: return "stochastic_fake_quantize";
    case Op::kStochasticQuantize: return "stochastic_quantize";
    default: return "dequantize";
  }
}

template <typename Platform>
class Handlers {
  using Context = typename Platform::Context;
  using Any = ffi::AnyBuffer;
  using Result = ffi::Result<ffi::AnyBuffer>;
  using Sizes = ffi::Span<const int64_t>;

 public:
  // (x, scale, zero_point) -> out. packed_bits: 4 or 2 for packed codes, else 0.
  template <Op op>
  static ffi::Error Value(Context context, Any x, Any scale, Any zero_point, Result out, int64_t qmin, int64_t qmax,
                          int64_t packed_bits) {
    return ValueWith<op>(context, x, scale, zero_point, nullptr, out, qmin, qmax, packed_bits);
  }
  // With the key's words, x's rank each, and where x lies in its array (see PlaceView).
  template <Op op>
  static ffi::Error KeyedValue(Context context, Any x, Any scale, Any zero_point, Any key0, Any key1, Any origin,
                               Result out, int64_t qmin, int64_t qmax, int64_t packed_bits, Sizes index_shape) {
    PlaceView places;
    KeyArguments key{&places, nullptr, nullptr, nullptr};
    JQ_RETURN_IF_ERROR(ReadKey(NameOf(op), x, key0, key1, origin, index_shape, &places, &key));
    return ValueWith<op>(context, x, scale, zero_point, &key, out, qmin, qmax, packed_bits);
  }

  template <Op op>
  static ffi::Error ValueWith(Context context, Any x, Any scale, Any zero_point, const KeyArguments* key, Result out,
                              int64_t qmin, int64_t qmax, int64_t packed_bits) {
    constexpr bool kFake = op == Op::kFakeQuantize || op == Op::kStochasticFakeQuantize;
    const char* name = NameOf(op);
    ScaleView view;
    MapArguments a{};
    JQ_RETURN_IF_ERROR(ReadScaleView(name, x, scale, zero_point, &view));
    JQ_RETURN_IF_ERROR(ReadDType(name, op == Op::kDequantize ? "q" : "x", x, &a.x_type));
    JQ_RETURN_IF_ERROR(ReadDType(name, "result", *out, &a.out_type));
    a.wide = (op == Op::kDequantize ? a.out_type : a.x_type) == DType::kF64;
    JQ_RETURN_IF_ERROR(CheckParameters(name, scale, zero_point, a.wide));
    if (kFake && a.x_type != a.out_type) return Refuse(name, "result", "x's type", "another");
    a.view = &view;
    a.key = key;
    a.x = x.untyped_data();
    a.scale = scale.untyped_data();
    a.zero_point = zero_point.untyped_data();
    a.out = out->untyped_data();
    a.qmin = static_cast<double>(qmin);
    a.qmax = static_cast<double>(qmax);
    if (packed_bits == 0) {
      JQ_RETURN_IF_ERROR(CheckShape(name, "result", *out, x));
      if (view.size == 0) return ffi::Error::Success();
      return Platform::Map(context, op, a, false);
    }
    PackArguments p{};
    JQ_RETURN_IF_ERROR(ReadPacking(name, x.dimensions(), *out, packed_bits, &p));
    if (view.size == 0) return ffi::Error::Success();
    a.out_type = DType::kI8;
    p.out = a.out;
    return Platform::PackedMap(context, op, a, p);
  }

  // (dy, x, scale, zero_point) -> dx, dscale, dzero_point, scratch. want: 1 dx, 2 dscale, 4 dzero_point; the results
  // that are not wanted are empty.
  template <Op op>
  static ffi::Error Gradient(Context context, Any dy, Any x, Any scale, Any zero_point, Result dx, Result dscale,
                             Result dzero_point, Result scratch, int64_t qmin, int64_t qmax, int64_t want) {
    return GradientWith<op>(context, dy, x, scale, zero_point, nullptr, dx, dscale, dzero_point, scratch, qmin, qmax,
                            want);
  }
  template <Op op>
  static ffi::Error KeyedGradient(Context context, Any dy, Any x, Any scale, Any zero_point, Any key0, Any key1,
                                  Any origin, Result dx, Result dscale, Result dzero_point, Result scratch,
                                  int64_t qmin, int64_t qmax, int64_t want, Sizes index_shape) {
    PlaceView places;
    KeyArguments key{&places, nullptr, nullptr, nullptr};
    JQ_RETURN_IF_ERROR(ReadKey(NameOf(op), x, key0, key1, origin, index_shape, &places, &key));
    return GradientWith<op>(context, dy, x, scale, zero_point, &key, dx, dscale, dzero_point, scratch, qmin, qmax,
                            want);
  }

  template <Op op>
  static ffi::Error GradientWith(Context context, Any dy, Any x, Any scale, Any zero_point, const KeyArguments* key,
                                 Result dx, Result dscale, Result dzero_point, Result scratch, int64_t qmin,
                                 int64_t qmax, int64_t want) {
    const char* name = NameOf(op);
    ScaleView view;
    GradientArguments a{};
    JQ_RETURN_IF_ERROR(ReadScaleView(name, x, scale, zero_point, &view));
    JQ_RETURN_IF_ERROR(ReadDType(name, "x", x, &a.type));
    a.wide = a.type == DType::kF64;
    JQ_RETURN_IF_ERROR(CheckParameters(name, scale, zero_point, a.wide));
    JQ_RETURN_IF_ERROR(CheckShape(name, "dy", dy, x));
    JQ_RETURN_IF_ERROR(CheckType(name, "dy", dy, x.element_type()));
    JQ_RETURN_IF_ERROR(CheckType(name, "dx", *dx, x.element_type()));
    a.view = &view;
    a.key = key;
    a.dy = dy.untyped_data();
    a.x = x.untyped_data();
    a.scale = scale.untyped_data();
    a.zero_point = zero_point.untyped_data();
    a.qmin = static_cast<double>(qmin);
    a.qmax = static_cast<double>(qmax);
    if (want & 1) {
      JQ_RETURN_IF_ERROR(CheckShape(name, "dx", *dx, x));
      a.dx = dx->untyped_data();
    }
    const int64_t scratch_size = ScratchSize(view.ReducedSize(), view.scale_size);
    const ffi::DataType real = a.wide ? ffi::DataType::F64 : ffi::DataType::F32;
    for (const int64_t bit : {2, 4}) {
      if (!(want & bit)) continue;
      Any result = bit == 2 ? *dscale : *dzero_point;
      JQ_RETURN_IF_ERROR(CheckShape(name, bit == 2 ? "dscale" : "dzero_point", result, scale));
      JQ_RETURN_IF_ERROR(CheckType(name, bit == 2 ? "dscale" : "dzero_point", result, real));
      (bit == 2 ? a.dscale : a.dzero_point) = result.untyped_data();
    }
    if (view.scale_size == 0) return ffi::Error::Success();
    if (want & 6) {
      JQ_RETURN_IF_ERROR(CheckType(name, "scratch", *scratch, real));
      JQ_RETURN_IF_ERROR(CheckSize(name, "scratch", *scratch, 2 * scratch_size));
      a.scratch = scratch->untyped_data();
      return Platform::Gradient(context, op, a);
    }
    if (view.size == 0 || !(want & 1)) return ffi::Error::Success();
    MapArguments map{};
    map.view = &view;
    map.key = key;
    map.x_type = map.out_type = a.type;
    map.wide = a.wide;
    map.dy = a.dy;
    map.x = a.x;
    map.scale = a.scale;
    map.zero_point = a.zero_point;
    map.out = a.dx;
    map.qmin = a.qmin;
    map.qmax = a.qmax;
    return Platform::Map(context, op, map, true);
  }

  static ffi::Error Pack(Context context, Any codes, Result packed, int64_t bits) {
    PackArguments p{};
    JQ_RETURN_IF_ERROR(ReadPacking("pack", codes.dimensions(), *packed, bits, &p));
    JQ_RETURN_IF_ERROR(CheckBytes("pack", "codes", codes));
    p.in = codes.untyped_data();
    p.out = packed->untyped_data();
    return p.rows == 0 || p.row_size == 0 ? ffi::Error::Success() : Platform::Pack(context, p);
  }

  static ffi::Error Unpack(Context context, Any packed, Result codes, int64_t bits) {
    PackArguments p{};
    JQ_RETURN_IF_ERROR(ReadPacking("unpack", codes->dimensions(), packed, bits, &p));
    JQ_RETURN_IF_ERROR(CheckBytes("unpack", "codes", *codes));
    p.is_signed = codes->element_type() == ffi::DataType::S8;
    p.in = packed.untyped_data();
    p.out = codes->untyped_data();
    return p.rows == 0 || p.row_size == 0 ? ffi::Error::Success() : Platform::Unpack(context, p);
  }

  static ffi::Error CheckParameters(const char* name, Any scale, Any zero_point, bool wide) {
    const ffi::DataType real = wide ? ffi::DataType::F64 : ffi::DataType::F32;
    JQ_RETURN_IF_ERROR(CheckType(name, "scale", scale, real));
    return CheckType(name, "zero_point", zero_point, real);
  }

  static ffi::Error ReadKey(const char* name, Any x, Any key0, Any key1, Any origin, Sizes index_shape,
                            PlaceView* places, KeyArguments* key) {
    JQ_RETURN_IF_ERROR(CheckType(name, "key", key0, ffi::DataType::U32));
    JQ_RETURN_IF_ERROR(CheckType(name, "key", key1, ffi::DataType::U32));
    JQ_RETURN_IF_ERROR(CheckShape(name, "key", key1, key0));
    JQ_RETURN_IF_ERROR(CheckType(name, "origin", origin, ffi::DataType::U32));
    JQ_RETURN_IF_ERROR(CheckSize(name, "origin", origin, 2));
    const auto xs = x.dimensions(), ks = key0.dimensions();
    int axis = 0;
    switch (MakePlaceView(xs.begin(), static_cast<int>(xs.size()), index_shape.begin(),
                          static_cast<int>(index_shape.size()), ks.begin(), static_cast<int>(ks.size()), places,
                          &axis)) {
      case PlaceViewError::kOk: break;
      case PlaceViewError::kRank:
        return Refuse(name, "key", "x's rank, for x of shape " + Shape(x),
                      Shape(key0) + " and " + std::to_string(index_shape.size()) + " indexed axes");
      case PlaceViewError::kTooManyDims:
        return Refuse(name, "key", "a layout that folds into 16 dimensions over x of shape " + Shape(x), Shape(key0));
      case PlaceViewError::kSize:
        return Refuse(name, "index_shape", "x's size or more on axis " + std::to_string(axis) + ", and fewer than 2^63",
                      Shape(index_shape.begin(), index_shape.size()));
      case PlaceViewError::kKey:
        return Refuse(
            name, "key",
            "1, or x's size before the indexed axes, on axis " + std::to_string(axis) + ", for x of shape " + Shape(x),
            Shape(key0));
    }
    key->key0 = static_cast<const uint32_t*>(key0.untyped_data());
    key->key1 = static_cast<const uint32_t*>(key1.untyped_data());
    key->origin = static_cast<const uint32_t*>(origin.untyped_data());
    return ffi::Error::Success();
  }

  // The packed array has the codes' shape but for the last axis.
  static ffi::Error ReadPacking(const char* name, Any::Dimensions codes, Any packed, int64_t bits, PackArguments* p) {
    if (bits != 4 && bits != 2) return Refuse(name, "bits", "4 or 2", bits);
    JQ_RETURN_IF_ERROR(CheckType(name, "packed", packed, ffi::DataType::U8));
    const auto got = packed.dimensions();
    bool same = codes.size() >= 1 && got.size() == codes.size();
    p->rows = 1;
    for (size_t d = 0; same && d + 1 < codes.size(); ++d) {
      same = got[d] == codes[d];
      p->rows *= codes[d];
    }
    if (same) {
      p->row_size = codes.back();
      same = got.back() == (p->row_size * bits + 7) / 8;
    }
    if (!same) {
      return Refuse(name, "packed",
                    std::to_string(8 / bits) + " codes to a byte along the last axis of codes of shape " +
                        Shape(codes.begin(), codes.size()),
                    Shape(packed));
    }
    p->bits = static_cast<int>(bits);
    // Whole bytes only: the array is then one long row.
    if (p->row_size * bits % 8 == 0) {
      p->row_size *= p->rows;
      p->rows = p->row_size == 0 ? 0 : 1;
    }
    return ffi::Error::Success();
  }

 private:
  static ffi::Error CheckBytes(const char* name, const char* operand, Any buffer) {
    const bool bytes = buffer.element_type() == ffi::DataType::S8 || buffer.element_type() == ffi::DataType::U8;
    return bytes ? ffi::Error::Success()
                 : Refuse(name, operand, "int8 or uint8", static_cast<int>(buffer.element_type()));
  }
};

// f(name, handler) for every target: the one list of operations on the C++ side.
template <typename Platform, typename F>
void ForEachTarget(const F& f) {
  f("fake_quantize", JQ_HANDLER(Handlers<Platform>::template Value<Op::kFakeQuantize>, "qmin", "qmax", "packed_bits"));
  f("quantize", JQ_HANDLER(Handlers<Platform>::template Value<Op::kQuantize>, "qmin", "qmax", "packed_bits"));
  f("dequantize", JQ_HANDLER(Handlers<Platform>::template Value<Op::kDequantize>, "qmin", "qmax", "packed_bits"));
  f("fake_quantize_gradient",
    JQ_HANDLER(Handlers<Platform>::template Gradient<Op::kFakeQuantize>, "qmin", "qmax", "want"));
  f("quantize_gradient", JQ_HANDLER(Handlers<Platform>::template Gradient<Op::kQuantize>, "qmin", "qmax", "want"));
  f("dequantize_gradient", JQ_HANDLER(Handlers<Platform>::template Gradient<Op::kDequantize>, "qmin", "qmax", "want"));
  f("stochastic_fake_quantize", JQ_HANDLER(Handlers<Platform>::template KeyedValue<Op::kStochasticFakeQuantize>, "qmin",
                                           "qmax", "packed_bits", "index_shape"));
  f("stochastic_quantize", JQ_HANDLER(Handlers<Platform>::template KeyedValue<Op::kStochasticQuantize>, "qmin", "qmax",
                                      "packed_bits", "index_shape"));
  f("stochastic_fake_quantize_gradient",
    JQ_HANDLER(Handlers<Platform>::template KeyedGradient<Op::kStochasticFakeQuantize>, "qmin", "qmax", "want",
               "index_shape"));
  f("stochastic_quantize_gradient", JQ_HANDLER(Handlers<Platform>::template KeyedGradient<Op::kStochasticQuantize>,
                                               "qmin", "qmax", "want", "index_shape"));
  f("pack", JQ_HANDLER(Handlers<Platform>::Pack, "bits"));
  f("unpack", JQ_HANDLER(Handlers<Platform>::Unpack, "bits"));
  f("histogram", JQ_HANDLER(HistogramHandlers<Platform>::Bins, "bins", "magnitude"));
  f("digit_histogram", JQ_HANDLER(HistogramHandlers<Platform>::Digits, "shift", "width", "magnitude"));
}

}  // namespace jq
