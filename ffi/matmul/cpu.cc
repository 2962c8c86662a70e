// Integer products for one instruction set. A unit walks over chunks of k: the panels of a chunk are packed where they
// do not lie ready, then multiplied with all rows of the unit, a tile at a time.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/matmul/epilogue.h"
#include "ffi/matmul/kernels.h"
#include "ffi/matmul/micro.h"
#include "ffi/matmul/pack.h"
#include "ffi/matmul/row_kernel.h"
#include "ffi/matmul/tile_unit.h"
#include "ffi/matmul/unit.h"

namespace jq {
namespace matmul {
namespace JQ_ISA {
namespace {

constexpr int64_t kLine = 64;

struct Shared {
  const Code* ones;  // of a group, zeros in its padding
  const int32_t* row_sums;
  const Code* codes;  // [a_rows, groups, group_codes]

  Shared(const ProductArguments& a, const Plan& plan, const uint8_t* shared)
      : ones(reinterpret_cast<const Code*>(shared)),
        row_sums(reinterpret_cast<const int32_t*>(shared + plan.sums_at)),
        codes(plan.a_in_place ? reinterpret_cast<const Code*>(a.a)
                              : reinterpret_cast<const Code*>(shared + plan.codes_at)) {}
};

template <typename T>
int32_t SumOf(const T* codes, int64_t count) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<uint32_t>(static_cast<int32_t>(codes[i]));
  return static_cast<int32_t>(sum);
}

template <typename From>
void ShiftedCodes(const uint8_t* from, int32_t shift, int64_t count, Code* to) {
  const Code by = static_cast<Code>(shift);  // as narrow as the codes, so that the loop is
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Code>(static_cast<From>(from[i]) - by);
}

void Prepare(const ProductArguments& a, const Plan& plan, uint8_t* shared, int64_t begin, int64_t end) {
  if (begin == 0 && plan.column_sums && !plan.tiles) {
    Code* ones = reinterpret_cast<Code*>(shared);
    for (int64_t i = 0; i < plan.group_codes; ++i) ones[i] = i < plan.group_size ? 1 : 0;
  }
  int32_t* sums = reinterpret_cast<int32_t*>(shared + plan.sums_at);
  Code* codes = reinterpret_cast<Code*>(shared + plan.codes_at);
  for (int64_t i = begin * a.groups; i < end * a.groups; ++i) {
    const uint8_t* from = a.a + i * plan.group_size;
    const Code* group = reinterpret_cast<const Code*>(from);
    if (!plan.a_in_place) {
      Code* to = codes + i * plan.group_codes;
      (a.a_signed ? ShiftedCodes<int8_t> : ShiftedCodes<uint8_t>)(from, plan.a_shift, plan.group_size, to);
      for (int64_t j = plan.group_size; j < plan.group_codes; ++j) to[j] = 0;
      group = to;
    }
    if (!plan.row_sums) continue;
    sums[i] = plan.a_in_place && !a.a_signed ? SumOf(from, plan.group_size) : SumOf(group, plan.group_size);
  }
}

// One unit's memory beside what it covers.
class Unit : UnitPlace {
 public:
  Unit(const ProductArguments& a, const Plan& plan, const uint8_t* shared, uint8_t* local, int64_t unit)
      : UnitPlace(a, plan, unit),
        shared_(a, plan, shared),
        epilogue_{a, plan, plan.row_sums ? shared_.row_sums : nullptr} {
    row_codes_ = a.groups * plan.group_codes;
    codes_ = shared_.codes + ((a.one_a ? 0 : matrix_) * a.m + row_) * row_codes_;

    local = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(local) + kLine - 1) / kLine * kLine);
    sums_ = reinterpret_cast<int32_t*>(local);
    local += (plan.rows_per_unit + 1) * columns_ * 4;  // row kernels sum columns of w beside the rows
    totals_ = reinterpret_cast<float*>(local);
    local += plan.rows_per_unit * columns_ * 4;
    column_sums_ = reinterpret_cast<int32_t*>(local);
    const int64_t at_once = plan.group_codes > 0 ? std::max<int64_t>(1, plan.chunk_codes / plan.group_codes) : a.groups;
    const int64_t bytes = CeilDivide(at_once * columns_ * 4, kLine) * kLine;
    scales_ = reinterpret_cast<float*>(local + bytes);
    zeros_ = reinterpret_cast<int32_t*>(local + 2 * bytes);
    packed_ = local + 3 * bytes;
  }

