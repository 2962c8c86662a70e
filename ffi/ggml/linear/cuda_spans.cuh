// A span of weights of any format, known at run time: 32 codes and their scales, or 32 values. Calls, not inlined:
// every format is compiled once for all kernels of the source.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_storage.h"
#include "ffi/ggml/linear/blocking.h"
#include "ffi/ggml/linear/cuda_fragments.cuh"
#include "ffi/ggml/linear/cuda_weights.cuh"

namespace jq {
namespace ggml {
namespace {

// Where a span's codes go (16-byte aligned), and its scale and offset; those of the second half of a span lie `half`
// further on.
struct SpanTarget {
  uint32_t* codes;
  float *scale, *offset;
  int half;
};

// Of bytes wherever they lie: groups with a number known at run time would put a copied block into local memory.
template <typename F>
__device__ __forceinline__ void StoreDecoded(const Row& row, int64_t span, const SpanTarget& to) {
  using D = Decoder<F>;
  constexpr int kSpansOfBlock = F::kBlock / kSpan;
  const F& block = reinterpret_cast<const F*>(row.matrix + row.row * row.row_bytes)[span / kSpansOfBlock];
  const int s = static_cast<int>(span % kSpansOfBlock);
#pragma unroll
  for (int half = 0; half < kSpan / D::kGroup; ++half) {
    int8_t codes[D::kGroup];
    float scale, offset = 0.0f;
    D::Group(block, s * (kSpan / D::kGroup) + half, codes, &scale, &offset);
    Words<D::kGroup> words;
    memcpy(words.w, codes, sizeof(codes));
    StoreWords(words, to.codes + half * (D::kGroup / 4));
    to.scale[half * to.half] = scale;
    if constexpr (D::kOffset) to.offset[half * to.half] = offset;
  }
}

template <typename F, Place kPlace>
__device__ __forceinline__ void StoreWordwise(const Row& row, int64_t span, const SpanTarget& to) {
  using C = CodeWords<F>;
  constexpr int kSpansOfBlock = F::kBlock / kSpan;
  const BlockView<F, kPlace> block = BlockView<F, kPlace>(row).At(span / kSpansOfBlock);
  const int s = static_cast<int>(span % kSpansOfBlock);
  Words<kSpan> codes;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    codes.w[q] = C::template Codes<0>(block, s, q);
    codes.w[4 + q] = C::template Codes<1>(block, s, q);
  }
  StoreWords(codes, to.codes);
#pragma unroll
  for (int half = 0; half < kSpan / Decoder<F>::kGroup; ++half) {
    to.scale[half * to.half] = C::Scale(block, s, half);
    if constexpr (Decoder<F>::kOffset) to.offset[half * to.half] = C::Offset(block, s, half);
  }
}

template <typename F>
__device__ __forceinline__ void StoreSpanOf(const Row& row, int64_t span, const SpanTarget& to) {
  if constexpr (kUnits<F>.interleaved) {
    if (row.interleaved) {
      StoreWordwise<F, Place::kInterleaved>(row, span, to);
    } else {
      StoreWordwise<F, Place::kPlain>(row, span, to);
    }
  } else {
    StoreDecoded<F>(row, span, to);
  }
}

__device__ JQ_NOINLINE void StoreSpan(int type_id, Row row, int64_t span, SpanTarget to) {
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: StoreSpanOf<F>(row, span, to); break;
    JQ_GGML_QUANTISED(JQ_CASE)
#undef JQ_CASE
    default: break;
  }
}

JQ_HOST_DEVICE constexpr bool IsFloatFormat(int type_id) {
  return type_id == F32::kId || type_id == F16::kId || type_id == BF16::kId;
}

// 16 or 32; whether there are offsets.
JQ_HOST_DEVICE constexpr int GroupOf(int type_id) {
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: return Decoder<F>::kGroup;
    JQ_GGML_QUANTISED(JQ_CASE)
#undef JQ_CASE
    default: return kSpan;
  }
}
JQ_HOST_DEVICE constexpr bool HasOffset(int type_id) {
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: return Decoder<F>::kOffset;
    JQ_GGML_QUANTISED(JQ_CASE)
#undef JQ_CASE
    default: return false;
  }
}
#define JQ_HAS_WORDS(F) static_assert(!Decoder<F>::kOffset || kUnits<F>.interleaved, "offsets come with words");
JQ_GGML_QUANTISED(JQ_HAS_WORDS)
#undef JQ_HAS_WORDS

// The values of a span, zeros behind the end of the row, to[0], to[1], ... : exactly as dequantised. Through `scratch`,
// kScratchWords of shared memory that no other thread uses.
constexpr int kScratchWords = 12;
__device__ JQ_NOINLINE void StoreValues(int type_id, Row row, int64_t k, int64_t span, uint32_t* scratch, float* to) {
  if (IsFloatFormat(type_id)) {
    const DType type = type_id == F32::kId ? DType::kF32 : type_id == F16::kId ? DType::kF16 : DType::kBF16;
    const void* values = row.matrix + row.row * row.row_bytes;
#pragma unroll 4
    for (int i = 0; i < kSpan; ++i) {
      const int64_t at = span * kSpan + i;
      to[i] = at < k ? LoadAny<float>(values, at, type) : 0.0f;
    }
    return;
  }
  float* scales = reinterpret_cast<float*>(scratch + 8);
  const bool halves = GroupOf(type_id) != kSpan, has_offset = HasOffset(type_id);
  StoreSpan(type_id, row, span, {scratch, scales, scales + 2, 1});
  const Words<kSpan> codes = LoadWords<kSpan>(scratch);
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    const int half = halves && i >= 16 ? 1 : 0;
    const float value = scales[half] * static_cast<float>(static_cast<int8_t>(codes.w[i / 4] >> (i % 4 * 8)));
    to[i] = has_offset ? value + scales[2 + half] : value;
  }
}

}  // namespace
}  // namespace ggml
}  // namespace jq
