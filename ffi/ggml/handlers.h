// The FFI handlers of the block formats, written once for every platform: read and check the operands, then hand plain
// arguments to Platform, which launches.
//
// Rows of values and rows of blocks are last axes; formats and layouts come as attributes. Python has checked what it
// can see; everything is checked again here. Products have a second result, memory for their kernels alone.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/common/checks.h"
#include "ffi/common/handler.h"
#include "ffi/ggml/arguments.h"
#include "ffi/ggml/formats.h"
#include "ffi/ggml/linear/layout.h"

namespace jq {
namespace ggml {

inline ffi::Error FindFormat(const char* name, int64_t type_id, FormatSize* size) {
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: *size = {F::kBlock, static_cast<int64_t>(sizeof(F))}; return ffi::Error::Success();
    JQ_GGML_FORMATS(JQ_CASE)
#undef JQ_CASE
    default: return Refuse(name, "format", "the type id of a GGML format", type_id);
  }
}

template <typename Platform>
class Handlers {
  using Context = typename Platform::Context;
  using Any = ffi::AnyBuffer;
  using Result = ffi::Result<ffi::AnyBuffer>;

 public:
  // (x [..., k] float32, imatrix [..., k] with axes of 1 where it is shared, or empty) -> data [..., row_bytes]
  static ffi::Error Quantize(Context context, Any x, Any imatrix, Result data, int64_t format) {
    const char* name = "ggml_quantize";
    QuantizeArguments a{};
    JQ_RETURN_IF_ERROR(FindFormat(name, format, &a.size));
    JQ_RETURN_IF_ERROR(CheckType(name, "x", x, ffi::DataType::F32));
    JQ_RETURN_IF_ERROR(CheckType(name, "imatrix", imatrix, ffi::DataType::F32));
    JQ_RETURN_IF_ERROR(ReadRows(name, x, *data, a.size, &a.rows, &a.k));
    a.type_id = static_cast<int>(format);
    a.x = static_cast<const float*>(x.untyped_data());
    a.data = static_cast<uint8_t*>(data->untyped_data());
    if (imatrix.element_count() != 0) {
      if (imatrix.dimensions().size() != x.dimensions().size()) {
        return Refuse(name, "imatrix", "x's rank, or no elements", Shape(imatrix));
      }
      JQ_RETURN_IF_ERROR(ReadImatrix(name, x, imatrix, &a));
    }
    return a.rows == 0 || a.k == 0 ? ffi::Error::Success() : Platform::Quantize(context, a);
  }

  // data [..., row_bytes] -> out [..., k]; prepared: [..., eights, 8 row_bytes] -> [..., n, k]
  static ffi::Error Dequantize(Context context, Any data, Result out, int64_t format, int64_t prepared) {
    const char* name = "ggml_dequantize";
    DequantizeArguments a{};
    JQ_RETURN_IF_ERROR(FindFormat(name, format, &a.size));
    JQ_RETURN_IF_ERROR(CheckPrepared(name, format, prepared));
    JQ_RETURN_IF_ERROR(ReadFloat(name, "result", *out, &a.out_type));
    a.prepared = prepared != 0;
    if (a.prepared) {
      JQ_RETURN_IF_ERROR(CheckType(name, "data", data, ffi::DataType::U8));
      JQ_RETURN_IF_ERROR(CheckRowsOfEight(name, data, *out));
      a.k = out->dimensions().back();
      a.n = out->dimensions()[out->dimensions().size() - 2];
      a.rows = a.k == 0 ? 0 : static_cast<int64_t>(out->element_count()) / a.k;
      JQ_RETURN_IF_ERROR(CheckRowBytes(name, data, a.k, a.size, true));
    } else {
      JQ_RETURN_IF_ERROR(ReadRows(name, *out, data, a.size, &a.rows, &a.k));
      a.n = a.rows;
    }
    a.data_n = StoredRows(a.n, a.prepared);
    a.type_id = static_cast<int>(format);
    a.data = static_cast<const uint8_t*>(data.untyped_data());
    a.out = out->untyped_data();
    return a.rows == 0 || a.k == 0 ? ffi::Error::Success() : Platform::Dequantize(context, a);
  }

