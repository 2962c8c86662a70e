// The block formats' kernels over XLA's thread pool. In plain IEEE arithmetic: with the flush-to-zero that XLA sets,
// ggml's own bytes change on values of size 1e-15.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ffi/affine/cpu_kernels.h"
#include "ffi/common/ieee_mode.h"
#include "ffi/common/local_memory.h"
#include "ffi/common/memory.h"
#include "ffi/common/parallel_for.h"
#include "ffi/ggml/cpu_kernels.h"
#include "ffi/ggml/handlers.h"
#include "ffi/ggml/linear/kernels.h"
#include "ffi/ggml/linear/layout.h"

namespace jq {
namespace ggml {

inline const CpuKernels& KernelsHere() { return *CpuKernelsHere().ggml; }

#if defined(JQ_HAS_v4)
namespace vnni {
extern const LinearKernels linear_kernels;
}
#endif

// Products have a level of their own beyond v4, whose bits are the same.
inline const LinearKernels& LinearKernelsHere() {
#if defined(JQ_HAS_v4)
  static const bool has_vnni = std::strcmp(CpuKernelsHere().isa, "v4") == 0 && __builtin_cpu_supports("avx512vnni");
  if (has_vnni) return vnni::linear_kernels;
#endif
  return *KernelsHere().linear;
}

// Rows [begin, end), which share their imatrix. Null, or what was wrong.
inline const char* QuantizeRowsOnCpu(const QuantizeArguments& a, QuantizeRows quantize, int64_t begin, int64_t end) {
  const float* x = a.x + begin * a.k;
  const int64_t count = (end - begin) * a.k;
  if (a.type_id == F32::kId) {
    std::memcpy(a.data + begin * a.k * 4, x, static_cast<size_t>(count) * 4);
    return nullptr;
  }
  return quantize(x, a.data + begin * (a.k / a.size.block) * a.size.bytes, end - begin, a.k, a.ImatrixOf(begin));
}

// Consecutive rows with one imatrix.
inline int64_t RowsPerImatrix(const QuantizeArguments& a) {
  if (a.imatrix == nullptr) return a.rows;
  int64_t rows = 1;
  for (int d = a.leading - 1; d >= 0 && a.imatrix_stride[d] == 0; --d) rows *= a.dims[d];
  return rows;
}

struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
  static auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

  static ffi::Error Quantize(Context pool, const QuantizeArguments& a) {
    const QuantizeRows quantize = KernelsHere().quantizer(a.type_id);
    if (quantize == nullptr && a.type_id != F32::kId) return NoKernel("ggml_quantize", a.type_id);
    // Quantisers take several blocks at once: enough of them for each piece, and pieces for each thread.
    constexpr int64_t kPiece = 1 << 14;
    const int64_t group = std::min(RowsPerImatrix(a), std::max<int64_t>(1, kPiece / a.k));
    const int64_t shared = RowsPerImatrix(a), pieces = (shared + group - 1) / group;
    std::atomic<const char*> wrong{nullptr};
    ParallelFor(pool, a.rows / shared * pieces, 1, [&](int64_t begin, int64_t end) {
      const IeeeMode plain;
      for (int64_t i = begin; i < end && wrong == nullptr; ++i) {
        const int64_t first = i / pieces * shared + i % pieces * group;
        const int64_t last = std::min(first + group, (i / pieces + 1) * shared);
        if (const char* message = QuantizeRowsOnCpu(a, quantize, first, last)) wrong = message;
      }
    });
    return wrong == nullptr ? ffi::Error::Success()
                            : ffi::Error::InvalidArgument(std::string("ggml_quantize: ") + wrong.load() + ".");
  }

