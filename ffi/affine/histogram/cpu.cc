// Histograms on CPU: slots of a block of values in a loop that vectorises, then one increment each.
#include "ffi/affine/cpu_kernels.h"
#include "ffi/affine/histogram/math.h"

namespace jq {
namespace JQ_ISA {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int kColumns = HistogramPlan::kColumns;

// The slot of each value: below `size`, or `size` itself for what is not counted. One entry for each group of a tile.
struct BinSlots {
  float unit[kColumns], origin[kColumns], factor[kColumns], last;
  uint32_t mask, size;

  BinSlots(const HistogramArguments& a, int64_t group, int groups, int64_t)
      : mask(MagnitudeMask(a.magnitude)), size(static_cast<uint32_t>(a.size)) {
    for (int g = 0; g < groups; ++g) {
      const Binning binning = Binning::Of(a.low[group + g], a.high[group + g], a.size);
      unit[g] = binning.unit;
      origin[g] = binning.origin;
      factor[g] = binning.factor;
      last = binning.last;
    }
  }
  JQ_HOST_DEVICE uint32_t Of(float value, int column) const {
    const float v = BitCast<float>(BitCast<uint32_t>(value) & mask);
    const uint32_t bin = Binning{unit[column], origin[column], factor[column], last}.Bin(v);
    return IsFinite(v) ? bin : size;
  }
};
template <bool kMagnitude>
struct DigitSlots {
  uint32_t prefix[kColumns];
  Digit digit;
  uint32_t size;

  DigitSlots(const HistogramArguments& a, int64_t group, int groups, int64_t table)
      : digit{a.shift, a.width}, size(static_cast<uint32_t>(a.size)) {
    for (int g = 0; g < groups; ++g) prefix[g] = a.prefix[(group + g) * a.tables + table];
  }
  JQ_HOST_DEVICE uint32_t Of(float value, int column) const {
    const uint32_t key = OrderedKey(BitCast<uint32_t>(value), kMagnitude), found = digit.Of(key);
    return IsFinite(value) & (digit.Before(key) == prefix[column]) ? found : size;
  }
};

float Load(float value) { return value; }
float Load(Float16 value) { return ToFloat(value); }
float Load(BFloat16 value) { return ToFloat(value); }

// Offset in x of a group's element i, where run elements are consecutive or the groups' own.
struct Walk {
  const ScaleView& view;
  int reduced = 0;

  explicit Walk(const ScaleView& v) : view(v) {
    for (int d = 0; d < view.dims; ++d) reduced += view.dim[d].scale_stride == 0;
  }
  int64_t OfElement(int64_t i) const {
    int64_t offset = 0;
    int left = reduced;
    for (int d = view.dims - 1; d >= 0; --d) {
      const ScaleView::Dim& dim = view.dim[d];
      if (dim.scale_stride != 0) continue;
      if (--left == 0) return offset + i * dim.stride;
      offset += i % dim.size * dim.stride;
      i /= dim.size;
    }
    return offset;
  }
  int64_t OfGroup(int64_t group) const {
    int64_t offset = 0;
    for (int d = 0; d < view.dims; ++d) {
      const ScaleView::Dim& dim = view.dim[d];
      if (dim.scale_stride != 0) offset += group / dim.scale_stride % dim.size * dim.stride;
    }
    return offset;
  }
};

template <int kCopies>
void Increment(const uint32_t* slots, int64_t n, uint32_t* tables, int64_t stride) {
  int64_t i = 0;
  for (; i + kCopies <= n; i += kCopies) {
    for (int c = 0; c < kCopies; ++c) ++tables[c * stride + slots[i + c]];
  }
  for (; i < n; ++i) ++tables[slots[i]];
}

// Elements [begin, end) of one group.
template <typename T, typename Slots>
void CountRow(const Walk& walk, const T* x, const Slots of, const HistogramPlan& plan, int64_t begin, int64_t end,
              uint32_t* tables) {
  const ScaleView::Dim& run = walk.view.run();
  const int64_t length = run.scale_stride == 0 ? run.size : 1;
  alignas(64) uint32_t slots[kBlock];
  int64_t held = 0;
  for (int64_t i = begin; i < end;) {
    int64_t n = length - i % length;
    n = n < end - i ? n : end - i;
    n = n < kBlock - held ? n : kBlock - held;
    const T* values = x + walk.OfElement(i);
    for (int64_t j = 0; j < n; ++j) slots[held + j] = of.Of(Load(values[j]), 0);
    i += n;
    held += n;
    if (held == kBlock || i == end) {
      (plan.copies == 2 ? Increment<2> : Increment<1>)(slots, held, tables, plan.stride);
      held = 0;
    }
  }
}

// Elements [begin, end) of `count` neighbouring groups.
template <typename T, typename Slots>
void CountColumns(const Walk& walk, const T* x, const Slots of, int count, const HistogramPlan& plan, int64_t begin,
                  int64_t end, uint32_t* tables) {
  for (int64_t i = begin; i < end; ++i) {
    const T* values = x + walk.OfElement(i);
    alignas(64) uint32_t slots[kColumns];
    if (count == kColumns) {
      for (int c = 0; c < kColumns; ++c) slots[c] = of.Of(Load(values[c]), c);
    } else {
      for (int c = 0; c < count; ++c) slots[c] = of.Of(Load(values[c]), c);
    }
    for (int c = 0; c < count; ++c) ++tables[c * plan.stride + slots[c]];
  }
}

// Whether the table before it looks for the same prefixes: neighbours in rank mostly share their leading bits.
bool LikeTheOneBefore(const HistogramArguments& a, int64_t group, int groups, int64_t table) {
  if (table == 0) return false;
  for (const uint32_t* p = a.prefix + group * a.tables + table; groups > 0; --groups, p += a.tables) {
    if (p[0] != p[-1]) return false;
  }
  return true;
}

void Flush(const uint32_t* table, const HistogramPlan& plan, int64_t size, int32_t* counts) {
  const int copies = plan.columns ? 1 : plan.copies;
  for (int64_t i = 0; i < size; ++i) {
    uint32_t sum = table[i];
    for (int c = 1; c < copies; ++c) sum += table[c * plan.stride + i];
    if (plan.slices == 1) {
      counts[i] = static_cast<int32_t>(sum);
    } else if (sum != 0) {
      __atomic_fetch_add(counts + i, static_cast<int32_t>(sum), __ATOMIC_RELAXED);
    }
  }
}

template <typename T, typename Slots>
void CountUnit(const HistogramArguments& a, const HistogramPlan& plan, int64_t group, int groups, int64_t begin,
               int64_t end, uint32_t* tables) {
  const Walk walk(*a.view);
  const T* x = static_cast<const T*>(a.x) + walk.OfGroup(group);
  for (int64_t t = 0; t < a.tables; ++t) {
    if (!LikeTheOneBefore(a, group, groups, t)) {
      const int64_t used = plan.columns ? groups : plan.copies;
      for (int64_t i = 0; i < used * plan.stride; ++i) tables[i] = 0;
      const Slots slots(a, group, groups, t);
      if (plan.columns) {
        CountColumns(walk, x, slots, groups, plan, begin, end, tables);
      } else {
        CountRow(walk, x, slots, plan, begin, end, tables);
      }
    }
    for (int g = 0; g < groups; ++g) {
      Flush(tables + g * plan.stride, plan, a.size, a.counts + ((group + g) * a.tables + t) * a.size);
    }
  }
}

template <typename T>
void CountUnits(const HistogramArguments& a, const HistogramPlan& plan, int64_t begin, int64_t end, uint32_t* tables) {
  const auto count = a.low != nullptr ? CountUnit<T, BinSlots>
                     : a.magnitude    ? CountUnit<T, DigitSlots<true>>
                                      : CountUnit<T, DigitSlots<false>>;
  const int64_t run = plan.columns ? a.view->run().size : 1, run_tiles = (run + kColumns - 1) / kColumns;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t tile = unit / plan.slices, first = unit % plan.slices * plan.slice;
    const int64_t last = first + plan.slice < plan.reduced ? first + plan.slice : plan.reduced;
    int64_t group = tile;
    int groups = 1;
    if (plan.columns) {
      const int64_t column = tile % run_tiles * kColumns;
      group = tile / run_tiles * run + column;
      groups = static_cast<int>(run - column < kColumns ? run - column : kColumns);
    }
    count(a, plan, group, groups, first, last, tables);
  }
}

bool Count(const HistogramArguments& a, const HistogramPlan& plan, int64_t begin, int64_t end, uint32_t* tables) {
  switch (a.type) {
    case DType::kF32: CountUnits<float>(a, plan, begin, end, tables); return true;
    case DType::kF16: CountUnits<Float16>(a, plan, begin, end, tables); return true;
    case DType::kBF16: CountUnits<BFloat16>(a, plan, begin, end, tables); return true;
    default: return false;
  }
}

}  // namespace

extern const HistogramLoops histogram_loops;
const HistogramLoops histogram_loops = {Count};

}  // namespace JQ_ISA
}  // namespace jq
