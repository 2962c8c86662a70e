// quantize on CPU: the mathematics of math.h in the loops of cpu_loops.h, compiled once per instruction set.
#include "ffi/affine/cpu_loops.h"
#include "ffi/affine/quantize/math.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <typename Real>
typename Loops<Real>::Map ValueLoop(DType x, DType out) {
  using Value = ValueOf<Quantize>;
  if (x == DType::kBF16 && sizeof(Real) == 4) {
    if (out == DType::kI8) return MapLoop<Value, Real, BFloat16, int8_t>;
    if (out == DType::kU8) return MapLoop<Value, Real, BFloat16, uint8_t>;
  }
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

extern const AffineLoops quantize_loops;
const AffineLoops quantize_loops = {LoopsOf<Quantize, float>(ValueLoop<float>),
                                    LoopsOf<Quantize, double>(ValueLoop<double>)};

}  // namespace JQ_ISA
}  // namespace jq