  static ffi::Error Dequantize(Context pool, const DequantizeArguments& a) {
    const auto dequantize = KernelsHere().dequantizer(a.type_id, a.out_type);
    if (dequantize == nullptr) return NoKernel("ggml_dequantize", a.type_id);
    const int64_t row_bytes = a.k / a.size.block * a.size.bytes, out_bytes = a.k * SizeOf(a.out_type);
    AdviseHugePages(a.out, a.rows * out_bytes);
    // Pieces of rows; plain ones without ids are one.
    const bool one = a.ids == nullptr && !a.prepared;
    const int64_t rows = one ? 1 : a.rows, blocks = (one ? a.rows : 1) * (a.k / a.size.block);
    const int64_t piece = std::max<int64_t>(1, (1 << 14) / a.size.block);
    const int64_t pieces = (blocks + piece - 1) / piece;
    ParallelFor(pool, rows * pieces, 1, [&](int64_t begin, int64_t end) {
      const IeeeMode plain;
      std::vector<uint8_t> buffer(a.prepared ? std::min(piece, blocks) * a.size.bytes : 0);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / pieces, first = i % pieces * piece, count = std::min(piece, blocks - first);
        char* out = static_cast<char*>(a.out) + row * out_bytes + first * a.size.block * SizeOf(a.out_type);
        const int64_t source = one ? 0 : a.Source(row);
        if (source < 0) {
          std::memset(out, 0, static_cast<size_t>(count * a.size.block * SizeOf(a.out_type)));
        } else if (a.prepared) {
          const int64_t in_eight = source % kLanes;
          ToPlainBlocks(a.type_id, a.data + (source - in_eight) * row_bytes, static_cast<int>(in_eight), first, count,
                        buffer.data());
          dequantize(buffer.data(), out, count * a.size.block);
        } else {
          dequantize(a.data + source * row_bytes + first * a.size.bytes, out, count * a.size.block);
        }
      }
    });
    return ffi::Error::Success();
  }

