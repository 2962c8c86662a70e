// The affine operations on the CPU: their work divided over XLA's thread pool.
#pragma once

#include <atomic>
#include <cstring>
#include <string>

#include "ffi/affine/cpu_kernels.h"
#include "ffi/affine/handlers.h"
#include "ffi/affine/histogram/cpu_platform.h"
#include "ffi/common/memory.h"
#include "ffi/common/parallel_for.h"

namespace jq {

inline const AffineLoops& LoopsFor(Op op) {
  const CpuKernels& kernels = CpuKernelsHere();
  switch (op) {
    case Op::kFakeQuantize: return *kernels.fake_quantize;
    case Op::kQuantize: return *kernels.quantize;
    case Op::kStochasticFakeQuantize: return *kernels.stochastic_fake_quantize;
    case Op::kStochasticQuantize: return *kernels.stochastic_quantize;
    default: return *kernels.dequantize;
  }
}

// Work below this many elements is not worth a second thread; above, chunks of it keep every thread busy to the end.
constexpr int64_t kGrain = 1 << 15;

inline ffi::Error UnknownTypes(Op op) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    std::string(NameOf(op)) + ": no CPU kernel for these element types.");
}

struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
  static auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

  static ffi::Error Map(Context pool, Op op, const MapArguments& a, bool gradient) {
    AdviseHugePages(a.out, a.view->size * SizeOf(a.out_type));
    std::atomic<bool> known{true};
    ParallelFor(pool, a.view->size, kGrain, [&](int64_t begin, int64_t end) {
      if (!CpuKernelsHere().map(LoopsFor(op), a, gradient, begin, end)) known = false;
    });
    return known ? ffi::Error::Success() : UnknownTypes(op);
  }

  static ffi::Error PackedMap(Context pool, Op op, const MapArguments& a, const PackArguments& p) {
    const int64_t tiles = (p.row_size + kPackTile - 1) / kPackTile;
    AdviseHugePages(p.out, p.rows * ((p.row_size * p.bits + 7) / 8));
    std::atomic<bool> known{true};
    const int64_t grain = kGrain / (p.row_size < kPackTile ? p.row_size : kPackTile);
    ParallelFor(pool, p.rows * tiles, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t column = i % tiles * kPackTile;
        const int64_t n = p.row_size - column < kPackTile ? p.row_size - column : kPackTile;
        if (!PackSegment(op, a, p, i / tiles, column, n)) known = false;
      }
    });
    return known ? ffi::Error::Success() : UnknownTypes(op);
  }

  static ffi::Error Gradient(Context pool, Op op, const GradientArguments& a) {
    if (a.dx != nullptr) AdviseHugePages(a.dx, a.view->size * SizeOf(a.type));
    std::atomic<bool> known{true};
    if (a.view->size == 0) {
      // Sums of nothing.
      const int64_t bytes = a.view->scale_size * (a.wide ? 8 : 4);
      if (a.dscale != nullptr) std::memset(a.dscale, 0, bytes);
      if (a.dzero_point != nullptr) std::memset(a.dzero_point, 0, bytes);
      return ffi::Error::Success();
    }
    const int64_t units = CpuKernelsHere().gradient_units(*a.view);
    const int64_t unit_size = a.view->size / units + 1;
    ParallelFor(pool, units, kGrain / unit_size, [&](int64_t begin, int64_t end) {
      if (!CpuKernelsHere().gradient(LoopsFor(op), a, begin, end)) known = false;
    });
    if (!known) return UnknownTypes(op);
    CpuKernelsHere().gradient_finish(a);
    return ffi::Error::Success();
  }

  static ffi::Error Pack(Context pool, const PackArguments& p) {
    return ForEachSegment(
        pool, p,
        [&](const uint8_t* codes, uint8_t* bytes, int64_t n) {
          CpuKernelsHere().packing->pack(codes, bytes, n, p.bits);
        },
        static_cast<const uint8_t*>(p.in), static_cast<uint8_t*>(p.out));
  }

  static ffi::Error Unpack(Context pool, const PackArguments& p) {
    return ForEachSegment(
        pool, p,
        [&](uint8_t* codes, const uint8_t* bytes, int64_t n) {
          CpuKernelsHere().packing->unpack(bytes, codes, n, p.bits, p.is_signed);
        },
        static_cast<uint8_t*>(p.out), static_cast<const uint8_t*>(p.in));
  }

  static ffi::Error Histogram(Context pool, const char* name, const HistogramArguments& a) {
    if (CountOnCpu(pool, a)) return ffi::Error::Success();
    return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(name) + ": no CPU kernel for this element type.");
  }

 protected:
  static constexpr int64_t kPackTile = 4096;

  // Packed codes of n elements of a row from `column` on, which begins a byte. Codes of a tile, then its bytes: the
  // codes never leave the cache.
  static bool PackSegment(Op op, const MapArguments& a, const PackArguments& p, int64_t row, int64_t column,
                          int64_t n) {
    alignas(64) int8_t codes[kPackTile];
    MapArguments tile = a;
    tile.out = codes;
    const int64_t per_byte = 8 / p.bits, packed = (p.row_size + per_byte - 1) / per_byte;
    for (const int64_t end = column + n; column < end; column += kPackTile) {
      const int64_t take = end - column < kPackTile ? end - column : kPackTile;
      tile.out_origin = row * p.row_size + column;
      if (!CpuKernelsHere().map(LoopsFor(op), tile, false, tile.out_origin, tile.out_origin + take)) return false;
      CpuKernelsHere().packing->pack(reinterpret_cast<const uint8_t*>(codes),
                                     static_cast<uint8_t*>(p.out) + row * packed + column / per_byte, take, p.bits);
    }
    return true;
  }

 private:
  // f(codes, bytes, n) for parts of rows that begin on a whole byte.
  template <typename Codes, typename Bytes, typename F>
  static ffi::Error ForEachSegment(Context pool, const PackArguments& p, const F& f, Codes codes, Bytes bytes) {
    const int64_t per_byte = 8 / p.bits, packed = (p.row_size + per_byte - 1) / per_byte;
    const int64_t segments = (p.row_size + kGrain - 1) / kGrain;
    ParallelFor(pool, p.rows * segments, kGrain / p.row_size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / segments, column = i % segments * kGrain;
        const int64_t n = p.row_size - column < kGrain ? p.row_size - column : kGrain;
        f(codes + row * p.row_size + column, bytes + row * packed + column / per_byte, n);
      }
    });
    return ffi::Error::Success();
  }
};

}  // namespace jq
