// fake_quantize on CPU: the mathematics of math.h in the loops of cpu_loops.h, compiled once per instruction set.
#include "ffi/affine/cpu_loops.h"
#include "ffi/affine/fake_quantize/math.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <typename Math, typename Real>
typename Loops<Real>::Map ValueLoop(DType x, DType out) {
  if (x == DType::kBF16 && out == DType::kBF16 && sizeof(Real) == 4) {
    return MapLoop<ValueOf<Math>, Real, BFloat16, BFloat16>;
  }
  if (x != kRealType<Real> || out != kRealType<Real>) return nullptr;
  return MapLoop<ValueOf<Math>, Real, Real, Real>;
}

}  // namespace

extern const AffineLoops fake_quantize_loops, stochastic_fake_quantize_loops;
const AffineLoops fake_quantize_loops =
    LoopsOf<FakeQuantize>(ValueLoop<FakeQuantize, float>, ValueLoop<FakeQuantize, double>);
const AffineLoops stochastic_fake_quantize_loops =
    LoopsOf<Keyed<FakeQuantize>>(ValueLoop<Keyed<FakeQuantize>, float>, ValueLoop<Keyed<FakeQuantize>, double>);

}  // namespace JQ_ISA
}  // namespace jq
