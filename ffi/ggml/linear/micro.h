// The innermost products: T rows of activations with S times eight rows of weights. Sums run over k in ascending order,
// whatever the tile:
//
//   int8:   sum = sum + (weight scale * activation scale) * (integer product of a group)
//           sum = sum + weight offset * (activation scale * sum of activation codes)
//           where the scales of a block are integers and a factor, for 32 values at a time:
//           sum = sum + (factor * activation scale) * (sum of integer scale * integer product)
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
  int v;
  JQ_INLINE __m256i Code(int s, int i) const {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(panel->codes[s][i][v]));
  }
  JQ_INLINE __m256 Scale(int s, int h) const { return _mm256_load_ps(panel->scales[s][h][v]); }
  JQ_INLINE __m256 Offset(int s, int h) const { return _mm256_load_ps(panel->offsets[s][h][v]); }
  JQ_INLINE __m256i IntegerScale(int s, int h) const {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(panel->integer_scales[s][h][v]));
  }
  JQ_INLINE __m256 Factor() const { return _mm256_load_ps(panel->factor[v]); }
};

// The integer products of half h (or all) of span s: of integer scales too, where there are some.
template <typename K, int T, int S, typename Source>
JQ_INLINE void GroupProducts(const Source (&w)[S], int s, int h, const ActivationSpan* const (&x)[T],
                             __m256i (&sums)[T][S]) {
  constexpr int kWords = K::kGroup / 4;
  __m256i scales[S];
#pragma GCC unroll 2
  for (int v = 0; v < S; ++v) {
    if constexpr (K::kIntegerScales) {
      scales[v] = w[v].IntegerScale(s, h);
    } else {
      scales[v] = _mm256_set1_epi16(1);
    }
  }
#if defined(JQ_VNNI)
  constexpr bool kFromZero = K::kTakenBack == Zero::kNone;
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < S; ++v) sums[t][v] = kFromZero ? _mm256_setzero_si256() : Broadcast(&x[t]->sums.wide[h]);
  }
#pragma GCC unroll 8
  for (int i = h * kWords; i < (h + 1) * kWords; ++i) {
    __m256i codes[S];
#pragma GCC unroll 2
    for (int v = 0; v < S; ++v) codes[v] = w[v].Code(s, i);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256i word = Broadcast(x[t]->codes + 4 * i);
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) sums[t][v] = _mm256_dpbusd_epi32(sums[t][v], codes[v], word);
    }
  }
  if constexpr (K::kIntegerScales) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) sums[t][v] = _mm256_mullo_epi32(sums[t][v], scales[v]);
    }
  }
#else
  constexpr int kRun = K::kRun == 0 ? 1 : K::kRun;
  __m256i pairs[T][S];
  if constexpr (K::kTakenBack == Zero::kPairs) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) pairs[t][v] = Broadcast(x[t]->sums.pairs[h]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kWords; ++i) {
    __m256i codes[S];
#pragma GCC unroll 2
    for (int v = 0; v < S; ++v) codes[v] = w[v].Code(s, h * kWords + i);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256i word = Broadcast(x[t]->codes + 4 * (h * kWords + i));
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) {
        // No instruction multiplies signed bytes: the sign of a signed code goes to the activation.
        const __m256i product = K::kRun == 0
                                    ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes[v]), _mm256_sign_epi8(word, codes[v]))
                                    : _mm256_maddubs_epi16(codes[v], word);
        const bool first = i % kRun == 0 && K::kTakenBack != Zero::kPairs;
        pairs[t][v] = first ? product : InOrder(_mm256_add_epi16(pairs[t][v], product));
        if (i % kRun == kRun - 1) {
          const __m256i wide = _mm256_madd_epi16(pairs[t][v], scales[v]);
          sums[t][v] = i < kRun ? wide : InOrder(_mm256_add_epi32(sums[t][v], wide));
        }
      }
    }
  }
  if constexpr (K::kTakenBack == Zero::kWide) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256i correction = Broadcast(&x[t]->sums.wide[h]);
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) sums[t][v] = _mm256_add_epi32(sums[t][v], correction);
    }
  }
#endif
}

// out[t][v] += scale * (activation scale) * sums[t][v]
template <int T, int S>
JQ_INLINE void AddScaled(const __m256 (&scale)[S], const ActivationSpan* const (&x)[T], const __m256i (&sums)[T][S],
                         __m256 (&out)[T][S]) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < S; ++v) {
      const __m256 scales = _mm256_mul_ps(scale[v], _mm256_broadcast_ss(&x[t]->scale));
      out[t][v] = _mm256_add_ps(out[t][v], _mm256_mul_ps(scales, _mm256_cvtepi32_ps(sums[t][v])));
    }
  }
}

