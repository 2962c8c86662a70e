// What the histogram handlers hand to a kernel.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"
#include "ffi/common/scale_view.h"

namespace jq {

// For each element of the view's scale (a group of x's elements): `tables` tables of `size` counts, row-major. Either
// bins between low and high, or digits of the values whose leading bits are a prefix (low is null then).
struct HistogramArguments {
  const ScaleView* view;
  DType type;
  const void* x;
  bool magnitude;
  const float* low;
  const float* high;
  const uint32_t* prefix;  // `tables` for each group
  int shift, width;
  int64_t tables, size;
  int32_t* counts;
};

// How the CPU divides the work. A unit is a tile of neighbouring groups and a slice of the elements of each.
struct HistogramPlan {
  static constexpr int kColumns = 16;
  bool columns;            // the run is one of groups: a tile is up to kColumns of them; else it is one group
  int64_t tiles, slices;   // units are tiles * slices; several slices of a tile add to zeroed counts
  int64_t reduced, slice;  // elements of a group, of a slice
  int copies;      // 1 or 2: tables of the same counts, so that equal values in a row do not wait for each other
  int64_t stride;  // of tables, in words
  int64_t ScratchWords() const { return (columns ? kColumns : copies) * stride; }
};

}  // namespace jq
