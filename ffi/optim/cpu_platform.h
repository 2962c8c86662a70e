// The optimiser on the CPU: blocks divided over XLA's thread pool.
#pragma once

#include <algorithm>

#include "ffi/affine/cpu_kernels.h"
#include "ffi/common/memory.h"
#include "ffi/common/parallel_for.h"
#include "ffi/optim/handlers.h"

namespace jq {
namespace optim {

struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
  static auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

  static ffi::Error Adam8bit(Context pool, const AdamArguments& a) {
    AdviseHugePages(a.update, a.rows * a.row_size * SizeOf(a.type));
    const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::min(a.block, a.row_size));
    ParallelFor(pool, a.Blocks(), grain, [&](int64_t begin, int64_t end) { CpuKernelsHere().adam8bit(a, begin, end); });
    return ffi::Error::Success();
  }
};

}  // namespace optim
}  // namespace jq