  void Multiply() {
    if constexpr (kRowKernels) {
      if (plan_.row_kernel) return MultiplyRowMajor();
    }
    ForEachPart({0, a_.groups, 0, plan_.group_codes}, plan_.group_codes, plan_.chunk_codes,
                [&](const Part& part) { Chunk(part.begin, part.end, part.first, part.count); });
  }

 private:
  // Codes [first, first + count) of groups [begin, end).
  void Chunk(int64_t begin, int64_t end, int64_t first, int64_t count) {
    const int bits = plan_.direct ? a_.w.bits : 8;
    Stretch s{};
    s.words = count / CodesPerWord(bits);
    const int64_t group_bytes = (plan_.direct ? plan_.group_codes / CodesPerWord(bits) : s.words) * kPanelBytes;
    const uint8_t* panels = packed_;
    if (plan_.direct) {
      s.flip = WeightFlip(a_.w);
      s.panel_stride = WordCount(a_.k, bits) * kPanelBytes;
      panels = w_ + panel_ * s.panel_stride + begin * group_bytes + first / CodesPerWord(bits) * kPanelBytes;
    } else {
      s.panel_stride = (end - begin) * group_bytes + kPanelBytes;  // no power of two: panels in sets of their own
      for (int64_t group = begin; group < end; ++group) {
        const auto pack = a_.w.prepared    ? PackPrepared<false>
                          : a_.w.bits == 8 ? PackRows<8, false>
                          : a_.w.bits == 4 ? PackRows<4, false>
                                           : PackRows<2, false>;
        pack(a_, w_, group * plan_.group_size, plan_.group_size, first, s.words, panel_, panels_,
             packed_ + (group - begin) * group_bytes, s.panel_stride);
      }
    }
    const bool starts = first == 0, ends = first + count == plan_.group_codes;
    if (ends) LoadColumns(begin, end);
    Tile tile;
    FloatTile t;
    for (int64_t row = 0; row < rows_;) {
      // The first rows come with one of ones, which sums the columns of w.
      const bool ones = plan_.column_sums && row == 0;
      const int row_count = static_cast<int>(std::min<int64_t>(kRowsAtOnce - ones, rows_ - row));
      const int most = MostPanels(bits, row_count + ones);
      for (int64_t panel = 0; panel < panels_;) {
        const int panel_count = static_cast<int>(std::min<int64_t>(most, panels_ - panel));
        const Place at = PlaceOf(row, row_count, panel, panel_count);
        if (!starts) Restore(sums_, row, at, tile);
        if (begin != 0 && ends) Restore(totals_, row, at, t);
        for (int64_t group = begin; group < end; ++group) {
          int32_t* column_sums = column_sums_ + (group - begin) * columns_ + panel * kPanel;
          for (int r = 0; r < row_count; ++r) {
            s.rows[r] = codes_ + (row + r) * row_codes_ + group * plan_.group_codes + first;
          }
          const size_t bytes = static_cast<size_t>(at.panels) * kPanel * sizeof(int32_t);
          if (ones) {
            s.rows[row_count] = shared_.ones + first;
            if (!starts) memcpy(tile[row_count], column_sums, bytes);
          }
          s.panels = panels + panel * s.panel_stride + (group - begin) * group_bytes;
          MultiplyTile(bits, row_count + ones, panel_count, s, tile, !starts);
          if (ones) memcpy(column_sums, tile[row_count], bytes);
          if (!ends) continue;
          const int64_t of_group = (group - begin) * columns_ + panel * kPanel;
          Finish(at, group, {scales_ + of_group, zeros_ + of_group, column_sums}, tile, t);
        }
        if (!ends) Save(sums_, row, at, tile);
        if (ends && end != a_.groups) Save(totals_, row, at, t);
        panel += panel_count;
      }
      row += row_count;
    }
  }

