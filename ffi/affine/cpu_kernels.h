// The CPU side's tables: loops that belong to an operation, and the drivers that walk a tensor with them. One set per
// instruction set, compiled from the same sources with JQ_ISA naming the set; dispatch.cc chooses once.
#pragma once

#include <cstdint>

#include "ffi/affine/arguments.h"
#include "ffi/affine/histogram/arguments.h"

namespace jq {

namespace optim {
struct AdamArguments;  // ffi/optim/math.h
}
namespace ggml {
struct CpuKernels;  // ffi/ggml/cpu_kernels.h
}

// Loops over consecutive elements, for arithmetic in Real.
template <typename Real>
struct Loops {
  // out = f(x) or, for gradients, f(dy, x). per_element: scale and zero point have a value per element. noise: what is
  // drawn for each element, where rounding is stochastic; never read otherwise.
  using Map = void (*)(const Real* dy, const void* x, void* out, int64_t n, const Real* scale, const Real* zero_point,
                       bool per_element, Range<Real> range, const Real* noise);
  // A gradient without noise. dx is no operand. False: to some elements the noise matters, and dx is not right.
  using Undrawn = bool (*)(const Real* dy, const Real* x, Real* dx, int64_t n, const Real* scale,
                           const Real* zero_point, bool per_element, Range<Real> range);
  // dx of up to kChunk elements that share a scale, and their two sums.
  using Row = void (*)(const Real* dy, const Real* x, Real* dx, int64_t n, Real scale, Real zero_point,
                       Range<Real> range, const Real* noise, Real* dscale, Real* dzero_point);
  // dx of elements that belong to neighbouring sums, whose terms are added to one lane each.
  using Columns = void (*)(const Real* dy, const Real* x, Real* dx, int64_t n, const Real* scale,
                           const Real* zero_point, Range<Real> range, const Real* noise, Real* scale_lane,
                           Real* zero_lane);

  // Null where there is no loop for the pair; the driver then converts a tile at a time from or to Real.
  Map (*value)(DType x, DType out);
  Map gradient;
  Undrawn undrawn;  // null where rounding is to nearest
  Row row;
  Columns columns;
};

// One operation's loops.
struct AffineLoops {
  Loops<float> single;
  Loops<double> wide;
};

struct PackingLoops {
  void (*pack)(const uint8_t* in, uint8_t* out, int64_t n, int bits);
  void (*unpack)(const uint8_t* in, uint8_t* out, int64_t n, int bits, bool is_signed);
};

struct HistogramLoops {
  // Units [begin, end) of a plan; scratch: its ScratchWords. False: no loop for the type.
  bool (*count)(const HistogramArguments&, const HistogramPlan&, int64_t begin, int64_t end, uint32_t* scratch);
};

// Ranges of blocks as keys (ffi/affine/dynamic/math.h), low and high those of scale element 0. absolute: low is not
// touched.
struct RangeLoops {
  // Adds elements [begin, end) of x. False: no such type.
  bool (*fold)(const ScaleView&, DType, const void* x, bool absolute, int64_t begin, int64_t end, int32_t* low,
               int32_t* high);
  void (*merge)(const int32_t* low, const int32_t* high, int64_t n, bool absolute, int32_t* to_low, int32_t* to_high);
  void (*values)(const int32_t* keys, int64_t n, float* values);
  // Scales and zero points [begin, end), in double where wide.
  void (*choose)(const int32_t* low, const int32_t* high, int64_t begin, int64_t end, bool symmetric,
                 Range<float> range, bool wide, void* scale, void* zero_point);
};

// Everything compiled for one instruction set.
struct CpuKernels {
  const char* isa;
  const AffineLoops* fake_quantize;
  const AffineLoops* quantize;
  const AffineLoops* dequantize;
  const AffineLoops* stochastic_fake_quantize;
  const AffineLoops* stochastic_quantize;
  const PackingLoops* packing;
  const HistogramLoops* histogram;
  const RangeLoops* range;

  // Elements [begin, end) of x. False: no conversion for these types.
  bool (*map)(const AffineLoops&, const MapArguments&, bool gradient, int64_t begin, int64_t end);
  // dx and the sums: units [begin, end) of gradient_units, each of about unit_size elements; then finish once.
  int64_t (*gradient_units)(const ScaleView&);
  bool (*gradient)(const AffineLoops&, const GradientArguments&, int64_t begin, int64_t end);
  void (*gradient_finish)(const GradientArguments&);

  const ggml::CpuKernels* ggml;

  // Blocks [begin, end) of a step.
  void (*adam8bit)(const optim::AdamArguments&, int64_t begin, int64_t end);
};

// The kernels for this machine, or those that JAXQUANT_ISA names (an unknown or unsupported name: the machine's).
const CpuKernels& CpuKernelsHere();
// Whether products may use the tile unit (ffi/common/cpu_tiles.h), which no set of its own is compiled for.
bool TilesHere();
// What is in use: a set's name, or "amx" for the best of them with tiles.
const char* InstructionSet();
// Compiled-in instruction sets, best last, separated by spaces.
const char* CompiledIsas();

}  // namespace jq
