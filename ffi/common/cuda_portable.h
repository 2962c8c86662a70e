// What a kernel source needs to compile both with nvcc and, for the tests, with g++ (cuda_on_host.h runs it there).
//
// Only the spellings that C++ cannot imitate are macros: shared memory, and a launch.
//
//   template <typename Real>
//   __global__ void Sum(const Real* x, Real* sum) {
//     JQ_SHARED(Real, lanes, 32);        // Real lanes[32]; further sizes make it an array of arrays
//     JQ_DYNAMIC_SHARED(Real, scratch);  // Real* scratch, as many bytes as the launch asks for
//     ...
//   }
//   JQ_LAUNCH((Sum<float>), grid, block, shared_bytes, stream, x, sum);
//   if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) ... cudaGetErrorString(error)
//
// A kernel with a comma in its name needs the parentheses; a type with a comma needs an alias.
#pragma once

namespace jq {

// SharedArray<float, 4, 8>::Type is float[4][8].
template <typename T, int... kSizes>
struct SharedArray {
  using Type = T;
};
template <typename T, int kSize, int... kSizes>
struct SharedArray<T, kSize, kSizes...> {
  using Type = typename SharedArray<T, kSizes...>::Type[kSize];
};

}  // namespace jq

// Asked for by name and not deduced from the compiler: in a CUDA build the host compiler sees these headers as well.
#if defined(JQ_CUDA_ON_HOST)

#include "ffi/common/cuda_on_host.h"

// As nvcc's -ftz, for the kernels of a source.
#if !defined(JQ_CUDA_FTZ)
#define JQ_CUDA_FTZ true
#endif

#define JQ_SHARED(T, name, ...)                                                                      \
  static const char name##_identity = 0; /* one address for each variable of each kernel instance */ \
  auto& name = ::jq::cuda_on_host::SharedVariable<typename ::jq::SharedArray<T, __VA_ARGS__>::Type>(&name##_identity)

#define JQ_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::jq::cuda_on_host::DynamicShared())

#define JQ_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::jq::cuda_on_host::Prepare(#kernel, kernel, grid, block, shared_bytes, stream, JQ_CUDA_FTZ)(__VA_ARGS__)

#else

#include <cuda_runtime.h>

#define JQ_SHARED(T, name, ...) __shared__ typename ::jq::SharedArray<T, __VA_ARGS__>::Type name

// One name and type for all kernels of a file: nvcc takes extern shared arrays of one name for the same variable.
#define JQ_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char jq_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(jq_dynamic_shared)

#define JQ_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)

#endif
