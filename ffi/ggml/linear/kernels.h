// Products of float rows with block-quantised matrices, once per instruction set; all give the same bits.
//
// One grouped product serves them all: linear() has a group per weight matrix of a batch, moe_linear() the rows that
// were routed to each expert, as index lists, ragged_linear() consecutive rows.
//
//   for e < experts, group_begin[e] <= p < group_begin[e + 1]:  out[out_row[p]] = x[x_row[p]] @ w[e].T
//
// The gradient in x is the same with the transpose: x holds rows of n values, out rows of k.
//
// A handler makes a Plan, then runs prepare() over [0, x_rows) and, when all of it is done, product() over
// [0, plan.units), in pieces and from any threads, each of which brings plan.local_bytes aligned to 64. gradient()
// needs neither.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/common/numeric.h"
#include "ffi/ggml/linear/layout.h"

namespace jq {
namespace ggml {

enum class Layout : int {
  kPlain,     // GGML's: rows of blocks
  kPrepared,  // layout.h
};

struct GroupedArguments {
  int type_id;
  Layout layout;
  bool int8_lhs;  // x quantised to int8 per 32 values; float formats ignore it
  const uint8_t* w;
  int64_t experts, n, k;  // w: experts x n rows of k values
  const void* x;
  DType x_type;  // kF32, kF16 or kBF16
  int64_t x_rows;
  const int64_t* group_begin;  // experts + 1 of them, ascending
  const int64_t* x_row;        // null: p itself
  const int64_t* out_row;      // null: p itself
  void* out;                   // of x_type; rows that no p names stay as they are

  const uint8_t* Matrix(int64_t expert, int64_t row_bytes) const {
    return w + expert * StoredRows(n, layout == Layout::kPrepared) * row_bytes;
  }
};

// Whether the tile unit multiplies, and who puts activations together for it.
enum class Tiles : int {
  kNone,
  kOfAll,    // prepare(), for all rows in their order
  kOfUnits,  // product(), where a unit has enough positions
};

// How a product or gradient is cut into units of work. Results do not depend on it.
struct Plan {
  int64_t columns_per_unit;         // of out
  int64_t column_units;             // that a group's columns make
  int64_t positions_per_unit;       // of p
  std::vector<int64_t> first_unit;  // of each group, and the number of all
  int64_t units;
  Tiles tiles;
  int64_t scratch_bytes;  // that prepare() writes and product() reads, aligned to 64
  int64_t local_bytes;
};
Plan PlanProduct(const GroupedArguments& arguments, int64_t threads, bool has_tiles);
Plan PlanGradient(const GroupedArguments& arguments, int64_t threads);

struct LinearKernels {
  // Rows [begin, end) of x: quantised, or converted to float32.
  void (*prepare)(const GroupedArguments& arguments, const Plan& plan, void* scratch, int64_t begin, int64_t end);
  // Units [begin, end) of the plan.
  void (*product)(const GroupedArguments& arguments, const Plan& plan, const void* scratch, void* local, int64_t begin,
                  int64_t end);
  void (*gradient)(const GroupedArguments& arguments, const Plan& plan, int64_t begin, int64_t end);
};

#if defined(JQ_ISA)
namespace JQ_ISA {
extern const LinearKernels linear_kernels;
}
#endif

}  // namespace ggml
}  // namespace jq
