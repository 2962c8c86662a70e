// The IQ quantisers of one instruction set.
#include "ffi/ggml/quantize/iq4.h"
#include "ffi/ggml/quantize/iq_lattice.h"
#include "ffi/ggml/quantize/iq_ternary.h"
#include "ffi/ggml/quantize/kernels.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <typename F>
const char* QuantizeEvenly(const float* x, void* out, int64_t rows, int64_t n, const float* imatrix) {
  const int64_t row_blocks = n / F::kBlock, blocks = rows * row_blocks;
  for (int64_t first = 0; first < blocks; first += kWidth) {
    const int count = static_cast<int>(blocks - first < kWidth ? blocks - first : kWidth);
    const float* values[kWidth];
    const float* weights[kWidth] = {};
    for (int lane = 0; lane < kWidth; ++lane) {
      const int64_t block = first + (lane < count ? lane : count - 1);
      values[lane] = x + block * F::kBlock;
      if (imatrix != nullptr) weights[lane] = imatrix + block % row_blocks * F::kBlock;
    }
    if (!Finite(values[0], static_cast<int64_t>(count) * F::kBlock)) return kNotFinite;
    Floats columns[F::kBlock], weight_columns[F::kBlock];
    Transpose(values, F::kBlock, columns);
    if (imatrix != nullptr) Transpose(weights, F::kBlock, weight_columns);
    F quantised[kWidth];
    const ggml::Tile<Floats> tile = {columns, imatrix != nullptr ? weight_columns : nullptr, Floats{}};
    ggml::Quantize(F{}, tile, ggml::Writer<F, Floats>{reinterpret_cast<uint8_t*>(quantised)});
    memcpy(static_cast<F*>(out) + first, quantised, count * sizeof(F));
  }
  return nullptr;
}

const char* CheckImatrix(const float* imatrix, int64_t n) {
  if (!Finite(imatrix, n)) return "imatrix: expected finite weights, got inf or NaN";
  float largest = 0, least = 0;
  for (int64_t i = 0; i < n; ++i) {
    largest = imatrix[i] > largest ? imatrix[i] : largest;
    least = imatrix[i] < least ? imatrix[i] : least;
  }
  if (least < 0) return "imatrix: expected weights of at least 0, got a negative one";
  if (largest == 0 && n > 0) return "imatrix: expected a weight above 0, got zeros alone";
  return nullptr;
}

template <ggml::QuantizeRows kQuantize, bool kRequired>
const char* Checked(const float* x, void* out, int64_t rows, int64_t n, const float* imatrix) {
  if (kRequired && imatrix == nullptr) return "imatrix: this format needs one";
  const char* message = imatrix == nullptr ? nullptr : CheckImatrix(imatrix, n);
  return message != nullptr ? message : kQuantize(x, out, rows, n, imatrix);
}

}  // namespace

ggml::QuantizeRows IqQuantizerOf(int type_id) {
  switch (type_id) {
    case ggml::IQ2_XXS::kId: return Checked<QuantizeLattice<ggml::IQ2_XXS>, true>;
    case ggml::IQ2_XS::kId: return Checked<QuantizeLattice<ggml::IQ2_XS>, true>;
    case ggml::IQ2_S::kId: return Checked<QuantizeLattice<ggml::IQ2_S>, false>;
    case ggml::IQ3_XXS::kId: return Checked<QuantizeLattice<ggml::IQ3_XXS>, false>;
    case ggml::IQ3_S::kId: return Checked<QuantizeLattice<ggml::IQ3_S>, false>;
    case ggml::IQ1_S::kId: return Checked<QuantizeTernary<ggml::IQ1_S>, true>;
    case ggml::IQ1_M::kId: return Checked<QuantizeTernary<ggml::IQ1_M>, false>;
    case ggml::IQ4_NL::kId: return Checked<QuantizeEvenly<ggml::IQ4_NL>, false>;
    case ggml::IQ4_XS::kId: return Checked<QuantizeEvenly<ggml::IQ4_XS>, false>;
    default: return nullptr;
  }
}

}  // namespace JQ_ISA
}  // namespace jq
