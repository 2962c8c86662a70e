// Ranges of blocks on CPU, compiled once per instruction set.
#include "ffi/affine/cpu_kernels.h"
#include "ffi/affine/dynamic/math.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <typename Int>
inline __attribute__((always_inline)) Int Least(Int a, Int b) {
  return b < a ? b : a;
}
template <typename Int>
inline __attribute__((always_inline)) Int Most(Int a, Int b) {
  return b > a ? b : a;
}

// Elements of one block.
template <typename X, bool kAbsolute>
void FoldRow(const X* x, int64_t n, int32_t* low, int32_t* high) {
  using K = Keys<X>;
  using Int = typename K::Int;
  Int least = K::kLowest, most = kAbsolute ? Int{0} : K::kHighest;
  for (int64_t i = 0; i < n; ++i) {
    const Int bits = BitCast<Int>(x[i]);
    if constexpr (kAbsolute) {
      most = Most(most, K::Magnitude(bits));
    } else {
      least = Least(least, K::Low(bits));
      most = Most(most, K::High(bits));
    }
  }
  *high = Most(*high, ToFloatKey<X>(most));
  if constexpr (!kAbsolute) *low = Least(*low, ToFloatKey<X>(least));
}

// Elements of consecutive blocks.
template <typename X, bool kAbsolute>
void FoldColumns(const X* x, int64_t n, int32_t* __restrict low, int32_t* __restrict high) {
  using K = Keys<X>;
  using F = Keys<float>;
  for (int64_t i = 0; i < n; ++i) {
    const bool finite = static_cast<typename K::Int>(BitCast<typename K::Int>(x[i]) & K::kMagnitude) < K::kInfinity;
    const int32_t bits = BitsOfRange(x[i]);
    if constexpr (kAbsolute) {
      high[i] = Most(high[i], finite ? bits & F::kMagnitude : 0);
    } else {
      low[i] = Least(low[i], finite ? F::Ordered(bits) : F::kLowest);
      high[i] = Most(high[i], finite ? F::Ordered(bits) : F::kHighest);
    }
  }
}

template <typename X, bool kAbsolute>
void FoldWith(const ScaleView& view, const void* data, int64_t begin, int64_t end, int32_t* low, int32_t* high) {
  const X* x = static_cast<const X*>(data);
  const ScaleView::Dim run = view.run();
  int64_t index[ScaleView::kMaxDims];
  int64_t scale = 0, rest = begin / run.size, at = begin % run.size;
  for (int d = view.dims - 2; d >= 0; --d) {
    index[d] = rest % view.dim[d].size;
    rest /= view.dim[d].size;
    scale += index[d] * view.dim[d].scale_stride;
  }
  while (begin < end) {
    const int64_t n = Least(run.size - at, end - begin);
    if (run.scale_stride == 0) {
      FoldRow<X, kAbsolute>(x + begin, n, low + scale, high + scale);
    } else {
      FoldColumns<X, kAbsolute>(x + begin, n, low + scale + at, high + scale + at);
    }
    begin += n;
    at = 0;
    for (int d = view.dims - 2; d >= 0; --d) {
      scale += view.dim[d].scale_stride;
      if (++index[d] < view.dim[d].size) break;
      scale -= view.dim[d].size * view.dim[d].scale_stride;
      index[d] = 0;
    }
  }
}

template <bool kAbsolute>
bool FoldOf(const ScaleView& view, DType type, const void* x, int64_t begin, int64_t end, int32_t* low, int32_t* high) {
  switch (type) {
    case DType::kF32: FoldWith<float, kAbsolute>(view, x, begin, end, low, high); return true;
    case DType::kF64: FoldWith<double, kAbsolute>(view, x, begin, end, low, high); return true;
    case DType::kF16: FoldWith<Float16, kAbsolute>(view, x, begin, end, low, high); return true;
    case DType::kBF16: FoldWith<BFloat16, kAbsolute>(view, x, begin, end, low, high); return true;
    default: return false;
  }
}

bool Fold(const ScaleView& view, DType type, const void* x, bool absolute, int64_t begin, int64_t end, int32_t* low,
          int32_t* high) {
  return absolute ? FoldOf<true>(view, type, x, begin, end, low, high)
                  : FoldOf<false>(view, type, x, begin, end, low, high);
}

void Merge(const int32_t* low, const int32_t* high, int64_t n, bool absolute, int32_t* to_low, int32_t* to_high) {
  for (int64_t i = 0; i < n; ++i) to_high[i] = Most(to_high[i], high[i]);
  for (int64_t i = 0; !absolute && i < n; ++i) to_low[i] = Least(to_low[i], low[i]);
}

void Values(const int32_t* keys, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = FromKey(keys[i]);
}

template <typename Real>
void ChooseAs(const int32_t* low, const int32_t* high, int64_t n, bool symmetric, Range<float> range, Real* scale,
              Real* zero_point) {
  for (int64_t i = 0; i < n; ++i) {
    const ScaleAndZero chosen = Choose(symmetric ? 0 : low[i], high[i], symmetric, range);
    scale[i] = static_cast<Real>(chosen.scale);
    zero_point[i] = static_cast<Real>(chosen.zero_point);
  }
}

void ChooseAll(const int32_t* low, const int32_t* high, int64_t begin, int64_t end, bool symmetric, Range<float> range,
               bool wide, void* scale, void* zero_point) {
  if (wide) {
    ChooseAs(low + begin, high + begin, end - begin, symmetric, range, static_cast<double*>(scale) + begin,
             static_cast<double*>(zero_point) + begin);
  } else {
    ChooseAs(low + begin, high + begin, end - begin, symmetric, range, static_cast<float*>(scale) + begin,
             static_cast<float*>(zero_point) + begin);
  }
}

}  // namespace

extern const RangeLoops range_loops;
const RangeLoops range_loops = {Fold, Merge, Values, ChooseAll};

}  // namespace JQ_ISA
}  // namespace jq
