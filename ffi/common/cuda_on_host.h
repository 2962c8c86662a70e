// Runs CUDA kernels on the host, so that the ordinary tests execute them where there is no GPU. For tests only.
//
// A kernel source written with the macros of cuda_portable.h compiles with g++ -DJQ_CUDA_ON_HOST -ffp-contract=off and
// gives the bits a GPU gives. Host threads take blocks from a counter; each CUDA thread is a fiber, which barriers,
// shuffles and votes suspend until the others have arrived.
//
// The emulation is stricter than a GPU, so that what passes here does not depend on luck there:
//   - Threads run in random order, another one each launch (JAXQUANT_EMULATION_SEED chooses the sequence), and shared
//     memory is full of NaN bytes when a block starts: a missing barrier gives wrong numbers.
//   - Every thread of a block must reach every __syncthreads(). Every lane that a mask names must exist and arrive at
//     the same function with the same mask. Otherwise the launch fails: cudaGetLastError() returns an error, and
//     cudaGetErrorString() of it says who waits for whom. Nothing hangs but a loop that waits for memory to change.
//   - Subnormals count as zero, as with nvcc -ftz=true (here in double as well), unless the source is compiled with
//     -DJQ_CUDA_FTZ=false.
//   - Launches are synchronous. __shared__ is left undefined: a static variable would escape the poisoning.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common/cuda_on_host/functions.h"
#include "ffi/common/cuda_on_host/types.h"
#include "ffi/common/cuda_on_host/worker.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#pragma GCC visibility push(hidden)

namespace jq {
namespace cuda_on_host {

constexpr uint64_t kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 48 << 10;        // without cudaFuncSetAttribute
constexpr size_t kMaxOptInSharedBytes = 227 << 10;  // an H100's
constexpr int kMultiprocessors = 4;                 // few, so that grid-stride loops take several strides

// What a launch on this host thread left behind.
inline thread_local cudaError_t last_error = cudaSuccess;  // until somebody asks
inline thread_local cudaError_t described_error = cudaSuccess;
inline thread_local std::string last_message;

// Sets or clears flush-to-zero and denormals-are-zero, restores the mode at the end.
class SubnormalsAsZero {
#if defined(__x86_64__)
 public:
  explicit SubnormalsAsZero(bool flush) : saved_(_mm_getcsr()) {
    _mm_setcsr(flush ? saved_ | 0x8040 : saved_ & ~0x8040u);
  }
  ~SubnormalsAsZero() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#else
 public:
  explicit SubnormalsAsZero(bool) {}  // results with subnormals are promised nowhere
#endif
};

// Workers between launches.
class WorkerPool {
 public:
  static WorkerPool& Instance() {
    static WorkerPool pool;
    return pool;
  }
  std::unique_ptr<Worker> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (workers_.empty()) return std::make_unique<Worker>();
    std::unique_ptr<Worker> worker = std::move(workers_.back());
    workers_.pop_back();
    return worker;
  }
  void Return(std::unique_ptr<Worker> worker) {
    std::lock_guard<std::mutex> lock(mutex_);
    workers_.push_back(std::move(worker));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

// The dynamic shared memory that kernels were allowed beyond the usual limit.
class SharedMemoryLimits {
 public:
  static SharedMemoryLimits& Instance() {
    static SharedMemoryLimits limits;
    return limits;
  }
  void Set(const void* kernel, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limits_[kernel] = bytes;
  }
  size_t Of(const void* kernel) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = limits_.find(kernel);
    return found == limits_.end() ? kMaxSharedBytes : std::max(found->second, kMaxSharedBytes);
  }

 private:
  std::mutex mutex_;
  std::map<const void*, size_t> limits_;
};

// Differs from launch to launch; the whole sequence follows from the environment variable.
inline uint64_t NextSeed() {
  static std::atomic<uint64_t> launches{0};
  const char* text = getenv("JAXQUANT_EMULATION_SEED");
  const uint64_t first = text == nullptr ? 0 : strtoull(text, nullptr, 0);
  return Mix(Mix(first + 0x9e3779b97f4a7c15) + launches++);
}

inline void CheckConfiguration(Launch* launch, size_t shared_limit) {
  const dim3 grid = launch->grid, block = launch->block;
  if (launch->Threads() == 0 || launch->Threads() > kMaxThreads || block.z > 64) {
    launch->Fail(cudaErrorInvalidConfiguration, ToString("block size", {block.x, block.y, block.z}));
  }
  if (launch->Blocks() == 0 || grid.x > 0x7fffffff || grid.y > 0xffff || grid.z > 0xffff) {
    launch->Fail(cudaErrorInvalidConfiguration, ToString("grid size", {grid.x, grid.y, grid.z}));
  }
  if (launch->shared_bytes > shared_limit) {
    launch->Fail(cudaErrorInvalidValue, std::to_string(launch->shared_bytes) + " bytes of dynamic shared memory, " +
                                            std::to_string(shared_limit) + " allowed");
  }
}

// Runs all blocks; the calling thread takes its share.
inline void RunGrid(Launch* launch) {
  const auto run_blocks = [launch] {
    const SubnormalsAsZero mode(launch->flushes_subnormals);
    std::unique_ptr<Worker> worker = WorkerPool::Instance().Take();
    worker->Run(launch);
    // After a failure there are threads on its stacks that will never end.
    if (!launch->failed) WorkerPool::Instance().Return(std::move(worker));
  };
  // At least two host threads, so that blocks do run at the same time. Asked once: the answer comes from a file.
  static const uint64_t most_workers = std::clamp(std::thread::hardware_concurrency(), 2u, 8u);
  const uint64_t workers = std::min(most_workers, launch->Blocks());
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < workers) helpers.emplace_back(run_blocks);
  } catch (const std::system_error&) {
    // No more threads to be had: those there are do the work.
  }
  run_blocks();
  for (std::thread& helper : helpers) helper.join();
}

