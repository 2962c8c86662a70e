// Dequantisation on CPU, and the table of everything compiled for one instruction set.
#include <utility>

#include "ffi/ggml/cpu_kernels.h"
#include "ffi/ggml/decode.h"
#include "ffi/ggml/linear/kernels.h"

namespace jq {
namespace ggml {
namespace JQ_LINEAR_ISA {
extern const LinearKernels linear_kernels;
}
}  // namespace ggml
namespace JQ_ISA {
namespace {

using namespace ggml;

template <typename F, typename Out>
JQ_HOST_DEVICE void DequantizeGroup(const F& block, int g, Out* out) {
  if constexpr (sizeof(Out) == sizeof(float)) {
    DecodeValues(block, g, out);
  } else {
    float wide[Decoder<F>::kGroup];
    DecodeValues(block, g, wide);
    for (int j = 0; j < Decoder<F>::kGroup; ++j) out[j] = Convert<Out>(wide[j]);
  }
}

// Groups by number: shifts by constants are vector instructions.
template <typename F, typename Out, int... g>
JQ_HOST_DEVICE void DequantizeBlock(const F& block, Out* values, std::integer_sequence<int, g...>) {
  (DequantizeGroup(block, g, values + g * Decoder<F>::kGroup), ...);
}

template <typename F, typename Out>
void Dequantize(const uint8_t* data, void* out, int64_t n) {
  const F* blocks = reinterpret_cast<const F*>(data);
  Out* values = static_cast<Out*>(out);
  if constexpr (kIsFloat<F>) {
    for (int64_t i = 0; i < n; ++i) values[i] = Convert<Out>(LoadValue(blocks[i]));
  } else {
    using Groups = std::make_integer_sequence<int, F::kBlock / Decoder<F>::kGroup>;
    for (int64_t i = 0; i < n / F::kBlock; ++i) DequantizeBlock(blocks[i], values + i * F::kBlock, Groups());
  }
}

template <typename Out>
CpuKernels::Dequantize DequantizerTo(int type_id) {
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: return Dequantize<F, Out>;
    JQ_GGML_FORMATS(JQ_CASE)
#undef JQ_CASE
    default: return nullptr;
  }
}

CpuKernels::Dequantize DequantizerOf(int type_id, DType out) {
  switch (out) {
    case DType::kF32: return DequantizerTo<float>(type_id);
    case DType::kF16: return DequantizerTo<Float16>(type_id);
    case DType::kBF16: return DequantizerTo<BFloat16>(type_id);
    default: return nullptr;
  }
}

}  // namespace

extern const ggml::CpuKernels ggml_kernels;
const ggml::CpuKernels ggml_kernels = {DequantizerOf, QuantizerOf, &ggml::JQ_LINEAR_ISA::linear_kernels};

}  // namespace JQ_ISA
}  // namespace jq
