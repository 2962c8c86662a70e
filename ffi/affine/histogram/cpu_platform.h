// Histograms over XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "ffi/affine/cpu_kernels.h"
#include "ffi/common/memory.h"
#include "ffi/common/parallel_for.h"

namespace jq {

inline HistogramPlan PlanHistogram(const HistogramArguments& a, int64_t threads) {
  constexpr int64_t kLeast = 1 << 18;  // elements that are worth a table of their own
  const ScaleView& view = *a.view;
  HistogramPlan plan{};
  plan.columns = view.run().scale_stride != 0;
  plan.reduced = view.ReducedSize();
  const int64_t run = view.run().size;
  const int64_t width = plan.columns ? std::min<int64_t>(run, HistogramPlan::kColumns) : 1;
  plan.tiles = plan.columns ? view.scale_size / run * ((run + width - 1) / width) : view.scale_size;
  const int64_t wanted = threads > 1 ? (4 * threads + plan.tiles - 1) / plan.tiles : 1;
  plan.slices = std::clamp<int64_t>(plan.reduced * width / kLeast, 1, wanted);
  plan.slice = (plan.reduced + plan.slices - 1) / plan.slices;
  plan.copies = !plan.columns && a.size <= 8192 && plan.slice >= 8 * a.size ? 2 : 1;
  // A slot for what is not counted; tables a multiple of 4096 bytes apart would look alike to the store buffer.
  plan.stride = (a.size + 1 + 15) / 16 * 16 + 16;
  return plan;
}

// False: no loop for the type.
inline bool CountOnCpu(ffi::ThreadPool& pool, const HistogramArguments& a) {
  const int64_t bytes = a.view->scale_size * a.tables * a.size * 4;
  AdviseHugePages(a.counts, bytes);
  if (a.view->size == 0) {
    std::memset(a.counts, 0, static_cast<size_t>(bytes));
    return true;
  }
  const HistogramPlan plan = PlanHistogram(a, static_cast<int64_t>(pool.num_threads()));
  if (plan.slices > 1) std::memset(a.counts, 0, static_cast<size_t>(bytes));
  const int64_t unit = (plan.columns ? HistogramPlan::kColumns : 1) * (plan.slice + a.size * a.tables);
  std::atomic<bool> known{true};
  ParallelFor(pool, plan.tiles * plan.slices, std::max<int64_t>(1, (1 << 16) / unit), [&](int64_t begin, int64_t end) {
    thread_local std::vector<uint32_t> scratch;
    if (static_cast<int64_t>(scratch.size()) < plan.ScratchWords()) scratch.resize(plan.ScratchWords());
    if (!CpuKernelsHere().histogram->count(a, plan, begin, end, scratch.data())) known = false;
  });
  return known;
}

}  // namespace jq
