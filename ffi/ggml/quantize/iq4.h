// IQ4_NL and IQ4_XS: the nearest of sixteen uneven values, under a scale per 32 values. Lanes as in lanes.h: of IQ4_NL
// a lane is a block, of IQ4_XS a super-block.
// Quantize(format, tile, writer) as in simple.h.
#pragma once

#include <cstddef>

#include "ffi/ggml/quantize/simple.h"
#include "ffi/ggml/tables.h"

namespace jq {
namespace ggml {

// Halfway between neighbours in kValuesIQ4. ggml compares rounded distances to both; near the middle these are exact.
JQ_TABLE(float, kMiddlesIQ4, 15) = {-115.5f, -93.5f, -74.0f, -57.0f, -42.0f, -28.5f, -16.0f, -4.5f,
                                    7.0f,    19.0f,  31.5f,  45.5f,  61.0f,  79.0f,  101.0f};

template <typename V>
struct NearestIQ4 {
  IntOf<V> code;
  V value;
};

// NaN counts as large.
template <typename V>
JQ_HOST_DEVICE NearestIQ4<V> FindNearestIQ4(V v) {
  using Int = IntOf<V>;
  // A binary search, where its tables fit a register.
#if defined(__AVX2__) && !defined(__clang__) && !defined(__CUDACC__)
  constexpr const float* m = kMiddlesIQ4;
  constexpr const int8_t* q = kValuesIQ4;
  if constexpr (kLanes<V> == 8) {
    const V quarters = {m[1], m[1], m[5], m[5], m[9], m[9], m[13], m[13]};
    const V eighths = {m[0], m[2], m[4], m[6], m[8], m[10], m[12], m[14]};
    const V even = {q[0], q[2], q[4], q[6], q[8], q[10], q[12], q[14]};
    const V odd = {q[1], q[3], q[5], q[7], q[9], q[11], q[13], q[15]};
    const Int below_half = v < m[7];
    Int pair = ~below_half & 4;
    pair |= ~(v < Choose(below_half, Splat<V>(m[3]), Splat<V>(m[11]))) & 2;
    pair |= ~(v < __builtin_shuffle(quarters, pair)) & 1;
    const Int below = v < __builtin_shuffle(eighths, pair);
    return {pair + pair + 1 + below, Choose(below, __builtin_shuffle(even, pair), __builtin_shuffle(odd, pair))};
  }
  if constexpr (kLanes<V> == 16) {
    const V middles = {m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8], m[9], m[10], m[11], m[12], m[13], m[14]};
    const V values = {q[0], q[1], q[2],  q[3],  q[4],  q[5],  q[6],  q[7],
                      q[8], q[9], q[10], q[11], q[12], q[13], q[14], q[15]};
    Int code = {};
    for (int step = 8; step > 0; step /= 2) {
      const MaskOf<V> below = v < __builtin_shuffle(middles, code + (step - 1));
      code = Choose(below, code, code + step);
    }
    return {code, __builtin_shuffle(values, code)};
  }
#endif
  Int code = {}, value = Int{} + kValuesIQ4[0];
  for (int i = 0; i < 15; ++i) {
    const MaskOf<V> below = v < kMiddlesIQ4[i];
    code += Choose(below, Int{}, Int{} + 1);
    value += Choose(below, Int{}, Int{} + (kValuesIQ4[i + 1] - kValuesIQ4[i]));
  }
  return {code, ToReal<V>(value)};
}

// The scale of 32 values under which their weighted error is least.
template <typename V>
JQ_HOST_DEVICE V SearchScaleIQ4(const V* x, const V* w) {
  const Extreme<V> extreme = ExtremeOf<32>(x);
  V scale = {}, best = {};
  for (int step = -1; step < 15; ++step) {
    const V inverse = step < 0 ? 1.0f / (-extreme.value / -127.0f) : static_cast<float>(step - 7 - 127) / extreme.value;
    V sum_qx = {}, sum_q2 = {};
    for (int i = 0; i < 32; ++i) {
      const V q = FindNearestIQ4(inverse * x[i]).value;
      const V wq = w[i] * q;
      sum_qx += wq * x[i];
      sum_q2 += wq * q;
    }
    const MaskOf<V> positive = sum_q2 > 0.0f;
    const MaskOf<V> better = step < 0 ? positive : positive & (sum_qx * sum_qx > best * sum_q2);
    scale = Choose(better, sum_qx / sum_q2, scale);
    best = step < 0 ? scale * sum_qx : Choose(better, scale * sum_qx, best);
  }
  return Choose(extreme.magnitude < kGroupMaximum, V{}, scale);
}

template <typename V>
JQ_HOST_DEVICE V InverseOrZero(V v) {
  return Choose(v != 0.0f, 1.0f / v, V{});
}

template <typename V>
JQ_HOST_DEVICE void NearestCodesIQ4(const V* x, V inverse, IntOf<V>* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = FindNearestIQ4(inverse * x[i]).code;
}

// The scales of all sub-blocks.
template <typename F, typename V>
JQ_HOST_DEVICE void SearchScalesIQ4(const Tile<V>& tile, V* scales) {
  V sigma2 = {};  // of the block, not of the row
  if (tile.weights) {
    for (int i = 0; i < F::kBlock; ++i) sigma2 += tile.x[i] * tile.x[i];
    sigma2 *= 2.0f / F::kBlock;
  }
  for (int first = 0; first < F::kBlock; first += 32) {
    V w[32];
    for (int i = 0; i < 32; ++i) {
      const V v = tile.x[first + i];
      w[i] = tile.weights ? tile.weights[first + i] * Sqrt(sigma2 + v * v) : v * v;
    }
    scales[first / 32] = SearchScaleIQ4(tile.x + first, w);
  }
}

template <typename V>
JQ_HOST_DEVICE void Quantize(IQ4_NL, const Tile<V>& tile, const Writer<IQ4_NL, V>& out) {
  V scale;
  SearchScalesIQ4<IQ4_NL>(tile, &scale);
  IntOf<V> codes[32];
  NearestCodesIQ4(tile.x, InverseOrZero(scale), codes);
  PutNibbles<32, V>(codes, out, offsetof(IQ4_NL, qs));
  out.template Put<2>(offsetof(IQ4_NL, d), HalfBits(scale));
}

template <typename V>
JQ_HOST_DEVICE void Quantize(IQ4_XS, const Tile<V>& tile, const Writer<IQ4_XS, V>& out) {
  using Int = IntOf<V>;
  V scales[8];
  SearchScalesIQ4<IQ4_XS>(tile, scales);
  const V d = -ExtremeOf<8>(scales).value / 32.0f;
  const V inverse = InverseOrZero(d);
  Int low = {}, high = {};
  for (int sub = 0; sub < 8; ++sub) {
    const Int l = Clamp(NearestInt(inverse * scales[sub]), -32, 31);
    Int codes[32];
    NearestCodesIQ4(tile.x + 32 * sub, InverseOrZero(d * ToReal<V>(l)), codes);
    PutNibbles<32, V>(codes, out, static_cast<int>(offsetof(IQ4_XS, qs)) + 16 * sub);
    low |= ((l + 32) & 15) << (4 * sub);
    high |= ((l + 32) >> 4) << (2 * sub);
  }
  out.template Put<2>(offsetof(IQ4_XS, d), HalfBits(d));
  out.template Put<2>(offsetof(IQ4_XS, scales_h), high);
  out.template Put<4>(offsetof(IQ4_XS, scales_l), low);
}

}  // namespace ggml
}  // namespace jq
