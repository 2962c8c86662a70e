// fake_quantize: the value a quantised x would have. See jaxquant/affine/fake_quantize.py.
#pragma once

#include "ffi/affine/rounding.h"

namespace jq {

struct FakeQuantize {
  template <typename Real, typename Rounding = Nearest>
  static JQ_HOST_DEVICE Real Value(Real x, Divisor<Real> scale, Real zero_point, Range<Real> range,
                                   Rounding rounding = {}) {
    const Real v = rounding.RoundedQuotient(scale, x) + zero_point;
    return (Clamp(v, range) - zero_point) * scale.scale;  // NaN passes through Clamp
  }

  // Straight-through: in range y moves with x; outside it moves with the scale and the zero point. NaN moves nothing.
  template <typename Real>
  struct Gradient {
    Real dx, dscale, dzero_point;

    template <typename Rounding = Nearest>
    static JQ_HOST_DEVICE Gradient Of(Real dy, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range,
                                      Rounding rounding = {}) {
      const Real t = scale.Quotient(x);
      const Real rounded = rounding.Round(t);
      const Real v = rounded + zero_point;
      const bool below = v < range.qmin;
      const bool above = v > range.qmax;
      const bool outside = below | above;
      const bool inside = (v >= range.qmin) & (v <= range.qmax);
      const Real edge = Select(above, range.qmax, range.qmin) - zero_point;
      const Real slope = Select(inside, rounded - t, edge);
      Gradient g;
      g.dx = Keep(inside, dy);
      // Selected after the product, so that NaN and infinity in what is not selected leave nothing behind.
      g.dscale = Keep(inside | outside, dy * slope);
      g.dzero_point = Keep(outside, -(scale.scale * dy));
      return g;
    }
  };
};

}  // namespace jq
