// The GGML block formats as they lie in memory, for host and device. Rows are consecutive blocks; a block holds kBlock
// values. Halves are raw bits. Little-endian machines only.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"

namespace jq {
namespace ggml {

constexpr int kSuper = 256;  // values in a super-block

#pragma pack(push, 1)

struct F32 {
  static constexpr int kId = 0, kBlock = 1;
  float value;
};
struct F16 {
  static constexpr int kId = 1, kBlock = 1;
  Float16 value;
};
struct BF16 {
  static constexpr int kId = 30, kBlock = 1;
  BFloat16 value;
};

// ---- 32 values (64, 128) with a scale

struct Q1_0 {
  static constexpr int kId = 41, kBlock = 128;
  Float16 d;
  uint8_t qs[16];  // a sign bit each
};
struct Q2_0 {
  static constexpr int kId = 42, kBlock = 64;
  Float16 d;
  uint8_t qs[16];
};
struct Q4_0 {
  static constexpr int kId = 2, kBlock = 32;
  Float16 d;
  uint8_t qs[16];  // nibbles, low: j, high: j + 16
};
struct Q4_1 {
  static constexpr int kId = 3, kBlock = 32;
  Float16 d, m;
  uint8_t qs[16];
};
struct Q5_0 {
  static constexpr int kId = 6, kBlock = 32;
  Float16 d;
  uint8_t qh[4];  // fifth bits
  uint8_t qs[16];
};
struct Q5_1 {
  static constexpr int kId = 7, kBlock = 32;
  Float16 d, m;
  uint8_t qh[4];
  uint8_t qs[16];
};
struct Q8_0 {
  static constexpr int kId = 8, kBlock = 32;
  Float16 d;
  int8_t qs[32];
};
struct Q8_1 {
  static constexpr int kId = 9, kBlock = 32;
  Float16 d, s;  // s: d * sum of qs
  int8_t qs[32];
};

// ---- K-quants: sub-blocks of 16 or 32 whose scales are quantised too

struct Q2_K {
  static constexpr int kId = 10, kBlock = kSuper;
  uint8_t scales[16];  // low nibble scale, high nibble min
  uint8_t qs[64];
  Float16 d, dmin;
};
struct Q3_K {
  static constexpr int kId = 11, kBlock = kSuper;
  uint8_t hmask[32];
  uint8_t qs[64];
  uint8_t scales[12];
  Float16 d;
};
struct Q4_K {
  static constexpr int kId = 12, kBlock = kSuper;
  Float16 d, dmin;
  uint8_t scales[12];
  uint8_t qs[128];
};
struct Q5_K {
  static constexpr int kId = 13, kBlock = kSuper;
  Float16 d, dmin;
  uint8_t scales[12];
  uint8_t qh[32];
  uint8_t qs[128];
};
struct Q6_K {
  static constexpr int kId = 14, kBlock = kSuper;
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  Float16 d;
};
struct Q8_K {
  static constexpr int kId = 15, kBlock = kSuper;
  float d;
  int8_t qs[256];
  int16_t bsums[16];
};

// ---- IQ: points of a lattice, and signs

struct IQ2_XXS {
  static constexpr int kId = 16, kBlock = kSuper;
  Float16 d;
  uint16_t qs[32];
};
struct IQ2_XS {
  static constexpr int kId = 17, kBlock = kSuper;
  Float16 d;
  uint16_t qs[32];
  uint8_t scales[8];
};
struct IQ2_S {
  static constexpr int kId = 22, kBlock = kSuper;
  Float16 d;
  uint8_t qs[64];  // 32 grid indices, then 32 sign bytes
  uint8_t qh[8];
  uint8_t scales[8];
};
struct IQ3_XXS {
  static constexpr int kId = 18, kBlock = kSuper;
  Float16 d;
  uint8_t qs[96];  // 64 grid indices, then 8 words of signs and scale
};
struct IQ3_S {
  static constexpr int kId = 21, kBlock = kSuper;
  Float16 d;
  uint8_t qs[64];
  uint8_t qh[8];
  uint8_t signs[32];
  uint8_t scales[4];
};
struct IQ1_S {
  static constexpr int kId = 19, kBlock = kSuper;
  Float16 d;
  uint8_t qs[32];
  uint16_t qh[8];
};
struct IQ1_M {
  static constexpr int kId = 29, kBlock = kSuper;
  uint8_t qs[32];
  uint8_t qh[16];
  uint8_t scales[8];  // the half scale is in their high nibbles (of 16-bit words)
};
struct IQ4_NL {
  static constexpr int kId = 20, kBlock = 32;
  Float16 d;
  uint8_t qs[16];
};
struct IQ4_XS {
  static constexpr int kId = 23, kBlock = kSuper;
  Float16 d;
  uint16_t scales_h;
  uint8_t scales_l[4];
  uint8_t qs[128];
};

// ---- Ternary and 4-bit floats

struct TQ1_0 {
  static constexpr int kId = 34, kBlock = kSuper;
  uint8_t qs[48];  // five digits of base 3 each
  uint8_t qh[4];   // four each
  Float16 d;
};
struct TQ2_0 {
  static constexpr int kId = 35, kBlock = kSuper;
  uint8_t qs[64];
  Float16 d;
};
struct MXFP4 {
  static constexpr int kId = 39, kBlock = 32;
  uint8_t e;  // E8M0
  uint8_t qs[16];
};
struct NVFP4 {
  static constexpr int kId = 40, kBlock = 64;
  uint8_t d[4];  // unsigned E4M3, of 16 values each
  uint8_t qs[32];
};

#pragma pack(pop)

// Every format, for tables: X(name).
// clang-format off
#define JQ_GGML_QUANTISED(X) \
  X(Q1_0) X(Q2_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q8_1) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(Q8_K) \
  X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ3_XXS) X(IQ3_S) X(IQ1_S) X(IQ1_M) \
  X(IQ4_NL) X(IQ4_XS) X(TQ1_0) X(TQ2_0) X(MXFP4) X(NVFP4)
#define JQ_GGML_FORMATS(X) X(F32) X(F16) X(BF16) JQ_GGML_QUANTISED(X)
// clang-format on

static_assert(sizeof(Q1_0) == 18 && sizeof(Q2_0) == 18 && sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20, "layout");
static_assert(sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 && sizeof(Q8_0) == 34 && sizeof(Q8_1) == 36, "layout");
static_assert(sizeof(Q2_K) == 84 && sizeof(Q3_K) == 110 && sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176, "layout");
static_assert(sizeof(Q6_K) == 210 && sizeof(Q8_K) == 292 && sizeof(IQ2_XXS) == 66 && sizeof(IQ2_XS) == 74, "layout");
static_assert(sizeof(IQ2_S) == 82 && sizeof(IQ3_XXS) == 98 && sizeof(IQ3_S) == 110 && sizeof(IQ1_S) == 50, "layout");
static_assert(sizeof(IQ1_M) == 56 && sizeof(IQ4_NL) == 18 && sizeof(IQ4_XS) == 136 && sizeof(TQ1_0) == 54, "layout");
static_assert(sizeof(TQ2_0) == 66 && sizeof(MXFP4) == 17 && sizeof(NVFP4) == 36, "layout");

}  // namespace ggml
}  // namespace jq
