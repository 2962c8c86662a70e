// The Platform of integer products over cuda_kernels.h, for CUDA and for the kernels emulated on the host (Target, as
// in ffi/cuda_platform.h).
#pragma once

#include <string>

#include "ffi/matmul/cuda_kernels.h"
#include "ffi/matmul/handlers.h"

namespace jq {
namespace matmul {

template <typename Target>
struct CudaPlatform : Target {
  using typename Target::Context;

  static ffi::Error Product(Context context, const char* name, const ProductArguments& a) {
    return Result(name, ProductOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Prepare(Context context, const ArrangeArguments& a) {
    return Result("prepare", PrepareOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Plain(Context context, const ArrangeArguments& a) {
    return Result("plain", PlainOnCuda(a, Target::Stream(context)));
  }

  // As ffi/cuda_platform.h: the kernels of a target, before anything is executed.
  static ffi::Error Load(const std::string& target) {
    const bool ours = target == "prepare" || target == "plain" || target == "int_matmul" || target == "scaled_matmul";
    return ours ? Result(target.c_str(), LoadMatmulOnCuda()) : ffi::Error::Success();
  }

  static ffi::Error Result(const char* name, const char* error) {
    if (error == nullptr) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(name) + ": " + Target::kName + ": " + error + ".");
  }
};

}  // namespace matmul
}  // namespace jq
