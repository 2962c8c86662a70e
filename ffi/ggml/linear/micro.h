// The innermost products: T rows of activations with S times eight rows of weights. Sums run over k in ascending order,
// whatever the tile:
//
//   int8:   sum = sum + (weight scale * activation scale) * (integer product of a group)
//           sum = sum + weight offset * (activation scale * sum of activation codes)
//   float:  sum = sum + (sum of 32 products, from zero)
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/ggml/linear/panel.h"

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

#if defined(__AVX2__)

JQ_INLINE __m256i Broadcast(const void* word) {
  int32_t bits;
  memcpy(&bits, word, sizeof(bits));
  return _mm256_set1_epi32(bits);
}

// Keeps a sum as it is written: regrouped by the compiler, all products would come first, and leave the registers.
JQ_INLINE __m256i InOrder(__m256i sum) {
#if defined(__AVX512VL__)
  asm("" : "+v"(sum));
#else
  asm("" : "+x"(sum));
#endif
  return sum;
}

struct PanelSource {
  const Panel* panel;
  JQ_INLINE __m256i Code(int s, int i) const {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(panel->codes[s][i]));
  }
  JQ_INLINE __m256 Scale(int s, int h) const { return _mm256_load_ps(panel->scales[s][h]); }
  JQ_INLINE __m256 Offset(int s, int h) const { return _mm256_load_ps(panel->offsets[s][h]); }
};

// The integer products of half h (or all) of span s.
template <typename K, int T, int S, typename Source>
JQ_INLINE void GroupProducts(const Source (&w)[S], int s, int h, const ActivationSpan* const (&x)[T],
                             __m256i (&sums)[T][S]) {
  constexpr int kWords = K::kGroup / 4;
#if defined(JQ_VNNI)
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < S; ++v) sums[t][v] = K::kHasZero ? Broadcast(&x[t]->sums.integer[h]) : _mm256_setzero_si256();
  }
#pragma GCC unroll 8
  for (int i = h * kWords; i < (h + 1) * kWords; ++i) {
    __m256i codes[S];
#pragma GCC unroll 2
    for (int v = 0; v < S; ++v) codes[v] = w[v].Code(s, i);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256i word = Broadcast(x[t]->codes + 4 * i);
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) sums[t][v] = _mm256_dpbusd_epi32(sums[t][v], codes[v], word);
    }
  }
#else
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (K::kRun == 0) {
    // No product has two operands of eight signed bits: the sign of the code goes to the activation.
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) {
      __m256i codes[S];
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) codes[v] = w[v].Code(s, h * kWords + i);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i word = Broadcast(x[t]->codes + 4 * (h * kWords + i));
#pragma GCC unroll 2
        for (int v = 0; v < S; ++v) {
          const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[v]), _mm256_sign_epi8(word, codes[v]));
          const __m256i wide = _mm256_madd_epi16(pairs, ones);
          sums[t][v] = i == 0 ? wide : InOrder(_mm256_add_epi32(sums[t][v], wide));
        }
      }
    }
  } else {
    constexpr int kRun = K::kRun < kWords ? K::kRun : kWords;
    __m256i pairs[T][S];
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) {
      __m256i codes[S];
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) codes[v] = w[v].Code(s, h * kWords + i);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i word = Broadcast(x[t]->codes + 4 * (h * kWords + i));
#pragma GCC unroll 2
        for (int v = 0; v < S; ++v) {
          const __m256i product = _mm256_maddubs_epi16(codes[v], word);
          pairs[t][v] = i % kRun == 0 ? product : InOrder(_mm256_add_epi16(pairs[t][v], product));
          if (i % kRun == kRun - 1) {
            const __m256i wide = _mm256_madd_epi16(pairs[t][v], ones);
            sums[t][v] = i < kRun ? wide : InOrder(_mm256_add_epi32(sums[t][v], wide));
          }
        }
      }
    }
  }
  if constexpr (K::kHasZero) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256i correction = Broadcast(&x[t]->sums.integer[h]);
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) sums[t][v] = _mm256_add_epi32(sums[t][v], correction);
    }
  }
#endif
}

template <typename K, int T, int S, typename Source>
JQ_INLINE void SpanProducts(const Source (&w)[S], int s, const ActivationSpan* const (&x)[T], __m256 (&out)[T][S]) {
#pragma GCC unroll 2
  for (int h = 0; h < kSpan / K::kGroup; ++h) {
    __m256i sums[T][S];
    GroupProducts<K>(w, s, h, x, sums);
#pragma GCC unroll 2
    for (int v = 0; v < S; ++v) {
      const __m256 scale = w[v].Scale(s, h);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256 scales = _mm256_mul_ps(scale, _mm256_broadcast_ss(&x[t]->scale));
        out[t][v] = _mm256_add_ps(out[t][v], _mm256_mul_ps(scales, _mm256_cvtepi32_ps(sums[t][v])));
      }
      if constexpr (K::kOffset) {
        const __m256 offset = w[v].Offset(s, h);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const __m256 sum = _mm256_broadcast_ss(&x[t]->sums.scaled[h]);
          out[t][v] = _mm256_add_ps(out[t][v], _mm256_mul_ps(offset, sum));
        }
      }
    }
  }
}