  // (data [n, row_bytes], or prepared, ids [t]) -> out [t, k]; rows of ids outside [0, n) are zero.
  static ffi::Error Take(Context context, Any data, Any ids, Result out, int64_t format, int64_t prepared) {
    const char* name = "ggml_take";
    DequantizeArguments a{};
    JQ_RETURN_IF_ERROR(FindFormat(name, format, &a.size));
    JQ_RETURN_IF_ERROR(CheckPrepared(name, format, prepared));
    JQ_RETURN_IF_ERROR(CheckRank(name, "data", data, 2));
    JQ_RETURN_IF_ERROR(CheckRank(name, "ids", ids, 1));
    JQ_RETURN_IF_ERROR(CheckRank(name, "result", *out, 2));
    JQ_RETURN_IF_ERROR(CheckType(name, "data", data, ffi::DataType::U8));
    JQ_RETURN_IF_ERROR(CheckType(name, "ids", ids, ffi::DataType::S32));
    JQ_RETURN_IF_ERROR(ReadFloat(name, "result", *out, &a.out_type));
    a.prepared = prepared != 0;
    a.rows = ids.dimensions()[0];
    a.k = out->dimensions()[1];
    JQ_RETURN_IF_ERROR(CheckRowBytes(name, data, a.k, a.size, a.prepared));
    if (out->dimensions()[0] != a.rows) return Refuse(name, "result", "a row for each id", Shape(*out));
    a.type_id = static_cast<int>(format);
    a.data = static_cast<const uint8_t*>(data.untyped_data());
    a.ids = static_cast<const int32_t*>(ids.untyped_data());
    a.data_rows = data.dimensions()[0] * (a.prepared ? kLanes : 1);
    a.out = out->untyped_data();
    return a.rows == 0 || a.k == 0 ? ffi::Error::Success() : Platform::Dequantize(context, a);
  }

  // plain data [..., n, row_bytes] -> prepared data [..., eights, 8 row_bytes], or back
  static ffi::Error Arrange(Context context, Any data, Result out, int64_t format, int64_t prepare) {
    const char* name = "ggml_prepare";
    ArrangeArguments a{};
    JQ_RETURN_IF_ERROR(FindFormat(name, format, &a.size));
    JQ_RETURN_IF_ERROR(CheckPrepared(name, format, 1));
    JQ_RETURN_IF_ERROR(CheckType(name, "data", data, ffi::DataType::U8));
    JQ_RETURN_IF_ERROR(CheckType(name, "result", *out, ffi::DataType::U8));
    a.prepare = prepare != 0;
    const Any plain = a.prepare ? data : *out, prepared = a.prepare ? *out : data;
    JQ_RETURN_IF_ERROR(CheckRowsOfEight(name, prepared, plain));
    const auto dims = plain.dimensions();
    const int64_t row_bytes = dims.back();
    a.n = dims[dims.size() - 2];
    a.matrices = row_bytes * a.n == 0 ? 0 : static_cast<int64_t>(plain.element_count()) / (row_bytes * a.n);
    a.k = row_bytes / a.size.bytes * a.size.block;
    JQ_RETURN_IF_ERROR(CheckRowBytes(name, plain, a.k, a.size, false));
    JQ_RETURN_IF_ERROR(CheckRowBytes(name, prepared, a.k, a.size, true));
    a.type_id = static_cast<int>(format);
    a.in = static_cast<const uint8_t*>(data.untyped_data());
    a.out = static_cast<uint8_t*>(out->untyped_data());
    return a.matrices == 0 ? ffi::Error::Success() : Platform::Arrange(context, a);
  }

  // (x [b or 1, m, k], w [b, n, row_bytes]) -> out [b, m, n]; int8: activations are quantised.
  static ffi::Error Linear(Context context, Any x, Any w, Result out, Result scratch, int64_t format, int64_t prepared,
                           int64_t int8) {
    const char* name = "ggml_linear";
    ProductArguments a{};
    JQ_RETURN_IF_ERROR(ReadWeight(name, w, format, prepared, &a));
    JQ_RETURN_IF_ERROR(CheckRank(name, "x", x, 3));
    JQ_RETURN_IF_ERROR(CheckRank(name, "result", *out, 3));
    JQ_RETURN_IF_ERROR(ReadOperands(name, x, *out, &a));
    const auto xs = x.dimensions(), os = out->dimensions();
    a.int8_lhs = int8 != 0;
    a.tokens = xs[1];
    a.k = xs[2];
    a.n = os[2];
    a.x_batch = xs[0];
    JQ_RETURN_IF_ERROR(CheckWeight(name, w, a));
    if ((xs[0] != 1 && xs[0] != a.experts) || os[0] != a.experts || os[1] != a.tokens) {
      return Refuse(name, "x and result", "[b or 1, m, k] and [b, m, n] for w of shape " + Shape(w),
                    Shape(x) + " and " + Shape(*out));
    }
    JQ_RETURN_IF_ERROR(ReadScratch(name, *scratch, &a));
    return os[0] * os[1] * os[2] == 0 ? ffi::Error::Success() : Platform::Linear(context, a);
  }

