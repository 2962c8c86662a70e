// The CUDA side's tables: what an operation can launch. Filled by <op>/cuda.cu, used by the handlers' platforms in
// cuda_module.cc and cuda_emulation_module.cc. No FFI types, so that nvcc need not read XLA's headers.
#pragma once

#include "ffi/affine/arguments.h"
#include "ffi/affine/histogram/arguments.h"

struct CUstream_st;

namespace jq {

using CudaStream = CUstream_st*;  // cudaStream_t

// Launches return null, or what went wrong.
struct CudaMap {
  DType x_type, out_type;
  // rows: how packed codes lie in the output, else null.
  const char* (*launch)(const MapArguments&, const PackArguments* rows, CudaStream);
  const char* (*load)();  // brings the kernels to the device
};
struct CudaGradient {
  DType type;
  const char* (*launch)(const GradientArguments&, CudaStream);
  const char* (*load)();
};

template <typename Entry>
struct CudaTable {
  const Entry* entries;
  int count;
  const Entry* begin() const { return entries; }
  const Entry* end() const { return entries + count; }
};
template <typename Entry, int kCount>
constexpr CudaTable<Entry> TableOf(const Entry (&entries)[kCount]) {
  return {entries, kCount};
}

struct CudaKernels {
  CudaTable<CudaMap> value;             // signed integer types stand for the unsigned ones as well
  CudaMap any_single, any_wide;         // for other floating types, by arithmetic; null where there is none
  CudaTable<CudaMap> packed4, packed2;  // out_type is not looked at
  CudaTable<CudaMap> gradient_in_x;
  CudaTable<CudaGradient> gradient;
};

extern const CudaKernels fake_quantize_cuda, quantize_cuda, dequantize_cuda;
extern const CudaKernels stochastic_fake_quantize_cuda, stochastic_quantize_cuda;

const char* PackOnCuda(const PackArguments&, CudaStream);
const char* UnpackOnCuda(const PackArguments&, CudaStream);
const char* LoadPackingOnCuda();

const char* HistogramOnCuda(const HistogramArguments&, CudaStream);
const char* LoadHistogramOnCuda();

}  // namespace jq
