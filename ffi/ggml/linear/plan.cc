#include <algorithm>

#include "ffi/ggml/linear/blocking.h"
#include "ffi/ggml/linear/kernels.h"

namespace jq {
namespace ggml {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// position_step: positions are cut, and cells counted, in multiples of it.
Plan Cut(const GroupedArguments& a, int64_t columns, int64_t column_step, int64_t max_positions, int64_t position_step,
         int64_t max_cells, int64_t threads) {
  int64_t positions = 0, largest = 0;
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t group = a.group_begin[e + 1] - a.group_begin[e];
    positions += group;
    largest = std::max(largest, group);
  }
  Plan plan{};
  const auto whole = [&](int64_t count) { return CeilDivide(count, position_step) * position_step; };
  plan.positions_per_unit = whole(std::max<int64_t>(1, std::min(largest, max_positions)));
  const int64_t widest =
      std::max(column_step, std::min(max_cells / plan.positions_per_unit, columns) / column_step * column_step);
  plan.columns_per_unit = widest;

  const auto count = [&] {
    plan.column_units = CeilDivide(columns, plan.columns_per_unit);
    plan.first_unit.assign(a.experts + 1, 0);
    for (int64_t e = 0; e < a.experts; ++e) {
      const int64_t group = a.group_begin[e + 1] - a.group_begin[e];
      plan.first_unit[e + 1] = plan.first_unit[e] + plan.column_units * CeilDivide(group, plan.positions_per_unit);
    }
    plan.units = plan.first_unit[a.experts];
  };
  count();
  if (positions == 0 || threads <= 1) return plan;
  // Some units for each thread, so that they end together: narrower ones first, since fewer positions to a unit mean
  // that weights are decoded more often.
  const int64_t wanted = threads * 8;
  if (plan.units < wanted) {
    const int64_t narrower = plan.columns_per_unit * plan.units / wanted / column_step * column_step;
    plan.columns_per_unit = std::max(column_step, narrower);
    count();
  }
  while (plan.units < threads * 2 && plan.positions_per_unit > 16) {
    plan.positions_per_unit = whole(std::max<int64_t>(16, CeilDivide(plan.positions_per_unit, 2)));
    count();
  }
  return plan;
}

bool IsFloat(int type_id) { return type_id == 0 || type_id == 1 || type_id == 30; }

// Activations of a unit that stay in the second cache, and columns for which it is worth while to fetch them.
constexpr int64_t kTileBytes = 3 << 19;
constexpr int64_t kTileColumns = 1024;

// largest: positions of a group.
Plan PlanTiles(const GroupedArguments& a, int64_t largest, int64_t threads) {
  // Units of few positions are left to the vector units, with room for kMaxCells.
  static_assert((kLeastTilePositions - 1) * kTileColumns <= kMaxCells, "their sums fit");
  const int64_t tile_row = StretchesOf(a.k) * static_cast<int64_t>(sizeof(ActivationTile));
  const int64_t most = std::clamp(kTileBytes / tile_row, int64_t{1}, kMaxTilePositions / kTilePositions);
  const int64_t positions = std::min(most, TilesOf(largest)) * kTilePositions;
  Plan plan = Cut(a, a.n, kPanelRows, positions, kTilePositions, positions * kTileColumns, threads);
  bool all = a.x_row == nullptr;
  for (int64_t e = 0; all && e < a.experts; ++e) all = a.group_begin[e] % kTilePositions == 0;
  plan.tiles = all ? Tiles::kOfAll : Tiles::kOfUnits;
  plan.scratch_bytes =
      all ? TilesOf(a.x_rows) * tile_row : a.x_rows * (a.k / kSpan) * static_cast<int64_t>(sizeof(ActivationSpan));
  plan.local_bytes = all ? 0 : TilesOf(plan.positions_per_unit) * tile_row;
  return plan;
}

}  // namespace

Plan PlanProduct(const GroupedArguments& a, int64_t threads, bool has_tiles) {
  const bool int8 = a.int8_lhs && !IsFloat(a.type_id);
  int64_t largest = 0;
  for (int64_t e = 0; e < a.experts; ++e) largest = std::max(largest, a.group_begin[e + 1] - a.group_begin[e]);
  if (has_tiles && int8 && largest >= kLeastTilePositions) return PlanTiles(a, largest, threads);
  Plan plan = Cut(a, a.n, kPanelRows, kMaxPositions, 1, kMaxCells, threads);
  if (int8) {
    plan.scratch_bytes = a.x_rows * (a.k / kSpan) * static_cast<int64_t>(sizeof(ActivationSpan));
  } else if (a.x_type != DType::kF32) {
    plan.scratch_bytes = a.x_rows * a.k * static_cast<int64_t>(sizeof(float));
  }
  return plan;
}
Plan PlanGradient(const GroupedArguments& a, int64_t threads) {
  return Cut(a, a.k, kGradientColumns, kGradientPositions, 1, kGradientColumns * kGradientPositions, threads);
}

}  // namespace ggml
}  // namespace jq
