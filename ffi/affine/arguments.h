// What a handler hands to a kernel, on every platform. Plain data, so that translation units compiled for different
// instruction sets share no inline code.
#pragma once

#include <cstdint>

#include "ffi/affine/rounding.h"
#include "ffi/common/numeric.h"
#include "ffi/common/scale_view.h"

namespace jq {

// Element by element: out = f(x, scale, zero_point), or f(dy, x, scale, zero_point) for a gradient in x alone.
struct MapArguments {
  const ScaleView* view;
  DType x_type, out_type;
  bool wide;  // arithmetic in double
  const void* dy;
  const void* x;
  const void* scale;
  const void* zero_point;
  void* out;
  int64_t out_origin;  // out[0] belongs to this element of x
  double qmin, qmax;
  const KeyArguments* key;  // null: rounding to nearest
};

// Sums over the elements that share a scale follow one order, whatever the platform and the number of threads. With
// j = 0, 1, ... numbering them row-major: chunks of kChunk; within a chunk lane j % kLanes adds its terms in ascending
// order from +0; the lanes combine as a tree of distances kLanes / 2, ..., 1; the chunk sums are summed by the same
// rule.
constexpr int kChunk = 256;
constexpr int kLanes = 32;

inline int64_t ChunkCount(int64_t terms) { return (terms + kChunk - 1) / kChunk; }

// Elements of scratch one summed quantity needs: the chunk sums of every level but the last, which is the result.
inline int64_t ScratchSize(int64_t reduced, int64_t scale_size) {
  int64_t total = 0;
  for (int64_t n = ChunkCount(reduced); n > 1; n = ChunkCount(n)) total += n * scale_size;
  return total;
}

// dx, and the sums dscale and dzero_point over the elements that share a scale; null where not wanted.
struct GradientArguments {
  const ScaleView* view;
  DType type;
  bool wide;
  const void* dy;
  const void* x;
  const void* scale;
  const void* zero_point;
  void* dx;
  void* dscale;
  void* dzero_point;
  void* scratch;  // ScratchSize elements for dscale, then as many for dzero_point
  double qmin, qmax;
  const KeyArguments* key;
};

// Packing of `bits`-wide codes along the last axis, low bits first; a row's odd tail is padded with zeros.
struct PackArguments {
  int64_t rows, row_size;  // of unpacked codes
  int bits;
  bool is_signed;
  const void* in;
  void* out;
};

}  // namespace jq
