// The quantisers, once per instruction set. All give the same bytes, those of ggml 0.20.2.
#pragma once

#include <cstdint>

namespace jq {
namespace ggml {

// Quantises `rows` rows of n values each, n a multiple of the format's block, to consecutive rows of blocks. imatrix:
// null, or n weights that the rows share. Returns null, or what was wrong with the values (a static message); the
// blocks are then unspecified. Never reads or writes out of bounds, whatever the values.
using QuantizeRows = const char* (*)(const float* x, void* out, int64_t rows, int64_t n, const float* imatrix);

}  // namespace ggml

#if defined(JQ_ISA)
namespace JQ_ISA {

// The quantiser of a type id; null for an unknown one.
ggml::QuantizeRows QuantizerOf(int type_id);
// The same of the IQ formats alone.
ggml::QuantizeRows IqQuantizerOf(int type_id);

}  // namespace JQ_ISA
#endif

}  // namespace jq
