// Both eights of a panel in vectors of 512 bits: how integer products are scaled and added, here and in tiles.h, and
// the products of eight positions with VNNI. Sums are those of micro.h, in the same order.
#pragma once

#include "ffi/ggml/linear/panel.h"

#if defined(JQ_VNNI)

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

// gcc 12 says of the form without a mask that it uses an uninitialised value.
JQ_INLINE __m512 ToFloats(__m512i integers) { return _mm512_maskz_cvtepi32_ps(0xffff, integers); }

// out[t] += what span s gives. product(h, t): the integer products of half h (or all) of the span with position t;
// scale(t): of its activations; scaled(h, t): with the sum of their codes.
template <typename K, int kPositions, typename Product, typename Scale, typename Scaled>
JQ_INLINE void AddScaled(const Panel& panel, int s, const Product& product, const Scale& scale, const Scaled& scaled,
                         __m512 (&out)[kPositions]) {
  if constexpr (K::kIntegerScales) {
    // Products with their scales have at most 24 bits, and so have the sums of two: float32 holds them all.
    const __m512 integer_scales[2] = {ToFloats(_mm512_load_si512(panel.integer_scales[s][0][0])),
                                      ToFloats(_mm512_load_si512(panel.integer_scales[s][1][0]))};
    const __m512 factor = _mm512_load_ps(panel.factor[0]);
#pragma GCC unroll 16
    for (int t = 0; t < kPositions; ++t) {
      const __m512 first = _mm512_mul_ps(ToFloats(product(0, t)), integer_scales[0]);
      const __m512 both = _mm512_fmadd_ps(ToFloats(product(1, t)), integer_scales[1], first);
      const __m512 scales = _mm512_mul_ps(factor, _mm512_set1_ps(scale(t)));
      out[t] = _mm512_add_ps(out[t], _mm512_mul_ps(scales, both));
    }
  } else {
#pragma GCC unroll 2
    for (int h = 0; h < kSpan / K::kGroup; ++h) {
      const __m512 weight_scale = _mm512_load_ps(panel.scales[s][h][0]);
#pragma GCC unroll 16
      for (int t = 0; t < kPositions; ++t) {
        const __m512 scales = _mm512_mul_ps(weight_scale, _mm512_set1_ps(scale(t)));
        out[t] = _mm512_add_ps(out[t], _mm512_mul_ps(scales, ToFloats(product(h, t))));
      }
      if constexpr (K::kOffset) {
        const __m512 offset = _mm512_load_ps(panel.offsets[s][h][0]);
#pragma GCC unroll 16
        for (int t = 0; t < kPositions; ++t) {
          out[t] = _mm512_add_ps(out[t], _mm512_mul_ps(offset, _mm512_set1_ps(scaled(h, t))));
        }
      }
    }
  }
}

constexpr int kWidePositions = 8;

// sums: kWidePositions times kPanelRows floats.
template <typename K>
__attribute__((noinline)) void MultiplyWide(const Panel& panel, int spans, const ActivationSpan* const* activations,
                                            float* sums) {
  constexpr int T = kWidePositions, kGroups = kSpan / K::kGroup, kWords = K::kGroup / 4;
  const ActivationSpan* x[T];
  for (int t = 0; t < T; ++t) x[t] = activations[t];
  __m512 out[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) out[t] = _mm512_loadu_ps(sums + t * kPanelRows);
  for (int s = 0; s < spans; ++s) {
    __m512i products[kGroups][T];
#pragma GCC unroll 2
    for (int h = 0; h < kGroups; ++h) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const bool from_zero = K::kTakenBack == Zero::kNone;
        products[h][t] = from_zero ? _mm512_setzero_si512() : _mm512_set1_epi32(x[t]->sums.wide[h]);
      }
#pragma GCC unroll 8
      for (int i = h * kWords; i < (h + 1) * kWords; ++i) {
        const __m512i codes = _mm512_load_si512(panel.codes[s][i][0]);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          int32_t word;
          memcpy(&word, x[t]->codes + 4 * i, sizeof(word));
          products[h][t] = _mm512_dpbusd_epi32(products[h][t], codes, _mm512_set1_epi32(word));
        }
      }
    }
    AddScaled<K>(
        panel, s, [&](int h, int t) { return products[h][t]; }, [&](int t) { return x[t]->scale; },
        [&](int h, int t) { return x[t]->sums.scaled[h]; }, out);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) ++x[t];
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) _mm512_storeu_ps(sums + t * kPanelRows, out[t]);
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq

#endif
