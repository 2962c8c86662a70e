// The loops of an operation, from its mathematics. Plain code that the compiler vectorises for JQ_ISA; everything is in
// an anonymous namespace, so that code of one instruction set is never merged with that of another.
#pragma once

#include <cstring>
#include <type_traits>

#include "ffi/affine/cpu_kernels.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <typename Math>
struct ValueOf {
  static constexpr bool kNoisy = kKeyed<Math>;
  template <typename Real>
  static JQ_HOST_DEVICE Real At(Real, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range, Real u) {
    return Rounded<Math, Real>::Value(x, scale, zero_point, range, u);
  }
};
template <typename Math>
struct GradientOf {
  static constexpr bool kNoisy = kKeyed<Math>;
  template <typename Real>
  static JQ_HOST_DEVICE Real At(Real dy, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range, Real u) {
    return Rounded<Math, Real>::Gradient(dy, x, scale, zero_point, range, u).dx;
  }
};

template <typename Function, typename Real, typename X, typename Out>
void MapLoop(const Real* __restrict dy, const void* x_data, void* out_data, int64_t n, const Real* __restrict scale,
             const Real* __restrict zero_point, bool per_element, Range<Real> range, const Real* __restrict noise) {
  const X* x = static_cast<const X*>(x_data);
  Out* out = static_cast<Out*>(out_data);
  // x may be out (donated buffers), element for element: no dependence between iterations.
  if (per_element) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      out[i] = Convert<Out>(Function::At(dy[i], Convert<Real>(x[i]), Divisor<Real>::Of(scale[i]),
                                         RoundZeroPoint(zero_point[i]), range, Function::kNoisy ? noise[i] : Real(0)));
    }
    return;
  }
  const Divisor<Real> divisor = Divisor<Real>::Of(*scale);
  const Real zero = RoundZeroPoint(*zero_point);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Convert<Out>(
        Function::At(dy[i], Convert<Real>(x[i]), divisor, zero, range, Function::kNoisy ? noise[i] : Real(0)));
  }
}

// dx where it is the same whatever is drawn, as it is but for elements next to the ends of the range. A quotient is
// rounded to one of two neighbours, each of which the least or the largest of draws gives. False: drawing matters to
// some element.
template <typename Math, typename Real>
bool UndrawnLoop(const Real* __restrict dy, const Real* __restrict x, Real* __restrict dx, int64_t n,
                 const Real* __restrict scale, const Real* __restrict zero_point, bool per_element, Range<Real> range) {
  using Bits = typename std::conditional<sizeof(Real) == 4, uint32_t, uint64_t>::type;
  constexpr Real kLeast = 0, kLargest = 1 - Real(5.9604644775390625e-8);  // 1 - 2^-24
  Bits different = 0;
  const auto one = [&](int64_t i, Divisor<Real> divisor, Real zero) {
    const Real low = Rounded<Math, Real>::Gradient(dy[i], x[i], divisor, zero, range, kLeast).dx;
    const Real high = Rounded<Math, Real>::Gradient(dy[i], x[i], divisor, zero, range, kLargest).dx;
    different |= BitCast<Bits>(low) ^ BitCast<Bits>(high);
    dx[i] = low;
  };
  if (per_element) {
    for (int64_t i = 0; i < n; ++i) one(i, Divisor<Real>::Of(scale[i]), RoundZeroPoint(zero_point[i]));
  } else {
    const Divisor<Real> divisor = Divisor<Real>::Of(*scale);
    const Real zero = RoundZeroPoint(*zero_point);
    for (int64_t i = 0; i < n; ++i) one(i, divisor, zero);
  }
  return different == 0;
}

// The sum of n terms of one chunk, in the order of arguments.h; terms has room for whole rows of kLanes. In registers,
// said explicitly: for a short row this is most of the work, and the compiler would keep the lanes in memory.
template <typename Real>
inline __attribute__((always_inline)) Real SumChunk(Real* terms, int64_t n) {
#if defined(__AVX__)
  constexpr int kBytes = 32;
#else
  constexpr int kBytes = 16;
#endif
  typedef Real Vector __attribute__((vector_size(kBytes)));
  constexpr int kWidth = kBytes / sizeof(Real), kVectors = kLanes / kWidth;
  for (int64_t i = n; i % kLanes != 0; ++i) terms[i] = 0;
  Vector lanes[kVectors] = {};
  for (int64_t row = 0; row < n; row += kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      Vector vector;
      memcpy(&vector, terms + row + i * kWidth, sizeof(vector));
      lanes[i] += vector;
    }
  }
#pragma GCC unroll 8
  for (int distance = kVectors / 2; distance > 0; distance /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < distance; ++i) lanes[i] += lanes[i + distance];
  }
  Real rest[kWidth];
  memcpy(rest, &lanes[0], sizeof(rest));
#pragma GCC unroll 8
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < distance; ++i) rest[i] += rest[i + distance];
  }
  return rest[0];
}

template <typename Math, typename Real>
void RowLoop(const Real* dy, const Real* x, Real* dx, int64_t n, Real scale, Real zero_point, Range<Real> range,
             const Real* __restrict noise, Real* dscale, Real* dzero_point) {
  // Terms first, then their sums: the first loop has no dependence between elements.
  alignas(64) Real scale_terms[kChunk], zero_terms[kChunk];
  const Divisor<Real> divisor = Divisor<Real>::Of(scale);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const Real u = kKeyed<Math> ? noise[i] : Real(0);
    const auto g = Rounded<Math, Real>::Gradient(dy[i], x[i], divisor, zero_point, range, u);
    dx[i] = g.dx;
    scale_terms[i] = g.dscale;
    zero_terms[i] = g.dzero_point;
  }
  *dscale = SumChunk(scale_terms, n);
  *dzero_point = SumChunk(zero_terms, n);
}

template <typename Math, typename Real>
void ColumnsLoop(const Real* dy, const Real* x, Real* dx, int64_t n, const Real* __restrict scale,
                 const Real* __restrict zero_point, Range<Real> range, const Real* __restrict noise,
                 Real* __restrict scale_lane, Real* __restrict zero_lane) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const Real u = kKeyed<Math> ? noise[i] : Real(0);
    const auto g = Rounded<Math, Real>::Gradient(dy[i], x[i], Divisor<Real>::Of(scale[i]), zero_point[i], range, u);
    dx[i] = g.dx;
    scale_lane[i] += g.dscale;
    zero_lane[i] += g.dzero_point;
  }
}

template <typename Math, typename Real>
constexpr Loops<Real> LoopsIn(typename Loops<Real>::Map (*value)(DType, DType)) {
  typename Loops<Real>::Undrawn undrawn = nullptr;
  if constexpr (kKeyed<Math>) undrawn = UndrawnLoop<Math, Real>;
  return {value, MapLoop<GradientOf<Math>, Real, Real, Real>, undrawn, RowLoop<Math, Real>, ColumnsLoop<Math, Real>};
}
template <typename Math>
constexpr AffineLoops LoopsOf(Loops<float>::Map (*single)(DType, DType), Loops<double>::Map (*wide)(DType, DType)) {
  return {LoopsIn<Math, float>(single), LoopsIn<Math, double>(wide)};
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace jq
