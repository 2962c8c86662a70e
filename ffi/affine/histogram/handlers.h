// The FFI handlers of histograms, for every platform; included by ffi/affine/handlers.h. A Platform has
//   Histogram(context, name, HistogramArguments)
// Arrays have one axis more than the values: x [..., 1], low and high [..., 1], prefix [..., k], counts [..., slots].
#pragma once

#include <cstdint>

#include "ffi/affine/histogram/arguments.h"
#include "ffi/common/checks.h"

namespace jq {

template <typename Platform>
class HistogramHandlers {
  using Context = typename Platform::Context;
  using Any = ffi::AnyBuffer;
  using Result = ffi::Result<ffi::AnyBuffer>;

 public:
  static ffi::Error Bins(Context context, Any x, Any low, Any high, Result counts, int64_t bins, int64_t magnitude) {
    const char* name = "histogram";
    HistogramArguments a{};
    ScaleView view;
    if (bins < 1 || bins > kMostSlots) return Refuse(name, "bins", "1 to 65536", bins);
    JQ_RETURN_IF_ERROR(CheckType(name, "low", low, ffi::DataType::F32));
    JQ_RETURN_IF_ERROR(CheckType(name, "high", high, ffi::DataType::F32));
    JQ_RETURN_IF_ERROR(CheckShape(name, "high", high, low));
    a.low = static_cast<const float*>(low.untyped_data());
    a.high = static_cast<const float*>(high.untyped_data());
    a.size = bins;
    JQ_RETURN_IF_ERROR(Read(name, x, "low", low, *counts, &view, &a));
    if (a.tables != 1) return Refuse(name, "low", "a last axis of 1", Shape(low));
    a.magnitude = magnitude != 0;
    return view.scale_size == 0 ? ffi::Error::Success() : Platform::Histogram(context, name, a);
  }

  static ffi::Error Digits(Context context, Any x, Any prefix, Result counts, int64_t shift, int64_t width,
                           int64_t magnitude) {
    const char* name = "digit_histogram";
    HistogramArguments a{};
    ScaleView view;
    if (width < 1 || width > 16) return Refuse(name, "width", "1 to 16", width);
    if (shift < 0 || shift + width > 32) return Refuse(name, "shift", "0 to 32 - width", shift);
    JQ_RETURN_IF_ERROR(CheckType(name, "prefix", prefix, ffi::DataType::U32));
    a.prefix = static_cast<const uint32_t*>(prefix.untyped_data());
    a.shift = static_cast<int>(shift);
    a.width = static_cast<int>(width);
    a.size = int64_t{1} << width;
    JQ_RETURN_IF_ERROR(Read(name, x, "prefix", prefix, *counts, &view, &a));
    a.magnitude = magnitude != 0;
    return view.scale_size == 0 || a.tables == 0 ? ffi::Error::Success() : Platform::Histogram(context, name, a);
  }

 private:
  static constexpr int64_t kMostSlots = 1 << 16;

  static ffi::Error Read(const char* name, Any x, const char* operand, Any groups, Any counts, ScaleView* view,
                         HistogramArguments* a) {
    JQ_RETURN_IF_ERROR(ReadDType(name, "x", x, &a->type));
    if (a->type != DType::kF32 && a->type != DType::kF16 && a->type != DType::kBF16) {
      return Refuse(name, "x", "float32, float16 or bfloat16", "another type");
    }
    JQ_RETURN_IF_ERROR(CheckType(name, "counts", counts, ffi::DataType::S32));
    const auto xs = x.dimensions(), gs = groups.dimensions(), cs = counts.dimensions();
    const int rank = static_cast<int>(xs.size()) - 1;
    int axis = 0;
    if (rank < 0 || xs[rank] != 1 || gs.size() != xs.size() ||
        MakeScaleView(xs.begin(), rank, gs.begin(), rank, gs.begin(), rank, view, &axis) != ScaleViewError::kOk) {
      return Refuse(name, operand, "blocks along each axis but the last of x, for x of shape " + Shape(x),
                    Shape(groups));
    }
    a->tables = gs[rank];
    bool same = cs.size() == gs.size() && cs[rank] == a->tables * a->size;
    for (int d = 0; same && d < rank; ++d) same = cs[d] == gs[d];
    if (!same) {
      const std::string slots = std::to_string(a->tables * a->size);
      return Refuse(name, "counts", slots + " slots for each element of " + Shape(groups), Shape(counts));
    }
    a->view = view;
    a->x = x.untyped_data();
    a->counts = static_cast<int32_t*>(counts.untyped_data());
    return ffi::Error::Success();
  }
};

}  // namespace jq
