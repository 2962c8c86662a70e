// fake_quantize: the value a quantised x would have. See jaxquant/affine/fake_quantize.py.
#pragma once

#include "ffi/common/numeric.h"

namespace jq {

struct FakeQuantize {
  template <typename Real>
  static JQ_HOST_DEVICE Real Value(Real x, Divisor<Real> scale, Real zero_point, Range<Real> range) {
    const Real v = RoundHalfToEven(scale.Divide(x)) + zero_point;
    return (Clamp(v, range) - zero_point) * scale.scale;  // NaN passes through Clamp
  }

  // Straight-through: in range y moves with x; outside it moves with the scale and the zero point. NaN moves nothing.
  template <typename Real>
  struct Gradient {
    Real dx, dscale, dzero_point;

    static JQ_HOST_DEVICE Gradient Of(Real dy, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range) {
      const Real t = scale.Divide(x);
      const Real rounded = RoundHalfToEven(t);
      const Real v = rounded + zero_point;
      const bool below = v < range.qmin;
      const bool above = v > range.qmax;
      const bool inside = v >= range.qmin && v <= range.qmax;
      const Real edge = (above ? range.qmax : range.qmin) - zero_point;
      Gradient g;
      g.dx = inside ? dy : Real(0);
      // Selected after the product, so that an infinite upstream gradient or residual leaves no NaN behind.
      g.dscale = inside ? dy * (rounded - t) : ((above || below) ? dy * edge : Real(0));
      g.dzero_point = (above || below) ? -(scale.scale * dy) : Real(0);
      return g;
    }
  };
};

}  // namespace jq
