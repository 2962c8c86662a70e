// Index arithmetic on the device: division by launch constants as a multiplication and a shift, and the way from an
// element of x to its scale.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_portable.h"
#include "ffi/common/numeric.h"
#include "ffi/common/scale_view.h"

namespace jq {

// n / divisor for 0 <= n < 2^63, and faster for n < 2^31 (Granlund and Montgomery, 1994; the multiplier's top bit is
// implied, hence the addition).
struct FastDivider {
  uint64_t divisor = 1, wide_multiplier = 1;
  uint32_t multiplier = 1, shift = 0;

  FastDivider() = default;
  explicit FastDivider(int64_t d) : divisor(static_cast<uint64_t>(d)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const unsigned __int128 rest = (uint64_t{1} << shift) - divisor;
    wide_multiplier = static_cast<uint64_t>((rest << 64) / divisor + 1);
    multiplier = static_cast<uint32_t>((rest << 32) / divisor + 1);
  }

  __device__ __forceinline__ uint64_t Divide(uint64_t n) const { return (__umul64hi(n, wide_multiplier) + n) >> shift; }
  __device__ __forceinline__ uint32_t Divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// A ScaleView as a kernel parameter.
struct DeviceView {
  struct Dim {
    FastDivider size;
    int64_t scale_stride, zero_point_stride;
  };
  int dims;
  bool small;  // every index fits 31 bits
  Dim dim[ScaleView::kMaxDims];

  DeviceView() = default;
  explicit DeviceView(const ScaleView& view) : dims(view.dims), small(view.size < (int64_t{1} << 31)) {
    for (int d = 0; d < dims; ++d) {
      dim[d] = {FastDivider(view.dim[d].size), view.dim[d].scale_stride, view.dim[d].zero_point_stride};
    }
  }

  // Where the run of an element begins: its scale and zero point; `at` is the element's place in the run.
  struct Place {
    int64_t scale, zero_point, at;
  };

  // Of element e of x.
  __device__ __forceinline__ Place Find(int64_t e) const {
    return small ? FindWith<uint32_t>(static_cast<uint32_t>(e)) : FindWith<uint64_t>(static_cast<uint64_t>(e));
  }
  // Of the first element of run r.
  __device__ __forceinline__ Place FindRun(int64_t r) const {
    return small ? FindRunWith<uint32_t>(static_cast<uint32_t>(r)) : FindRunWith<uint64_t>(static_cast<uint64_t>(r));
  }

 private:
  template <typename Index>
  __device__ __forceinline__ Place FindWith(Index e) const {
    if (dims == 1) return {0, 0, static_cast<int64_t>(e)};
    const Index run = dim[dims - 1].size.Divide(e);
    Place place = FindRunWith<Index>(run);
    place.at = static_cast<int64_t>(e - run * static_cast<Index>(dim[dims - 1].size.divisor));
    return place;
  }
  template <typename Index>
  __device__ __forceinline__ Place FindRunWith(Index rest) const {
    Index scale = 0, zero_point = 0;
#pragma unroll 1
    for (int d = dims - 2; d > 0; --d) {
      const Index outer = dim[d].size.Divide(rest);
      const Index index = rest - outer * static_cast<Index>(dim[d].size.divisor);
      scale += index * static_cast<Index>(dim[d].scale_stride);
      zero_point += index * static_cast<Index>(dim[d].zero_point_stride);
      rest = outer;
    }
    if (dims > 1) {  // the outermost index is what is left
      scale += rest * static_cast<Index>(dim[0].scale_stride);
      zero_point += rest * static_cast<Index>(dim[0].zero_point_stride);
    }
    return {static_cast<int64_t>(scale), static_cast<int64_t>(zero_point), 0};
  }
};

}  // namespace jq
