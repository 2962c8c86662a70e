// Dequantisation on CPU, and the table of everything compiled for one instruction set.
#include "ffi/ggml/cpu_kernels.h"
#include "ffi/ggml/decode.h"
#include "ffi/ggml/linear/kernels.h"

namespace jq {
namespace JQ_ISA {
namespace {

using namespace ggml;

template <typename F, typename Out>
void Dequantize(const uint8_t* data, void* out, int64_t n) {
  const F* blocks = reinterpret_cast<const F*>(data);
  Out* values = static_cast<Out*>(out);
  if constexpr (kIsFloat<F>) {
    for (int64_t i = 0; i < n; ++i) values[i] = Convert<Out>(LoadValue(blocks[i]));
  } else {
    constexpr int kGroup = Decoder<F>::kGroup;
    for (int64_t i = 0; i < n / F::kBlock; ++i) {
      for (int g = 0; g < F::kBlock / kGroup; ++g, values += kGroup) {
        if constexpr (sizeof(Out) == sizeof(float)) {
          DecodeValues(blocks[i], g, reinterpret_cast<float*>(values));
        } else {
          float wide[kGroup];
          DecodeValues(blocks[i], g, wide);
          for (int j = 0; j < kGroup; ++j) values[j] = Convert<Out>(wide[j]);
        }
      }
    }
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
const ggml::CpuKernels ggml_kernels = {DequantizerOf, QuantizerOf, &ggml::JQ_ISA::linear_kernels};

}  // namespace JQ_ISA
}  // namespace jq
