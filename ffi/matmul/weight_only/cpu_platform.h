// Weight-only products over XLA's thread pool.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "ffi/affine/cpu_kernels.h"
#include "ffi/common/local_memory.h"
#include "ffi/common/parallel_for.h"
#include "ffi/matmul/weight_only/handlers.h"

namespace jq {
namespace weight_only {

#define JQ_DECLARE(isa)                     \
  namespace isa {                           \
  extern const Kernels weight_only_kernels; \
  }
JQ_DECLARE(portable)
JQ_DECLARE(v3)
JQ_DECLARE(vnni)
#undef JQ_DECLARE

inline const Kernels& KernelsHere() {
  static const Kernels& chosen = []() -> const Kernels& {
    const std::string isa = CpuKernelsHere().isa;
#if defined(JQ_HAS_v4)
    if (isa == "v4" && __builtin_cpu_supports("avx512vnni")) return vnni::weight_only_kernels;
#endif
#if defined(JQ_HAS_v3)
    if (isa == "v3" || isa == "v4") return v3::weight_only_kernels;
#endif
    return portable::weight_only_kernels;
  }();
  return chosen;
}

struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
  static auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

  static ffi::Error Matmul(Context pool, const Arguments& a) {
    const int64_t bytes = ScratchBytes(a);
    const Memory scratch = bytes == 0 ? Memory(nullptr, std::free) : Allocate(bytes);
    if (bytes != 0 && scratch == nullptr) return NoMemory("weight_only_matmul", bytes);
    const Kernels& kernels = KernelsHere();
    if (bytes != 0) {
      constexpr int64_t kGrain = 1 << 14;
      ParallelFor(pool, a.x_batch * a.rows, std::max<int64_t>(1, kGrain / a.codes.k),
                  [&](int64_t begin, int64_t end) { kernels.prepare(a, scratch.get(), begin, end); });
    }
    const Plan plan = PlanProduct(a, pool.num_threads());
    ParallelFor(pool, plan.units, Grain(a, plan),
                [&](int64_t begin, int64_t end) { kernels.product(a, plan, scratch.get(), begin, end); });
    return ffi::Error::Success();
  }

  static ffi::Error Gradient(Context pool, const Arguments& a) {
    const Plan plan = PlanGradient(a, pool.num_threads());
    ParallelFor(pool, plan.units, Grain(a, plan),
                [&](int64_t begin, int64_t end) { KernelsHere().gradient(a, plan, begin, end); });
    return ffi::Error::Success();
  }

 private:
  // Units that are worth a second thread.
  static int64_t Grain(const Arguments& a, const Plan& plan) {
    constexpr int64_t kWork = 1 << 17;  // products
    const int64_t all = a.batch * a.rows * a.codes.n * a.codes.k;
    return std::max<int64_t>(1, kWork / std::max<int64_t>(1, all / plan.units));
  }
};

}  // namespace weight_only
}  // namespace jq