  // (dy [b, m, n], w [b, n, row_bytes]) -> dx [b, m, k]
  static ffi::Error LinearGradient(Context context, Any dy, Any w, Result dx, Result scratch, int64_t format,
                                   int64_t prepared) {
    const char* name = "ggml_linear_gradient";
    ProductArguments a{};
    JQ_RETURN_IF_ERROR(ReadWeight(name, w, format, prepared, &a));
    JQ_RETURN_IF_ERROR(CheckRank(name, "dy", dy, 3));
    JQ_RETURN_IF_ERROR(CheckRank(name, "result", *dx, 3));
    JQ_RETURN_IF_ERROR(ReadOperands(name, dy, *dx, &a));
    const auto ys = dy.dimensions(), os = dx->dimensions();
    a.tokens = ys[1];
    a.k = os[2];
    a.n = ys[2];
    a.x_batch = ys[0];
    JQ_RETURN_IF_ERROR(CheckWeight(name, w, a));
    if (ys[0] != a.experts || os[0] != a.experts || os[1] != a.tokens) {
      return Refuse(name, "dy and result", "[b, m, n] and [b, m, k] for w of shape " + Shape(w),
                    Shape(dy) + " and " + Shape(*dx));
    }
    JQ_RETURN_IF_ERROR(ReadScratch(name, *scratch, &a));
    return os[0] * os[1] * os[2] == 0 ? ffi::Error::Success() : Platform::LinearGradient(context, a);
  }

  // (x [t, 1 or s, k], w [e, n, row_bytes], ids [t, s]) -> out [t, s, n]; ids outside [0, e): zero rows
  static ffi::Error MoeLinear(Context context, Any x, Any w, Any ids, Result out, Result scratch, int64_t format,
                              int64_t prepared, int64_t int8) {
    const char* name = "ggml_moe_linear";
    ProductArguments a{};
    JQ_RETURN_IF_ERROR(ReadWeight(name, w, format, prepared, &a));
    JQ_RETURN_IF_ERROR(ReadMoe(name, x, ids, *out, &a));
    const auto xs = x.dimensions(), os = out->dimensions();
    a.int8_lhs = int8 != 0;
    a.k = xs[2];
    a.n = os[2];
    a.x_batch = xs[1];
    JQ_RETURN_IF_ERROR(CheckWeight(name, w, a));
    if (xs[0] != a.tokens || (xs[1] != 1 && xs[1] != a.slots)) {
      return Refuse(name, "x", "[t, 1 or s, k] for ids of shape " + Shape(ids), Shape(x));
    }
    JQ_RETURN_IF_ERROR(ReadScratch(name, *scratch, &a));
    return os[0] * os[1] * os[2] == 0 ? ffi::Error::Success() : Platform::Linear(context, a);
  }

  // (dy [t, s, n], w [e, n, row_bytes], ids [t, s]) -> dx [t, s, k]
  static ffi::Error MoeLinearGradient(Context context, Any dy, Any w, Any ids, Result dx, Result scratch,
                                      int64_t format, int64_t prepared) {
    const char* name = "ggml_moe_linear_gradient";
    ProductArguments a{};
    JQ_RETURN_IF_ERROR(ReadWeight(name, w, format, prepared, &a));
    JQ_RETURN_IF_ERROR(ReadMoe(name, dy, ids, *dx, &a));
    const auto ys = dy.dimensions(), os = dx->dimensions();
    a.k = os[2];
    a.n = ys[2];
    a.x_batch = ys[1];
    JQ_RETURN_IF_ERROR(CheckWeight(name, w, a));
    if (ys[0] != a.tokens || ys[1] != a.slots) {
      return Refuse(name, "dy", "[t, s, n] for ids of shape " + Shape(ids), Shape(dy));
    }
    JQ_RETURN_IF_ERROR(ReadScratch(name, *scratch, &a));
    return os[0] * os[1] * os[2] == 0 ? ffi::Error::Success() : Platform::LinearGradient(context, a);
  }

