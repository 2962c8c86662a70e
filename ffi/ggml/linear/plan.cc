#include <algorithm>

#include "ffi/ggml/linear/blocking.h"
#include "ffi/ggml/linear/kernels.h"

namespace jq {
namespace ggml {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

Plan Cut(const GroupedArguments& a, int64_t columns, int64_t column_step, int64_t max_positions, int64_t max_cells,
         int64_t threads) {
  int64_t positions = 0, largest = 0;
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t group = a.group_begin[e + 1] - a.group_begin[e];
    positions += group;
    largest = std::max(largest, group);
  }
  Plan plan{};
  plan.positions_per_unit = std::max<int64_t>(1, std::min(largest, max_positions));
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
    plan.positions_per_unit = std::max<int64_t>(16, CeilDivide(plan.positions_per_unit, 2));
    count();
  }
  return plan;
}

}  // namespace

Plan PlanProduct(const GroupedArguments& a, int64_t threads) {
  return Cut(a, a.n, kPanelRows, kMaxPositions, kMaxCells, threads);
}
Plan PlanGradient(const GroupedArguments& a, int64_t threads) {
  return Cut(a, a.k, kGradientColumns, kGradientPositions, kGradientColumns * kGradientPositions, threads);
}

int64_t ScratchBytes(const GroupedArguments& a) {
  const bool is_float = a.type_id == 0 || a.type_id == 1 || a.type_id == 30;
  if (a.int8_lhs && !is_float) return a.x_rows * (a.k / kSpan) * static_cast<int64_t>(sizeof(ActivationSpan));
  return a.x_type == DType::kF32 ? 0 : a.x_rows * a.k * static_cast<int64_t>(sizeof(float));
}

}  // namespace ggml
}  // namespace jq
