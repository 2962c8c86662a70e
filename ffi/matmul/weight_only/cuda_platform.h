// Weight-only products on CUDA, and with the kernels emulated on the host (Target, as in ffi/cuda_platform.h).
#pragma once

#include <string>

#include "ffi/matmul/weight_only/cuda_kernels.h"
#include "ffi/matmul/weight_only/handlers.h"

namespace jq {
namespace weight_only {

template <typename Target>
struct CudaPlatform : Target {
  using typename Target::Context;

  static ffi::Error Matmul(Context context, const Arguments& a) {
    return Result("weight_only_matmul", MatmulOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Gradient(Context context, const Arguments& a) {
    return Result("weight_only_gradient", GradientOnCuda(a, Target::Stream(context)));
  }

  // As ffi/cuda_platform.h: the kernels of a target, before anything is executed.
  static ffi::Error Load(const std::string& target) {
    return target.rfind("weight_only_", 0) == 0 ? Result(target.c_str(), LoadOnCuda()) : ffi::Error::Success();
  }

 private:
  static ffi::Error Result(const char* name, const char* error) {
    if (error == nullptr) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(name) + ": " + Target::kName + ": " + error + ".");
  }
};

}  // namespace weight_only
}  // namespace jq
