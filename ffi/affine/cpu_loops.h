// The loops of an operation, from its mathematics. Plain code that the compiler vectorises for JQ_ISA; everything is in
// an anonymous namespace, so that code of one instruction set is never merged with that of another.
#pragma once

#include "ffi/affine/cpu_kernels.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <typename Math>
struct ValueOf {
  template <typename Real>
  static JQ_HOST_DEVICE Real At(Real, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range) {
    return Math::Value(x, scale, zero_point, range);
  }
};
template <typename Math>
struct GradientOf {
  template <typename Real>
  static JQ_HOST_DEVICE Real At(Real dy, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range) {
    return Math::template Gradient<Real>::Of(dy, x, scale, zero_point, range).dx;
  }
};

template <typename Function, typename Real, typename X, typename Out>
void MapLoop(const Real* __restrict dy, const void* x_data, void* out_data, int64_t n, const Real* __restrict scale,
             const Real* __restrict zero_point, bool per_element, Range<Real> range) {
  const X* x = static_cast<const X*>(x_data);
  Out* out = static_cast<Out*>(out_data);
  // x may be out (donated buffers), element for element: no dependence between iterations.
  if (per_element) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      out[i] = Convert<Out>(
          Function::At(dy[i], Convert<Real>(x[i]), Divisor<Real>::Of(scale[i]), RoundZeroPoint(zero_point[i]), range));
    }
    return;
  }
  const Divisor<Real> divisor = Divisor<Real>::Of(*scale);
  const Real zero = RoundZeroPoint(*zero_point);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Convert<Out>(Function::At(dy[i], Convert<Real>(x[i]), divisor, zero, range));
  }
}

template <typename Math, typename Real>
void RowLoop(const Real* dy, const Real* x, Real* dx, int64_t n, Real scale, Real zero_point, Range<Real> range,
             Real* dscale, Real* dzero_point) {
  const Divisor<Real> divisor = Divisor<Real>::Of(scale);
  alignas(64) Real scale_lanes[kLanes] = {}, zero_lanes[kLanes] = {};
  int64_t base = 0;
  for (; base + kLanes <= n; base += kLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto g = Math::template Gradient<Real>::Of(dy[base + lane], x[base + lane], divisor, zero_point, range);
      dx[base + lane] = g.dx;
      scale_lanes[lane] += g.dscale;
      zero_lanes[lane] += g.dzero_point;
    }
  }
  for (int lane = 0; base + lane < n; ++lane) {
    const auto g = Math::template Gradient<Real>::Of(dy[base + lane], x[base + lane], divisor, zero_point, range);
    dx[base + lane] = g.dx;
    scale_lanes[lane] += g.dscale;
    zero_lanes[lane] += g.dzero_point;
  }
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) {
      scale_lanes[lane] += scale_lanes[lane + distance];
      zero_lanes[lane] += zero_lanes[lane + distance];
    }
  }
  *dscale = scale_lanes[0];
  *dzero_point = zero_lanes[0];
}

template <typename Math, typename Real>
void ColumnsLoop(const Real* dy, const Real* x, Real* dx, int64_t n, const Real* __restrict scale,
                 const Real* __restrict zero_point, Range<Real> range, Real* __restrict scale_lane,
                 Real* __restrict zero_lane) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const auto g = Math::template Gradient<Real>::Of(dy[i], x[i], Divisor<Real>::Of(scale[i]), zero_point[i], range);
    dx[i] = g.dx;
    scale_lane[i] += g.dscale;
    zero_lane[i] += g.dzero_point;
  }
}

template <typename Math, typename Real>
constexpr Loops<Real> LoopsOf(typename Loops<Real>::Map (*value)(DType, DType)) {
  return {value, MapLoop<GradientOf<Math>, Real, Real, Real>, RowLoop<Math, Real>, ColumnsLoop<Math, Real>};
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace jq
