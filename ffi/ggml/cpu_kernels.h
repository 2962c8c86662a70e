// The CPU's kernels of the block formats, once per instruction set.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"
#include "ffi/ggml/quantize/kernels.h"

namespace jq {
namespace ggml {

struct LinearKernels;  // linear/kernels.h

struct CpuKernels {
  // n values, whole blocks, to float32, float16 or bfloat16.
  using Dequantize = void (*)(const uint8_t* blocks, void* out, int64_t n);

  // Null where there is no such format or type.
  Dequantize (*dequantizer)(int type_id, DType out);
  QuantizeRows (*quantizer)(int type_id);
  const LinearKernels* linear;
};

}  // namespace ggml
}  // namespace jq
