// The prepared layout: a matrix's rows in eights, and of eight rows the blocks at one place of the row together, in
// units of four bytes that alternate between the rows: a 32-byte load then holds the same four bytes of eight blocks,
// the form in which the kernels decode. Blocks whose size is no multiple of four have a shorter unit before or behind
// the others. Nothing is added or lost. The last rows, fewer than eight, stay plain, as do the formats whose decoding
// gains nothing.
#pragma once

#include <cstdint>

#include "ffi/ggml/formats.h"
#include "ffi/ggml/linear/kernels.h"

namespace jq {
namespace ggml {

constexpr int kLanes = 8;  // rows that one vector holds

struct Units {
  bool interleaved;
  int lead;   // bytes before the units of four
  int words;  // units of four
  int tail;   // bytes behind
};

template <typename F>
constexpr Units kUnits = {false, 0, static_cast<int>(sizeof(F)) / 4, static_cast<int>(sizeof(F)) % 4};
#define JQ_INTERLEAVED(F, lead)                                                             \
  template <>                                                                               \
  inline constexpr Units kUnits<F> = {true, lead, (static_cast<int>(sizeof(F)) - lead) / 4, \
                                      (static_cast<int>(sizeof(F)) - lead) % 4};
JQ_INTERLEAVED(Q4_0, 2)
JQ_INTERLEAVED(Q4_1, 0)
JQ_INTERLEAVED(Q5_0, 2)
JQ_INTERLEAVED(Q5_1, 0)
JQ_INTERLEAVED(Q8_0, 2)
JQ_INTERLEAVED(Q8_1, 0)
JQ_INTERLEAVED(Q2_K, 0)
JQ_INTERLEAVED(Q3_K, 0)
JQ_INTERLEAVED(Q4_K, 0)
JQ_INTERLEAVED(Q5_K, 0)
JQ_INTERLEAVED(Q6_K, 0)
JQ_INTERLEAVED(Q8_K, 0)
JQ_INTERLEAVED(IQ4_NL, 2)
JQ_INTERLEAVED(IQ4_XS, 0)
JQ_INTERLEAVED(TQ2_0, 0)
JQ_INTERLEAVED(MXFP4, 1)
JQ_INTERLEAVED(NVFP4, 0)
#undef JQ_INTERLEAVED

// Whether a type id has a prepared form; the others' prepared form is the plain one.
bool HasPreparedForm(int type_id);

// Converts rows [begin, end) of a matrix of n rows of k values, both limits multiples of eight or n. False: an unknown
// type id.
bool ToPrepared(int type_id, const uint8_t* plain, uint8_t* prepared, int64_t n, int64_t k, int64_t begin, int64_t end);
bool ToPlain(int type_id, const uint8_t* prepared, uint8_t* plain, int64_t n, int64_t k, int64_t begin, int64_t end);

}  // namespace ggml
}  // namespace jq
