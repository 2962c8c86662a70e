// Walks a tensor with an operation's loops: pieces that share a scale for maps, units of the fixed summation order for
// gradients. Compiled once per instruction set.
#include <cstring>

#include "ffi/affine/cpu_convert.h"
#include "ffi/affine/cpu_kernels.h"
#include "ffi/affine/cpu_noise.h"
#include "ffi/common/fetch.h"

namespace jq {
namespace JQ_GGML_ISA {
extern const ggml::CpuKernels ggml_kernels;
}
namespace JQ_ISA {
namespace {

// Elements handled at a time where a conversion or a gather needs a buffer; it stays in L1.
constexpr int64_t kTile = 512;
// Shorter runs are gathered into tiles with a scale per element.
constexpr int64_t kShortRun = 32;
// Neighbouring sums taken together where x's consecutive elements belong to consecutive scales.
constexpr int64_t kColumns = 256;

// ----------------------------------------------------------------------------------------------------------- maps

// Calls f(offset, n, scale, zero_point, per_element) for consecutive pieces of [begin, end) of x, at most `most` long.
// per_element: scale and zero_point have one value per element; otherwise they point at the one the piece shares.
template <typename Real, typename F>
void ForEachPiece(const ScaleView& view, const Real* scale, const Real* zero_point, int64_t begin, int64_t end,
                  int64_t most, const F& f) {
  alignas(64) Real scales[kTile], zero_points[kTile];
  const ScaleView::Dim run = view.run();
  int64_t index[ScaleView::kMaxDims];
  int64_t s = 0, z = 0;
  int64_t rest = begin / run.size;
  int64_t at = begin % run.size;
  for (int d = view.dims - 2; d >= 0; --d) {
    index[d] = rest % view.dim[d].size;
    rest /= view.dim[d].size;
    s += index[d] * view.dim[d].scale_stride;
    z += index[d] * view.dim[d].zero_point_stride;
  }
  const auto next_run = [&] {
    at = 0;
    for (int d = view.dims - 2; d >= 0; --d) {
      s += view.dim[d].scale_stride;
      z += view.dim[d].zero_point_stride;
      if (++index[d] < view.dim[d].size) return;
      s -= view.dim[d].size * view.dim[d].scale_stride;
      z -= view.dim[d].size * view.dim[d].zero_point_stride;
      index[d] = 0;
    }
  };

  if (run.size >= kShortRun) {
    const bool expand_zero_point = run.scale_stride != 0 && run.zero_point_stride == 0;
    int64_t expanded = -1;
    if (expand_zero_point && most > kTile) most = kTile;
    while (begin < end) {
      int64_t n = run.size - at;
      n = n < end - begin ? n : end - begin;
      n = n < most ? n : most;
      const Real* zeros = zero_point + z + at * run.zero_point_stride;
      if (expand_zero_point) {
        if (expanded != z) {
          for (int64_t i = 0; i < kTile; ++i) zero_points[i] = zero_point[z];
          expanded = z;
        }
        zeros = zero_points;
      }
      f(begin, n, scale + s + at * run.scale_stride, zeros, run.scale_stride != 0);
      begin += n;
      at += n;
      if (at == run.size) next_run();
    }
    return;
  }
  if (most > kTile) most = kTile;
  while (begin < end) {
    const int64_t n = most < end - begin ? most : end - begin;
    for (int64_t filled = 0; filled < n;) {
      int64_t take = run.size - at;
      take = take < n - filled ? take : n - filled;
      for (int64_t i = 0; i < take; ++i) {
        scales[filled + i] = scale[s + (at + i) * run.scale_stride];
        zero_points[filled + i] = zero_point[z + (at + i) * run.zero_point_stride];
      }
      filled += take;
      at += take;
      if (at == run.size) next_run();
    }
    f(begin, n, scales, zero_points, true);
    begin += n;
  }
}

template <typename Real>
bool MapWith(const Loops<Real>& loops, const MapArguments& a, bool gradient, int64_t begin, int64_t end) {
  // Directly where a loop reads and writes these types; otherwise through tiles of Real on either side.
  const auto loop_for = [&](DType x, DType out) {
    if (!gradient) return loops.value(x, out);
    return x == kRealType<Real> && out == kRealType<Real> ? loops.gradient : nullptr;
  };
  Conversion widen = nullptr, narrow = nullptr;
  auto loop = loop_for(a.x_type, a.out_type);
  if (loop == nullptr && (loop = loop_for(kRealType<Real>, a.out_type))) widen = Widening<Real>(a.x_type);
  if (loop == nullptr && (loop = loop_for(a.x_type, kRealType<Real>))) narrow = Narrowing<Real>(a.out_type);
  if (loop == nullptr || (loop_for(a.x_type, a.out_type) == nullptr && widen == nullptr && narrow == nullptr)) {
    loop = loop_for(kRealType<Real>, kRealType<Real>);
    widen = Widening<Real>(a.x_type);
    narrow = Narrowing<Real>(a.out_type);
    if (widen == nullptr || narrow == nullptr) return false;
  }

  const int64_t x_size = SizeOf(a.x_type), out_size = SizeOf(a.out_type);
  const char* x = static_cast<const char*>(a.x);
  const char* dy = static_cast<const char*>(a.dy);
  char* out = static_cast<char*>(a.out);
  const Range<Real> range{static_cast<Real>(a.qmin), static_cast<Real>(a.qmax)};
  alignas(64) Real x_tile[kTile], dy_tile[kTile];
  alignas(64) char result_tile[kTile * sizeof(Real)];
  alignas(64) Real noise[kTile];
  // Where a result takes its operand's place, it cannot be computed again.
  const bool undrawn_first = gradient && a.key != nullptr && a.out != a.x && a.out != a.dy;
  // Where few pieces can do without drawing, few are tried.
  int in_vain = 0, drawn_at_once = 0;
  const int64_t most = widen || narrow || a.key ? kTile : INT64_MAX;
  ForEachPiece<Real>(*a.view, static_cast<const Real*>(a.scale), static_cast<const Real*>(a.zero_point), begin, end,
                     most, [&](int64_t offset, int64_t n, const Real* scale, const Real* zero_point, bool per_element) {
                       const void* x_piece = x + offset * x_size;
                       // An operation without an upstream gradient never reads it, but its loop takes a pointer.
                       const void* dy_piece = dy == nullptr ? static_cast<const void*>(dy_tile) : dy + offset * x_size;
                       if (widen != nullptr) {
                         widen(x_piece, x_tile, n);
                         x_piece = x_tile;
                         if (dy != nullptr) {
                           widen(dy_piece, dy_tile, n);
                           dy_piece = dy_tile;
                         }
                       }
                       char* out_piece = out + (offset - a.out_origin) * out_size;
                       void* target = narrow != nullptr ? result_tile : out_piece;
                       bool done = false;
                       if (undrawn_first && --drawn_at_once < 0) {
                         FetchSoon(x + (offset + n) * x_size, n * x_size);
                         FetchSoon(dy + (offset + n) * x_size, n * x_size);
                         done = loops.undrawn(static_cast<const Real*>(dy_piece), static_cast<const Real*>(x_piece),
                                              static_cast<Real*>(target), n, scale, zero_point, per_element, range);
                         in_vain = done ? 0 : in_vain < 15 ? 2 * in_vain + 1 : 15;
                         drawn_at_once = in_vain;
                       }
                       if (!done) {
                         if (a.key != nullptr) {
                           FetchSoon(x + offset * x_size, n * x_size);
                           Draw(*a.key, offset, n, noise);
                         }
                         loop(static_cast<const Real*>(dy_piece), x_piece, target, n, scale, zero_point, per_element,
                              range, noise);
                       }
                       if (narrow != nullptr) narrow(result_tile, out_piece, n);
                     });
  return true;
}

// ------------------------------------------------------------------------------------------------------ gradients

// The work divides into units: one chunk of one sum, or of up to kColumns neighbouring sums.
struct GradientPlan {
  bool columns;
  int kept = 0, reduced = 0;
  ScaleView::Dim kept_dim[ScaleView::kMaxDims], reduced_dim[ScaleView::kMaxDims];
  int64_t reduced_size = 1, chunks, width = 1, tiles = 1, units;

