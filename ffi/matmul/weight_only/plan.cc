#include <algorithm>

#include "ffi/matmul/weight_only/kernels.h"

namespace jq {
namespace weight_only {
namespace {

// Units of up to `rows` and `columns`, narrowed to `least` columns while threads would have too few of them.
Plan Cut(const Arguments& a, int64_t width, int64_t rows, int64_t columns, int64_t least, int64_t threads) {
  Plan plan{};
  plan.rows_per_unit = std::max<int64_t>(1, std::min(a.rows, rows));
  plan.row_units = (a.rows + plan.rows_per_unit - 1) / plan.rows_per_unit;
  plan.columns_per_unit = columns;
  const auto count = [&] {
    plan.column_units = (width + plan.columns_per_unit - 1) / plan.columns_per_unit;
    plan.units = a.batch * plan.row_units * plan.column_units;
  };
  count();
  while (threads > 1 && plan.units < 4 * threads && plan.columns_per_unit > least) {
    plan.columns_per_unit /= 2;
    count();
  }
  return plan;
}

}  // namespace

Plan PlanProduct(const Arguments& a, int64_t threads) {
  // Few rows: a prepared panel is read from end to end, plain rows as far along as sums can be kept.
  constexpr int64_t kFew = 8;
  const int64_t columns = a.rows > kFew ? 128 : a.codes.prepared ? 32 : 512;
  return Cut(a, a.codes.n, kUnitRows, columns, a.codes.prepared ? 32 : 64, threads);
}
Plan PlanGradient(const Arguments& a, int64_t threads) { return Cut(a, a.codes.k, kUnitRows, 64, 8, threads); }

}  // namespace weight_only
}  // namespace jq
