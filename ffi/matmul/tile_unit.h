// A unit of a product on the tile unit. It walks over parts of k, whose panels are packed where they do not lie ready;
// then over blocks of rows; then over chunks of the part, whose codes of a are copied into tiles, so that their number
// may be any and no two rows fall on the same places of the first cache; then over blocks of panels.
#pragma once

#if defined(JQ_TILES)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "ffi/matmul/epilogue.h"
#include "ffi/matmul/kernels.h"
#include "ffi/matmul/pack.h"
#include "ffi/matmul/tiles.h"
#include "ffi/matmul/unit.h"

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

class TileUnit : UnitPlace {
 public:
  TileUnit(const ProductArguments& a, const Plan& plan, const uint8_t* shared, uint8_t* local, int64_t unit,
           BlockShapes& shapes)
      : UnitPlace(a, plan, unit),
        epilogue_{a, plan, plan.row_sums ? reinterpret_cast<const int32_t*>(shared + plan.sums_at) : nullptr},
        shapes_(shapes),
        multiply_(BlockFunctionOf(a.a_signed, a.w.is_signed)) {
    local += -reinterpret_cast<uintptr_t>(local) % 64;
    const TileMemory memory(plan);
    sums_ = reinterpret_cast<int32_t*>(local);
    totals_ = reinterpret_cast<float*>(local + memory.totals_at);
    scales_ = reinterpret_cast<float*>(local + memory.scales_at);
    zeros_ = reinterpret_cast<int32_t*>(local + memory.zeros_at);
    column_sums_ = reinterpret_cast<int32_t*>(local + memory.column_sums_at);
    rests_ = reinterpret_cast<uint32_t*>(local + memory.rests_at);
    codes_ = local + memory.codes_at;
    packed_ = local + memory.packed_at;
    row_bytes_ = static_cast<int>(std::min<int64_t>(kTileRowBytes, plan.group_codes));
  }

  void Multiply() {
    ForEachPart({0, a_.groups, 0, plan_.group_codes}, plan_.group_codes, plan_.pack_codes,
                [&](const Part& part) { Multiply(part); });
  }