  void LoadColumns(int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t at = (group - begin) * columns_;
      epilogue_.Load(matrix_, group, panel_ * kPanel, columns_, columns_, scales_ + at, zeros_ + at);
    }
  }

  void Finish(const Place& at, int64_t group, const ColumnValues& columns, const Tile& tile, FloatTile& t) const {
    uint32_t zero[kTileRows], rest[kTileRows];
    epilogue_.LoadRowZeros(at.matrix, at.row, at.rows, zero);
    if (plan_.row_sums) epilogue_.LoadRowRests(at.matrix, at.row, at.rows, group, zero, rest);
    epilogue_.Finish(at, group, {zero, rest}, columns, {tile[0], t[0], kTileColumns});
  }

  // Sums that wait for the next chunk.
  template <typename T>
  void Restore(const T* from, int64_t row, const Place& at, T (&tile)[kTileRows][kTileColumns]) const {
    from += row * columns_ + at.column - panel_ * kPanel;
    for (int r = 0; r < at.rows; ++r)
      memcpy(tile[r], from + r * columns_, static_cast<size_t>(at.panels) * kPanel * sizeof(T));
  }
  template <typename T>
  void Save(T* to, int64_t row, const Place& at, const T (&tile)[kTileRows][kTileColumns]) const {
    to += row * columns_ + at.column - panel_ * kPanel;
    for (int r = 0; r < at.rows; ++r)
      memcpy(to + r * columns_, tile[r], static_cast<size_t>(at.panels) * kPanel * sizeof(T));
  }

#if defined(__AVX512VNNI__)
  void MultiplyRowMajor() {
    const int64_t column = panel_ * kPanel, columns = std::min(panels_ * kPanel, a_.n - column);
    const int rows = static_cast<int>(rows_);
    int32_t* sums = sums_;
    Tile tile;
    FloatTile t;
    alignas(64) int32_t column_sums[kBlock];
    for (int64_t group = 0; group < a_.groups; ++group) {
      GroupSums(rows, plan_.column_sums, w_ + group * plan_.group_size * a_.n + column, a_.n, columns,
                codes_ + group * plan_.group_codes, row_codes_, shared_.ones, plan_.group_size, WeightFlip(a_.w), sums,
                columns_);
      LoadColumns(group, group + 1);
      for (int64_t panel = 0; panel < panels_; panel += kTilePanels) {
        const int panel_count = static_cast<int>(std::min<int64_t>(kTilePanels, panels_ - panel));
        const Place at = PlaceOf(0, rows, panel, panel_count);
        const int64_t from = panel * kPanel;
        for (int r = 0; r < rows; ++r) InOrder(sums + r * columns_ + from, tile[r]);
        if (plan_.column_sums) InOrder(sums + rows * columns_ + from, column_sums);
        if (group != 0) Restore(totals_, 0, at, t);
        Finish(at, group, {scales_ + from, zeros_ + from, column_sums}, tile, t);
        if (group + 1 != a_.groups) Save(totals_, 0, at, t);
      }
    }
  }
#else
  void MultiplyRowMajor() {}
#endif

  const Shared shared_;
  const Epilogue epilogue_;
  int64_t row_codes_;
  const Code* codes_;
  int32_t* sums_;
  float* totals_;
  int32_t* column_sums_;  // of the groups of a chunk, as the next two
  float* scales_;
  int32_t* zeros_;
  uint8_t* packed_;
};

void Product(const ProductArguments& a, const Plan& plan, const uint8_t* shared, uint8_t* local, int64_t begin,
             int64_t end) {
#if defined(JQ_TILES)
  if (plan.tiles) {
    BlockShapes shapes;
    for (int64_t unit = begin; unit < end; ++unit) TileUnit(a, plan, shared, local, unit, shapes).Multiply();
    return;
  }
#endif
  for (int64_t unit = begin; unit < end; ++unit) Unit(a, plan, shared, local, unit).Multiply();
}

#if defined(JQ_TILES)
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

}  // namespace

const Kernels matmul_kernels = {{sizeof(Code), kRowKernels, kTiles}, Prepare, Product};

}  // namespace JQ_ISA
}  // namespace matmul
}  // namespace jq
