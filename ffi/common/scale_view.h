// How a scale and a zero point lie over x: the one place that knows granularities.
//
// Each axis of the scale is 1, x's, or a number of blocks of x's axis; each axis of the zero point is 1 or the scale's.
// Folded into as few dimensions as possible, a tensor becomes nested loops whose innermost one is a run of consecutive
// elements that share one scale (step 0) or have consecutive scales (step 1): no kernel computes an index per element.
#pragma once

#include <cstdint>

namespace jq {

struct ScaleView {
  static constexpr int kMaxDims = 16;
  struct Dim {
    int64_t size, stride, scale_stride, zero_point_stride;
  };

  int64_t size = 0;        // elements of x
  int64_t scale_size = 0;  // elements of the scale
  int64_t zero_point_size = 0;
  int dims = 0;  // at least 1; the last is the run
  Dim dim[kMaxDims];

  const Dim& run() const { return dim[dims - 1]; }

  // The reduction that belongs to each element of the scale: x's elements that share it, in row-major order.
  int64_t ReducedSize() const { return scale_size == 0 ? 0 : size / scale_size; }
};

enum class ScaleViewError { kOk, kRank, kTooManyDims, kScale, kZeroPoint };

// Fills `view`; on an error `axis` names the one at fault.
inline ScaleViewError MakeScaleView(const int64_t* x, int x_rank, const int64_t* scale, int scale_rank,
                                    const int64_t* zero_point, int zero_point_rank, ScaleView* view, int* axis) {
  *axis = 0;
  if (scale_rank != x_rank || zero_point_rank != x_rank) return ScaleViewError::kRank;
  view->size = view->scale_size = view->zero_point_size = 1;
  for (int d = 0; d < x_rank; ++d) {
    *axis = d;
    const int64_t n = x[d], m = scale[d], k = zero_point[d];
    if (m != n && m != 1 && (m <= 0 || n % m != 0)) return ScaleViewError::kScale;
    if (k != m && k != 1) return ScaleViewError::kZeroPoint;
    view->size *= n;
    view->scale_size *= m;
    view->zero_point_size *= k;
  }
  view->dims = 0;
  if (view->size == 0) return ScaleViewError::kOk;

  // From the last axis to the first, as (blocks, block) pairs, merged with the dimension inside where strides allow.
  ScaleView::Dim reversed[ScaleView::kMaxDims];
  int count = 0;
  int64_t stride = 1, scale_stride = 1, zero_point_stride = 1;
  bool overflow = false;
  const auto push = [&](int64_t size, int64_t s, int64_t z) {
    if (size == 1) return;
    if (count > 0) {
      ScaleView::Dim& inner = reversed[count - 1];
      if (s == inner.scale_stride * inner.size && z == inner.zero_point_stride * inner.size) {
        inner.size *= size;
        stride *= size;
        return;
      }
    }
    if (count == ScaleView::kMaxDims) {
      overflow = true;
      return;
    }
    reversed[count++] = {size, stride, s, z};
    stride *= size;
  };
  for (int d = x_rank - 1; d >= 0; --d) {
    const int64_t blocks = scale[d];
    push(x[d] / blocks, 0, 0);
    push(blocks, blocks > 1 ? scale_stride : 0, zero_point[d] > 1 ? zero_point_stride : 0);
    scale_stride *= blocks;
    zero_point_stride *= zero_point[d];
  }
  if (overflow) return ScaleViewError::kTooManyDims;
  if (count == 0) reversed[count++] = {1, 1, 0, 0};
  view->dims = count;
  for (int i = 0; i < count; ++i) view->dim[i] = reversed[count - 1 - i];
  return ScaleViewError::kOk;
}

}  // namespace jq
