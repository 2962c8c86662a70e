// What cuda.cu gives the handlers' platform. No FFI types, so that nvcc need not read XLA's headers. Launches return
// null, or what went wrong.
#pragma once

#include "ffi/matmul/weight_only/kernels.h"

struct CUstream_st;

namespace jq {

using CudaStream = CUstream_st*;  // cudaStream_t

namespace weight_only {

const char* MatmulOnCuda(const Arguments& arguments, CudaStream stream);
const char* GradientOnCuda(const Arguments& arguments, CudaStream stream);
const char* LoadOnCuda();

}  // namespace weight_only
}  // namespace jq