  explicit GradientPlan(const ScaleView& view) {
    columns = view.run().scale_stride != 0;
    for (int d = 0; d < view.dims; ++d) {
      if (view.dim[d].scale_stride != 0) {
        kept_dim[kept++] = view.dim[d];
      } else {
        reduced_dim[reduced++] = view.dim[d];
        reduced_size *= view.dim[d].size;
      }
    }
    chunks = ChunkCount(reduced_size);
    if (columns) {
      width = kept_dim[kept - 1].size;
      tiles = (width + kColumns - 1) / kColumns;
    }
    units = view.scale_size / width * tiles * chunks;
  }
};

// Walks x's offsets of the reduced elements j, j + 1, ...
struct ReducedCursor {
  const GradientPlan& plan;
  int64_t index[ScaleView::kMaxDims];
  int64_t offset = 0;

  ReducedCursor(const GradientPlan& p, int64_t j) : plan(p) {
    // The outermost index is what is left: one division fewer, and none at all in the common case of one dimension.
    for (int d = plan.reduced - 1; d >= 0; --d) {
      index[d] = d == 0 ? j : j % plan.reduced_dim[d].size;
      if (d > 0) j /= plan.reduced_dim[d].size;
      offset += index[d] * plan.reduced_dim[d].stride;
    }
  }
  // Elements left in the innermost reduced dimension.
  int64_t Left() const {
    return plan.reduced == 0 ? 1 : plan.reduced_dim[plan.reduced - 1].size - index[plan.reduced - 1];
  }
  void Advance(int64_t n) {
    for (int d = plan.reduced - 1; d >= 0; --d) {
      const ScaleView::Dim& dim = plan.reduced_dim[d];
      index[d] += n;
      offset += n * dim.stride;
      if (index[d] < dim.size) return;
      index[d] = 0;
      offset -= dim.size * dim.stride;
      n = 1;
    }
  }
};

// lanes: kLanes rows of kColumns; leaves the sums of the first n columns in the first row.
template <typename Real>
void CombineLanes(Real* lanes, int64_t n) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) {
      Real* low = lanes + lane * kColumns;
      const Real* high = low + distance * kColumns;
      for (int64_t i = 0; i < n; ++i) low[i] += high[i];
    }
  }
}

template <typename Real>
class GradientPass {
 public:
  GradientPass(const Loops<Real>& loops, const GradientArguments& a)
      : loops_(loops),
        view_(*a.view),
        plan_(*a.view),
        dy_(static_cast<const char*>(a.dy)),
        x_(static_cast<const char*>(a.x)),
        dx_(static_cast<char*>(a.dx)),
        scale_(static_cast<const Real*>(a.scale)),
        zero_point_(static_cast<const Real*>(a.zero_point)),
        range_{static_cast<Real>(a.qmin), static_cast<Real>(a.qmax)},
        key_(a.key),
        size_(SizeOf(a.type)),
        direct_(a.type == kRealType<Real>),
        widen_(Widening<Real>(a.type)),
        narrow_(Narrowing<Real>(a.type)) {
    // The first level's sums go to scratch, or are the result when one chunk holds them all.
    const int64_t reduced = view_.ReducedSize();
    const bool last = ChunkCount(reduced) <= 1;
    Real* scratch = static_cast<Real*>(a.scratch);
    if (a.dscale) dscale_ = last ? static_cast<Real*>(a.dscale) : scratch;
    if (a.dzero_point) {
      dzero_point_ = last ? static_cast<Real*>(a.dzero_point) : scratch + ScratchSize(reduced, view_.scale_size);
    }
  }

  bool Run(int64_t begin, int64_t end) {
    if (widen_ == nullptr || narrow_ == nullptr) return false;
    int64_t outer = begin / plan_.chunks, chunk = begin % plan_.chunks;
    for (int64_t unit = begin; unit < end; ++unit) {
      plan_.columns ? Columns(outer, chunk) : Row(outer, chunk);
      if (++chunk == plan_.chunks) {
        chunk = 0;
        ++outer;
      }
    }
    return true;
  }

 private:
  // One chunk of the sum that belongs to scale element e.
  void Row(int64_t e, int64_t chunk) {
    int64_t base = 0, zero = 0;
    Locate(e, plan_.kept, &base, &zero);
    const int64_t begin = chunk * kChunk;
    const int64_t n = begin + kChunk < plan_.reduced_size ? kChunk : plan_.reduced_size - begin;
    ReducedCursor cursor(plan_, begin);
    const Real z = RoundZeroPoint(zero_point_[zero]);
    Real ds, dz;
    if (direct_ && cursor.Left() >= n) {
      const int64_t at = (base + cursor.offset) * size_;
      if (key_ != nullptr) {
        FetchSoon(dy_ + at, n * size_);
        FetchSoon(x_ + at, n * size_);
        Draw(*key_, base + cursor.offset, n, noise_tile_);
      }
      loops_.row(Reals(dy_ + at), Reals(x_ + at), dx_ ? reinterpret_cast<Real*>(dx_ + at) : dx_tile_, n, scale_[e], z,
                 range_, noise_tile_, &ds, &dz);
    } else {
      ReducedCursor scatter = cursor;
      for (int64_t filled = 0; filled < n;) {
        const int64_t take = cursor.Left() < n - filled ? cursor.Left() : n - filled;
        widen_(dy_ + (base + cursor.offset) * size_, dy_tile_ + filled, take);
        widen_(x_ + (base + cursor.offset) * size_, x_tile_ + filled, take);
        if (key_ != nullptr) Draw(*key_, base + cursor.offset, take, noise_tile_ + filled);
        filled += take;
        cursor.Advance(take);
      }
      loops_.row(dy_tile_, x_tile_, dx_tile_, n, scale_[e], z, range_, noise_tile_, &ds, &dz);
      for (int64_t done = 0; dx_ != nullptr && done < n;) {
        const int64_t take = scatter.Left() < n - done ? scatter.Left() : n - done;
        narrow_(dx_tile_ + done, dx_ + (base + scatter.offset) * size_, take);
        done += take;
        scatter.Advance(take);
      }
    }
    if (dscale_) dscale_[chunk * view_.scale_size + e] = ds;
    if (dzero_point_) dzero_point_[chunk * view_.scale_size + e] = dz;
  }

