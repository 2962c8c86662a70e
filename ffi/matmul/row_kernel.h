// One to four rows of a with a row-major w of 8 bits, which is read once, in long stretches, and never stored again:
// four rows of 64 codes are interleaved in registers. The sums lie in memory meanwhile, in the order the interleaving
// gives: of 64 columns, vector q holds columns 16 lane + 4 q ... + 3 in each lane.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/matmul/micro.h"

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

#if defined(__AVX512VNNI__)

constexpr bool kRowKernels = true;
constexpr int kBlock = 64;  // columns

// Sums of `words` words along k. present: rows of w there are of the last word; those beyond count as any, and meet
// zeros of a.
template <int R, bool kColumnSums>
inline void AddWords(const uint8_t* w, int64_t stride, __mmask64 mask, const int8_t* rows, int64_t row_stride,
                     const int8_t* ones, int words, int present, __m512i flip, int32_t* sums, int64_t sums_stride) {
  __m512i s[R + kColumnSums][4];
#pragma GCC unroll 5
  for (int r = 0; r < R + kColumnSums; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) s[r][q] = _mm512_loadu_si512(sums + r * sums_stride + 16 * q);
  }
#pragma GCC unroll 4
  for (int i = 0; i < words; ++i) {
    const int last = i + 1 < words ? 3 : present - 1;
    __m512i v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      v[j] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, w + (4 * i + std::min(j, last)) * stride), flip);
    }
    const __m512i a = _mm512_unpacklo_epi8(v[0], v[1]), b = _mm512_unpackhi_epi8(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi8(v[2], v[3]), d = _mm512_unpackhi_epi8(v[2], v[3]);
    const __m512i codes[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c), _mm512_unpacklo_epi16(b, d),
                              _mm512_unpackhi_epi16(b, d)};
#pragma GCC unroll 5
    for (int r = 0; r < R + kColumnSums; ++r) {
      const int8_t* from = r < R ? rows + r * row_stride : ones;
      const __m512i word = _mm512_set1_epi32(static_cast<int>(LoadWord(from + 4 * i)));
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) s[r][q] = _mm512_dpbusd_epi32(s[r][q], codes[q], word);
    }
  }
#pragma GCC unroll 5
  for (int r = 0; r < R + kColumnSums; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) _mm512_storeu_si512(sums + r * sums_stride + 16 * q, s[r][q]);
  }
}

// A group: sums [R (+ 1 for those of columns)][sums_stride], of `columns` columns rounded up to blocks.
template <int R, bool kColumnSums>
void GroupSums(const uint8_t* w, int64_t stride, int64_t columns, const int8_t* rows, int64_t row_stride,
               const int8_t* ones, int64_t group_size, unsigned flip_byte, int32_t* sums, int64_t sums_stride) {
  constexpr int kWords = 2;
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(flip_byte));
  const int64_t blocks = CeilDivide(columns, kBlock);
  for (int r = 0; r < R + kColumnSums; ++r) memset(sums + r * sums_stride, 0, static_cast<size_t>(blocks * kBlock * 4));
  for (int64_t k = 0; k < group_size; k += 4 * kWords) {
    const int64_t left = group_size - k;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t valid = columns - block * kBlock;
      const __mmask64 mask = valid >= kBlock ? ~__mmask64{0} : (__mmask64{1} << valid) - 1;
      const uint8_t* from = w + k * stride + block * kBlock;
      int32_t* to = sums + block * kBlock;
      if (left >= 4 * kWords) {
        AddWords<R, kColumnSums>(from, stride, mask, rows + k, row_stride, ones + k, kWords, 4, flip, to, sums_stride);
      } else {
        const int words = static_cast<int>(CeilDivide(left, 4));
        AddWords<R, kColumnSums>(from, stride, mask, rows + k, row_stride, ones + k, words,
                                 static_cast<int>(left - 4 * (words - 1)), flip, to, sums_stride);
      }
    }
  }
}

inline void GroupSums(int rows_count, bool column_sums, const uint8_t* w, int64_t stride, int64_t columns,
                      const int8_t* rows, int64_t row_stride, const int8_t* ones, int64_t group_size, unsigned flip,
                      int32_t* sums, int64_t sums_stride) {
  const auto run = [&](auto function) {
    function(w, stride, columns, rows, row_stride, ones, group_size, flip, sums, sums_stride);
  };
  switch (2 * rows_count + column_sums) {
    case 2: return run(GroupSums<1, false>);
    case 3: return run(GroupSums<1, true>);
    case 4: return run(GroupSums<2, false>);
    case 5: return run(GroupSums<2, true>);
    case 6: return run(GroupSums<3, false>);
    case 7: return run(GroupSums<3, true>);
    case 8: return run(GroupSums<4, false>);
    default: return run(GroupSums<4, true>);
  }
}

// The sums of a block in the order of columns.
inline void InOrder(const int32_t* sums, int32_t* to) {
  for (int q = 0; q < 4; ++q) {
    for (int lane = 0; lane < 4; ++lane) memcpy(to + 16 * lane + 4 * q, sums + 16 * q + 4 * lane, 16);
  }
}

#else

constexpr bool kRowKernels = false;

#endif

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