 private:
  static ffi::Error CheckRank(const char* name, const char* operand, Any buffer, size_t rank) {
    return buffer.dimensions().size() == rank ? ffi::Error::Success()
                                              : Refuse(name, operand, std::to_string(rank) + " axes", Shape(buffer));
  }

  static ffi::Error ReadFloat(const char* name, const char* operand, Any buffer, DType* type) {
    const ffi::DataType given = buffer.element_type();
    if (given == ffi::DataType::F32 || given == ffi::DataType::F16 || given == ffi::DataType::BF16) {
      return ReadDType(name, operand, buffer, type);
    }
    return Refuse(name, operand, "float32, float16 or bfloat16",
                  "XLA element type " + std::to_string(static_cast<int>(given)));
  }

  static ffi::Error CheckPrepared(const char* name, int64_t format, int64_t prepared) {
    if (prepared == 0 || HasPreparedForm(format)) return ffi::Error::Success();
    return Refuse(name, "format", "one with a prepared form", "type id " + std::to_string(format));
  }

  // The last axis of data holds k values, of eight rows where it is prepared.
  static ffi::Error CheckRowBytes(const char* name, Any data, int64_t k, const FormatSize& size, bool prepared) {
    const int64_t rows = prepared ? kLanes : 1;
    if (k % size.block == 0 && data.dimensions().back() == k / size.block * size.bytes * rows) {
      return ffi::Error::Success();
    }
    return Refuse(name, "data",
                  "blocks of " + std::to_string(size.bytes) + " bytes for " + std::to_string(size.block) + " of " +
                      std::to_string(k) + " values" + (prepared ? " in each of eight rows" : "") +
                      " along the last axis",
                  Shape(data));
  }

  // prepared [..., ceil(n / 8), ...] for rows [..., n, ...]
  static ffi::Error CheckRowsOfEight(const char* name, Any prepared, Any rows) {
    const auto p = prepared.dimensions(), r = rows.dimensions();
    bool same = p.size() == r.size() && p.size() >= 2;
    for (size_t i = 0; same && i + 1 < p.size(); ++i) same = p[i] == (i + 2 < p.size() ? r[i] : EightsOf(r[i]));
    if (same) return ffi::Error::Success();
    return Refuse(name, "prepared data", "[..., ceil(n / 8), bytes] for rows of shape " + Shape(rows), Shape(prepared));
  }

  // values [..., k], data [..., row_bytes]
  static ffi::Error ReadRows(const char* name, Any values, Any data, const FormatSize& size, int64_t* rows,
                             int64_t* k) {
    const auto v = values.dimensions(), d = data.dimensions();
    JQ_RETURN_IF_ERROR(CheckType(name, "data", data, ffi::DataType::U8));
    bool same = v.size() == d.size() && v.size() >= 1;
    *rows = 1;
    for (size_t i = 0; same && i + 1 < v.size(); ++i) {
      same = v[i] == d[i];
      *rows *= v[i];
    }
    if (!same) return Refuse(name, "data", "the leading axes of " + Shape(values), Shape(data));
    *k = v.back();
    return CheckRowBytes(name, data, *k, size, false);
  }

  static ffi::Error ReadImatrix(const char* name, Any x, Any imatrix, QuantizeArguments* a) {
    const auto xs = x.dimensions(), is = imatrix.dimensions();
    const int leading = static_cast<int>(xs.size()) - 1;
    if (leading > kMaxLeading)
      return Refuse(name, "x", "at most " + std::to_string(kMaxLeading + 1) + " axes", Shape(x));
    a->leading = leading;
    int64_t stride = is[leading];
    for (int d = leading - 1; d >= 0; --d) {
      a->dims[d] = xs[d];
      a->imatrix_stride[d] = is[d] == 1 ? 0 : stride;
      stride *= is[d];
      if (is[d] != 1 && is[d] != xs[d]) return Refuse(name, "imatrix", "1 or x's size " + Shape(x), Shape(imatrix));
    }
    if (is[leading] != xs[leading]) return Refuse(name, "imatrix", "x's row of " + Shape(x), Shape(imatrix));
    a->imatrix = static_cast<const float*>(imatrix.untyped_data());
    return ffi::Error::Success();
  }

