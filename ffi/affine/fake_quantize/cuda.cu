// fake_quantize on CUDA: the mathematics of math.h in the kernels of cuda_map.cuh and cuda_gradient.cuh.
#include "ffi/affine/cuda_table.cuh"
#include "ffi/affine/fake_quantize/math.h"

namespace jq {
namespace {

template <typename Math>
struct Entries {
  using Value = ValueOf<Math>;
  static constexpr CudaMap kValue[] = {
      MapEntry<Value, float, float, float>(),
      MapEntry<Value, float, Float16, Float16>(),
      MapEntry<Value, float, BFloat16, BFloat16>(),
      MapEntry<Value, double, double, double>(),
  };
  static constexpr CudaKernels kKernels = {
      TableOf(kValue), {}, {}, {}, {}, TableOf(Gradients<Math>::kInX), TableOf(Gradients<Math>::kAll),
  };
};

}  // namespace

const CudaKernels fake_quantize_cuda = Entries<FakeQuantize>::kKernels;
const CudaKernels stochastic_fake_quantize_cuda = Entries<Keyed<FakeQuantize>>::kKernels;

}  // namespace jq
