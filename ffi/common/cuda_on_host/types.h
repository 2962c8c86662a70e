// The names that CUDA's headers declare: qualifiers, vector types, errors, built-in variables. See cuda_on_host.h.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

// may_alias: kernels read arrays of other types through these.
#define JQ_VECTOR_TYPE(name, element, bytes, ...)          \
  struct __attribute__((aligned(bytes), may_alias)) name { \
    element __VA_ARGS__;                                   \
  }
JQ_VECTOR_TYPE(char4, signed char, 4, x, y, z, w);
JQ_VECTOR_TYPE(uchar4, unsigned char, 4, x, y, z, w);
JQ_VECTOR_TYPE(short4, short, 8, x, y, z, w);
JQ_VECTOR_TYPE(ushort4, unsigned short, 8, x, y, z, w);
JQ_VECTOR_TYPE(int2, int, 8, x, y);
JQ_VECTOR_TYPE(int4, int, 16, x, y, z, w);
JQ_VECTOR_TYPE(uint2, unsigned, 8, x, y);
JQ_VECTOR_TYPE(uint3, unsigned, 4, x, y, z);
JQ_VECTOR_TYPE(uint4, unsigned, 16, x, y, z, w);
JQ_VECTOR_TYPE(float2, float, 8, x, y);
JQ_VECTOR_TYPE(float4, float, 16, x, y, z, w);
JQ_VECTOR_TYPE(double2, double, 16, x, y);
JQ_VECTOR_TYPE(longlong2, long long, 16, x, y);
#undef JQ_VECTOR_TYPE

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

typedef struct CUstream_st* cudaStream_t;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

// The process may hold the real CUDA runtime too; its functions must not take the place of those of the same name here.
#pragma GCC visibility push(hidden)

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;
constexpr int warpSize = 32;

#pragma GCC visibility pop
