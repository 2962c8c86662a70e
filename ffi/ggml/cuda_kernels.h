// What the CUDA sources of the block formats give the handlers' platform. No FFI types, so that nvcc need not read
// XLA's headers. Launches return null, or what went wrong.
#pragma once

#include "ffi/ggml/arguments.h"

struct CUstream_st;

namespace jq {

using CudaStream = CUstream_st*;  // cudaStream_t

namespace ggml {

// ---- codec/cuda.cu

// Rows one after the other, or by number.
const char* DequantizeOnCuda(const DequantizeArguments& arguments, CudaStream stream);
const char* ArrangeOnCuda(const ArrangeArguments& arguments, CudaStream stream);
const char* LoadDequantizeOnCuda();
const char* LoadArrangeOnCuda();

// ---- quantize/cuda.cu

// Whether a format is quantised on the device. The others, the IQ formats but for IQ4, take tables and sorting that
// belong on the host.
bool QuantizesOnCuda(int type_id);
// A device cannot refuse values without being waited for: see the source for what becomes of those that are not finite.
const char* QuantizeOnCuda(const QuantizeArguments& arguments, CudaStream stream);
const char* LoadQuantizeOnCuda();

// ---- linear/cuda.cu

// scratch: ProductScratchBytes(arguments) bytes, aligned to 16.
const char* LinearOnCuda(const ProductArguments& arguments, void* scratch, CudaStream stream);
const char* LinearGradientOnCuda(const ProductArguments& arguments, void* scratch, CudaStream stream);
const char* LoadProductsOnCuda();

}  // namespace ggml
}  // namespace jq
