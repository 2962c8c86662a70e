// dequantize: the value of a code. See jaxquant/affine/dequantize.py.
#pragma once

#include "ffi/common/numeric.h"

namespace jq {

struct Dequantize {
  template <typename Real>
  static JQ_HOST_DEVICE Real Value(Real q, Divisor<Real> scale, Real zero_point, Range<Real>) {
    return (q - zero_point) * scale.scale;
  }

  template <typename Real>
  struct Gradient {
    Real dx, dscale, dzero_point;

    static JQ_HOST_DEVICE Gradient Of(Real dy, Real q, Divisor<Real> scale, Real zero_point, Range<Real>) {
      Gradient g;
      g.dx = dy * scale.scale;
      g.dscale = dy * (q - zero_point);
      g.dzero_point = -(dy * scale.scale);
      return g;
    }
  };
};

}  // namespace jq