  static ffi::Error Arrange(Context pool, const ArrangeArguments& a) {
    const int64_t row_bytes = a.k / a.size.block * a.size.bytes, eights = EightsOf(a.n);
    const int64_t grain = std::max<int64_t>(1, (1 << 18) / (row_bytes * kLanes));
    // Weights stay, and are read from end to end by every product.
    AdviseHugePages(a.out, a.matrices * StoredRows(a.n, a.prepare) * row_bytes);
    ParallelFor(pool, a.matrices * eights, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % eights * kLanes, plain = (i / eights * a.n + first) * row_bytes;
        const int64_t prepared = i * kLanes * row_bytes;
        const int rows = static_cast<int>(std::min<int64_t>(kLanes, a.n - first));
        if (a.prepare) {
          ToPrepared(a.type_id, a.in + plain, a.out + prepared, rows, a.k);
        } else {
          ToPlain(a.type_id, a.in + prepared, a.out + plain, rows, a.k);
        }
      }
    });
    return ffi::Error::Success();
  }

  static ffi::Error Linear(Context pool, const ProductArguments& a) {
    Groups groups(a, a.n);
    const GroupedArguments& g = groups.arguments;
    const int64_t threads = ThreadsFor(pool, g);
    const Plan plan = PlanProduct(g, threads, TilesHere());
    const Memory scratch = plan.scratch_bytes == 0 ? Memory(nullptr, std::free) : Allocate(plan.scratch_bytes);
    if (plan.scratch_bytes != 0 && scratch == nullptr) return NoMemory("ggml_linear", plan.scratch_bytes);
    const LinearKernels& kernels = LinearKernelsHere();
    if (plan.scratch_bytes != 0) {
      ParallelFor(pool, g.x_rows, std::max<int64_t>(1, (1 << 14) / a.k), [&](int64_t begin, int64_t end) {
        const IeeeMode plain;
        kernels.prepare(g, plan, scratch.get(), begin, end);
      });
    }
    std::atomic<bool> enough{true};
    ParallelFor(pool, plan.units, threads == 1 ? plan.units : 1, [&](int64_t begin, int64_t end) {
      const IeeeMode plain;
      uint8_t* const local = plan.local_bytes == 0 ? nullptr : LocalMemory(plan.local_bytes);
      if (plan.local_bytes != 0 && local == nullptr) {
        enough = false;
      } else {
        kernels.product(g, plan, scratch.get(), local, begin, end);
      }
    });
    return enough ? ffi::Error::Success() : NoMemory("ggml_linear", plan.local_bytes);
  }

  static ffi::Error LinearGradient(Context pool, const ProductArguments& a) {
    Groups groups(a, a.k);
    const GroupedArguments& g = groups.arguments;
    const int64_t threads = ThreadsFor(pool, g);
    const Plan plan = PlanGradient(g, threads);
    ParallelFor(pool, plan.units, threads == 1 ? plan.units : 1, [&](int64_t begin, int64_t end) {
      const IeeeMode plain;
      LinearKernelsHere().gradient(g, plan, begin, end);
    });
    return ffi::Error::Success();
  }

 private:
  // To wake a thread takes as long as multiplying a million weights.
  static int64_t ThreadsFor(Context pool, const GroupedArguments& g) {
    constexpr int64_t kWorthWaking = 1 << 20;
    return g.group_begin[g.experts] * g.n * g.k < kWorthWaking ? 1 : pool.num_threads();
  }

  // Which rows belong to which matrix; rows of the result that belong to none are set to zero.
  struct Groups {
    std::vector<int64_t> begin, x_row, out_row;
    GroupedArguments arguments{};

    Groups(const ProductArguments& a, int64_t out_width) : begin(a.experts + 1, 0) {
      arguments.type_id = a.type_id;
      arguments.layout = a.prepared ? Layout::kPrepared : Layout::kPlain;
      arguments.int8_lhs = a.int8_lhs;
      arguments.w = a.w;
      arguments.experts = a.experts;
      arguments.n = a.n;
      arguments.k = a.k;
      arguments.x = a.x;
      arguments.x_type = a.x_type;
      arguments.out = a.out;
      const int64_t rows = a.ids == nullptr ? a.experts * a.tokens : a.tokens * a.slots;
      const int64_t row_bytes = out_width * SizeOf(a.x_type);
      AdviseHugePages(a.out, rows * row_bytes);
      if (a.ids == nullptr) {
        arguments.x_rows = a.x_batch * a.tokens;
        for (int64_t e = 0; e <= a.experts; ++e) begin[e] = e * a.tokens;
        if (a.x_batch != a.experts) {
          x_row.resize(a.experts * a.tokens);
          for (size_t p = 0; p < x_row.size(); ++p) x_row[p] = static_cast<int64_t>(p) % a.tokens;
        }
      } else {
        arguments.x_rows = a.tokens * a.x_batch;
        for (int64_t r = 0; r < rows; ++r) {
          if (Known(a, r)) {
            ++begin[a.ids[r] + 1];
          } else {
            std::memset(static_cast<char*>(a.out) + r * row_bytes, 0, static_cast<size_t>(row_bytes));
          }
        }
        for (int64_t e = 0; e < a.experts; ++e) begin[e + 1] += begin[e];
        out_row.resize(begin[a.experts]);
        x_row.resize(begin[a.experts]);
        std::vector<int64_t> next(begin.begin(), begin.end() - 1);
        for (int64_t r = 0; r < rows; ++r) {
          if (!Known(a, r)) continue;
          const int64_t p = next[a.ids[r]]++;
          out_row[p] = r;
          x_row[p] = a.x_batch == 1 ? r / a.slots : r;
        }
      }
      arguments.group_begin = begin.data();
      arguments.x_row = x_row.empty() ? nullptr : x_row.data();
      arguments.out_row = out_row.empty() ? nullptr : out_row.data();
    }

    static bool Known(const ProductArguments& a, int64_t r) { return a.ids[r] >= 0 && a.ids[r] < a.experts; }
  };

  static ffi::Error NoKernel(const char* name, int type_id) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      std::string(name) + ": no CPU kernel for GGML type " + std::to_string(type_id) + ".");
  }
};

}  // namespace ggml
}  // namespace jq
