// A step of Adam on moments of 8 bits, once for host and device.
//
// A block's moments are coded relative to a power of two, 2^(exponent - 127), which its largest magnitude chooses. With
// c = 2^(exponent - 127 - kBinades), a code is the bit pattern of magnitude + c, less that of c, to three bits behind
// the leading one: linear below c, logarithmic above, in integer arithmetic and without a search. Dettmers et al.
// (2021) reach a like range and precision with a table. As the lattice is fixed (a power of two and not the largest
// magnitude itself), a moment that did not change gets its code again.
//
// Rounding is stochastic: an average that changes by 1 - b2 = 0.1 % a step would never leave its code otherwise. The
// dither is a hash of the new moments' bits, the place in the block and the step, so that neither threads nor shards
// nor batches matter.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"

namespace jq {
namespace optim {

// One row of the operand `factors`.
struct Factors {
  float b1, rest1, b2, rest2;  // rest = 1 - b
  // The step is m / (root * sqrt(v) + floor): with c1 = 1 - b1^t and c2 = 1 - b2^t, root = c1 / sqrt(c2) and
  // floor = c1 * eps correct the bias of both moments.
  float root, floor;
};
constexpr int kFactors = 6;

constexpr int64_t kMostBlock = 2048;

// The smallest exponent leaves the least value of either code a normal number, the largest its largest value finite.
constexpr int32_t kLeastExponent = 40, kMostExponent = 250;
// A gradient beyond counts as this much in the moments: its square is finite.
constexpr float kMostGradient = 0x1p60f;
constexpr int kDropped = 20;  // bits of a float's mantissa that a code does not keep
constexpr uint32_t kSign = 0x80000000u;

JQ_HOST_DEVICE uint32_t Magnitude(float value) { return BitCast<uint32_t>(value) & ~kSign; }

JQ_HOST_DEVICE int32_t ClampExponent(int32_t value) {
  value = value < kLeastExponent ? kLeastExponent : value;
  return value > kMostExponent ? kMostExponent : value;
}

// bits: of the largest magnitude of a block. Beyond 1.75 times a power of two the next one, so that nothing rounds to
// more than the last code.
JQ_HOST_DEVICE uint8_t ExponentOf(uint32_t bits) {
  return static_cast<uint8_t>(ClampExponent(static_cast<int32_t>((bits + ((2u << kDropped) - 1)) >> 23)));
}

// The bits of c. Any byte is an exponent: zeros are the state before the first step.
template <int kBinades>
JQ_HOST_DEVICE uint32_t OffsetOf(uint8_t exponent) {
  return static_cast<uint32_t>(ClampExponent(exponent) - kBinades) << 23;
}
// dither: below 1 << kDropped.
JQ_HOST_DEVICE uint32_t Encode(float magnitude, uint32_t offset, uint32_t dither) {
  return (BitCast<uint32_t>(magnitude + BitCast<float>(offset)) - offset + dither) >> kDropped;
}

// The first moment: seven bits and a sign; 15 binades and a linear part.
struct First {
  static JQ_HOST_DEVICE uint32_t Offset(uint8_t exponent) { return OffsetOf<15>(exponent); }
  // code: sign-extended.
  static JQ_HOST_DEVICE float Decode(int32_t code, uint32_t offset) {
    const uint32_t bits = (static_cast<uint32_t>(code) << kDropped & (kSign | 0x7fu << kDropped)) + offset;
    return BitCast<float>(bits) - BitCast<float>(offset | (bits & kSign));
  }
  // The code in the low byte of a word.
  static JQ_HOST_DEVICE uint32_t Word(float value, uint32_t offset, uint32_t hash) {
    const uint32_t dither = hash >> 6 & ((1u << kDropped) - 1);
    return Encode(BitCast<float>(Magnitude(value)), offset, dither) | (BitCast<uint32_t>(value) >> 24 & 0x80u);
  }
};

// The second moment: eight bits, 31 binades and a linear part. Code 0 stands for a quarter of the least step and not
// for 0: whatever rounds to it, no step divides by eps alone.
struct Second {
  static JQ_HOST_DEVICE uint32_t Offset(uint8_t exponent) { return OffsetOf<31>(exponent); }
  static JQ_HOST_DEVICE float Zero(uint32_t offset) { return BitCast<float>(offset) * (1.0f - 0x1p-5f); }
  static JQ_HOST_DEVICE float Decode(uint32_t code, uint32_t offset, float zero) {
    return BitCast<float>((code << kDropped) + offset) - zero;
  }
  static JQ_HOST_DEVICE uint32_t Word(float value, uint32_t offset, uint32_t hash) {
    return Encode(value, offset, hash >> (32 - kDropped));
  }
};

// What a place in a block adds to the hash of its moments' bits. Of both moments: where gradients are zero, blocks
// would round alike otherwise.
JQ_HOST_DEVICE uint32_t Salt(uint32_t index, uint32_t seed) { return index * 0x9e3779b1u + seed; }
JQ_HOST_DEVICE uint32_t Hash(float first, float second, uint32_t salt) {
  const uint32_t h = ((BitCast<uint32_t>(first) + BitCast<uint32_t>(second)) ^ salt) * 0x7feb352du;
  return (h ^ h >> 15) * 0x846ca68bu;
}

// Where all gradients of a block are at most kMostGradient in magnitude, and floor > 0, kNone gives the same results.
enum class Check { kNone, kAll };
JQ_HOST_DEVICE bool NeedsChecks(uint32_t most_magnitude, const Factors& f) {
  return most_magnitude > BitCast<uint32_t>(kMostGradient) || !(f.floor > 0.0f);
}
JQ_HOST_DEVICE bool IsFinite(float g) { return Magnitude(g) < 0x7f800000u; }

struct Moments {
  float first, second;
};

template <Check check>
JQ_HOST_DEVICE Moments Advance(float g, Moments old, const Factors& f) {
  if (check == Check::kAll) g = Clamp(Keep(IsFinite(g), g), Range<float>{-kMostGradient, kMostGradient});
  return {f.rest1 * g + f.b1 * old.first, f.rest2 * (g * g) + f.b2 * old.second};
}

JQ_HOST_DEVICE float SquareRoot(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// The step in units of the learning rate; NaN where the gradient is not finite, 0 rather than something over 0.
template <Check check>
JQ_HOST_DEVICE float Update(float g, Moments m, const Factors& f) {
  const float denominator = f.root * SquareRoot(m.second) + f.floor;
  const float quotient = m.first / denominator;
  if (check == Check::kNone) return quotient;
  return Select(IsFinite(g), Keep(denominator != 0.0f, quotient), BitCast<float>(uint32_t{0x7fc00000u}));
}

// What a handler hands to a kernel: rows of values, blocks of `block` consecutive values of a row (the last one of a
// row may be shorter). Results may be the operands.
struct AdamArguments {
  DType type;  // of g and update
  int64_t rows, row_size, block;
  const void* g;
  const uint8_t* m;
  const uint8_t* m_exponent;
  const uint8_t* v;
  const uint8_t* v_exponent;
  const Factors* factors;
  const uint32_t* seed;
  int64_t sharing;  // consecutive rows of the same factors and seed
  void* update;
  uint8_t* new_m;
  uint8_t* new_m_exponent;
  uint8_t* new_v;
  uint8_t* new_v_exponent;

  JQ_HOST_DEVICE int64_t BlocksOfRow() const { return (row_size + block - 1) / block; }
  JQ_HOST_DEVICE int64_t Blocks() const { return rows * BlocksOfRow(); }
};

// Where a block of all lies: its first value, how many, and which factors are its own.
struct Place {
  int64_t first, size, factors;
};
JQ_HOST_DEVICE Place PlaceOf(const AdamArguments& a, int64_t block) {
  const int64_t of_row = a.BlocksOfRow(), row = block / of_row, at = (block - row * of_row) * a.block;
  const int64_t left = a.row_size - at;
  return {row * a.row_size + at, left < a.block ? left : a.block, row / a.sharing};
}

}  // namespace optim
}  // namespace jq
