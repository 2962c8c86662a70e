// dequantize on CPU: the mathematics of math.h in the loops of cpu_loops.h, compiled once per instruction set.
#include "ffi/affine/cpu_loops.h"
#include "ffi/affine/dequantize/math.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <typename Real>
typename Loops<Real>::Map ValueLoop(DType x, DType out) {
  using Value = ValueOf<Dequantize>;
  if (out != kRealType<Real>) return nullptr;
  switch (x) {
    case DType::kI8: return MapLoop<Value, Real, int8_t, Real>;
    case DType::kU8: return MapLoop<Value, Real, uint8_t, Real>;
    case DType::kI16: return MapLoop<Value, Real, int16_t, Real>;
    case DType::kU16: return MapLoop<Value, Real, uint16_t, Real>;
    default: return x == kRealType<Real> ? MapLoop<Value, Real, Real, Real> : nullptr;
  }
}

}  // namespace

extern const AffineLoops dequantize_loops;
const AffineLoops dequantize_loops = LoopsOf<Dequantize>(ValueLoop<float>, ValueLoop<double>);

}  // namespace JQ_ISA
}  // namespace jq
