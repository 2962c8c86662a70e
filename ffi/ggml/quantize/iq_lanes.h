// Sub-blocks side by side, one a lane: each lane does what a sub-block alone would do, operation for operation.
// For the IQ quantisers only; compiled once per instruction set.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "ffi/common/numeric.h"
#include "ffi/ggml/quantize/iq_tables.h"
#include "ffi/ggml/quantize/lanes.h"

namespace jq {
namespace JQ_ISA {
namespace {

#define JQ_INLINE inline __attribute__((always_inline))

using ggml::Abs;
using ggml::Any;
using ggml::Choose;
using ggml::Clamp;
using ggml::NearestInt;
using ggml::Splat;
using ggml::ToReal;

// As wide as the registers. Eight floats are also a table that one instruction looks up in.
#if defined(__AVX2__) && !defined(__clang__)
#define JQ_TABLE_LOOKUP 1
#endif
#if defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

JQ_INLINE Floats Load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof(values));
  return values;
}

// columns[i][lane] = rows[lane][i] for i < n, a multiple of 8.
JQ_INLINE void Transpose(const float* const* rows, int n, Floats* columns) {
#if defined(JQ_TABLE_LOOKUP)
  for (int i = 0; i < n; i += 8) {
    Floats a[8], b[8];
    for (int lane = 0; lane < 8; ++lane) a[lane] = Load(rows[lane] + i);
    for (int j = 0; j < 8; j += 2) {
      b[j] = __builtin_shuffle(a[j], a[j + 1], Ints{0, 8, 1, 9, 4, 12, 5, 13});
      b[j + 1] = __builtin_shuffle(a[j], a[j + 1], Ints{2, 10, 3, 11, 6, 14, 7, 15});
    }
    for (int j = 0; j < 8; j += 4) {
      for (int k = 0; k < 2; ++k) {
        a[j + 2 * k] = __builtin_shuffle(b[j + k], b[j + k + 2], Ints{0, 1, 8, 9, 4, 5, 12, 13});
        a[j + 2 * k + 1] = __builtin_shuffle(b[j + k], b[j + k + 2], Ints{2, 3, 10, 11, 6, 7, 14, 15});
      }
    }
    for (int j = 0; j < 4; ++j) {
      columns[i + j] = __builtin_shuffle(a[j], a[j + 4], Ints{0, 1, 2, 3, 8, 9, 10, 11});
      columns[i + j + 4] = __builtin_shuffle(a[j], a[j + 4], Ints{4, 5, 6, 7, 12, 13, 14, 15});
    }
  }
#else
  for (int i = 0; i < n; ++i) {
    float column[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) column[lane] = rows[lane][i];
    columns[i] = Load(column);
  }
#endif
}

template <int kSub>
JQ_INLINE void TransposeSubBlocks(const float* values, Floats* columns) {
  const float* rows[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) rows[lane] = values + lane * kSub;
  Transpose(rows, kSub, columns);
}

// ---- Points of a lattice

constexpr int kNoPoint = 0x7fffffff;

// The neighbour of a word off the grid with the least sum of w * (scale * value - x)^2 over its coordinates, the first
// in the list among equals; kNoPoint when no sum is below FLT_MAX. values: what the codes stand for, at the code mod 8.
template <int kBits>
JQ_INLINE int NearestNeighbour(const ggml::Lattice& lattice, int32_t entry, const float* values, float scale,
                               const float* x, const float* w) {
  constexpr int kCoordinates = kBits == 2 ? 8 : 4;
  const int count = ~entry & 255;
  const uint16_t* list = lattice.neighbours + static_cast<int64_t>(~entry >> 8) * ggml::Lattice::kChunk;
  // A coordinate takes few values: its terms are computed once, and looked up for the neighbours.
#if defined(JQ_TABLE_LOOKUP)
  const Floats points = scale * Load(values);
  Floats terms[kCoordinates];
  for (int i = 0; i < kCoordinates; ++i) {
    const Floats apart = points - x[i];
    terms[i] = w[i] * apart * apart;
  }
  Floats least = Splat<Floats>(FLT_MAX);
  Ints found = Ints{} + kNoPoint;
  Ints position = Ints{0, 1, 2, 3, 4, 5, 6, 7} << 16;
  for (int chunk = 0; chunk < count; ++chunk, list += ggml::Lattice::kChunk, position += 8 << 16) {
    uint16_t packed __attribute__((vector_size(16)));
    memcpy(&packed, list, sizeof(packed));
    const Ints words = __builtin_convertvector(packed, Ints);
    Floats sum = __builtin_shuffle(terms[0], words);
    for (int i = 1; i < kCoordinates; ++i) sum += __builtin_shuffle(terms[i], words >> (kBits * i));
    const Ints better = sum < least;
    least = better ? sum : least;
    found = better ? (position | words) : found;
  }
  // The least of the lanes, and among equals that of the first position.
  const Ints across[3] = {{4, 5, 6, 7, 0, 1, 2, 3}, {2, 3, 0, 1, 6, 7, 4, 5}, {1, 0, 3, 2, 5, 4, 7, 6}};
  Floats minimum = least;
  for (const Ints& lanes : across) {
    const Floats other = __builtin_shuffle(minimum, lanes);
    minimum = other < minimum ? other : minimum;
  }
  found = least == minimum ? found : Ints{} + kNoPoint;
  for (const Ints& lanes : across) {
    const Ints other = __builtin_shuffle(found, lanes);
    found = other < found ? other : found;
  }
  return found[0] == kNoPoint ? kNoPoint : found[0] & 0xffff;
#else
  float terms[kCoordinates][8];
  for (int i = 0; i < kCoordinates; ++i) {
    for (int code = 0; code < 8; ++code) {
      const float apart = scale * values[code] - x[i];
      terms[i][code] = w[i] * apart * apart;
    }
  }
  float least = FLT_MAX;
  int found = kNoPoint;
  for (int j = 0; j < count * ggml::Lattice::kChunk; ++j) {
    const uint32_t word = list[j];
    float sum = terms[0][word & 7];
    for (int i = 1; i < kCoordinates; ++i) sum += terms[i][(word >> (kBits * i)) & 7];
    found = sum < least ? static_cast<int>(word) : found;
    least = sum < least ? sum : least;
  }
  return found;
#endif
}

// ---- Super-blocks

constexpr const char kNotFinite[] = "x: expected finite values, got inf or NaN; the format holds neither";
constexpr const char kOutOfRange[] =
    "x: the values of a block, or of it and imatrix, are too large or too far apart for this format";

JQ_INLINE bool Finite(const float* x, int64_t n) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= (BitCast<uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u;
  return bad == 0;
}

// quantize_block(x, imatrix or null, sum of x * x, block) for the super-blocks of all rows; the first message ends it.
template <typename F, typename QuantizeBlock>
JQ_INLINE const char* ForEachSuperBlock(const float* x, void* out, int64_t rows, int64_t n, const float* imatrix,
                                        QuantizeBlock quantize_block) {
  const int64_t row_blocks = n / ggml::kSuper, blocks = rows * row_blocks;
  F* block = static_cast<F*>(out);
  int64_t in_row = 0;
  for (int64_t first = 0; first < blocks; first += kWidth) {
    // The sums are taken in order, which is slow for one block; several together cost no more.
    const float* lanes[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) {
      const int64_t b = first + lane < blocks ? first + lane : blocks - 1;
      lanes[lane] = x + b * ggml::kSuper;
    }
    const int count = static_cast<int>(blocks - first < kWidth ? blocks - first : kWidth);
    if (!Finite(lanes[0], static_cast<int64_t>(count) * ggml::kSuper)) return kNotFinite;
    Floats squares{};
    for (int i = 0; i < ggml::kSuper; i += 8) {
      Floats columns[8];
      const float* parts[kWidth];
      for (int lane = 0; lane < kWidth; ++lane) parts[lane] = lanes[lane] + i;
      Transpose(parts, 8, columns);
      for (const Floats& column : columns) squares += column * column;
    }
    for (int lane = 0; lane < count; ++lane) {
      const float* weights = imatrix == nullptr ? nullptr : imatrix + in_row * ggml::kSuper;
      const char* message = quantize_block(lanes[lane], weights, squares[lane], block++);
      if (message != nullptr) return message;
      if (++in_row == row_blocks) in_row = 0;
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace jq
