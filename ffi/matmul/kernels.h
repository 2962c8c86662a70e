// Integer products on the CPU, once per instruction set; all give the same bits.
//
// A handler makes a Plan, runs prepare() over [0, plan.a_rows) and, when all of it is done, product() over
// [0, plan.units), in pieces and from any threads. Each thread brings plan.local_bytes of its own.
#pragma once

#include <cstdint>

#include "ffi/matmul/arguments.h"

namespace jq {
namespace matmul {

// What a set's kernels are like.
struct Traits {
  int code_bytes;    // of a code of a as they read it: a signed byte, or 16 bits
  bool row_kernels;  // a few rows of a are multiplied with a row-major w as it lies
  bool tiles;        // there are functions for the tile unit, and it may be used
};

// How a product is cut into units: rows x panels of one matrix. Results do not depend on it.
struct Plan {
  bool direct;      // panels are read as they lie, in the prepared layout
  bool row_kernel;  // w is read as it lies, row-major
  bool tiles;       // the tile unit multiplies
  bool a_in_place;  // codes of a are read as they lie
  bool row_sums, column_sums;
  // With tiles: whether sums, or totals of groups, wait for the next chunk; and those of all rows at a time.
  bool sums_wait, totals_wait, rows_wait;
  int32_t a_shift, w_shift;
  int64_t a_rows;       // of all matrices of a
  int64_t group_size;   // codes along k
  int64_t group_codes;  // the same, with what pads the last word
  int64_t chunk_codes;  // along k, that are multiplied at a time: whole groups, or a part of one
  int64_t pack_codes;   // with tiles: the same of panels, of which several chunks are packed at a time
  int64_t rows_per_unit, row_units, panels_per_unit, panel_units, units;
  int64_t sums_at, codes_at, shared_bytes;
  int64_t local_bytes;
};
// The memory of a unit on the tile unit: where in it what begins.
struct TileMemory {
  int64_t totals_at, scales_at, zeros_at, column_sums_at, rests_at, codes_at, packed_at, bytes;

  explicit TileMemory(const Plan& plan);
};

Plan MakePlan(const ProductArguments& arguments, const Traits& traits, int64_t threads);

struct Kernels {
  Traits traits;
  // Rows [begin, end) of a: codes and their sums.
  void (*prepare)(const ProductArguments& arguments, const Plan& plan, uint8_t* shared, int64_t begin, int64_t end);
  // Units [begin, end).
  void (*product)(const ProductArguments& arguments, const Plan& plan, const uint8_t* shared, uint8_t* local,
                  int64_t begin, int64_t end);
};

#if defined(JQ_ISA)
namespace JQ_ISA {
extern const Kernels matmul_kernels;
}
#endif

}  // namespace matmul
}  // namespace jq
