// quantize on CUDA: the mathematics of math.h in the kernels of cuda_map.cuh and cuda_gradient.cuh.
#include "ffi/affine/cuda_table.cuh"
#include "ffi/affine/quantize/math.h"

namespace jq {
namespace {

using Value = ValueOf<Quantize>;
constexpr CudaMap kValue[] = {
    MapEntry<Value, float, float, Code8>(),     MapEntry<Value, float, float, Code16>(),
    MapEntry<Value, float, float, float>(),     MapEntry<Value, float, Float16, Code8>(),
    MapEntry<Value, float, Float16, Code16>(),  MapEntry<Value, float, Float16, Float16>(),
    MapEntry<Value, float, Float16, float>(),   MapEntry<Value, float, BFloat16, Code8>(),
    MapEntry<Value, float, BFloat16, Code16>(), MapEntry<Value, float, BFloat16, BFloat16>(),
    MapEntry<Value, float, BFloat16, float>(),  MapEntry<Value, double, double, Code8>(),
    MapEntry<Value, double, double, Code16>(),  MapEntry<Value, double, double, double>(),
};

template <int bits>
struct PackedValue {
  static constexpr CudaMap kAll[] = {
      MapEntry<Value, float, float, Packed<bits>>(),
      MapEntry<Value, float, Float16, Packed<bits>>(),
      MapEntry<Value, float, BFloat16, Packed<bits>>(),
      MapEntry<Value, double, double, Packed<bits>>(),
  };
};

}  // namespace

const CudaKernels quantize_cuda = {
    TableOf(kValue),
    AnyMapEntry<Value, float>(),
    AnyMapEntry<Value, double>(),
    TableOf(PackedValue<4>::kAll),
    TableOf(PackedValue<2>::kAll),
    TableOf(Gradients<Quantize>::kInX),
    TableOf(Gradients<Quantize>::kAll),
};

}  // namespace jq
