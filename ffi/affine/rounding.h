// How a quotient is rounded: half to even, or up or down as a key and the element's place in its array decide. The rule
// of jaxquant/affine/stochastic.py, for host and device.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"

namespace jq {

struct Nearest {
  template <typename Real>
  JQ_HOST_DEVICE Real Round(Real t) const {
    return RoundHalfToEven(t);
  }
  template <typename Real>
  JQ_HOST_DEVICE Real RoundedQuotient(Divisor<Real> scale, Real x) const {
    return scale.RoundedQuotient(x);
  }
};

JQ_HOST_DEVICE float Floor(float value) {
#if defined(__CUDA_ARCH__)
  return floorf(value);
#else
  return __builtin_floorf(value);
#endif
}
JQ_HOST_DEVICE double Floor(double value) {
#if defined(__CUDA_ARCH__)
  return floor(value);
#else
  return __builtin_floor(value);
#endif
}

template <typename Real>
struct Drawn {
  Real u;  // in [0, 1)

  // floor(t + u), but that the sum is not rounded: what lies on the grid stays there. Never -0.
  JQ_HOST_DEVICE Real Round(Real t) const {
    const Real down = Floor(t);
    return down + Keep(u >= Real(1) - (t - down), Real(1));
  }
  JQ_HOST_DEVICE Real RoundedQuotient(Divisor<Real> scale, Real x) const { return Round(scale.Quotient(x)); }
};

// An operation's mathematics with drawn rounding.
template <typename Math>
struct Keyed {};
template <typename Math>
constexpr bool kKeyed = false;
template <typename Math>
constexpr bool kKeyed<Keyed<Math>> = true;

// u counts only where Math is Keyed.
template <typename Math, typename Real>
struct Rounded {
  static JQ_HOST_DEVICE Real Value(Real x, Divisor<Real> scale, Real zero_point, Range<Real> range, Real) {
    return Math::Value(x, scale, zero_point, range);
  }
  static JQ_HOST_DEVICE auto Gradient(Real dy, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range, Real) {
    return Math::template Gradient<Real>::Of(dy, x, scale, zero_point, range);
  }
};
template <typename Math, typename Real>
struct Rounded<Keyed<Math>, Real> {
  static JQ_HOST_DEVICE Real Value(Real x, Divisor<Real> scale, Real zero_point, Range<Real> range, Real u) {
    return Math::Value(x, scale, zero_point, range, Drawn<Real>{u});
  }
  static JQ_HOST_DEVICE auto Gradient(Real dy, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range,
                                      Real u) {
    return Math::template Gradient<Real>::Of(dy, x, scale, zero_point, range, Drawn<Real>{u});
  }
};

// ---- What is drawn

struct RandomWords {
  uint32_t even, odd;  // of the elements 2 i and 2 i + 1
};

JQ_HOST_DEVICE uint32_t RotateLeft(uint32_t value, int distance) {
  return (value << distance) | (value >> (32 - distance));
}

template <int group>
JQ_HOST_DEVICE void ThreefryRounds(RandomWords* words, const uint32_t (&schedule)[3]) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  constexpr int d0 = kRotations[group % 2][0], d1 = kRotations[group % 2][1];
  constexpr int d2 = kRotations[group % 2][2], d3 = kRotations[group % 2][3];
  words->even += words->odd;
  words->odd = RotateLeft(words->odd, d0) ^ words->even;
  words->even += words->odd;
  words->odd = RotateLeft(words->odd, d1) ^ words->even;
  words->even += words->odd;
  words->odd = RotateLeft(words->odd, d2) ^ words->even;
  words->even += words->odd;
  words->odd = RotateLeft(words->odd, d3) ^ words->even;
  words->even += schedule[(group + 1) % 3];
  words->odd += schedule[(group + 2) % 3] + group + 1;
}

// Threefry-2x32 with 20 rounds (Salmon et al., 2011) of the counter i in two words.
JQ_HOST_DEVICE RandomWords Threefry(uint32_t key0, uint32_t key1, uint32_t high, uint32_t low) {
  const uint32_t schedule[3] = {key0, key1, key0 ^ key1 ^ 0x1bd11bdau};
  RandomWords words{high + key0, low + key1};
  ThreefryRounds<0>(&words, schedule);
  ThreefryRounds<1>(&words, schedule);
  ThreefryRounds<2>(&words, schedule);
  ThreefryRounds<3>(&words, schedule);
  ThreefryRounds<4>(&words, schedule);
  return words;
}

template <typename Real>
JQ_HOST_DEVICE Real Uniform(uint32_t word) {
  return static_cast<Real>(static_cast<int32_t>(word >> 8)) * Real(5.9604644775390625e-8);  // 2^-24
}

// ---- Where elements lie in their array

// x may be part of a larger array (a shard), and hold several arrays with keys of their own (vmap). Folded into nested
// loops, the innermost over elements with consecutive indices.
struct PlaceView {
  static constexpr int kMaxDims = 16;
  struct Dim {
    int64_t size, index_stride, key_stride;
  };
  int dims = 0;
  Dim dim[kMaxDims];

  const Dim& run() const { return dim[dims - 1]; }
};

enum class PlaceViewError { kOk, kRank, kTooManyDims, kSize, kKey };

// index_shape: sizes of the whole array along x's last axes, -1 where they are x's. key: x's rank, 1 along these axes,
// 1 or x's along the others.
inline PlaceViewError MakePlaceView(const int64_t* x, int rank, const int64_t* index_shape, int index_rank,
                                    const int64_t* key, int key_rank, PlaceView* view, int* axis) {
  *axis = 0;
  if (index_rank > rank || key_rank != rank) return PlaceViewError::kRank;
  PlaceView::Dim reversed[PlaceView::kMaxDims];
  reversed[0] = {1, 1, 0};
  int count = 1;
  int64_t index_stride = 1, key_stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    *axis = d;
    const int i = d - (rank - index_rank);
    int64_t index_step = 0, key_step = 0;
    if (i >= 0) {
      if (key[d] != 1) return PlaceViewError::kKey;
      const int64_t whole = index_shape[i] < 0 ? x[d] : index_shape[i];
      if (whole < x[d]) return PlaceViewError::kSize;
      index_step = index_stride;
      if (__builtin_mul_overflow(index_stride, whole, &index_stride)) return PlaceViewError::kSize;
    } else {
      if (key[d] != 1 && key[d] != x[d]) return PlaceViewError::kKey;
      key_step = key[d] == 1 ? 0 : key_stride;
      key_stride *= key[d];
    }
    if (x[d] == 1) continue;
    PlaceView::Dim& inner = reversed[count - 1];
    if (index_step == inner.index_stride * inner.size && key_step == inner.key_stride * inner.size) {
      inner.size *= x[d];
      continue;
    }
    if (count == PlaceView::kMaxDims) return PlaceViewError::kTooManyDims;
    reversed[count++] = {x[d], index_step, key_step};
  }
  view->dims = count;
  for (int i = 0; i < count; ++i) view->dim[i] = reversed[count - 1 - i];
  return PlaceViewError::kOk;
}

// What a handler hands to a kernel with stochastic rounding.
struct KeyArguments {
  const PlaceView* view;
  const uint32_t* key0;
  const uint32_t* key1;
  const uint32_t* origin;  // low and high word of the index of the first element
};

}  // namespace jq
