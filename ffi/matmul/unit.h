// What a unit of a plan covers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/matmul/kernels.h"
#include "ffi/matmul/layout.h"

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

struct UnitPlace {
  const ProductArguments& a_;
  const Plan& plan_;
  int64_t matrix_, row_, rows_, panel_, panels_;
  int64_t columns_;   // of its memory, in which every unit is as wide
  const uint8_t* w_;  // its matrix

  UnitPlace(const ProductArguments& a, const Plan& plan, int64_t unit) : a_(a), plan_(plan) {
    // Units of the same panels follow each other.
    row_ = unit % plan.row_units * plan.rows_per_unit;
    rows_ = std::min(plan.rows_per_unit, a.m - row_);
    const int64_t rest = unit / plan.row_units;
    panel_ = rest % plan.panel_units * plan.panels_per_unit;
    panels_ = std::min(plan.panels_per_unit, PanelCount(a.n) - panel_);
    matrix_ = rest / plan.panel_units;
    columns_ = plan.panels_per_unit * kPanel;
    w_ = a.w.data;
    if (!a.one_w) {
      w_ += matrix_ * (a.w.prepared ? PreparedBytes(a.k, a.n, a.w.bits) : PlainBytes(a.k, a.n, a.w.bits));
    }
  }

  Place PlaceOf(int64_t row, int rows, int64_t panel, int panels) const {
    const int64_t column = (panel_ + panel) * kPanel;
    return {matrix_, row_ + row, column, rows, static_cast<int>(std::min<int64_t>(panels * kPanel, a_.n - column)),
            panels};
  }
};

// Codes [first, first + count) of groups [begin, end); of more than one group all.
struct Part {
  int64_t begin, end, first, count;
};

// Cuts a part into pieces of `most` codes, of several groups or of a piece of one.
template <typename F>
void ForEachPart(const Part& whole, int64_t group_codes, int64_t most, const F& f) {
  if (group_codes <= most) {
    const int64_t at_once = group_codes == 0 ? whole.end - whole.begin : most / group_codes;
    for (int64_t group = whole.begin; group < whole.end; group += at_once) {
      f(Part{group, std::min(group + at_once, whole.end), 0, group_codes});
    }
    return;
  }
  const int64_t last = whole.first + whole.count;
  for (int64_t group = whole.begin; group < whole.end; ++group) {
    for (int64_t first = whole.first; first < last; first += most) {
      f(Part{group, group + 1, first, std::min(most, last - first)});
    }
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
