// What the CUDA source of integer products gives the handlers' platform. No FFI types, so that nvcc need not read XLA's
// headers. Launches return null, or what went wrong.
#pragma once

#include "ffi/matmul/arguments.h"

struct CUstream_st;

namespace jq {

using CudaStream = CUstream_st*;  // cudaStream_t

namespace matmul {

const char* ProductOnCuda(const ProductArguments& arguments, CudaStream stream);
const char* PrepareOnCuda(const ArrangeArguments& arguments, CudaStream stream);
const char* PlainOnCuda(const ArrangeArguments& arguments, CudaStream stream);
const char* LoadMatmulOnCuda();

}  // namespace matmul
}  // namespace jq
