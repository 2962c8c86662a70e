// Stages of a product's operands in shared memory: kStageCodes along k of some rows of a and columns of w, as words of
// four signed bytes, zeros beyond the ends.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_launch.h"
#include "ffi/common/cuda_portable.h"
#include "ffi/matmul/layout.h"
#include "ffi/matmul/math.h"

namespace jq {
namespace matmul {
namespace {

constexpr int kStageCodes = 64, kStageWords = kStageCodes / 4;
constexpr int kStride = kStageWords + 4;  // no two rows of a fragment in one bank

// What launches of a product share.
struct Product {
  ProductArguments a;
  int64_t group_size;
  uint32_t a_flip;           // turns a word of a into signed bytes
  int32_t a_shift, w_shift;  // code = byte + shift
  uint32_t w_flip;           // of the fields of a word of w
  bool a_words;              // rows of a, and groups of them, begin on words
  bool w_words;              // prepared: groups begin on words; plain: rows do
  bool row_sums, column_sums;
  int64_t row_tiles, column_tiles, tiles;
};

// The bytes of a word that are there.
__device__ __forceinline__ uint32_t Present(int64_t count) {
  return count >= 4 ? 0xffffffffu : count <= 0 ? 0u : (1u << (8 * static_cast<int>(count))) - 1;
}

template <int kRows>
__device__ __forceinline__ void LoadRows(const Product& p, int64_t matrix, int64_t first_row, int64_t group, int64_t k,
                                         uint32_t (&to)[kRows][kStride]) {
  const uint8_t* base = p.a.a + (p.a.one_a ? 0 : matrix) * p.a.m * p.a.k + group * p.group_size + k;
  for (int task = static_cast<int>(threadIdx.x); task < kRows * kStageWords; task += kThreads) {
    const int r = task / kStageWords, i = task % kStageWords;
    const int64_t left = p.group_size - k - 4 * i;
    uint32_t word = 0;
    if (first_row + r < p.a.m && left > 0) {
      const uint8_t* from = base + (first_row + r) * p.a.k + 4 * i;
      if (p.a_words) {
        word = *reinterpret_cast<const uint32_t*>(from);
      } else {
        for (int j = 0; j < 4; ++j) word |= j < left ? static_cast<uint32_t>(from[j]) << (8 * j) : 0u;
      }
      word = (word ^ p.a_flip) & Present(left);
    }
    to[r][i] = word;
  }
}

// Code `row`, `column` of w as a signed byte.
__device__ __forceinline__ uint32_t CodeAt(const Product& p, const uint8_t* w, int64_t row, int64_t column) {
  const CodePlace at = p.a.w.prepared
                           ? PreparedPlace(row, column, (p.a.k + 32 / p.a.w.bits - 1) / (32 / p.a.w.bits), p.a.w.bits)
                           : PlainPlace(row, column, (p.a.n * p.a.w.bits + 7) / 8, p.a.w.bits);
  const uint32_t mask = (1u << p.a.w.bits) - 1;
  return ((static_cast<uint32_t>(w[at.byte]) >> at.shift) ^ p.w_flip) & mask;
}

template <int kColumns>
__device__ __forceinline__ void LoadColumns(const Product& p, const uint8_t* w, int64_t first_column, int64_t group,
                                            int64_t k, uint32_t (&to)[kColumns][kStride]) {
  const int64_t left = p.group_size - k, row = group * p.group_size + k;
  if (p.a.w.prepared && p.w_words) {
    const int bits = p.a.w.bits, parts = 8 / bits, words = kStageWords / parts;
    const int64_t all_words = (p.a.k + 32 / bits - 1) / (32 / bits), panels = (p.a.n + kPanel - 1) / kPanel;
    const uint32_t mask = ((1u << bits) - 1) * 0x01010101u;
    for (int task = static_cast<int>(threadIdx.x); task < kColumns * words; task += kThreads) {
      const int c = task % kColumns, i = task / kColumns;
      const int64_t panel = (first_column + c) / kPanel, word = row / (32 / bits) + i;
      uint32_t raw = 0;
      const bool there = panel < panels && 4 * parts * i < left;
      if (there) {
        raw = *reinterpret_cast<const uint32_t*>(w + (panel * all_words + word) * kPanelBytes +
                                                 (first_column + c) % kPanel * 4);
      }
      for (int t = 0; t < parts; ++t) {
        const uint32_t codes = ((raw >> (bits * t)) ^ (p.w_flip * 0x01010101u)) & mask;
        to[c][parts * i + t] = there ? codes & Present(left - 4 * (parts * i + t)) : 0;
      }
    }
  } else if (p.a.w.bits == 8 && p.w_words) {
    for (int task = static_cast<int>(threadIdx.x); task < kColumns / 4 * kStageWords; task += kThreads) {
      const int c = task % (kColumns / 4) * 4, i = task / (kColumns / 4);
      uint32_t rows[4] = {};
      if (first_column + c < p.a.n) {
        for (int j = 0; j < 4; ++j) {
          if (4 * i + j >= left) continue;
          const uint8_t* from = w + (row + 4 * i + j) * p.a.n + first_column + c;
          rows[j] = *reinterpret_cast<const uint32_t*>(from) ^ (p.w_flip * 0x01010101u);
        }
      }
      const uint32_t a = __byte_perm(rows[0], rows[1], 0x5140), b = __byte_perm(rows[0], rows[1], 0x7362);
      const uint32_t d = __byte_perm(rows[2], rows[3], 0x5140), e = __byte_perm(rows[2], rows[3], 0x7362);
      to[c][i] = __byte_perm(a, d, 0x5410);
      to[c + 1][i] = __byte_perm(a, d, 0x7632);
      to[c + 2][i] = __byte_perm(b, e, 0x5410);
      to[c + 3][i] = __byte_perm(b, e, 0x7632);
    }
  } else {
    for (int task = static_cast<int>(threadIdx.x); task < kColumns * kStageWords; task += kThreads) {
      const int c = task % kColumns, i = task / kColumns;
      uint32_t word = 0;
      for (int j = 0; j < 4; ++j) {
        if (first_column + c < p.a.n && 4 * i + j < left) {
          word |= CodeAt(p, w, row + 4 * i + j, first_column + c) << (8 * j);
        }
      }
      to[c][i] = word;
    }
  }
}

__device__ __forceinline__ int32_t SumOfWords(const uint32_t (&words)[kStride], int32_t sum) {
#pragma unroll
  for (int i = 0; i < kStageWords; ++i) sum = __dp4a(static_cast<int>(words[i]), 0x01010101, sum);
  return sum;
}

// The integer of a group at (row, column), from the shifted codes' sums.
__device__ __forceinline__ int32_t GroupInteger(const Product& p, int64_t matrix, int64_t row, int64_t column,
                                                int64_t group, int32_t sum, int32_t row_sum, int32_t column_sum) {
  int32_t a_zero = -p.a_shift, w_zero = -p.w_shift;
  if (p.a.a_zero_point != nullptr) {
    a_zero += ZeroPoint(p.a.a_zero_point[matrix * p.a.a_scale_of_matrix + row * p.a.a_scale_of_row]);
  }
  if (p.a.w_zero_point != nullptr) {
    const int64_t of_group = matrix * p.a.groups + group;
    w_zero += ZeroPoint(p.a.w_zero_point[p.a.per_column ? of_group * p.a.n + column : of_group]);
  }
  const int32_t count = static_cast<int32_t>(static_cast<uint32_t>(p.group_size));
  const int32_t rest = p.row_sums ? WrappingDifference(row_sum, WrappingProduct(count, a_zero)) : 0;
  return Corrected(sum, a_zero, p.column_sums ? column_sum : 0, w_zero, rest);
}

__device__ __forceinline__ float Scaled(const Product& p, int64_t matrix, int64_t column, int64_t group, int32_t value,
                                        float t) {
  const int64_t of_group = matrix * p.a.groups + group;
  const float product = static_cast<float>(value) * p.a.w_scale[p.a.per_column ? of_group * p.a.n + column : of_group];
  return group == 0 ? product : t + product;
}

__device__ __forceinline__ void StoreInteger(const Product& p, int64_t matrix, int64_t row, int64_t column,
                                             int32_t value) {
  static_cast<int32_t*>(p.a.out)[(matrix * p.a.m + row) * p.a.n + column] = value;
}
__device__ __forceinline__ void StoreFloat(const Product& p, int64_t matrix, int64_t row, int64_t column, float t) {
  float y = t * p.a.a_scale[matrix * p.a.a_scale_of_matrix + row * p.a.a_scale_of_row];
  if (p.a.bias != nullptr) y = y + p.a.bias[column];
  const int64_t at = (matrix * p.a.m + row) * p.a.n + column;
  switch (p.a.out_type) {
    case ResultType::kF16: static_cast<Float16*>(p.a.out)[at] = ToFloat16(y); break;
    case ResultType::kBF16: static_cast<BFloat16*>(p.a.out)[at] = ToBFloat16(y); break;
    default: static_cast<float*>(p.a.out)[at] = y;
  }
}

}  // namespace
}  // namespace matmul
}  // namespace jq