template <int T, int S>
JQ_INLINE void LoadSums(const float* sums, __m256 (&out)[T][S]) {
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < S; ++v) out[t][v] = _mm256_loadu_ps(sums + t * kPanelRows + v * kLanes);
  }
}
template <int T, int S>
JQ_INLINE void StoreSums(const __m256 (&out)[T][S], float* sums) {
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < S; ++v) _mm256_storeu_ps(sums + t * kPanelRows + v * kLanes, out[t][v]);
  }
}

// sums: T times kPanelRows floats.
template <typename K, int T, int S>
__attribute__((noinline)) void Multiply(const Panel* panels, int spans, const ActivationSpan* const* activations,
                                        float* sums) {
  const ActivationSpan* x[T];
  for (int t = 0; t < T; ++t) x[t] = activations[t];
  PanelSource w[S];
  for (int v = 0; v < S; ++v) w[v].panel = panels + v;
  __m256 out[T][S];
  LoadSums(sums, out);
  for (int s = 0; s < spans; ++s) {
    SpanProducts<K>(w, s, x, out);
    for (int t = 0; t < T; ++t) ++x[t];
  }
  StoreSums(out, sums);
}

// The same without a panel between, for a whole row and eight rows of weights.
template <typename F, int T>
__attribute__((noinline)) void MultiplyDirectly(const Rows<F>& rows, int64_t blocks,
                                                const ActivationSpan* const* activations, float* sums) {
  const ActivationSpan* x[T];
  for (int t = 0; t < T; ++t) x[t] = activations[t];
  __m256 out[T][1];
  LoadSums(sums, out);
  for (int64_t b = 0; b < blocks; ++b) {
    alignas(64) uint8_t buffer[kLanes * sizeof(F)];
    rows.Prefetch(b);
    const Lanes<F> w[1] = {Lanes<F>(rows.Prepared(b, buffer))};
#pragma GCC unroll 8
    for (int s = 0; s < F::kBlock / kSpan; ++s) {
      SpanProducts<KindOf<F>>(w, s, x, out);
      for (int t = 0; t < T; ++t) ++x[t];
    }
  }
  StoreSums(out, sums);
}

#else

template <typename K, int T, int S>
__attribute__((noinline)) void Multiply(const Panel* panels, int spans, const ActivationSpan* const* activations,
                                        float* sums) {
  constexpr int kWords = K::kGroup / 4;
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < S; ++v) {
      const Panel& w = panels[v];
      float* out = sums + t * kPanelRows + v * kLanes;
      for (int s = 0; s < spans; ++s) {
        const ActivationSpan& x = activations[t][s];
        for (int h = 0; h < kSpan / K::kGroup; ++h) {
          int32_t products[kLanes] = {};
          for (int i = h * kWords; i < (h + 1) * kWords; ++i) {
            for (int row = 0; row < kLanes; ++row) {
              for (int j = 0; j < 4; ++j) {
                products[row] += static_cast<int8_t>(w.codes[s][i][4 * row + j]) * x.codes[4 * i + j];
              }
            }
          }
          for (int row = 0; row < kLanes; ++row) {
            out[row] = out[row] + w.scales[s][h][row] * x.scale * static_cast<float>(products[row]);
            if constexpr (K::kOffset) out[row] = out[row] + w.offsets[s][h][row] * x.sums.scaled[h];
          }
        }
      }
    }
  }
}

#endif

// Eight floats, for every instruction set.
typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));

template <int T, int S>
__attribute__((noinline)) void Multiply(const ValuePanel* panels, int count, const float* const* activations,
                                        float* sums) {
  const float* x[T];
  for (int t = 0; t < T; ++t) x[t] = activations[t];
  for (int first = 0; first < count; first += kSpan) {
    const int last = count - first < kSpan ? count : first + kSpan;
    Floats partial[T][S];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) partial[t][v] = Floats{};
    }
    for (int k = first; k < last; ++k) {
      Floats values[S];
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) values[v] = *reinterpret_cast<const Floats*>(panels[v].at[k]);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < S; ++v) partial[t][v] = partial[t][v] + values[v] * x[t][k];
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) {
        Floats* out = reinterpret_cast<Floats*>(sums + t * kPanelRows + v * kLanes);
        *out = *out + partial[t][v];
      }
    }
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq
