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
// The tile unit pays for more rows of a, and for at least so many codes of a group.
constexpr int64_t kVectorRows = 4, kVectorRowsPrepared = 8, kVectorCodes = 16;

int64_t RoundUp(int64_t n, int64_t to) { return CeilDivide(n, to) * to; }

// For the tile unit: sizes in codes and panels that leave in a core's second cache what is read again, here the panels
// of a part of k, which meet one block of rows after the other.
Plan MakeTilePlan(const ProductArguments& a, int64_t threads) {
  constexpr int64_t kStep = 64, kChunk = 1024, kPart = 16384, kPanelCodes = 1 << 16, kSpreadCodes = 1 << 14, kWide = 64;
  constexpr int64_t kShallowRows = 128, kWaitingRows = 1024;  // whose sums may wait for the next part of k
  Plan plan{};
  plan.tiles = true;
  plan.group_size = a.k / a.groups;
  plan.group_codes = RoundUp(plan.group_size, 4);
  plan.direct = a.w.prepared && a.w.bits == 8 && (a.groups == 1 || plan.group_size % 4 == 0);
  plan.a_in_place = true;
  plan.a_rows = (a.one_a ? 1 : a.batch) * a.m;
  plan.row_sums = a.w_zero_point != nullptr;
  plan.column_sums = a.a_zero_point != nullptr;

  // Rows of a w that is packed are read in long stretches, where few rows of a leave room for the sums of many columns;
  // fields that are spread are read again at once.
  const bool shallow = !plan.direct && a.m <= kShallowRows;
  const auto whole_groups = [&](int64_t most) {
    const int64_t padded = RoundUp(plan.group_codes, std::min(kStep, plan.group_codes));
    return padded <= most ? std::min(most / padded, a.groups) * plan.group_codes : most;
  };
  plan.chunk_codes = whole_groups(kChunk);
  plan.pack_codes = whole_groups(shallow ? kChunk : kPart);
  const int64_t all = a.groups * plan.group_codes;
  plan.sums_wait = plan.group_codes > plan.chunk_codes;
  plan.totals_wait = a.groups > 1 && all > plan.chunk_codes;
  plan.rows_wait = all > plan.pack_codes;

  const int64_t panels = std::max<int64_t>(1, PanelCount(a.n));
  const int64_t panel_codes = shallow && a.w.prepared ? kSpreadCodes : kPanelCodes;
  const int64_t most_panels = std::clamp<int64_t>(panel_codes / std::min(all, plan.pack_codes) / 4 * 4, 4, kWide);
  plan.rows_per_unit = plan.rows_wait ? std::min(a.m, kWaitingRows) : a.m;
  plan.panels_per_unit = RoundUp(CeilDivide(panels, CeilDivide(panels, most_panels)), 4);
  const auto count = [&] {
    plan.row_units = CeilDivide(a.m, plan.rows_per_unit);
    plan.panel_units = CeilDivide(panels, plan.panels_per_unit);
    plan.units = a.batch * plan.row_units * plan.panel_units;
  };
  const auto halve_rows = [&](int64_t least) {
    if (plan.rows_per_unit <= least) return false;
    plan.rows_per_unit = RoundUp(CeilDivide(plan.rows_per_unit, 2), 32);
    return true;
  };
  const auto halve_panels = [&](int64_t least) {
    if (plan.panels_per_unit <= least) return false;
    plan.panels_per_unit = RoundUp(CeilDivide(plan.panels_per_unit, 2), 4);
    return true;
  };
  count();
  // Rows that are divided pack the same panels again.
  const auto divide = [&] {
    return (plan.direct && halve_rows(256)) || halve_panels(16) || (!plan.direct && halve_rows(256)) ||
           (plan.direct && halve_rows(32)) || halve_panels(4) || halve_rows(32);
  };
  while (threads > 1 && plan.units < 2 * threads && divide()) count();
  plan.codes_at = plan.sums_at + RoundUp(plan.row_sums ? plan.a_rows * a.groups * 4 : 0, kLine);
  plan.shared_bytes = plan.codes_at + kLine;
  plan.local_bytes = kLine + TileMemory(plan).bytes;
  return plan;
}

}  // namespace

TileMemory::TileMemory(const Plan& plan) {
  constexpr int64_t kBlockRows = 32, kBlock = kBlockRows * kBlockRows * 4;
  const int64_t columns = plan.panels_per_unit * kPanel;
  const int64_t part_groups = std::max<int64_t>(1, plan.pack_codes / plan.group_codes);
  const int64_t chunk_groups = std::max<int64_t>(1, plan.chunk_codes / plan.group_codes);
  const int64_t step = std::min<int64_t>(64, plan.group_codes);
  const int64_t waiting = columns * 4 * (plan.rows_wait ? RoundUp(plan.rows_per_unit, kBlockRows) : kBlockRows);
  int64_t at = 0;
  const auto take = [&](int64_t size) {
    const int64_t begin = at;
    at += RoundUp(size, kLine);
    return begin;
  };
  take(plan.sums_wait ? waiting : kBlock);
  totals_at = take(plan.totals_wait ? waiting : kBlock);
  scales_at = take(part_groups * columns * 4);
  zeros_at = take(part_groups * columns * 4);
  column_sums_at = take(part_groups * columns * 4);
  rests_at = take(chunk_groups * kBlockRows * 4);
  codes_at = take(chunk_groups * RoundUp(std::min(plan.group_codes, plan.chunk_codes), step) * kBlockRows);
  // The last step may read beyond the last panel.
  packed_at = take(plan.direct ? 0 : (plan.pack_codes + 16) * columns + 16 * kPanelBytes);
  bytes = at;
}

Plan MakePlan(const ProductArguments& a, const Traits& traits, int64_t threads) {
  const bool shifts = !a.a_signed && a.w.bits == 8;  // without tiles, which read a as it lies
  const int64_t vector_rows = a.w.prepared && !shifts ? kVectorRowsPrepared : kVectorRows;
  if (traits.tiles && a.m > vector_rows && a.k / a.groups >= kVectorCodes) return MakeTilePlan(a, threads);
  Plan plan{};
  plan.w_shift = WeightShift(a.w);
  plan.group_size = a.k / a.groups;
  plan.direct = a.w.prepared && (a.groups == 1 || plan.group_size % CodesPerWord(a.w.bits) == 0);
  plan.row_kernel = traits.row_kernels && !a.w.prepared && a.w.bits == 8 && a.m <= kFewRows;
  plan.group_codes = RoundUp(plan.group_size, plan.direct ? CodesPerWord(a.w.bits) : 4);
  plan.a_rows = (a.one_a ? 1 : a.batch) * a.m;
  plan.a_shift = traits.code_bytes == 1 && !a.a_signed ? 128 : 0;
  plan.a_in_place = traits.code_bytes == 1 && a.a_signed && plan.group_codes == plan.group_size;
  plan.row_sums = plan.w_shift != 0 || a.w_zero_point != nullptr;
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
