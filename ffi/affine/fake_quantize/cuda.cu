// fake_quantize on CUDA: the mathematics of math.h in the kernels of cuda_map.cuh and cuda_gradient.cuh.
#include "ffi/affine/cuda_table.cuh"
#include "ffi/affine/fake_quantize/math.h"

namespace jq {
namespace {

using Value = ValueOf<FakeQuantize>;
constexpr CudaMap kValue[] = {
    MapEntry<Value, float, float, float>(),
    MapEntry<Value, float, Float16, Float16>(),
    MapEntry<Value, float, BFloat16, BFloat16>(),
    MapEntry<Value, double, double, double>(),
};

}  // namespace

const CudaKernels fake_quantize_cuda = {
    TableOf(kValue), {}, {}, {}, {}, TableOf(Gradients<FakeQuantize>::kInX), TableOf(Gradients<FakeQuantize>::kAll),
};

}  // namespace jq