  static ffi::Error ReadWeight(const char* name, Any w, int64_t format, int64_t prepared, ProductArguments* a) {
    JQ_RETURN_IF_ERROR(FindFormat(name, format, &a->size));
    JQ_RETURN_IF_ERROR(CheckPrepared(name, format, prepared));
    JQ_RETURN_IF_ERROR(CheckRank(name, "w", w, 3));
    JQ_RETURN_IF_ERROR(CheckType(name, "w", w, ffi::DataType::U8));
    a->type_id = static_cast<int>(format);
    a->prepared = prepared != 0;
    a->w = static_cast<const uint8_t*>(w.untyped_data());
    a->experts = w.dimensions()[0];
    return ffi::Error::Success();
  }

  // w has n rows of k values.
  static ffi::Error CheckWeight(const char* name, Any w, const ProductArguments& a) {
    if (w.dimensions()[1] != (a.prepared ? EightsOf(a.n) : a.n)) {
      const std::string rows = std::to_string(a.n) + " rows" + (a.prepared ? ", eight in one" : "");
      return Refuse(name, "w", rows, Shape(w));
    }
    return CheckRowBytes(name, w, a.k, a.size, a.prepared);
  }

  static ffi::Error ReadOperands(const char* name, Any x, Any out, ProductArguments* a) {
    DType out_type;
    JQ_RETURN_IF_ERROR(ReadFloat(name, "x", x, &a->x_type));
    JQ_RETURN_IF_ERROR(ReadFloat(name, "result", out, &out_type));
    if (out_type != a->x_type) return Refuse(name, "result", "x's type", "another");
    a->x = x.untyped_data();
    a->out = out.untyped_data();
    return ffi::Error::Success();
  }

  static ffi::Error ReadScratch(const char* name, Any scratch, ProductArguments* a) {
    JQ_RETURN_IF_ERROR(CheckType(name, "scratch", scratch, ffi::DataType::U8));
    const int64_t bytes = ProductScratchBytes(*a);
    if (static_cast<int64_t>(scratch.element_count()) != bytes) {
      return Refuse(name, "scratch", std::to_string(bytes) + " bytes", Shape(scratch));
    }
    a->scratch = scratch.untyped_data();
    return ffi::Error::Success();
  }

  static ffi::Error ReadMoe(const char* name, Any x, Any ids, Any out, ProductArguments* a) {
    JQ_RETURN_IF_ERROR(CheckRank(name, "x", x, 3));
    JQ_RETURN_IF_ERROR(CheckRank(name, "ids", ids, 2));
    JQ_RETURN_IF_ERROR(CheckRank(name, "result", out, 3));
    JQ_RETURN_IF_ERROR(CheckType(name, "ids", ids, ffi::DataType::S32));
    JQ_RETURN_IF_ERROR(ReadOperands(name, x, out, a));
    a->ids = static_cast<const int32_t*>(ids.untyped_data());
    a->tokens = ids.dimensions()[0];
    a->slots = ids.dimensions()[1];
    if (out.dimensions()[0] != a->tokens || out.dimensions()[1] != a->slots) {
      return Refuse(name, "result", "a row for each id, of shape " + Shape(ids), Shape(out));
    }
    return ffi::Error::Success();
  }
};

// f(target name, handler) for every target of a platform.
template <typename Platform, typename F>
void ForEachTarget(F&& f) {
  f("ggml_quantize", JQ_HANDLER(Handlers<Platform>::Quantize, "format"));
  f("ggml_dequantize", JQ_HANDLER(Handlers<Platform>::Dequantize, "format", "prepared"));
  f("ggml_take", JQ_HANDLER(Handlers<Platform>::Take, "format", "prepared"));
  f("ggml_prepare", JQ_HANDLER(Handlers<Platform>::Arrange, "format", "prepare"));
  f("ggml_linear", JQ_HANDLER(Handlers<Platform>::Linear, "format", "prepared", "int8"));
  f("ggml_linear_gradient", JQ_HANDLER(Handlers<Platform>::LinearGradient, "format", "prepared"));
  f("ggml_moe_linear", JQ_HANDLER(Handlers<Platform>::MoeLinear, "format", "prepared", "int8"));
  f("ggml_moe_linear_gradient", JQ_HANDLER(Handlers<Platform>::MoeLinearGradient, "format", "prepared"));
}

}  // namespace ggml
}  // namespace jq
