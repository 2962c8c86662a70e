// What launches share. Nothing here allocates or waits: a launch can be captured in a CUDA graph.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ffi/common/cuda_portable.h"

namespace jq {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;  // 2048 threads; where registers allow fewer, the rest queue up

// Of the current device; asked once for each.
inline int MultiprocessorCount() {
  constexpr int kDevices = 64;
  static std::atomic<int> counts[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0) return 1;
  std::atomic<int>& known = counts[device % kDevices];
  int count = device < kDevices ? known.load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    known.store(count, std::memory_order_relaxed);
  }
  return count;
}

// Blocks for `work` pieces of which a block takes `each` at a time: enough to fill the device, then loops.
inline unsigned GridSize(int64_t work, int64_t each) {
  const int64_t most = static_cast<int64_t>(MultiprocessorCount()) * kBlocksPerMultiprocessor;
  return static_cast<unsigned>(std::clamp<int64_t>((work + each - 1) / each, 1, most));
}

// Null, or what went wrong with the launch before.
inline const char* LaunchError() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Brings a kernel's code to the device, which otherwise happens at its first launch: too late while a stream captures.
template <typename Kernel>
const char* LoadKernel(Kernel* kernel) {
#if defined(JQ_CUDA_ON_HOST)
  (void)kernel;
  return nullptr;
#else
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#endif
}

inline bool IsAligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace jq
