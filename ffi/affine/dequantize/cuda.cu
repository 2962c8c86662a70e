// dequantize on CUDA: the mathematics of math.h in the kernels of cuda_map.cuh and cuda_gradient.cuh.
#include "ffi/affine/cuda_table.cuh"
#include "ffi/affine/dequantize/math.h"

namespace jq {
namespace {

using Value = ValueOf<Dequantize>;
constexpr CudaMap kValue[] = {
    MapEntry<Value, float, Code8, float>(),     MapEntry<Value, float, Code8, Float16>(),
    MapEntry<Value, float, Code8, BFloat16>(),  MapEntry<Value, double, Code8, double>(),
    MapEntry<Value, float, Code16, float>(),    MapEntry<Value, float, Code16, Float16>(),
    MapEntry<Value, float, Code16, BFloat16>(), MapEntry<Value, double, Code16, double>(),
    MapEntry<Value, float, float, float>(),     MapEntry<Value, float, float, Float16>(),
    MapEntry<Value, float, float, BFloat16>(),  MapEntry<Value, float, Float16, Float16>(),
    MapEntry<Value, float, Float16, float>(),   MapEntry<Value, float, BFloat16, BFloat16>(),
    MapEntry<Value, float, BFloat16, float>(),  MapEntry<Value, double, double, double>(),
};

}  // namespace

const CudaKernels dequantize_cuda = {
    TableOf(kValue),
    AnyMapEntry<Value, float>(),
    AnyMapEntry<Value, double>(),
    {},
    {},
    TableOf(Gradients<Dequantize>::kInX),
    TableOf(Gradients<Dequantize>::kAll),
};

}  // namespace jq