template <typename K, int T, int S, typename Source>
JQ_INLINE void SpanProducts(const Source (&w)[S], int s, const ActivationSpan* const (&x)[T], __m256 (&out)[T][S]) {
  __m256 scale[S];
  if constexpr (K::kIntegerScales) {
    __m256i sums[T][S], second[T][S];
    GroupProducts<K>(w, s, 0, x, sums);
    GroupProducts<K>(w, s, 1, x, second);
#pragma GCC unroll 2
    for (int v = 0; v < S; ++v) {
      scale[v] = w[v].Factor();
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sums[t][v] = _mm256_add_epi32(sums[t][v], second[t][v]);
    }
    AddScaled(scale, x, sums, out);
  } else {
#pragma GCC unroll 2
    for (int h = 0; h < kSpan / K::kGroup; ++h) {
      __m256i sums[T][S];
      GroupProducts<K>(w, s, h, x, sums);
#pragma GCC unroll 2
      for (int v = 0; v < S; ++v) scale[v] = w[v].Scale(s, h);
      AddScaled(scale, x, sums, out);
      if constexpr (K::kOffset) {
#pragma GCC unroll 2
        for (int v = 0; v < S; ++v) {
          const __m256 offset = w[v].Offset(s, h);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
            const __m256 sum = _mm256_broadcast_ss(&x[t]->sums.scaled[h]);
            out[t][v] = _mm256_add_ps(out[t][v], _mm256_mul_ps(offset, sum));
          }
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
__attribute__((noinline)) void Multiply(const Panel& panel, int spans, const ActivationSpan* const* activations,
                                        float* sums) {
  const ActivationSpan* x[T];
  for (int t = 0; t < T; ++t) x[t] = activations[t];
  PanelSource w[S];
  for (int v = 0; v < S; ++v) w[v] = {&panel, v};
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
    rows.Prefetch(b, kUnits<F>.tail != 0 ? kDirectAhead : 0);
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
__attribute__((noinline)) void Multiply(const Panel& panel, int spans, const ActivationSpan* const* activations,
                                        float* sums) {
  constexpr int kWords = K::kGroup / 4;
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < S; ++v) {
      float* out = sums + t * kPanelRows + v * kLanes;
      for (int s = 0; s < spans; ++s) {
        const ActivationSpan& x = activations[t][s];
        int32_t scaled[kLanes] = {};
        for (int h = 0; h < kSpan / K::kGroup; ++h) {
          int32_t products[kLanes] = {};
          for (int i = h * kWords; i < (h + 1) * kWords; ++i) {
            for (int row = 0; row < kLanes; ++row) {
              for (int j = 0; j < 4; ++j) {
                products[row] += static_cast<int8_t>(panel.codes[s][i][v][4 * row + j]) * x.codes[4 * i + j];
              }
            }
          }
          for (int row = 0; row < kLanes; ++row) {
            if constexpr (K::kIntegerScales) {
              scaled[row] += products[row] * panel.integer_scales[s][h][v][row];
            } else {
              out[row] = out[row] + panel.scales[s][h][v][row] * x.scale * static_cast<float>(products[row]);
              if constexpr (K::kOffset) out[row] = out[row] + panel.offsets[s][h][v][row] * x.sums.scaled[h];
            }
          }
        }
        if constexpr (K::kIntegerScales) {
          for (int row = 0; row < kLanes; ++row) {
            out[row] = out[row] + panel.factor[v][row] * x.scale * static_cast<float>(scaled[row]);
          }
        }
      }
    }
  }
}

#endif

// Floats of every instruction set: eight, or sixteen where a vector holds them.
template <int count>
struct Floats {
  typedef float Vector __attribute__((vector_size(4 * count)));
};
// Not returned: without AVX the compiler would warn of how.
template <typename Vector>
JQ_INLINE void LoadVector(const float* from, Vector& vector) {
  memcpy(&vector, from, sizeof(vector));
}
template <typename Vector>
JQ_INLINE void AddTo(float* to, const Vector& vector) {
  Vector sum;
  LoadVector(to, sum);
  sum = sum + vector;
  memcpy(to, &sum, sizeof(sum));
}
#if defined(__AVX512F__)
constexpr int kWidest = 2 * kLanes;
#else
constexpr int kWidest = kLanes;
#endif

template <int T, int S>
__attribute__((noinline)) void Multiply(const ValuePanel& panel, int count, const float* const* activations,
                                        float* sums) {
  constexpr int kWidth = kWidest < S * kLanes ? kWidest : S * kLanes, kVectors = S * kLanes / kWidth;
  const float* x[T];
  for (int t = 0; t < T; ++t) x[t] = activations[t];
  for (int first = 0; first < count; first += kSpan) {
    const int last = count - first < kSpan ? count : first + kSpan;
    typename Floats<kWidth>::Vector partial[T][kVectors];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) partial[t][v] = typename Floats<kWidth>::Vector{};
    }
    for (int k = first; k < last; ++k) {
      typename Floats<kWidth>::Vector values[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) LoadVector(panel.at[k][v * kWidth / kLanes], values[v]);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) partial[t][v] = partial[t][v] + values[v] * x[t][k];
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) AddTo(sums + t * kPanelRows + v * kWidth, partial[t][v]);
    }
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq
