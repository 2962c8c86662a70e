// Grouped products and their gradients: units of the plan, a tile at a time.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/ggml/linear/activations.h"
#include "ffi/ggml/linear/gradient.h"
#include "ffi/ggml/linear/kernels.h"
#include "ffi/ggml/linear/micro.h"
#include "ffi/ggml/linear/tiles.h"
#include "ffi/ggml/linear/wide.h"

namespace jq {
namespace ggml {
namespace JQ_ISA {
namespace {

// ---- Units

struct Unit {
  int64_t group;
  int64_t first_column, end_column;
  int64_t first_position, end_position;
};

template <typename Visit>
JQ_INLINE void ForEachUnit(const GroupedArguments& a, const Plan& plan, int64_t columns, int64_t begin, int64_t end,
                           const Visit& visit) {
  int64_t group = 0;
  for (int64_t unit = begin; unit < end; ++unit) {
    while (plan.first_unit[group + 1] <= unit) ++group;
    // Units that share weights follow each other: they find them in the cache.
    const int64_t within = unit - plan.first_unit[group];
    const int64_t blocks = (plan.first_unit[group + 1] - plan.first_unit[group]) / plan.column_units;
    const int64_t column = within / blocks * plan.columns_per_unit;
    const int64_t position = a.group_begin[group] + within % blocks * plan.positions_per_unit;
    const int64_t end_column = column + plan.columns_per_unit, end_position = position + plan.positions_per_unit;
    const int64_t group_end = a.group_begin[group + 1];
    visit(Unit{group, column, end_column < columns ? end_column : columns, position,
               end_position < group_end ? end_position : group_end});
  }
}

JQ_INLINE int64_t RowOf(const int64_t* rows, int64_t position) { return rows == nullptr ? position : rows[position]; }

// ---- Products

// The activations of a unit that are multiplied before the next ones are loaded: they should stay in the second cache.
constexpr int64_t kActivationBytes = 384 << 10;
// Up to so many positions, weights go straight from their blocks into the products.
constexpr int kDirectPositions = 4;

constexpr int kTile = 4;  // positions that share the registers

// All positions, in tiles of T and a smaller one for the rest.
template <typename K, int S, int T = kTile>
JQ_INLINE void MultiplyAll(const Panel& panel, int spans, const ActivationSpan* const* x, int positions, float* sums) {
  int t = 0;
#if defined(JQ_VNNI)
  if constexpr (S == kEights && T == kTile) {
    for (; t + kWidePositions <= positions; t += kWidePositions) {
      MultiplyWide<K>(panel, spans, x + t, sums + t * kPanelRows);
    }
  }
#endif
  for (; t + T <= positions; t += T) Multiply<K, T, S>(panel, spans, x + t, sums + t * kPanelRows);
  if constexpr (T > 1) {
    if (t < positions) MultiplyAll<K, S, T - 1>(panel, spans, x + t, positions - t, sums + t * kPanelRows);
  }
}
template <int S>
JQ_INLINE void MultiplyAll(const ValuePanel& panel, int count, const float* const* x, int positions, float* sums) {
  constexpr int kSums = 8;  // that are under way at once
  constexpr int T = kWidest >= S * kLanes ? kSums : kSums / S;
  int t = 0;
  for (; t + T <= positions; t += T) Multiply<T, S>(panel, count, x + t, sums + t * kPanelRows);
  for (; t < positions; ++t) Multiply<1, S>(panel, count, x + t, sums + t * kPanelRows);
}

// sums[t] += x[t] * the two eights of rows, for values [first, end) of k. x begins at value `first`.
template <typename F>
void MultiplyInt8(const Rows<F> (&rows)[2], int eights, int64_t first, int64_t end, const ActivationSpan* const* x,
                  int positions, float* sums) {
  using K = KindOf<F>;
#if defined(__AVX2__)
  if constexpr (kHasLanes<F>) {
    if (positions <= kDirectPositions) {
      for (int v = 0; v < eights; ++v) {
        float* out = sums + v * kLanes;
        const int64_t blocks = end / F::kBlock;
        if (positions == 1) MultiplyDirectly<F, 1>(rows[v], blocks, x, out);
        if (positions == 2) MultiplyDirectly<F, 2>(rows[v], blocks, x, out);
        if (positions == 3) MultiplyDirectly<F, 3>(rows[v], blocks, x, out);
        if (positions == 4) MultiplyDirectly<F, 4>(rows[v], blocks, x, out);
      }
      return;
    }
  }
#endif
  Panel panel;
  const ActivationSpan* here[kMaxPositions];
  for (int64_t at = first; at < end; at += kStretch) {
    const int spans = static_cast<int>((end - at < kStretch ? end - at : kStretch) / kSpan);
    for (int v = 0; v < eights; ++v) Fill(rows[v], at, spans, v, &panel);
    for (int t = 0; t < positions; ++t) here[t] = x[t] + (at - first) / kSpan;
    if (eights == 2) MultiplyAll<K, 2>(panel, spans, here, positions, sums);
    if (eights == 1) MultiplyAll<K, 1>(panel, spans, here, positions, sums);
  }
}

template <typename F>
void MultiplyFloat(const Rows<F> (&rows)[2], int eights, int64_t first, int64_t end, const float* const* x,
                   int positions, float* sums) {
  ValuePanel panel;
  const float* here[kMaxPositions];
  for (int64_t at = first; at < end; at += kStretch) {
    const int count = static_cast<int>(end - at < kStretch ? end - at : kStretch);
    for (int v = 0; v < eights; ++v) Fill(rows[v], at, count, v, &panel);
    for (int t = 0; t < positions; ++t) here[t] = x[t] + (at - first);
    if (eights == 2) MultiplyAll<2>(panel, count, here, positions, sums);
    if (eights == 1) MultiplyAll<1>(panel, count, here, positions, sums);
  }
}

template <typename F>
JQ_INLINE void MultiplyRows(const Rows<F> (&rows)[2], int eights, int64_t first, int64_t end,
                            const ActivationSpan* const* x, int positions, float* sums) {
  if constexpr (!kIsFloat<F>) MultiplyInt8<F>(rows, eights, first, end, x, positions, sums);
}
template <typename F>
JQ_INLINE void MultiplyRows(const Rows<F> (&rows)[2], int eights, int64_t first, int64_t end, const float* const* x,
                            int positions, float* sums) {
  MultiplyFloat<F>(rows, eights, first, end, x, positions, sums);
}

template <typename Real>
void StoreRow(const float* sums, int64_t count, Real* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = Convert<Real>(sums[i]);
}
void StoreRow(const GroupedArguments& a, int64_t position, int64_t column, const float* sums, int64_t count) {
  const int64_t at = RowOf(a.out_row, position) * a.n + column;
  if (a.x_type == DType::kF32) StoreRow(sums, count, static_cast<float*>(a.out) + at);
  if (a.x_type == DType::kF16) StoreRow(sums, count, static_cast<Float16*>(a.out) + at);
  if (a.x_type == DType::kBF16) StoreRow(sums, count, static_cast<BFloat16*>(a.out) + at);
}

// Element: ActivationSpan (32 values) or float. x: rows of k values.
template <typename F, typename Element>
void MultiplyUnit(const GroupedArguments& a, const Unit& unit, const Element* x) {
  constexpr int kValues = sizeof(Element) == sizeof(float) ? 1 : kSpan;
  const int positions = static_cast<int>(unit.end_position - unit.first_position);
  const int64_t row_bytes = a.k / F::kBlock * static_cast<int64_t>(sizeof(F));
  const uint8_t* w = a.Matrix(unit.group, row_bytes);

  const int64_t row_elements = a.k / kValues, bytes = positions * static_cast<int64_t>(sizeof(Element));
  int64_t stretches = kActivationBytes / (bytes * kStretch / kValues);
  stretches = stretches < 1 ? 1 : stretches;
  const bool whole = positions <= kDirectPositions || stretches * kStretch >= a.k;
  const int64_t step = whole ? a.k : stretches * kStretch;

  alignas(64) float sums[kMaxCells];
  memset(sums, 0, (unit.end_column - unit.first_column + kPanelRows - 1) / kPanelRows * kPanelRows * positions * 4);
  for (int64_t first = 0; first < a.k; first += step) {
    const int64_t end = first + step < a.k ? first + step : a.k;
    const Element* from[kMaxPositions];
    for (int t = 0; t < positions; ++t) {
      from[t] = x + RowOf(a.x_row, unit.first_position + t) * row_elements + first / kValues;
    }
    float* out = sums;
    for (int64_t row = unit.first_column; row < unit.end_column; row += kPanelRows) {
      const Rows<F> rows[2] = {{w, a.layout, a.n, a.k, row}, {w, a.layout, a.n, a.k, row + kLanes}};
      MultiplyRows<F>(rows, row + kLanes < unit.end_column ? 2 : 1, first, end, from, positions, out);
      out += positions * kPanelRows;
    }
  }
  const float* in = sums;
  for (int64_t row = unit.first_column; row < unit.end_column; row += kPanelRows) {
    const int64_t count = unit.end_column - row < kPanelRows ? unit.end_column - row : kPanelRows;
    for (int t = 0; t < positions; ++t) StoreRow(a, unit.first_position + t, row, in + t * kPanelRows, count);
    in += positions * kPanelRows;
  }
}

#if defined(JQ_TILES)
// x: tiles of the unit's positions; `step` further on those of the next stretch.
template <typename F>
void MultiplyUnitOfTiles(const GroupedArguments& a, const Unit& unit, const ActivationTile* x, int64_t step) {
  using K = KindOf<F>;
  const int positions = static_cast<int>(unit.end_position - unit.first_position);
  const int64_t stretches = StretchesOf(a.k);
  const uint8_t* w = a.Matrix(unit.group, a.k / F::kBlock * static_cast<int64_t>(sizeof(F)));
  // Panels whose results are stored together: rows of out are pages apart.
  constexpr int64_t kAtOnce = 4;
  alignas(64) float sums[kAtOnce][kMaxTilePositions][kPanelRows];
  Panel panel{};
  for (int64_t first_row = unit.first_column; first_row < unit.end_column; first_row += kAtOnce * kPanelRows) {
    const int64_t columns = std::min(kAtOnce * kPanelRows, unit.end_column - first_row);
    for (int64_t p = 0; p * kPanelRows < columns; ++p) {
      const int64_t row = first_row + p * kPanelRows;
      const Rows<F> rows[2] = {{w, a.layout, a.n, a.k, row}, {w, a.layout, a.n, a.k, row + kLanes}};
      const int eights = row + kLanes < unit.end_column ? 2 : 1;
      for (int64_t stretch = 0; stretch < stretches; ++stretch) {
        const int64_t first = stretch * kStretch;
        const int spans = static_cast<int>(std::min<int64_t>(a.k - first, kStretch) / kSpan);
        for (int v = 0; v < eights; ++v) Fill(rows[v], first, spans, v, &panel);
        TakeBackZeros<K>(Coding<F>::kZero, spans, &panel);
        MultiplyTiles<K>(panel, spans, x + stretch * step, positions, stretch != 0, sums[p]);
      }
    }
    for (int t = 0; t < positions; ++t) {
      for (int64_t p = 0; p * kPanelRows < columns; ++p) {
        const int64_t column = p * kPanelRows;
        StoreRow(a, unit.first_position + t, first_row + column, sums[p][t],
                 std::min<int64_t>(columns - column, kPanelRows));
      }
    }
  }
}

// Tiles of the rows of a unit.
const ActivationTile* TilesOfUnit(const GroupedArguments& a, const Unit& unit, const ActivationSpan* x, void* local) {
  const int64_t positions = unit.end_position - unit.first_position, step = TilesOf(positions);
  ActivationTile* tiles = static_cast<ActivationTile*>(local);
  memset(static_cast<void*>(tiles), 0, step * StretchesOf(a.k) * sizeof(ActivationTile));
  for (int64_t t = 0; t < positions; ++t) {
    const ActivationSpan* from = x + RowOf(a.x_row, unit.first_position + t) * (a.k / kSpan);
    for (int64_t s = 0; s < a.k / kSpan; ++s) {
      Put(from[s], static_cast<int>(t % kTilePositions), s % kSpans, tiles + s / kSpans * step + t / kTilePositions);
    }
  }
  return tiles;
}
#endif

template <typename F>
JQ_INLINE bool Int8(const GroupedArguments& a) {
  return !kIsFloat<F> && a.int8_lhs;
}

template <typename F>
void Product(const GroupedArguments& a, const Plan& plan, const void* scratch, [[maybe_unused]] void* local,
             int64_t begin, int64_t end) {
#if defined(JQ_TILES)
  if constexpr (!kIsFloat<F>) {
    if (plan.tiles != Tiles::kNone) {
      const TileScope scope;
      ShapeTiles<KindOf<F>>();
      return ForEachUnit(a, plan, a.n, begin, end, [&](const Unit& unit) {
        if (plan.tiles == Tiles::kOfAll) {
          const ActivationTile* tiles = static_cast<const ActivationTile*>(scratch);
          return MultiplyUnitOfTiles<F>(a, unit, tiles + unit.first_position / kTilePositions, TilesOf(a.x_rows));
        }
        const ActivationSpan* x = static_cast<const ActivationSpan*>(scratch);
        if (unit.end_position - unit.first_position < kLeastTilePositions) return MultiplyUnit<F>(a, unit, x);
        const int64_t step = TilesOf(unit.end_position - unit.first_position);
        MultiplyUnitOfTiles<F>(a, unit, TilesOfUnit(a, unit, x, local), step);
      });
    }
  }
#endif
  ForEachUnit(a, plan, a.n, begin, end, [&](const Unit& unit) {
    if (Int8<F>(a)) {
      MultiplyUnit<F>(a, unit, static_cast<const ActivationSpan*>(scratch));
    } else {
      MultiplyUnit<F>(a, unit, static_cast<const float*>(a.x_type == DType::kF32 ? a.x : scratch));
    }
  });
}

// ---- Preparation

#if defined(JQ_TILES)
template <typename Real>
void PrepareTiles(const GroupedArguments& a, const Real* x, Correction correction, ActivationTile* tiles, int64_t begin,
                  int64_t end) {
  const int64_t stretches = StretchesOf(a.k), step = TilesOf(a.x_rows), rows = step * kTilePositions;
  for (int64_t row = begin; row < (end == a.x_rows ? rows : end); ++row) {
    const int lane = static_cast<int>(row % kTilePositions);
    for (int64_t s = 0; s < stretches * kSpans; ++s) {
      ActivationSpan span{};
      if (row < a.x_rows && s * kSpan < a.k) {
        float values[kSpan];
        LoadFloats(x + row * a.k + s * kSpan, kSpan, values);
        QuantizeSpan(values, correction, &span);
      }
      Put(span, lane, s % kSpans, tiles + s / kSpans * step + row / kTilePositions);
    }
  }
}
#endif

template <typename F, typename Real>
void PrepareRows(const GroupedArguments& a, [[maybe_unused]] const Plan& plan, const Real* x, void* scratch,
                 int64_t begin, int64_t end) {
  if constexpr (!kIsFloat<F>) {
    if (a.int8_lhs) {
      using C = Coding<F>;
      const Sums sums = C::kOffset ? Sums::kScaled : C::kTakenBack == Zero::kPairs ? Sums::kPairs : Sums::kWide;
      const Correction correction{sums, C::kZero, C::kGroup};
#if defined(JQ_TILES)
      if (plan.tiles == Tiles::kOfAll) {
        return PrepareTiles(a, x, correction, static_cast<ActivationTile*>(scratch), begin, end);
      }
#endif
      ActivationSpan* to = static_cast<ActivationSpan*>(scratch);
      for (int64_t row = begin; row < end; ++row) {
        QuantizeRow(x + row * a.k, a.k, correction, to + row * (a.k / kSpan));
      }
      return;
    }
  }
  if (sizeof(Real) == sizeof(float)) return;
  LoadFloats(x + begin * a.k, (end - begin) * a.k, static_cast<float*>(scratch) + begin * a.k);
}

template <typename F>
void Prepare(const GroupedArguments& a, const Plan& plan, void* scratch, int64_t begin, int64_t end) {
  if (a.x_type == DType::kF32) PrepareRows<F>(a, plan, static_cast<const float*>(a.x), scratch, begin, end);
  if (a.x_type == DType::kF16) PrepareRows<F>(a, plan, static_cast<const Float16*>(a.x), scratch, begin, end);
  if (a.x_type == DType::kBF16) PrepareRows<F>(a, plan, static_cast<const BFloat16*>(a.x), scratch, begin, end);
}

// ---- Gradients

template <typename F, typename Real>
void GradientUnit(const GroupedArguments& a, const Unit& unit) {
  const int64_t row_bytes = a.k / F::kBlock * static_cast<int64_t>(sizeof(F));
  const int positions = static_cast<int>(unit.end_position - unit.first_position);
  const Real* dy[kGradientPositions];
  Real* dx[kGradientPositions];
  for (int t = 0; t < positions; ++t) {
    dy[t] = static_cast<const Real*>(a.x) + RowOf(a.x_row, unit.first_position + t) * a.n;
    dx[t] = static_cast<Real*>(a.out) + RowOf(a.out_row, unit.first_position + t) * a.k;
  }
  for (int64_t first = unit.first_column; first < unit.end_column; first += kStretch) {
    const int64_t left = unit.end_column - first;
    Gradient<F, Real>(a, a.Matrix(unit.group, row_bytes), first, static_cast<int>(left < kStretch ? left : kStretch),
                      positions, dy, dx);
  }
}

template <typename F>
void Gradients(const GroupedArguments& a, const Plan& plan, int64_t begin, int64_t end) {
  ForEachUnit(a, plan, a.k, begin, end, [&](const Unit& unit) {
    if (a.x_type == DType::kF32) GradientUnit<F, float>(a, unit);
    if (a.x_type == DType::kF16) GradientUnit<F, Float16>(a, unit);
    if (a.x_type == DType::kBF16) GradientUnit<F, BFloat16>(a, unit);
  });
}

// ---- The format

#define JQ_FOR_FORMAT(type_id, call)       \
  switch (type_id) {                       \
    JQ_GGML_FORMATS(JQ_FORMAT_CASE_##call) \
    default: break;                        \
  }
#define JQ_FORMAT_CASE_Prepare(F) \
  case F::kId: return Prepare<F>(a, plan, scratch, begin, end);
#define JQ_FORMAT_CASE_Product(F) \
  case F::kId: return Product<F>(a, plan, scratch, local, begin, end);
#define JQ_FORMAT_CASE_Gradients(F) \
  case F::kId: return Gradients<F>(a, plan, begin, end);

void PrepareAny(const GroupedArguments& a, const Plan& plan, void* scratch, int64_t begin, int64_t end) {
  JQ_FOR_FORMAT(a.type_id, Prepare)
}
void ProductAny(const GroupedArguments& a, const Plan& plan, const void* scratch, void* local, int64_t begin,
                int64_t end) {
  JQ_FOR_FORMAT(a.type_id, Product)
}
void GradientAny(const GroupedArguments& a, const Plan& plan, int64_t begin, int64_t end) {
  JQ_FOR_FORMAT(a.type_id, Gradients)
}

}  // namespace

extern const LinearKernels linear_kernels = {PrepareAny, ProductAny, GradientAny};

}  // namespace JQ_ISA
}  // namespace ggml
}  // namespace jq
