// One launch, and the worker that runs its blocks on a host thread. See cuda_on_host.h.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "ffi/common/cuda_on_host/fiber.h"
#include "ffi/common/cuda_on_host/types.h"

#pragma GCC visibility push(hidden)

namespace jq {
namespace cuda_on_host {

inline uint64_t Mix(uint64_t value) {  // the finaliser of SplitMix64
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

inline std::string Hex(uint32_t value) {
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[value >> shift & 15];
  return text;
}

inline std::string ToString(const char* what, uint3 index) {
  return std::string(what) + " (" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

inline uint3 Unflatten(uint64_t index, dim3 size) {
  return {static_cast<unsigned>(index % size.x), static_cast<unsigned>(index / size.x % size.y),
          static_cast<unsigned>(index / size.x / size.y)};
}

// Shared memory of exactly the size asked for, so that AddressSanitizer sees an access outside it.
class SharedBuffer {
 public:
  SharedBuffer(const void* identity, size_t bytes)
      : identity_(identity), bytes_(bytes), data_(::operator new(bytes, kAlignment)) {
    Poison();
  }
  void Poison() { memset(data_.get(), 0xff, bytes_); }
  const void* identity() const { return identity_; }
  void* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{128};
  struct Delete {
    void operator()(void* data) const { ::operator delete(data, kAlignment); }
  };
  const void* identity_;
  size_t bytes_;
  std::unique_ptr<void, Delete> data_;
};

struct Configuration {
  const char* kernel;
  dim3 grid, block;
  size_t shared_bytes;
  bool flushes_subnormals;

  uint64_t Blocks() const { return uint64_t{grid.x} * grid.y * grid.z; }
  uint64_t Threads() const { return uint64_t{block.x} * block.y * block.z; }
};

struct Launch : Configuration {
  void (*run_thread)(const void* closure);
  const void* closure;
  uint64_t seed = 0;
  std::atomic<uint64_t> next_block{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;  // of the first error
  cudaError_t error = cudaSuccess;
  std::string message;

  Launch(const Configuration& configuration, void (*run_thread)(const void* closure), const void* closure)
      : Configuration(configuration), run_thread(run_thread), closure(closure) {}

  void Fail(cudaError_t code, const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex);
    if (error != cudaSuccess) return;
    error = code;
    message = std::string(kernel) + ": " + reason;
    failed = true;
  }
};

class Worker;
inline thread_local Worker* current_worker = nullptr;

// Runs blocks, one after another, on the host thread that holds it. Keeps its stacks from launch to launch.
class Worker {
 public:
  void Run(Launch* launch) {
    current_worker = this;
    launch_ = launch;
    blockDim = launch->block;
    gridDim = launch->grid;
    shared_.clear();
    shared_.emplace_back(nullptr, launch->shared_bytes);
    threads_.assign(launch->Threads(), Thread{});
    for (uint32_t i = 0; i < threads_.size(); ++i) threads_[i].index = Unflatten(i, launch->block);
    const uint64_t blocks = launch->Blocks();
    for (uint64_t i; !launch->failed && (i = launch->next_block++) < blocks;) {
      RunBlock((i + launch->seed % blocks) % blocks);
    }
    current_worker = nullptr;
  }

  // What follows is called by kernels.

  int Lane() const { return static_cast<int>(current_ % warpSize); }

  void* DynamicShared() { return shared_[0].data(); }

  void* SharedVariable(const void* identity, size_t bytes) {
    for (const SharedBuffer& buffer : shared_) {
      if (buffer.identity() == identity) return buffer.data();
    }
    shared_.emplace_back(identity, bytes);
    return shared_.back().data();
  }

  // Waits for all threads of the block; returns how many of them voted yes.
  int Barrier(bool vote) {
    barrier_votes_ += vote;
    if (++barrier_arrived_ < threads_.size()) {
      Suspend(kBarrier);
    } else {
      barrier_result_ = barrier_votes_;
      barrier_arrived_ = barrier_votes_ = 0;
      for (uint32_t i = 0; i < threads_.size(); ++i) {
        if (i != current_) Release(i);
      }
    }
    return barrier_result_;  // every thread reads it before the next barrier can complete
  }

  // Waits for the lanes in mask; returns the value that lane `source` brought.
  uint64_t Exchange(const char* function, uint32_t mask, uint64_t value, int source) {
    Collective(function, mask, value, source, /*vote=*/false);
    return threads_[current_].value;
  }

  // Waits for the lanes in mask; returns a bit from each.
  uint32_t Vote(const char* function, uint32_t mask, bool vote) {
    Collective(function, mask, vote, /*source=*/0, /*vote=*/true);
    return static_cast<uint32_t>(threads_[current_].value);
  }

 private:
  static constexpr char kBarrier[] = "__syncthreads";

  struct Thread {
    uint3 index;
    Fiber* fiber;
    const char* waits_in;  // a function, if any
    uint32_t mask;
    int source;
    uint64_t value;  // brought, then received
  };

  void RunBlock(uint64_t number) {
    blockIdx = Unflatten(number, launch_->grid);
    random_ = Mix(launch_->seed + number);
    for (SharedBuffer& buffer : shared_) buffer.Poison();
    barrier_arrived_ = barrier_votes_ = 0;
    ready_.resize(threads_.size());
    for (uint32_t i = 0; i < ready_.size(); ++i) ready_[i] = i;
    for (size_t running = threads_.size(); running > 0;) {
      if (ready_.empty()) Fail(Deadlock(running));
      if (launch_->failed.load(std::memory_order_relaxed)) return;
      const uint32_t chosen = RandomBelow(static_cast<uint32_t>(ready_.size()));
      current_ = ready_[chosen];
      ready_[chosen] = ready_.back();
      ready_.pop_back();
      running -= Resume(&threads_[current_]);
    }
  }

  // Runs a thread until it waits or ends, and returns whether it ended.
  bool Resume(Thread* thread) {
    if (thread->fiber == nullptr) thread->fiber = TakeFiber();
    threadIdx = thread->index;
    finished_ = false;
    thread->fiber->Resume();
    if (!finished_) return false;
    if (thread->fiber->Overflowed()) Fail(ToString("thread", thread->index) + " needs more stack than there is");
    free_.push_back(thread->fiber);
    thread->fiber = nullptr;
    return true;
  }

  Fiber* TakeFiber() {
    if (free_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(&Worker::RunThreads));
      return fibers_.back().get();
    }
    Fiber* fiber = free_.back();  // the one used last: threads that never wait all run on the same warm stack
    free_.pop_back();
    return fiber;
  }

  // What a fiber runs: one thread after another. The next launch may continue it on another host thread, so it must
  // not look at thread_local variables again.
  static void RunThreads() {
    Worker* worker = current_worker;
    Fiber* fiber = worker->threads_[worker->current_].fiber;
    fiber->Enter();
    for (;;) {
      worker->launch_->run_thread(worker->launch_->closure);
      worker->finished_ = true;
      fiber->Suspend();
    }
  }

  void Suspend(const char* function) {
    Thread& self = threads_[current_];
    self.waits_in = function;
    self.fiber->Suspend();
  }

  void Release(uint32_t thread) {
    threads_[thread].waits_in = nullptr;
    ready_.push_back(thread);
  }

  void Collective(const char* function, uint32_t mask, uint64_t value, int source, bool vote) {
    Thread& self = threads_[current_];
    if ((mask >> Lane() & 1) == 0) {
      Fail(ToString("thread", self.index) + " is lane " + std::to_string(Lane()) + ", not in the mask " + Hex(mask) +
           " it gives to " + function);
      for (;;) Suspend(function);  // a failed launch abandons its stacks
    }
    self.mask = mask;
    self.value = value;
    self.source = source;
    self.waits_in = function;
    const uint32_t warp = current_ - current_ % warpSize;
    if (FirstMissingLane(warp, self) < warpSize) {
      Suspend(function);
    } else {
      Complete(warp, mask, vote);
    }
  }

  // Of those that `waiting` waits for; warpSize if all are there.
  uint32_t FirstMissingLane(uint32_t warp, const Thread& waiting) const {
    for (uint32_t lanes = waiting.mask; lanes != 0; lanes &= lanes - 1) {
      const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(lanes));
      if (warp + lane >= threads_.size()) return lane;
      const Thread& other = threads_[warp + lane];
      if (other.waits_in != waiting.waits_in || other.mask != waiting.mask) return lane;
    }
    return warpSize;
  }

  // The last lane hands out all results at once: a lane that runs ahead cannot overwrite what another has yet to read.
  void Complete(uint32_t warp, uint32_t mask, bool vote) {
    uint64_t values[warpSize], votes = 0;
    for (uint32_t lane = 0; lane < warpSize; ++lane) {
      const bool named = mask >> lane & 1;
      values[lane] = named ? threads_[warp + lane].value : ~uint64_t{0};  // the value of a lane outside is poison
      votes |= uint64_t{named && values[lane] != 0} << lane;
    }
    for (uint32_t lane = 0; lane < warpSize; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      Thread& thread = threads_[warp + lane];
      thread.value = vote ? votes : values[thread.source];
      if (warp + lane != current_) Release(warp + lane);
    }
    threads_[current_].waits_in = nullptr;
  }

  std::string Deadlock(size_t running) const {
    std::string text = "no thread can go on: of " + std::to_string(threads_.size()) + " threads, " +
                       std::to_string(threads_.size() - running) + " have returned, " +
                       std::to_string(barrier_arrived_) + " wait in __syncthreads";
    const size_t waiting_in_warps = running - barrier_arrived_;
    if (waiting_in_warps == 0) return text;
    text += ", " + std::to_string(waiting_in_warps) + " for lanes of their warp";
    for (uint32_t i = 0; i < threads_.size(); ++i) {
      const Thread& thread = threads_[i];
      if (thread.waits_in == nullptr || thread.waits_in == kBarrier) continue;
      return text + ": " + ToString("thread", thread.index) + " in " + thread.waits_in + " with mask " +
             Hex(thread.mask) + " for lane " + std::to_string(FirstMissingLane(i - i % warpSize, thread));
    }
    return text;
  }

  void Fail(const std::string& reason) {
    launch_->Fail(cudaErrorLaunchFailure, ToString("block", blockIdx) + ": " + reason);
  }

  uint32_t RandomBelow(uint32_t bound) {
    random_ = random_ * 6364136223846793005 + 1442695040888963407;
    return static_cast<uint32_t>((random_ >> 32) * bound >> 32);
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> free_;
  Launch* launch_ = nullptr;
  std::vector<Thread> threads_;  // of the block
  std::vector<uint32_t> ready_;  // the threads that can run now
  std::vector<SharedBuffer> shared_;
  uint64_t random_ = 0;
  uint32_t current_ = 0;
  bool finished_ = false;
  uint32_t barrier_arrived_ = 0;
  int barrier_votes_ = 0, barrier_result_ = 0;
};

}  // namespace cuda_on_host
}  // namespace jq

#pragma GCC visibility pop
