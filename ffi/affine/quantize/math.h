// quantize: the code of x. See jaxquant/affine/quantize.py.
#pragma once

#include "ffi/affine/rounding.h"

namespace jq {

struct Quantize {
  template <typename Real, typename Rounding = Nearest>
  static JQ_HOST_DEVICE Real Value(Real x, Divisor<Real> scale, Real zero_point, Range<Real> range,
                                   Rounding rounding = {}) {
    const Real v = rounding.RoundedQuotient(scale, x) + zero_point;
    const Real code = v == v ? v : zero_point;  // NaN has no code; the zero point's dequantises to 0
    // Even a NaN zero point gives a code: no conversion to integer ever meets a NaN.
    return ClampNumber(code, range);
  }

  // The codes seen as floating-point numbers; in range dy / scale, the operation this project began with.
  template <typename Real>
  struct Gradient {
    Real dx, dscale, dzero_point;

    template <typename Rounding = Nearest>
    static JQ_HOST_DEVICE Gradient Of(Real dy, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range,
                                      Rounding rounding = {}) {
      const Real t = scale.Quotient(x);
      const Real v = rounding.Round(t) + zero_point;
      const bool inside = (v >= range.qmin) & (v <= range.qmax);
      const Real slope = scale.Divide(dy);
      Gradient g;
      g.dx = Keep(inside, slope);
      g.dscale = Keep(inside, -(slope * t));
      g.dzero_point = Keep(inside, dy);
      return g;
    }
  };
};

}  // namespace jq
