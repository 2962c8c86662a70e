// A parallel loop on XLA's thread pool that cannot deadlock: the calling thread takes chunks like every helper and
// waits only for chunks that a running thread holds, never for a task that is still queued. (Waiting for queued tasks
// hangs as soon as every pool thread runs a handler that waits.)
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jq {

// Calls body(begin, end) for consecutive ranges of [0, n), each of `grain` (the last one shorter), from any thread.
template <typename Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t n, int64_t grain, const Body& body) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  const int64_t chunks = (n + grain - 1) / grain;
  int64_t workers = chunks > 1 ? pool.num_threads() : 1;
  if (workers > chunks) workers = chunks;
  if (workers <= 1) {
    body(int64_t{0}, n);
    return;
  }

  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  // Shared, since a helper may start after the loop has returned; it then finds no chunk left and never touches `body`.
  auto state = std::make_shared<State>();
  const Body* borrowed = &body;
  auto work = [state, borrowed, n, grain, chunks] {
    int64_t mine = 0;
    for (int64_t chunk; (chunk = state->next.fetch_add(1, std::memory_order_relaxed)) < chunks; ++mine) {
      const int64_t begin = chunk * grain;
      (*borrowed)(begin, begin + grain < n ? begin + grain : n);
    }
    if (mine > 0 && state->done.fetch_add(mine, std::memory_order_acq_rel) + mine == chunks) {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->all_done.notify_one();
    }
  };
  for (int64_t i = 1; i < workers; ++i) pool.Schedule(decltype(work)(work));
  work();
  const auto finished = [&] { return state->done.load(std::memory_order_acquire) >= chunks; };
  // Helpers finish within microseconds of the caller; a short spin avoids the cost of sleeping.
  for (int spin = 0; spin < 2000 && !finished(); ++spin) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  if (finished()) return;
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, finished);
}

}  // namespace jq
