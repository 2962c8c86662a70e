// quantize on CPU: the mathematics of math.h in the loops of cpu_loops.h, compiled once per instruction set.
#include "ffi/affine/cpu_loops.h"
#include "ffi/affine/quantize/math.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <typename Math, typename Real>
typename Loops<Real>::Map ValueLoop(DType x, DType out) {
  using Value = ValueOf<Math>;
  if (x != kRealType<Real>) return nullptr;
  switch (out) {
    case DType::kI8: return MapLoop<Value, Real, Real, int8_t>;
    case DType::kU8: return MapLoop<Value, Real, Real, uint8_t>;
    case DType::kI16: return MapLoop<Value, Real, Real, int16_t>;
    case DType::kU16: return MapLoop<Value, Real, Real, uint16_t>;
    default: return out == kRealType<Real> ? MapLoop<Value, Real, Real, Real> : nullptr;
  }
}

}  // namespace

extern const AffineLoops quantize_loops, stochastic_quantize_loops;
const AffineLoops quantize_loops = LoopsOf<Quantize>(ValueLoop<Quantize, float>, ValueLoop<Quantize, double>);
const AffineLoops stochastic_quantize_loops =
    LoopsOf<Keyed<Quantize>>(ValueLoop<Keyed<Quantize>, float>, ValueLoop<Keyed<Quantize>, double>);

}  // namespace JQ_ISA
}  // namespace jq
