// Conversions of tiles between storage types and the arithmetic type, those vectorised by hand that no compiler does by
// itself. Compiled once per instruction set.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ffi/affine/arguments.h"

namespace jq {
namespace JQ_ISA {
namespace {

#if defined(__AVX2__)
// ToBFloat16 for eight floats, each in the low half of its 32 bits.
inline __m256i BFloat16Bits(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
#endif

template <typename From, typename To>
void ConvertTile(const void* in, void* out, int64_t n) {
  const From* from = static_cast<const From*>(in);
  To* to = static_cast<To*>(out);
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (__is_same(From, Float16) && __is_same(To, float)) {
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
  }
  if constexpr (__is_same(From, float) && __is_same(To, Float16)) {
    for (; i + 8 <= n; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
#endif
#if defined(__AVX2__)
  if constexpr (__is_same(From, float) && __is_same(To, BFloat16)) {
    for (; i + 16 <= n; i += 16) {
      const __m256i low = BFloat16Bits(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      const __m256i high = BFloat16Bits(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 8)));
      // The pack interleaves 128-bit halves; the permutation undoes it.
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), packed);
    }
  }
#endif
  for (; i < n; ++i) to[i] = Convert<To>(from[i]);
}

using Conversion = void (*)(const void* in, void* out, int64_t n);

// Conversions between the arithmetic type and a floating storage type; null where there is none.
template <typename Real>
Conversion Widening(DType type) {
  switch (type) {
    case DType::kF32: return ConvertTile<float, Real>;
    case DType::kF16: return ConvertTile<Float16, Real>;
    case DType::kBF16: return ConvertTile<BFloat16, Real>;
    default: return type == kRealType<Real> ? ConvertTile<Real, Real> : nullptr;
  }
}
template <typename Real>
Conversion Narrowing(DType type) {
  switch (type) {
    case DType::kF32: return ConvertTile<Real, float>;
    case DType::kF16: return ConvertTile<Real, Float16>;
    case DType::kBF16: return ConvertTile<Real, BFloat16>;
    default: return type == kRealType<Real> ? ConvertTile<Real, Real> : nullptr;
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace jq
