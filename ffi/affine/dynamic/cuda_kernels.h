// Dynamic quantisation on CUDA. No FFI types, so that nvcc need not read XLA's headers.
#pragma once

#include "ffi/affine/cuda_kernels.h"
#include "ffi/affine/dynamic/arguments.h"

namespace jq {

const char* RangeOnCuda(const RangeArguments&, CudaStream);
// Scale and zero point, and the result as well where one kernel makes all of them (*complete); else the map follows.
const char* DynamicOnCuda(const DynamicArguments&, bool fake, CudaStream, bool* complete);
const char* LoadDynamicOnCuda();

}  // namespace jq
