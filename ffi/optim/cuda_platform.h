// The optimiser's Platform over cuda.cu, for CUDA and for the kernels emulated on the host (Target, as in
// ffi/cuda_platform.h).
#pragma once

#include <string>

#include "ffi/optim/handlers.h"

struct CUstream_st;

namespace jq {
namespace optim {

const char* Adam8bitOnCuda(const AdamArguments& arguments, CUstream_st* stream);
const char* LoadAdam8bitOnCuda();

template <typename Target>
struct CudaPlatform : Target {
  using typename Target::Context;

  static ffi::Error Adam8bit(Context context, const AdamArguments& a) {
    return Result(Adam8bitOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Load(const std::string& target) {
    return target == "adam8bit" ? Result(LoadAdam8bitOnCuda()) : ffi::Error::Success();
  }

 private:
  static ffi::Error Result(const char* error) {
    if (error == nullptr) return ffi::Error::Success();
    return ffi::Error::Internal(std::string("adam8bit: ") + Target::kName + ": " + error + ".");
  }
};

}  // namespace optim
}  // namespace jq
