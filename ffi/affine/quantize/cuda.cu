// quantize on CUDA: the mathematics of math.h in the kernels of cuda_map.cuh and cuda_gradient.cuh.
#include "ffi/affine/cuda_table.cuh"
#include "ffi/affine/quantize/math.h"

namespace jq {
namespace {

template <typename Math, int bits>
struct PackedEntries {
  using Value = ValueOf<Math>;
  static constexpr CudaMap kAll[] = {
      MapEntry<Value, float, float, Packed<bits>>(),
      MapEntry<Value, float, Float16, Packed<bits>>(),
      MapEntry<Value, float, BFloat16, Packed<bits>>(),
      MapEntry<Value, double, double, Packed<bits>>(),
  };
};

template <typename Math>
struct Entries {
  using Value = ValueOf<Math>;
  static constexpr CudaMap kValue[] = {
      MapEntry<Value, float, float, Code8>(),     MapEntry<Value, float, float, Code16>(),
      MapEntry<Value, float, float, float>(),     MapEntry<Value, float, Float16, Code8>(),
      MapEntry<Value, float, Float16, Code16>(),  MapEntry<Value, float, Float16, Float16>(),
      MapEntry<Value, float, Float16, float>(),   MapEntry<Value, float, BFloat16, Code8>(),
      MapEntry<Value, float, BFloat16, Code16>(), MapEntry<Value, float, BFloat16, BFloat16>(),
      MapEntry<Value, float, BFloat16, float>(),  MapEntry<Value, double, double, Code8>(),
      MapEntry<Value, double, double, Code16>(),  MapEntry<Value, double, double, double>(),
  };
  static constexpr CudaKernels kKernels = {
      TableOf(kValue),
      AnyMapEntry<Value, float>(),
      AnyMapEntry<Value, double>(),
      TableOf(PackedEntries<Math, 4>::kAll),
      TableOf(PackedEntries<Math, 2>::kAll),
      TableOf(Gradients<Math>::kInX),
      TableOf(Gradients<Math>::kAll),
  };
};

}  // namespace

const CudaKernels quantize_cuda = Entries<Quantize>::kKernels;
const CudaKernels stochastic_quantize_cuda = Entries<Keyed<Quantize>>::kKernels;

}  // namespace jq
