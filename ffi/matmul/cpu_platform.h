// Integer products over XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "ffi/affine/cpu_kernels.h"
#include "ffi/common/local_memory.h"
#include "ffi/common/memory.h"
#include "ffi/common/parallel_for.h"
#include "ffi/matmul/handlers.h"
#include "ffi/matmul/kernels.h"

namespace jq {
namespace matmul {

#define JQ_DECLARE(isa)                \
  namespace isa {                      \
  extern const Kernels matmul_kernels; \
  }
JQ_DECLARE(portable)
JQ_DECLARE(v3)
JQ_DECLARE(vnni)
#undef JQ_DECLARE

// Dot products come with AVX2 and with VNNI: the levels below and between take those before.
inline const Kernels& KernelsHere() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* isa = CpuKernelsHere().isa;
#if defined(JQ_HAS_v4)
    if (std::strcmp(isa, "v4") == 0 && __builtin_cpu_supports("avx512vnni")) return vnni::matmul_kernels;
#endif
#if defined(JQ_HAS_v3)
    if (std::strcmp(isa, "v3") == 0 || std::strcmp(isa, "v4") == 0) return v3::matmul_kernels;
#endif
    (void)isa;
    return portable::matmul_kernels;
  }();
  return chosen;
}

struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
  static auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

  static ffi::Error Product(Context pool, const char* name, const ProductArguments& a) {
    const Kernels& kernels = KernelsHere();
    Traits traits = kernels.traits;
    traits.tiles = traits.tiles && TilesHere();
    const Plan plan = MakePlan(a, traits, pool.num_threads());
    AdviseHugePages(a.out, a.batch * a.m * a.n * SizeOf(a.out_type));
    const Memory shared = Allocate(plan.shared_bytes);
    if (shared == nullptr) return NoMemory(name, plan.shared_bytes);
    if (!plan.a_in_place || plan.row_sums || (plan.column_sums && !plan.tiles)) {
      ParallelFor(pool, plan.a_rows, std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(a.k, 1)),
                  [&](int64_t begin, int64_t end) { kernels.prepare(a, plan, shared.get(), begin, end); });
    }
    // As many units as are worth a second thread.
    const int64_t work = plan.tiles ? 1 << 25 : 1 << 21;  // products
    const int64_t each = std::max<int64_t>(1, a.batch * a.m * a.n * a.k / plan.units);
    std::atomic<bool> enough{true};
    ParallelFor(pool, plan.units, std::max<int64_t>(1, work / each), [&](int64_t begin, int64_t end) {
      uint8_t* const local = LocalMemory(plan.local_bytes);
      if (local == nullptr) {
        enough = false;
      } else {
        kernels.product(a, plan, shared.get(), local, begin, end);
      }
    });
    return enough ? ffi::Error::Success() : NoMemory(name, plan.local_bytes);
  }

  static ffi::Error Prepare(Context pool, const ArrangeArguments& a) {
    const int64_t size = PreparedBytes(a.k, a.n, a.bits), panel = WordCount(a.k, a.bits) * kPanelBytes;
    const int64_t panels = PanelCount(a.n), rows = PlainBytes(a.k, a.n, a.bits);
    AdviseHugePages(a.out, a.matrices * size);
    ParallelFor(pool, a.matrices * panels, std::max<int64_t>(1, (1 << 16) / panel), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        PreparePanel(a.in + i / panels * rows, i % panels, a, a.out + i / panels * size + i % panels * panel);
      }
    });
    return ffi::Error::Success();
  }

  static ffi::Error Plain(Context pool, const ArrangeArguments& a) {
    const int64_t prepared = PreparedBytes(a.k, a.n, a.bits), row_bytes = PlainRowBytes(a.n, a.bits);
    AdviseHugePages(a.out, a.matrices * a.k * row_bytes);
    ParallelFor(pool, a.matrices * a.k, std::max<int64_t>(1, (1 << 14) / row_bytes), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint8_t* from = a.in + i / a.k * prepared;
        for (int64_t byte = 0; byte < row_bytes; ++byte) {
          a.out[i * row_bytes + byte] = PlainByte(from, i % a.k * row_bytes + byte, a.k, a.n, a.bits);
        }
      }
    });
    return ffi::Error::Success();
  }

 private:
  static void PreparePanel(const uint8_t* plain, int64_t panel, const ArrangeArguments& a, uint8_t* to) {
    const int64_t words = WordCount(a.k, a.bits), row_bytes = PlainRowBytes(a.n, a.bits);
    const int each = CodesPerWord(a.bits), columns = static_cast<int>(std::min<int64_t>(kPanel, a.n - panel * kPanel));
    const int per_byte = 8 / a.bits, mask = (1 << a.bits) - 1;
    const uint8_t* first = plain + panel * kPanel / per_byte;
    std::memset(to, 0, static_cast<size_t>(words * kPanelBytes));
    for (int64_t row = 0; row < a.k; ++row) {
      const int within = static_cast<int>(row % each), shift = within / 4 * a.bits;
      const uint8_t* from = first + row * row_bytes;
      uint8_t* word = to + row / each * kPanelBytes + within % 4;
      for (int c = 0; c < columns; ++c) {
        word[4 * c] |= static_cast<uint8_t>((from[c / per_byte] >> (c % per_byte * a.bits) & mask) << shift);
      }
    }
  }
};

}  // namespace matmul
}  // namespace jq
