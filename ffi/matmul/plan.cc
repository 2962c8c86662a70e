#include <algorithm>

#include "ffi/matmul/kernels.h"
#include "ffi/matmul/layout.h"
#include "ffi/matmul/math.h"

namespace jq {
namespace matmul {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kFewRows = 4;  // that row kernels take
constexpr int64_t kRows = 256;   // of a unit
constexpr int64_t kNarrow = 12;  // panels, with many rows of a beside them

int64_t RoundUp(int64_t n, int64_t to) { return CeilDivide(n, to) * to; }

}  // namespace

Plan MakePlan(const ProductArguments& a, const Traits& traits, int64_t threads) {
  Plan plan{};
  plan.group_size = a.k / a.groups;
  plan.direct = a.w.prepared && (a.groups == 1 || plan.group_size % CodesPerWord(a.w.bits) == 0);
  plan.row_kernel = traits.row_kernels && !a.w.prepared && a.w.bits == 8 && a.m <= kFewRows;
  plan.group_codes = RoundUp(plan.group_size, plan.direct ? CodesPerWord(a.w.bits) : 4);
  plan.a_rows = (a.one_a ? 1 : a.batch) * a.m;
  plan.a_shift = traits.code_bytes == 1 && !a.a_signed ? 128 : 0;
  plan.a_in_place = traits.code_bytes == 1 && a.a_signed && plan.group_codes == plan.group_size;
  plan.row_sums = WeightShift(a.w) != 0 || a.w_zero_point != nullptr;
  plan.column_sums = plan.a_shift != 0 || a.a_zero_point != nullptr;

  // Blocks that stay in a core's second cache: packed panels, their sums, and the rows of a. Wide ones, so that rows of
  // w are read in long stretches.
  const int64_t panels = std::max<int64_t>(1, PanelCount(a.n));
  int64_t most_panels = 32, most_codes = 1024;
  plan.rows_per_unit = std::min(a.m, kRows);
  if (plan.direct) {
    most_panels = kNarrow;
    most_codes = 8192;
  } else if (plan.row_kernel) {
    most_panels = 128;
  } else if (a.m > kRows && a.k <= most_codes) {
    most_panels = kNarrow;
    plan.rows_per_unit = std::min(a.m, 4 * kRows);  // no sums wait for a second chunk
  }
  plan.panels_per_unit = std::min(plan.row_kernel ? RoundUp(panels, 4) : panels, most_panels);
  plan.chunk_codes = plan.group_codes <= most_codes && plan.group_codes > 0
                         ? std::min(most_codes / plan.group_codes, a.groups) * plan.group_codes
                         : most_codes;
  const auto count = [&] {
    plan.row_units = CeilDivide(a.m, plan.rows_per_unit);
    plan.panel_units = CeilDivide(panels, plan.panels_per_unit);
    plan.units = a.batch * plan.row_units * plan.panel_units;
  };
  count();
  if (plan.row_kernel) {
    // One for each thread: half as wide, rows of w are read in pieces too short for the prefetchers.
    plan.panels_per_unit = std::min(plan.panels_per_unit, RoundUp(CeilDivide(panels, threads), 4));
    count();
  } else if (threads > 1 && plan.units < 8 * threads) {
    // The width at which the thread with the most panels has the fewest; many units even out by themselves.
    const auto most_of_a_thread = [&](int64_t width) {
      return CeilDivide(a.batch * plan.row_units * CeilDivide(panels, width), threads) * width;
    };
    for (int64_t width = most_panels - 4; width > 0; width -= 4) {
      if (most_of_a_thread(width) < most_of_a_thread(plan.panels_per_unit)) plan.panels_per_unit = width;
    }
    count();
  }
  while (threads > 1 && plan.units < 2 * threads && plan.rows_per_unit > 32) {
    plan.rows_per_unit = RoundUp(CeilDivide(plan.rows_per_unit, 2), 8);
    count();
  }

  const int64_t ones = RoundUp(plan.group_codes * traits.code_bytes, kLine);
  plan.sums_at = ones;
  plan.codes_at = ones + RoundUp(plan.row_sums ? plan.a_rows * a.groups * 4 : 0, kLine);
  plan.shared_bytes =
      plan.codes_at + (plan.a_in_place ? 0 : plan.a_rows * a.groups * plan.group_codes * traits.code_bytes) + kLine;

  const int64_t columns = plan.panels_per_unit * kPanel;
  const int64_t groups_at_once =
      plan.group_codes > 0 ? std::max<int64_t>(1, plan.chunk_codes / plan.group_codes) : a.groups;
  plan.local_bytes = kLine + 3 * RoundUp(groups_at_once * columns * 4, kLine) +
                     (2 * plan.rows_per_unit + 1) * columns * 4 +
                     (plan.direct || plan.row_kernel ? 0 : (plan.chunk_codes + 4) * columns);
  return plan;
}

}  // namespace matmul
}  // namespace jq
