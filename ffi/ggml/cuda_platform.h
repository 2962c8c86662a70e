// The block formats' Platform over cuda_kernels.h, for CUDA and for the kernels emulated on the host (Target, as in
// ffi/cuda_platform.h).
#pragma once

#include <string>

#include "ffi/ggml/cuda_kernels.h"
#include "ffi/ggml/handlers.h"

namespace jq {
namespace ggml {

template <typename Target>
struct CudaPlatform : Target {
  using typename Target::Context;

  static ffi::Error Quantize(Context context, const QuantizeArguments& a) {
    if (!QuantizesOnCuda(a.type_id)) {
      return ffi::Error(ffi::ErrorCode::kUnimplemented,
                        "ggml_quantize: no CUDA kernel for GGML type " + std::to_string(a.type_id) +
                            ": the IQ formats, but for IQ4_NL and IQ4_XS, are quantised on the host.");
    }
    return Result("ggml_quantize", QuantizeOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Dequantize(Context context, const DequantizeArguments& a) {
    return Result("ggml_dequantize", DequantizeOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Arrange(Context context, const ArrangeArguments& a) {
    return Result("ggml_prepare", ArrangeOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Linear(Context context, const ProductArguments& a) {
    return Result("ggml_linear", LinearOnCuda(a, a.scratch, Target::Stream(context)));
  }
  static ffi::Error LinearGradient(Context context, const ProductArguments& a) {
    return Result("ggml_linear_gradient", LinearGradientOnCuda(a, a.scratch, Target::Stream(context)));
  }

  // As ffi/cuda_platform.h: the kernels of a target, before anything is executed.
  static ffi::Error Load(const std::string& target) {
    const char* error = nullptr;
    if (target == "ggml_quantize") error = LoadQuantizeOnCuda();
    if (target == "ggml_dequantize" || target == "ggml_take") error = LoadDequantizeOnCuda();
    if (target == "ggml_prepare") error = LoadArrangeOnCuda();
    if (target.find("linear") != std::string::npos) error = LoadProductsOnCuda();
    return Result(target.c_str(), error);
  }

  static ffi::Error Result(const char* name, const char* error) {
    if (error == nullptr) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(name) + ": " + Target::kName + ": " + error + ".");
  }
};

}  // namespace ggml
}  // namespace jq