  // One chunk of up to kColumns neighbouring sums.
  void Columns(int64_t outer_tile, int64_t chunk) {
    const int64_t tile = outer_tile % plan_.tiles, outer = outer_tile / plan_.tiles;
    const int64_t column = tile * kColumns;
    const int64_t n = plan_.width - column < kColumns ? plan_.width - column : kColumns;
    const ScaleView::Dim run = view_.run();
    int64_t base = column, zero = column * run.zero_point_stride;
    Locate(outer, plan_.kept - 1, &base, &zero);
    const int64_t e = outer * plan_.width + column;
    for (int64_t i = 0; i < n; ++i) zero_tile_[i] = RoundZeroPoint(zero_point_[zero + i * run.zero_point_stride]);
    const int64_t end = (chunk + 1) * kChunk < plan_.reduced_size ? (chunk + 1) * kChunk : plan_.reduced_size;
    const int64_t lanes = end - chunk * kChunk < kLanes ? end - chunk * kChunk : kLanes;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      memset(scale_lanes_ + lane * kColumns, 0, n * sizeof(Real));
      memset(zero_lanes_ + lane * kColumns, 0, n * sizeof(Real));
    }
    ReducedCursor cursor(plan_, chunk * kChunk);
    for (int64_t j = chunk * kChunk; j < end; ++j, cursor.Advance(1)) {
      const int64_t at = (base + cursor.offset) * size_;
      Real* scale_lane = scale_lanes_ + j % kLanes * kColumns;
      Real* zero_lane = zero_lanes_ + j % kLanes * kColumns;
      if (key_ != nullptr) Draw(*key_, base + cursor.offset, n, noise_tile_);
      if (direct_) {
        loops_.columns(Reals(dy_ + at), Reals(x_ + at), dx_ ? reinterpret_cast<Real*>(dx_ + at) : dx_tile_, n,
                       scale_ + e, zero_tile_, range_, noise_tile_, scale_lane, zero_lane);
      } else {
        widen_(dy_ + at, dy_tile_, n);
        widen_(x_ + at, x_tile_, n);
        loops_.columns(dy_tile_, x_tile_, dx_tile_, n, scale_ + e, zero_tile_, range_, noise_tile_, scale_lane,
                       zero_lane);
        if (dx_ != nullptr) narrow_(dx_tile_, dx_ + at, n);
      }
    }
    if (lanes > 1) {
      CombineLanes(scale_lanes_, n);
      CombineLanes(zero_lanes_, n);
    }
    if (dscale_) memcpy(dscale_ + chunk * view_.scale_size + e, scale_lanes_, n * sizeof(Real));
    if (dzero_point_) memcpy(dzero_point_ + chunk * view_.scale_size + e, zero_lanes_, n * sizeof(Real));
  }

  // Adds to `base` and `zero` the offsets in x and the zero point of the i-th element of the first `kept` dimensions.
  void Locate(int64_t i, int kept, int64_t* base, int64_t* zero) const {
    for (int d = kept - 1; d >= 0; --d) {
      const int64_t index = d == 0 ? i : i % plan_.kept_dim[d].size;
      if (d > 0) i /= plan_.kept_dim[d].size;
      *base += index * plan_.kept_dim[d].stride;
      *zero += index * plan_.kept_dim[d].zero_point_stride;
    }
  }

  static const Real* Reals(const char* bytes) { return reinterpret_cast<const Real*>(bytes); }

  const Loops<Real>& loops_;
  const ScaleView& view_;
  const GradientPlan plan_;
  const char *dy_, *x_;
  char* dx_;
  const Real *scale_, *zero_point_;
  const Range<Real> range_;
  const KeyArguments* const key_;
  const int64_t size_;
  const bool direct_;
  const Conversion widen_, narrow_;
  Real *dscale_ = nullptr, *dzero_point_ = nullptr;
  alignas(64) Real dy_tile_[kChunk], x_tile_[kChunk], dx_tile_[kChunk], zero_tile_[kColumns];
  alignas(64) Real noise_tile_[kChunk > kColumns ? kChunk : kColumns];
  alignas(64) Real scale_lanes_[kLanes * kColumns], zero_lanes_[kLanes * kColumns];
};