 private:
  void Multiply(const Part& part) {
    if (plan_.direct) {
      panel_stride_ = WordCount(a_.k, 8) * kPanelBytes;
      group_stride_ = plan_.group_codes * kPanel;
      panels_at_ = w_ + panel_ * panel_stride_ + part.begin * group_stride_ + part.first * kPanel;
    } else {
      Pack(part);
    }
    if (plan_.column_sums) SumColumns(part);
    if (part.first + part.count == plan_.group_codes) {
      for (int64_t group = part.begin; group < part.end; ++group) {
        const int64_t at = (group - part.begin) * columns_;
        epilogue_.Load(matrix_, group, panel_ * kPanel, columns_, columns_, scales_ + at, zeros_ + at);
      }
    }
    for (int64_t row = 0; row < rows_; row += kBlockRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kBlockRows, rows_ - row));
      shapes_.Need(rows, row_bytes_);
      epilogue_.LoadRowZeros(matrix_, row_ + row, rows, row_zeros_);
      ForEachPart(part, plan_.group_codes, plan_.chunk_codes,
                  [&](const Part& chunk) { MultiplyRows(part, chunk, row, rows); });
    }
  }

  void Pack(const Part& part) {
    const int64_t words = part.count / 4;
    group_stride_ = words * kPanelBytes;
    panel_stride_ = (part.end - part.begin) * group_stride_ + kPanelBytes;  // panels in sets of their own
    panels_at_ = packed_;
    const bool spread = a_.w.prepared && (a_.groups == 1 || plan_.group_size % CodesPerWord(a_.w.bits) == 0);
    const auto pack = spread           ? (a_.w.bits == 4 ? SpreadPrepared<4, true> : SpreadPrepared<2, true>)
                      : a_.w.prepared  ? PackPrepared<true>
                      : a_.w.bits == 8 ? PackRows<8, true>
                      : a_.w.bits == 4 ? PackRows<4, true>
                                       : PackRows<2, true>;
    for (int64_t group = part.begin; group < part.end; ++group) {
      pack(a_, w_, group * plan_.group_size, plan_.group_size, part.first, words, panel_, panels_,
           packed_ + (group - part.begin) * group_stride_, panel_stride_);
    }
  }

  void SumColumns(const Part& part) {
    const __m512i ones = _mm512_set1_epi8(1);
    const int beyond = part.first + part.count == plan_.group_codes ? PaddingBytes() : 0;
    const __m512i last = _mm512_set1_epi32(0x01010101 >> 8 * beyond);
    for (int64_t group = part.begin; group < part.end; ++group) {
      for (int64_t panel = 0; panel < panels_; ++panel) {
        int32_t* to = column_sums_ + (group - part.begin) * columns_ + panel * kPanel;
        const uint8_t* from = panels_at_ + panel * panel_stride_ + (group - part.begin) * group_stride_;
        __m512i sum = part.first == 0 ? _mm512_setzero_si512() : _mm512_loadu_si512(to);
        for (int64_t at = 0; at < part.count; at += 4, from += kPanelBytes) {
          const __m512i word = _mm512_loadu_si512(from), one = at + 4 < part.count ? ones : last;
          sum = a_.w.is_signed ? _mm512_dpbusd_epi32(sum, one, word) : _mm512_dpbusd_epi32(sum, word, one);
        }
        _mm512_storeu_si512(to, sum);
      }
    }
  }
  // Of a group's last word.
  int PaddingBytes() const { return static_cast<int>(plan_.group_codes - plan_.group_size); }

  void MultiplyRows(const Part& part, const Part& chunk, int64_t row, int rows) {
    const int64_t steps = CeilDivide(chunk.count, row_bytes_), tail = steps * row_bytes_ - chunk.count;
    // A last step of fewer codes begins before them: words beyond w there may be none of. Those packed have room
    // behind.
    const int64_t back = plan_.direct ? tail : 0;
    CopyRows(chunk, row, rows, steps, back);
    if (plan_.row_sums) {
      for (int64_t group = chunk.begin; group < chunk.end; ++group) {
        epilogue_.LoadRowRests(matrix_, row_ + row, rows, group, row_zeros_,
                               rests_ + (group - chunk.begin) * kBlockRows);
      }
    }
    const bool starts = chunk.first == 0, ends = chunk.first + chunk.count == plan_.group_codes;
    const bool plain = a_.out_type == ResultType::kInt32 && !plan_.row_sums && !plan_.column_sums;
    const int most = BlockPanels(rows), stride = most * kPanel;
    TileStretch s{};
    s.row_bytes = row_bytes_;
    s.panel_stride = panel_stride_;
    s.steps = steps;
    s.last = ((steps - 1) * row_bytes_ - back) * kPanel;
    for (int64_t panel = 0; panel < panels_; panel += most) {
      const int panels = static_cast<int>(std::min<int64_t>(most, panels_ - panel));
      const Place at = PlaceOf(row, rows, panel, panels);
      // Where sums or totals wait for the next chunk, each block has a place.
      const int64_t block =
          ((plan_.rows_wait ? row : 0) * columns_ + panel * kPanel * (rows > kTileSide ? kBlockRows : kTileSide));
      int32_t* const sums = sums_ + (plan_.sums_wait ? block : 0);
      float* const totals = totals_ + (plan_.totals_wait ? block : 0);
      for (int64_t group = chunk.begin; group < chunk.end; ++group) {
        s.rows = codes_ + (group - chunk.begin) * steps * kBlockRows * row_bytes_;
        s.panels = panels_at_ + panel * panel_stride_ + (group - part.begin) * group_stride_ +
                   (chunk.first - part.first) * kPanel;
        s.from = starts ? nullptr : sums;
        s.to = sums;
        s.from_stride = s.to_stride = stride * 4;
        const bool to_out = plain && ends && at.columns == panels * kPanel;
        if (to_out) {
          s.to = static_cast<int32_t*>(a_.out) + (at.matrix * a_.m + at.row) * a_.n + at.column;
          s.to_stride = a_.n * 4;
        }
        multiply_(rows, panels, s);
        if (!ends || to_out) continue;
        const int64_t column = (group - part.begin) * columns_ + panel * kPanel;
        epilogue_.Finish(at, group, {row_zeros_, rests_ + (group - chunk.begin) * kBlockRows},
                         {scales_ + column, zeros_ + column, column_sums_ + column}, {sums, totals, stride});
      }
    }
  }

  // Zeros where a group ends within a step.
  void CopyRows(const Part& chunk, int64_t row, int rows, int64_t steps, int64_t back) {
    const uint8_t* const a = a_.a + ((a_.one_a ? 0 : matrix_) * a_.m + row_ + row) * a_.k;
    const int64_t count = std::min(chunk.count, plan_.group_size - chunk.first);
    const __mmask64 row_mask = FirstBytes(row_bytes_);
    for (int64_t group = chunk.begin; group < chunk.end; ++group) {
      uint8_t* const to = codes_ + (group - chunk.begin) * steps * kBlockRows * row_bytes_;
      for (int r = 0; r < rows; ++r) {
        const uint8_t* const from = a + r * a_.k + group * plan_.group_size + chunk.first;
        for (int64_t i = 0; i < steps; ++i) {
          const int64_t left = count - i * row_bytes_;
          __m512i codes;
          if (left >= kTileRowBytes) {
            codes = _mm512_loadu_si512(from + i * row_bytes_);
          } else {
            const __mmask64 mask = FirstBytes(std::min<int64_t>(left, row_bytes_)) << back;
            codes = _mm512_maskz_loadu_epi8(mask, from + i * row_bytes_ - back);
          }
          _mm512_mask_storeu_epi8(to + (i * kBlockRows + r) * row_bytes_, row_mask, codes);
        }
      }
    }
  }
  static __mmask64 FirstBytes(int64_t count) { return count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1; }

  const Epilogue epilogue_;
  BlockShapes& shapes_;
  const BlockFunction multiply_;
  int32_t* sums_;
  float* totals_;
  float* scales_;  // of the groups of a part, as the next two
  int32_t* zeros_;
  int32_t* column_sums_;
  uint32_t* rests_;  // of the groups of a chunk
  uint8_t *codes_, *packed_;
  int row_bytes_;
  const uint8_t* panels_at_ = nullptr;
  int64_t panel_stride_ = 0, group_stride_ = 0;
  uint32_t row_zeros_[kBlockRows];
};

}  // namespace
}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq

#endif
