// The FFI handler of the optimiser, written once for every platform: reads and checks the operands, then hands plain
// arguments to Platform, which launches.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/common/checks.h"
#include "ffi/common/handler.h"
#include "ffi/optim/math.h"

namespace jq {
namespace optim {

template <typename Platform>
class Handlers {
  using Context = typename Platform::Context;
  using Any = ffi::AnyBuffer;
  using Result = ffi::Result<ffi::AnyBuffer>;
  static constexpr const char* kName = "adam8bit";

 public:
  // g and, of its shape, codes of m and v; their exponents have 1 in place of the axes after `axis` (negative), and a
  // block for every `length` places along it; factors [f, 6] and seed [f], each for an equal part of the leading axes.
  // -> update, and the codes and exponents of the new moments
  static ffi::Error Adam8bit(Context context, Any g, Any m, Any m_exponent, Any v, Any v_exponent, Any factors,
                             Any seed, Result update, Result new_m, Result new_m_exponent, Result new_v,
                             Result new_v_exponent, int64_t axis, int64_t length) {
    AdamArguments a{};
    JQ_RETURN_IF_ERROR(ReadDType(kName, "g", g, &a.type));
    JQ_RETURN_IF_ERROR(CheckType(kName, "update", *update, g.element_type()));
    JQ_RETURN_IF_ERROR(CheckShape(kName, "update", *update, g));
    for (const Any& codes : {m, v, *new_m, *new_v}) {
      JQ_RETURN_IF_ERROR(CheckType(kName, "codes", codes, ffi::DataType::U8));
      JQ_RETURN_IF_ERROR(CheckShape(kName, "codes", codes, g));
    }
    JQ_RETURN_IF_ERROR(ReadBlocks(g, m_exponent, axis, length, &a));
    for (const Any& exponents : {m_exponent, v_exponent, *new_m_exponent, *new_v_exponent}) {
      JQ_RETURN_IF_ERROR(CheckType(kName, "exponents", exponents, ffi::DataType::U8));
      JQ_RETURN_IF_ERROR(CheckShape(kName, "exponents", exponents, m_exponent));
    }
    const auto fs = factors.dimensions(), ss = seed.dimensions();
    JQ_RETURN_IF_ERROR(CheckType(kName, "factors", factors, ffi::DataType::F32));
    JQ_RETURN_IF_ERROR(CheckType(kName, "seed", seed, ffi::DataType::U32));
    if (fs.size() != 2 || ss.size() != 1 || fs[0] < 1 || a.rows % fs[0] != 0 || fs[1] != kFactors || ss[0] != fs[0]) {
      return Refuse(kName, "factors and seed", "[f, 6] and [f] for f parts of g of shape " + Shape(g),
                    Shape(factors) + " and " + Shape(seed));
    }
    a.sharing = a.rows / fs[0];
    a.g = g.untyped_data();
    a.m = Bytes(m);
    a.m_exponent = Bytes(m_exponent);
    a.v = Bytes(v);
    a.v_exponent = Bytes(v_exponent);
    a.factors = static_cast<const Factors*>(factors.untyped_data());
    a.seed = static_cast<const uint32_t*>(seed.untyped_data());
    a.update = update->untyped_data();
    a.new_m = Bytes(*new_m);
    a.new_m_exponent = Bytes(*new_m_exponent);
    a.new_v = Bytes(*new_v);
    a.new_v_exponent = Bytes(*new_v_exponent);
    if (g.element_count() == 0) return ffi::Error::Success();
    if (a.type != DType::kF32 && a.type != DType::kF16 && a.type != DType::kBF16) {
      return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(kName) + ": g: no kernel for this element type.");
    }
    return Platform::Adam8bit(context, a);
  }

 private:
  static uint8_t* Bytes(Any buffer) { return static_cast<uint8_t*>(buffer.untyped_data()); }

  static ffi::Error ReadBlocks(Any g, Any exponents, int64_t axis, int64_t length, AdamArguments* a) {
    const auto gs = g.dimensions(), es = exponents.dimensions();
    const int64_t rank = static_cast<int64_t>(gs.size());
    if (axis >= 0 || axis < -rank) {
      return Refuse(kName, "axis", "a negative one of g of shape " + Shape(g), axis);
    }
    if (length < 1 || length > kMostBlock) return Refuse(kName, "block", "1 to 2048 values", length);
    const int64_t at = rank + axis;
    int64_t inner = 1;
    bool same = es.size() == gs.size();
    a->rows = 1;
    for (int64_t d = 0; same && d < rank; ++d) {
      same = es[d] == (d < at ? gs[d] : d == at ? (gs[d] + length - 1) / length : 1);
      if (d < at) a->rows *= gs[d];
      if (d > at && inner <= kMostBlock) inner *= gs[d];
    }
    if (!same) {
      return Refuse(kName, "exponents", "one for each block of g of shape " + Shape(g), Shape(exponents));
    }
    if (inner * length > kMostBlock || (inner == 0 && exponents.element_count() != 0)) {
      return Refuse(kName, "block", "1 to 2048 values", inner * length);
    }
    a->row_size = gs[at] * inner;
    a->block = inner * length;
    return ffi::Error::Success();
  }
};

template <typename Platform, typename F>
void ForEachTarget(const F& f) {
  f("adam8bit", JQ_HANDLER(Handlers<Platform>::Adam8bit, "axis", "length"));
}

}  // namespace optim
}  // namespace jq