// Sums of sums: [terms, width] -> [ChunkCount(terms), width].
template <typename Real>
void SumChunks(const Real* in, Real* out, int64_t terms, int64_t width) {
  alignas(64) Real lanes[kLanes * kColumns];
  for (int64_t chunk = 0; chunk < ChunkCount(terms); ++chunk) {
    const int64_t end = (chunk + 1) * kChunk < terms ? (chunk + 1) * kChunk : terms;
    for (int64_t column = 0; column < width; column += kColumns) {
      const int64_t n = width - column < kColumns ? width - column : kColumns;
      for (int lane = 0; lane < kLanes; ++lane) memset(lanes + lane * kColumns, 0, n * sizeof(Real));
      for (int64_t j = chunk * kChunk; j < end; ++j) {
        Real* row = lanes + j % kLanes * kColumns;
        for (int64_t i = 0; i < n; ++i) row[i] += in[j * width + column + i];
      }
      CombineLanes(lanes, n);
      memcpy(out + chunk * width + column, lanes, n * sizeof(Real));
    }
  }
}

// The upper levels, in one thread: they hold 1/256 of the terms.
template <typename Real>
void FinishSums(const GradientArguments& a) {
  const int64_t reduced = a.view->ReducedSize(), width = a.view->scale_size;
  void* results[2] = {a.dscale, a.dzero_point};
  for (int quantity = 0; quantity < 2; ++quantity) {
    if (results[quantity] == nullptr) continue;
    Real* level = static_cast<Real*>(a.scratch) + quantity * ScratchSize(reduced, width);
    for (int64_t n = ChunkCount(reduced); n > 1; n = ChunkCount(n)) {
      Real* above = ChunkCount(n) == 1 ? static_cast<Real*>(results[quantity]) : level + n * width;
      SumChunks(level, above, n, width);
      level = above;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- entry

bool Map(const AffineLoops& loops, const MapArguments& a, bool gradient, int64_t begin, int64_t end) {
  return a.wide ? MapWith(loops.wide, a, gradient, begin, end) : MapWith(loops.single, a, gradient, begin, end);
}

int64_t GradientUnits(const ScaleView& view) { return GradientPlan(view).units; }

bool Gradient(const AffineLoops& loops, const GradientArguments& a, int64_t begin, int64_t end) {
  return a.wide ? GradientPass<double>(loops.wide, a).Run(begin, end)
                : GradientPass<float>(loops.single, a).Run(begin, end);
}

void FinishGradient(const GradientArguments& a) { a.wide ? FinishSums<double>(a) : FinishSums<float>(a); }

}  // namespace

extern const AffineLoops fake_quantize_loops, quantize_loops, dequantize_loops;
extern const AffineLoops stochastic_fake_quantize_loops, stochastic_quantize_loops;
extern const PackingLoops packing_loops;
extern const HistogramLoops histogram_loops;
extern const RangeLoops range_loops;
extern const CpuKernels cpu_kernels;
void Adam8bit(const optim::AdamArguments& arguments, int64_t begin, int64_t end);

#define JQ_TEXT(x) #x
#define JQ_NAME(x) JQ_TEXT(x)
const CpuKernels cpu_kernels = {
    JQ_NAME(JQ_ISA),
    &fake_quantize_loops,
    &quantize_loops,
    &dequantize_loops,
    &stochastic_fake_quantize_loops,
    &stochastic_quantize_loops,
    &packing_loops,
    &histogram_loops,
    &range_loops,
    Map,
    GradientUnits,
    Gradient,
    FinishGradient,
    &JQ_GGML_ISA::ggml_kernels,
    Adam8bit,
};

}  // namespace JQ_ISA
}  // namespace jq
