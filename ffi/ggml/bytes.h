// Steps of decoding: halves, words, and eight or sixteen bytes at once, for host and device.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/common/numeric.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__CUDACC__)
#define JQ_DECODE static __device__ __forceinline__
#else
#define JQ_DECODE static inline __attribute__((always_inline))
#endif

namespace jq {
namespace ggml {

JQ_DECODE uint32_t Word(const void* bytes) {
  uint32_t word;
  memcpy(&word, bytes, sizeof(word));
  return word;
}

JQ_DECODE float HalfToFloat(Float16 half) {
#if defined(__AVX2__) && defined(__F16C__) && !defined(__CUDACC__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half.bits)));
#else
  return ToFloat(half);
#endif
}

// ---- Steps on bytes, eight or sixteen at once. Compilers would not find the vectors by themselves.

#if defined(__CUDACC__) || defined(JQ_CUDA_ON_HOST)
// A device has instructions for the four bytes of a register.
template <int kBytes>
struct Bytes {
  uint32_t words[kBytes / 4];
};
template <int kBytes>
JQ_DECODE Bytes<kBytes> Spread(int value) {
  Bytes<kBytes> bytes;
  for (int j = 0; j < kBytes / 4; ++j) bytes.words[j] = static_cast<uint8_t>(value) * 0x01010101u;
  return bytes;
}
JQ_DECODE uint32_t MultiplyBytes(uint32_t x, uint32_t y) {
  uint32_t product = 0;
  for (int j = 0; j < 32; j += 8) product |= ((x >> j & 255) * (y >> j & 255) & 255) << j;
  return product;
}
#define JQ_BYTES_OPERATOR(op, expression)                                 \
  template <int kBytes>                                                   \
  JQ_DECODE Bytes<kBytes> operator op(Bytes<kBytes> a, Bytes<kBytes> b) { \
    for (int j = 0; j < kBytes / 4; ++j) {                                \
      const uint32_t x = a.words[j], y = b.words[j];                      \
      a.words[j] = expression;                                            \
    }                                                                     \
    return a;                                                             \
  }
JQ_BYTES_OPERATOR(&, x& y)
JQ_BYTES_OPERATOR(|, x | y)
JQ_BYTES_OPERATOR(^, x ^ y)
JQ_BYTES_OPERATOR(+, __vadd4(x, y))
JQ_BYTES_OPERATOR(-, __vsub4(x, y))
JQ_BYTES_OPERATOR(*, MultiplyBytes(x, y))
JQ_BYTES_OPERATOR(==, __vcmpeq4(x, y))
JQ_BYTES_OPERATOR(>=, __vcmpgeu4(x, y))
#undef JQ_BYTES_OPERATOR
template <int kBytes>
JQ_DECODE Bytes<kBytes> operator>>(Bytes<kBytes> a, int bits) {
  for (int j = 0; j < kBytes / 4; ++j) a.words[j] = a.words[j] >> bits & 0x01010101u * (255u >> bits);
  return a;
}
template <int kBytes>
JQ_DECODE Bytes<kBytes> operator<<(Bytes<kBytes> a, int bits) {
  for (int j = 0; j < kBytes / 4; ++j) a.words[j] = a.words[j] << bits & 0x01010101u * (255u << bits & 255u);
  return a;
}
#elif defined(__GNUC__) && !defined(__clang__)
#define JQ_BYTE_VECTORS
template <int kBytes>
using Bytes __attribute__((vector_size(kBytes))) = uint8_t;
template <int kBytes>
JQ_DECODE Bytes<kBytes> Spread(int value) {
  return static_cast<uint8_t>(value) - Bytes<kBytes>{};
}
#else
template <int kBytes>
struct Bytes {
  uint8_t at[kBytes];
};
template <int kBytes>
JQ_DECODE Bytes<kBytes> Spread(int value) {
  Bytes<kBytes> bytes;
  for (int j = 0; j < kBytes; ++j) bytes.at[j] = static_cast<uint8_t>(value);
  return bytes;
}
#define JQ_BYTES_OPERATOR(op, expression)                                 \
  template <int kBytes>                                                   \
  JQ_DECODE Bytes<kBytes> operator op(Bytes<kBytes> a, Bytes<kBytes> b) { \
    for (int j = 0; j < kBytes; ++j) {                                    \
      const int x = a.at[j], y = b.at[j];                                 \
      a.at[j] = static_cast<uint8_t>(expression);                         \
    }                                                                     \
    return a;                                                             \
  }
JQ_BYTES_OPERATOR(&, x& y)
JQ_BYTES_OPERATOR(|, x | y)
JQ_BYTES_OPERATOR(^, x ^ y)
JQ_BYTES_OPERATOR(+, x + y)
JQ_BYTES_OPERATOR(-, x - y)
JQ_BYTES_OPERATOR(*, x* y)
JQ_BYTES_OPERATOR(==, x == y ? 255 : 0)
JQ_BYTES_OPERATOR(>=, x >= y ? 255 : 0)
#undef JQ_BYTES_OPERATOR
template <int kBytes>
JQ_DECODE Bytes<kBytes> operator>>(Bytes<kBytes> a, int bits) {
  for (int j = 0; j < kBytes; ++j) a.at[j] = static_cast<uint8_t>(a.at[j] >> bits);
  return a;
}
template <int kBytes>
JQ_DECODE Bytes<kBytes> operator<<(Bytes<kBytes> a, int bits) {
  for (int j = 0; j < kBytes; ++j) a.at[j] = static_cast<uint8_t>(a.at[j] << bits);
  return a;
}
#endif

template <int kBytes>
JQ_DECODE Bytes<kBytes> LoadBytes(const void* from) {
  Bytes<kBytes> bytes;
  memcpy(&bytes, from, kBytes);
  return bytes;
}
template <int kBytes>
JQ_DECODE void StoreBytes(Bytes<kBytes> bytes, int8_t* to) {
  memcpy(to, &bytes, kBytes);
}

// In registers: a vector load would wait for two narrower stores.
JQ_DECODE Bytes<16> Pair(uint64_t low, uint64_t high) {
#if defined(JQ_BYTE_VECTORS)
  using Words __attribute__((vector_size(16))) = uint64_t;
  return (Bytes<16>)Words{low, high};
#else
  const uint64_t words[2] = {low, high};
  return LoadBytes<16>(words);
#endif
}

// codes[j] = point[j], negated where bit j of signs is set.
JQ_DECODE void Signed(const void* point, uint32_t signs, int8_t* codes) {
  const uint8_t places[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  const Bytes<8> place = LoadBytes<8>(places);
  const Bytes<8> negative = (Bytes<8>)((Spread<8>(static_cast<int>(signs)) & place) == place);
  StoreBytes<8>((LoadBytes<8>(point) ^ negative) - negative, codes);
}

// Byte j: value if bit j of 16 is set, else 0.
JQ_DECODE Bytes<16> SpreadBits(const uint8_t* bits, int value) {
  const uint8_t places[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const Bytes<16> words = Pair(bits[0] * 0x0101010101010101u, bits[1] * 0x0101010101010101u);
  const Bytes<16> place = LoadBytes<16>(places);
  return (Bytes<16>)((words & place) == place) & Spread<16>(value);
}

// The codes of a table: n bytes hold 2 n, the low nibbles first.
template <int n>
JQ_DECODE void LookUp(const int8_t* values, const uint8_t* qs, int8_t* codes) {
#if defined(JQ_BYTE_VECTORS) && defined(__SSSE3__)
  const Bytes<16> table = LoadBytes<16>(values);
  if constexpr (n == 16) {
    const Bytes<16> packed = LoadBytes<16>(qs);
    const Bytes<16> low = __builtin_shuffle(table, packed & 15), high = __builtin_shuffle(table, packed >> 4);
    memcpy(codes, &low, 16);
    memcpy(codes + 16, &high, 16);
  } else {
    static_assert(n == 8, "no such table");
    uint64_t word;
    memcpy(&word, qs, 8);
    const Bytes<16> nibbles = Pair(word & 0x0f0f0f0f0f0f0f0fu, word >> 4 & 0x0f0f0f0f0f0f0f0fu);
    const Bytes<16> found = __builtin_shuffle(table, nibbles);
    memcpy(codes, &found, 16);
  }
#else
  for (int j = 0; j < n; ++j) {
    codes[j] = values[qs[j] & 15];
    codes[j + n] = values[qs[j] >> 4];
  }
#endif
}

}  // namespace ggml
}  // namespace jq
