// The innermost products: T rows of activations with S strips of columns, a strip as wide as a vector. Integers are
// exact in any order; the floating-point steps are those of kernels.h whatever the tile.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/matmul/weight_only/gather.h"

namespace jq {
namespace weight_only {
namespace JQ_ISA {
namespace {

// A span of a row of activations.
struct alignas(64) Span {
  int8_t digits[kDigits][kSpan];
  int32_t start[kDigits];  // takes back the codes' offset
  float from;              // of SpanScale
  float sum;               // of the activations of its group up to its end, as they are multiplied
};

#if defined(__AVX512VNNI__)
constexpr int kLanes = 16;
using Bytes = __m512i;
JQ_INLINE Bytes LoadBytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
JQ_INLINE Bytes Filled(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }
JQ_INLINE Bytes Xor(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
JQ_INLINE Bytes And(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
template <int shift>
JQ_INLINE Bytes Shifted(Bytes a) {
  return _mm512_srli_epi16(a, shift);
}
#elif defined(__AVX2__)
constexpr int kLanes = 8;
using Bytes = __m256i;
JQ_INLINE Bytes LoadBytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
JQ_INLINE Bytes Filled(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }
JQ_INLINE Bytes Xor(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
JQ_INLINE Bytes And(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
template <int shift>
JQ_INLINE Bytes Shifted(Bytes a) {
  return _mm256_srli_epi16(a, shift);
}
#else
constexpr int kLanes = 4;
typedef uint8_t Bytes __attribute__((vector_size(16)));
JQ_INLINE Bytes LoadBytes(const uint8_t* from) {
  Bytes bytes;
  memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}
JQ_INLINE Bytes Filled(int byte) { return Bytes{} + static_cast<uint8_t>(byte); }
JQ_INLINE Bytes Xor(Bytes a, Bytes b) { return a ^ b; }
JQ_INLINE Bytes And(Bytes a, Bytes b) { return a & b; }
template <int shift>
JQ_INLINE Bytes Shifted(Bytes a) {
  return a >> shift;
}
#endif

typedef int32_t Ints __attribute__((vector_size(4 * kLanes), may_alias));
typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// sum[c] + codes[4 c ... + 3] . digits[0 ... 3]. small: codes are below 16.
template <bool small>
JQ_INLINE Ints Dot(Ints sum, Bytes codes, const int8_t* digits) {
  int32_t word;
  memcpy(&word, digits, sizeof(word));
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, codes, _mm512_set1_epi32(word));
#elif defined(__AVX2__)
  const __m256i all = _mm256_set1_epi32(word);
  if constexpr (small) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, all);
    return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  } else {  // pairs of bytes would saturate
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(all, 8));
    return sum + (Ints)_mm256_add_epi32(even, odd);
  }
#elif defined(__SSE2__)
  const __m128i all = _mm_set1_epi32(word), bytes = (__m128i)codes;
  const __m128i even =
      _mm_madd_epi16(_mm_and_si128(bytes, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(all, 8), 8));
  const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(bytes, 8), _mm_srai_epi16(all, 8));
  return sum + (Ints)_mm_add_epi32(even, odd);
#else
  for (int c = 0; c < kLanes; ++c) {
    for (int j = 0; j < 4; ++j) sum[c] += codes[4 * c + j] * digits[j];
  }
  return sum;
#endif
}

// What the columns of a strip have in each group of a stretch.
struct GroupScales {
  const float* scale;
  const float* zero_point;  // with the offset of unsigned codes; null where all are 0
  int64_t stride;           // from a group to the next
};

// The sums of a strip at T rows, kept between stretches.
struct Sums {
  float* group;  // of the group that has begun
  float* total;
};

struct Stretch {
  int64_t first_span, spans, spans_of_group;
  int64_t length_of_last;  // activations in the last span of a group
};

// bits: of a code as it lies at `codes`, a word of each column in 4 kPanel bytes; spans follow each other.
template <int bits, bool small, int T, int S>
__attribute__((noinline)) void Multiply(const uint8_t* const* strips, int flip, int64_t ahead, const Stretch& stretch,
                                        const Span* const* x, const GroupScales* scales, const Sums* sums,
                                        int64_t row_stride) {
  constexpr int kPer = 8 / bits;
  const uint8_t* codes[S];
  for (int s = 0; s < S; ++s) codes[s] = strips[s];
  const Bytes flipped = Filled(flip), mask = Filled((1 << bits) - 1);
  int64_t in_group = stretch.first_span % stretch.spans_of_group, group = 0;
  for (int64_t i = 0; i < stretch.spans; ++i) {
    const bool last = in_group + 1 == stretch.spans_of_group;
    const int64_t length = last ? stretch.length_of_last : kSpan;
    const int words = static_cast<int>((length + 4 * kPer - 1) / (4 * kPer));
    const Span* here[T];
    Ints sum[T][S][kDigits];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      here[t] = x[t] + i;
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
#pragma GCC unroll 3
        for (int d = 0; d < kDigits; ++d) sum[t][s][d] = Ints{} + here[t]->start[d];
      }
    }
    for (int word = 0; word < words; ++word) {
      Bytes packed[S];
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        // To the second cache: the first one has too few lines in flight to keep the memory busy.
        __builtin_prefetch(codes[s] + word * (4 * kPanel) + ahead, 0, 2);
        packed[s] = Xor(LoadBytes(codes[s] + word * (4 * kPanel)), flipped);
      }
#pragma GCC unroll 4
      for (int part = 0; part < kPer; ++part) {
        Bytes one[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
          one[s] = packed[s];
          if constexpr (bits == 4) one[s] = part == 0 ? one[s] : Shifted<4>(one[s]);
          if constexpr (bits == 2) {
            one[s] = part == 0   ? one[s]
                     : part == 1 ? Shifted<2>(one[s])
                     : part == 2 ? Shifted<4>(one[s])
                                 : Shifted<6>(one[s]);
          }
          if constexpr (bits < 8) one[s] = And(one[s], mask);
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
#pragma GCC unroll 3
          for (int d = 0; d < kDigits; ++d) {
            const int8_t* digits = here[t]->digits[d] + 4 * (word * kPer + part);
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s) sum[t][s][d] = Dot<small>(sum[t][s][d], one[s], digits);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) codes[s] += words * (4 * kPanel);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        const Floats high = __builtin_convertvector((sum[t][s][2] << 8) + sum[t][s][1], Floats);
        const Floats low = __builtin_convertvector(sum[t][s][0], Floats);
        Floats* kept = reinterpret_cast<Floats*>(sums[s].group + t * row_stride);
        Floats value = (high * 256.0f + low) * here[t]->from;
        if (in_group != 0) value = *kept + value;
        if (!last) {
          *kept = value;
          continue;
        }
        Floats* total = reinterpret_cast<Floats*>(sums[s].total + t * row_stride);
        const int64_t at = group * scales[s].stride;
        if (scales[s].zero_point != nullptr) {
          value = value - *reinterpret_cast<const Floats*>(scales[s].zero_point + at) * here[t]->sum;
        }
        *total = *total + value * *reinterpret_cast<const Floats*>(scales[s].scale + at);
      }
    }
    ++in_group;
    if (last) {
      in_group = 0;
      ++group;
    }
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace weight_only
}  // namespace jq