inline void Run(Launch* launch, size_t shared_limit) {
  CheckConfiguration(launch, shared_limit);
  if (!launch->failed) {
    launch->seed = NextSeed();
    RunGrid(launch);
  }
  if (launch->error == cudaSuccess) return;
  last_error = described_error = launch->error;
  last_message = launch->message;
}

// kernel<<<grid, block, shared_bytes, stream>>>, to be called with the arguments. They are converted to the kernel's
// parameters once; each thread has its own copy.
template <typename... Parameters>
struct PreparedLaunch {
  Configuration configuration;
  void (*kernel)(Parameters...);

  void operator()(Parameters... arguments) const {
    const auto thread = [&] { kernel(arguments...); };
    Launch launch(configuration, [](const void* closure) { (*static_cast<decltype(&thread)>(closure))(); }, &thread);
    Run(&launch, SharedMemoryLimits::Instance().Of(reinterpret_cast<const void*>(kernel)));
  }
};
template <typename... Parameters>
PreparedLaunch<Parameters...> Prepare(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                      size_t shared_bytes, cudaStream_t, bool flushes_subnormals) {
  return {{name, grid, block, shared_bytes, flushes_subnormals}, kernel};
}

template <typename Array>
Array& SharedVariable(const void* identity) {
  return *static_cast<Array*>(current_worker->SharedVariable(identity, sizeof(Array)));
}

inline void* DynamicShared() { return current_worker->DynamicShared(); }

}  // namespace cuda_on_host
}  // namespace jq

// ---- The runtime functions that launching code may use ----

inline cudaError_t cudaPeekAtLastError() { return jq::cuda_on_host::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(jq::cuda_on_host::last_error, cudaSuccess); }

// For the error of the last launch that failed on this host thread, what happened.
inline const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  return error == jq::cuda_on_host::described_error ? jq::cuda_on_host::last_message.c_str() : "invalid argument";
}

inline cudaError_t cudaMemsetAsync(void* data, int byte, size_t bytes, cudaStream_t) {
  memset(data, byte, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const bool memory = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin;
  *value = memory ? static_cast<int>(jq::cuda_on_host::kMaxOptInSharedBytes) : jq::cuda_on_host::kMultiprocessors;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > jq::cuda_on_host::kMaxOptInSharedBytes) return cudaErrorInvalidValue;
  jq::cuda_on_host::SharedMemoryLimits::Instance().Set(reinterpret_cast<const void*>(kernel),
                                                       static_cast<size_t>(bytes));
  return cudaSuccess;
}

#pragma GCC visibility pop
