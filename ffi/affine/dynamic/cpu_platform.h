// Dynamic quantisation on the CPU: in one pass where a slice of the tensor holds all of its blocks and the caches hold
// the slice, else ranges first.
#pragma once

#include <mutex>
#include <vector>

#include "ffi/affine/cpu_platform.h"
#include "ffi/affine/dynamic/handlers.h"
#include "ffi/affine/dynamic/math.h"
#include "ffi/common/fetch.h"

namespace jq {

// The tensor along its outermost dimension, where blocks do not reach from one index to another: each slice, and any
// number of them, is independent of the others.
struct Slices {
  int64_t count = 0;  // 0: blocks reach across
  int64_t size = 0, scales = 0;

  explicit Slices(const ScaleView& view) {
    if (view.size == 0 || view.dim[0].scale_stride == 0) return;
    count = view.dim[0].size;
    size = view.size / count;
    scales = view.dim[0].scale_stride;
  }
};

struct DynamicCpu : Cpu {
  static ffi::Error Range(Context pool, const RangeArguments& a) {
    Keyed keys(*a.view, a.absolute);
    if (!keys.Fold(pool, a.type, a.x)) return UnknownTypes("range");
    const RangeLoops& loops = *CpuKernelsHere().range;
    loops.values(keys.high(), a.view->scale_size, a.high);
    if (!a.absolute) loops.values(keys.low(), a.view->scale_size, a.low);
    return ffi::Error::Success();
  }

  static ffi::Error Dynamic(Context pool, Op op, const DynamicArguments& d) {
    const MapArguments& a = d.map;
    const ScaleView& view = *a.view;
    const jq::Range<float> range{static_cast<float>(a.qmin), static_cast<float>(a.qmax)};
    const CpuKernels& kernels = CpuKernelsHere();
    Keyed keys(view, d.symmetric);
    const auto choose = [&](int64_t begin, int64_t end) {
      kernels.range->choose(keys.low(), keys.high(), begin, end, d.symmetric, range, a.wide, d.scale, d.zero_point);
    };

    const Slices slices(view);
    if (!InOnePass(pool, slices, d)) {
      if (!keys.Fold(pool, a.x_type, a.x)) return UnknownTypes(DynamicNameOf(op));
      ParallelFor(pool, view.scale_size, kGrain, choose);
      if (view.size == 0) return ffi::Error::Success();
      return d.packing != nullptr ? Cpu::PackedMap(pool, op, a, *d.packing) : Cpu::Map(pool, op, a, false);
    }

    if (d.packing == nullptr) {
      AdviseHugePages(a.out, view.size * SizeOf(a.out_type));
    } else {
      AdviseHugePages(a.out, view.size * d.packing->bits / 8);
    }
    std::atomic<bool> known{true};
    const int64_t batch = SlicesAtATime(slices, d);
    ParallelFor(pool, (slices.count + batch - 1) / batch, kGrain / (batch * slices.size), [&](int64_t i, int64_t last) {
      for (; i < last; ++i) {
        const int64_t begin = i * batch, end = begin + batch < slices.count ? begin + batch : slices.count;
        const int64_t first = begin * slices.size, n = (end - begin) * slices.size;
        const bool done =
            kernels.range->fold(view, a.x_type, a.x, d.symmetric, first, first + n, keys.low(), keys.high());
        if (!done) return known.store(false);
        choose(begin * slices.scales, end * slices.scales);
        if (!(d.packing != nullptr ? PackRows(op, a, *d.packing, first, n) : MapRows(op, a, first, n))) known = false;
      }
    });
    return known ? ffi::Error::Success() : UnknownTypes(DynamicNameOf(op));
  }

 private:
  // Keys of the extremes of each block (see math.h).
  class Keyed {
   public:
    Keyed(const ScaleView& view, bool absolute)
        : view_(view), absolute_(absolute), high_(view.scale_size, absolute ? 0 : Keys<float>::kHighest) {
      if (!absolute) low_.assign(view.scale_size, Keys<float>::kLowest);
    }
    int32_t* low() { return low_.data(); }
    int32_t* high() { return high_.data(); }

