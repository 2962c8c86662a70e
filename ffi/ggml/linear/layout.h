// The prepared layout: a matrix's rows in eights, and of eight rows the blocks at one place of the row together, in
// units of four bytes that alternate between the rows: a 32-byte load then holds the same four bytes of eight blocks,
// the form in which the kernels decode. Blocks whose size is no multiple of four have a shorter unit before or behind
// the others. Rows of zeros fill up the last eight. A matrix may be cut along k in whole blocks, as in the plain form.
// Formats whose decoding gains nothing have no prepared form.
#pragma once

#include <cstdint>

#include "ffi/ggml/formats.h"

namespace jq {
namespace ggml {

constexpr int kLanes = 8;  // rows that one vector holds

constexpr int64_t EightsOf(int64_t n) { return (n + kLanes - 1) / kLanes; }
// Rows of a matrix of n that lie in memory.
constexpr int64_t StoredRows(int64_t n, bool prepared) { return prepared ? EightsOf(n) * kLanes : n; }

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

JQ_HOST_DEVICE constexpr bool HasPreparedForm(int64_t type_id) {
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: return kUnits<F>.interleaved;
    JQ_GGML_FORMATS(JQ_CASE)
#undef JQ_CASE
    default: return false;
  }
}

// Converts up to eight rows of k values. False: a type id without a prepared form.
bool ToPrepared(int type_id, const uint8_t* plain, uint8_t* prepared, int rows, int64_t k);
bool ToPlain(int type_id, const uint8_t* prepared, uint8_t* plain, int rows, int64_t k);

// Blocks [first, first + count) of one row of eight.
void ToPlainBlocks(int type_id, const uint8_t* prepared, int row, int64_t first, int64_t count, uint8_t* plain);

}  // namespace ggml
}  // namespace jq
