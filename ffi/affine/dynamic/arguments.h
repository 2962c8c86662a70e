// What the handlers of dynamic quantisation hand to a kernel.
#pragma once

#include <cstdint>

#include "ffi/affine/arguments.h"

namespace jq {

// The range of the finite values of each block. absolute: the largest magnitude alone, in high.
struct RangeArguments {
  const ScaleView* view;
  DType type;
  bool absolute;
  const void* x;
  float* low;
  float* high;
};

// Scales from the ranges, then the map: its scale and zero_point are results, which the kernel writes.
struct DynamicArguments {
  MapArguments map;
  const PackArguments* packing;  // null: no packed codes
  bool symmetric;
  void* scale;
  void* zero_point;
};

}  // namespace jq