    bool Fold(Context pool, DType type, const void* x) {
      if (view_.size == 0) return true;
      const RangeLoops& loops = *CpuKernelsHere().range;
      std::atomic<bool> known{true};
      const Slices slices(view_);
      if (slices.count > 0 && slices.size <= kGrain) {
        ParallelFor(pool, slices.count, kGrain / slices.size, [&](int64_t begin, int64_t end) {
          if (!loops.fold(view_, type, x, absolute_, begin * slices.size, end * slices.size, low(), high())) {
            known = false;
          }
        });
        return known;
      }
      // Each part has keys for all blocks, so a part should be much longer than they.
      int64_t grain = 4 * view_.scale_size > kGrain ? 4 * view_.scale_size : kGrain;
      const int64_t even = view_.size / (8 * static_cast<int64_t>(pool.num_threads())) + 1;
      grain = grain > even ? grain : even;
      if (grain >= view_.size) return loops.fold(view_, type, x, absolute_, 0, view_.size, low(), high());
      std::mutex merging;
      ParallelFor(pool, view_.size, grain, [&](int64_t begin, int64_t end) {
        Keyed part(view_, absolute_);
        if (!loops.fold(view_, type, x, absolute_, begin, end, part.low(), part.high())) known = false;
        const std::lock_guard<std::mutex> lock(merging);
        loops.merge(part.low(), part.high(), view_.scale_size, absolute_, low(), high());
      });
      return known;
    }

   private:
    const ScaleView& view_;
    const bool absolute_;
    std::vector<int32_t> low_, high_;
  };

  static constexpr int64_t kCached = 1 << 20;  // bytes of x

  static bool InOnePass(Context& pool, const Slices& slices, const DynamicArguments& d) {
    if (slices.count == 0 || slices.size * SizeOf(d.map.x_type) > kCached) return false;
    if (slices.count < static_cast<int64_t>(pool.num_threads()) && slices.size > kGrain) return false;
    // A batch of slices must be whole bytes of a line of codes, or whole rows.
    return d.packing == nullptr || d.packing->rows == 1 || slices.size % d.packing->row_size == 0;
  }

  static int64_t SlicesAtATime(const Slices& slices, const DynamicArguments& d) {
    constexpr int64_t kElements = 8192;
    int64_t batch = kElements / slices.size;
    // Eight elements are whole bytes of codes.
    if (d.packing != nullptr && d.packing->rows == 1) batch = (batch + 7) / 8 * 8;
    batch = batch > 1 ? batch : d.packing != nullptr && d.packing->rows == 1 && slices.size % 8 != 0 ? 8 : 1;
    return batch;
  }

  // In tiles, each while as many elements of the next batch come from memory: codes are bound by division, and folding
  // by memory alone.
  static bool MapRows(Op op, const MapArguments& a, int64_t first, int64_t n) {
    constexpr int64_t kBytes = 2048;
    const int64_t size = SizeOf(a.x_type), tile = kBytes / size;
    const char* ahead = static_cast<const char*>(a.x) + (first + n) * size;
    bool known = true;
    for (int64_t at = 0; at < n; at += tile) {
      const int64_t take = n - at < tile ? n - at : tile;
      FetchSoon(ahead + at * size, take * size);
      known &= CpuKernelsHere().map(LoopsFor(op), a, false, first + at, first + at + take);
    }
    return known;
  }

  static bool PackRows(Op op, const MapArguments& a, const PackArguments& p, int64_t first, int64_t n) {
    while (n > 0) {
      const int64_t row = first / p.row_size, column = first % p.row_size;
      const int64_t take = p.row_size - column < n ? p.row_size - column : n;
      if (!PackSegment(op, a, p, row, column, take)) return false;
      first += take;
      n -= take;
    }
    return true;
  }

  static ffi::Error UnknownTypes(const char* name) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(name) + ": no CPU kernel for these element types.");
  }
};

}  // namespace jq
