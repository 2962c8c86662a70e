#include <cstdint>
#include <cstring>

#include "ffi/matmul/weight_only/gradient.h"
#include "ffi/matmul/weight_only/kernels.h"
#include "ffi/matmul/weight_only/micro.h"

namespace jq {
namespace weight_only {
namespace JQ_ISA {
namespace {

static_assert(sizeof(Span) == kSpanBytes, "scratch is counted in spans");

#if defined(__AVX512VNNI__)
constexpr int kTileRows = 4, kTileStrips = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 2, kTileStrips = 1;
#else
constexpr int kTileRows = 1, kTileStrips = 1;
#endif
constexpr int kStripsOfPanel = kPanel / kLanes;
constexpr int kBlockPanels = 16;   // that are gathered together: stretches of plain rows that the hardware foresees
constexpr int kStretchSpans = 4;   // between which weights in place stay in the first cache
constexpr int kGatheredSpans = 1;  // the same for those that are gathered
constexpr int kQuad = 4;           // panels, a cache line of bytes
constexpr int64_t kAhead = 4096;   // bytes of a panel that are asked for in advance
constexpr int64_t kRowsAhead = 8;  // the same of plain rows
constexpr int kMaxCells = 8192;    // of a unit

// ---- Activations

template <typename Real>
void PrepareSpan(const Real* x, int length, float sum_before, Span* out) {
  memset(out, 0, sizeof(*out));
  alignas(64) float values[kSpan] = {};
  for (int i = 0; i < length; ++i) values[i] = Convert<float>(x[i]);
  uint32_t largest = 0;
  for (int i = 0; i < kSpan; ++i) {
    const uint32_t magnitude = BitCast<uint32_t>(values[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const SpanScale scale = ScaleOfSpan(largest);
  out->from = scale.from;
  out->sum = scale.from;  // NaN
  if (largest >= 0x7f800000u) return;
  int32_t sum[kDigits] = {};
  for (int i = 0; i < kSpan; ++i) {
    const Digits digits = DigitsOf(ToFixed(values[i], scale.to));
    for (int d = 0; d < kDigits; ++d) {
      out->digits[d][i] = digits.at[d];
      sum[d] += digits.at[d];
    }
  }
  for (int d = 0; d < kDigits; ++d) out->start[d] = sum[d];
  const int32_t all = sum[2] * 65536 + sum[1] * 256 + sum[0];
  out->sum = sum_before + static_cast<float>(all) * scale.from;
}

template <typename Real>
void PrepareRows(const Arguments& a, Span* scratch, int64_t begin, int64_t end) {
  const int64_t group = a.Group(), each = SpansOfGroup(a);
  const int32_t offset = -a.codes.Offset();
  for (int64_t row = begin; row < end; ++row) {
    const Real* x = static_cast<const Real*>(a.x) + row * a.codes.k;
    Span* out = scratch + row * a.groups * each;
    for (int64_t g = 0; g < a.groups; ++g) {
      float sum = 0.0f;
      for (int64_t at = 0; at < group; at += kSpan, ++out) {
        PrepareSpan(x + g * group + at, static_cast<int>(group - at < kSpan ? group - at : kSpan), sum, out);
        sum = out->sum;
        for (int d = 0; d < kDigits; ++d) out->start[d] *= offset;
      }
    }
  }
}

void Prepare(const Arguments& a, void* scratch, int64_t begin, int64_t end) {
  Span* to = static_cast<Span*>(scratch);
  if (a.type == DType::kF32) PrepareRows<float>(a, to, begin, end);
  if (a.type == DType::kF16) PrepareRows<Float16>(a, to, begin, end);
  if (a.type == DType::kBF16) PrepareRows<BFloat16>(a, to, begin, end);
}

// ---- Products

struct Unit {
  int64_t matrix, first_row, first_column;
  int rows, columns;
};

// The unit's share of one matrix, and its sums.
template <int bits>
class UnitProduct {
 public:
  UnitProduct(const Arguments& a, const Unit& unit, const Span* scratch)
      : a_(a), codes_(a.Matrix(unit.matrix)), unit_(unit), group_(a.Group()), spans_of_group_(SpansOfGroup(a)) {
    spans_ = a.groups * spans_of_group_;
    x_ = scratch + ((a.x_batch == 1 ? 0 : unit.matrix) * a.rows + unit.first_row) * spans_;
    in_place_ = codes_.prepared && (a.groups == 1 || group_ % (4 * codes_.Per()) == 0);
    panels_ = (unit.columns + kPanel - 1) / kPanel;
    memset(total_, 0, static_cast<size_t>(panels_) * unit.rows * kPanel * sizeof(float));
  }

  void Run() {
    const int64_t most = in_place_ ? kStretchSpans : kGatheredSpans;
    for (int64_t first = 0; first < spans_; first += most) {
      const int64_t spans = spans_ - first < most ? spans_ - first : most;
      const Stretch stretch{first, spans, spans_of_group_, group_ - (spans_of_group_ - 1) * kSpan};
      for (int panel = 0; panel < panels_; panel += kBlockPanels) {
        MultiplyBlock(stretch, panel, panels_ - panel < kBlockPanels ? panels_ - panel : kBlockPanels);
      }
    }
    if (a_.type == DType::kF32) Store<float>();
    if (a_.type == DType::kF16) Store<Float16>();
    if (a_.type == DType::kBF16) Store<BFloat16>();
  }

 private:
  int64_t FirstRow(int64_t span) const { return span / spans_of_group_ * group_ + span % spans_of_group_ * kSpan; }

  void MultiplyBlock(const Stretch& stretch, int panel, int panels) {
    LoadScales(stretch, panel, panels);
    const uint8_t* from[kBlockPanels];
    if (in_place_) {
      const int64_t word = FirstRow(stretch.first_span) / (4 * codes_.Per());
      for (int p = 0; p < panels; ++p) {
        from[p] = codes_.data + (unit_.first_column / kPanel + panel + p) * codes_.PanelBytes() + word * (4 * kPanel);
      }
      const int flip = codes_.is_signed ? codes_.Offset() * (bits == 8 ? 1 : bits == 4 ? 0x11 : 0x55) : 0;
      MultiplyRows<bits>(stretch, panel, panels, from, flip, kAhead);
    } else {
      GatherPanels(stretch, panel, panels);
      for (int p = 0; p < panels; ++p) from[p] = gathered_[p];
      MultiplyRows<8>(stretch, panel, panels, from, 0, 0);
    }
  }

  void GatherPanels(const Stretch& stretch, int panel, int panels) {
    FourRows four = {};
    const int64_t column = unit_.first_column + panel * kPanel;
    int64_t at = 0;
    for (int64_t span = stretch.first_span; span < stretch.first_span + stretch.spans; ++span) {
      const bool last = (span + 1) % spans_of_group_ == 0;
      const int length = static_cast<int>(last ? stretch.length_of_last : kSpan);
      const int64_t row = FirstRow(span);
      for (int i = 0; i < length; i += kWordCodes, at += 4 * kPanel) {
        const int count = length - i < kWordCodes ? length - i : kWordCodes;
        int p = 0;
        if (!codes_.prepared && count == kWordCodes) {
          const uint8_t* from = codes_.data + (row + i) * codes_.RowBytes() + column * bits / 8;
          const int whole = (unit_.columns - panel * kPanel) / kPanel;
          for (; p + kQuad <= panels && p + kQuad <= whole; p += kQuad, from += kQuad * kPanel * bits / 8) {
            const uint8_t* rows[kWordCodes];
            for (int j = 0; j < kWordCodes; ++j) {
              rows[j] = from + j * codes_.RowBytes();
              __builtin_prefetch(rows[j] + kRowsAhead * codes_.RowBytes());
            }
            matmul::JQ_ISA::InterleaveFourPanels<bits>(rows, codes_.is_signed ? codes_.Offset() : 0, gathered_[p] + at,
                                                       sizeof(gathered_[0]));
          }
        }
        for (; p < panels; ++p) {
          const int64_t first = column + p * kPanel, left = unit_.first_column + unit_.columns - first;
          Gather<bits>(codes_, row + i, count, first, static_cast<int>(left < kPanel ? left : kPanel), &four);
          Interleave(four, gathered_[p] + at);
        }
      }
    }
  }

  // Scales of the groups that end in a stretch. Codes without a sign are multiplied less the offset.
  void LoadScales(const Stretch& stretch, int panel, int panels) {
    const int64_t first = stretch.first_span / spans_of_group_;
    const int64_t end = (stretch.first_span + stretch.spans) / spans_of_group_;
    const float offset = codes_.is_signed ? 0.0f : static_cast<float>(codes_.Offset());
    has_zero_point_ = a_.zero_point != nullptr || !codes_.is_signed;
    const int columns =
        unit_.columns - panel * kPanel < panels * kPanel ? unit_.columns - panel * kPanel : panels * kPanel;
    for (int64_t g = first; g < end; ++g) {
      const int64_t at = (unit_.matrix * a_.groups + g) * a_.scale_columns;
      const bool one = a_.scale_columns == 1;
      const int64_t from = one ? at : at + unit_.first_column + panel * kPanel;
      float* scale = scale_[g - first];
      float* zero_point = zero_point_[g - first];
      for (int c = 0; c < columns; ++c) scale[c] = a_.scale[one ? from : from + c];
      if (!has_zero_point_) continue;
      for (int c = 0; c < columns; ++c) {
        zero_point[c] = (a_.zero_point == nullptr ? 0.0f : a_.zero_point[one ? from : from + c]) - offset;
      }
    }
  }

  template <int lying>
  void MultiplyRows(const Stretch& stretch, int panel, int panels, const uint8_t* const* from, int flip,
                    int64_t ahead) {
    const int strips = panels * kStripsOfPanel;
    for (int row = 0; row < unit_.rows; row += kTileRows) {
      const int rows = unit_.rows - row < kTileRows ? unit_.rows - row : kTileRows;
      const Span* x[kTileRows];
      for (int t = 0; t < rows; ++t) x[t] = x_ + (row + t) * spans_ + stretch.first_span;
      for (int strip = 0; strip < strips; strip += kTileStrips) {
        const uint8_t* codes[kTileStrips];
        GroupScales scales[kTileStrips];
        Sums sums[kTileStrips];
        const int here = strips - strip < kTileStrips ? strips - strip : kTileStrips;
        for (int s = 0; s < here; ++s) {
          const int p = (strip + s) / kStripsOfPanel, lane = (strip + s) % kStripsOfPanel * kLanes;
          codes[s] = from[p] + 4 * lane;
          const int column = p * kPanel + lane;
          scales[s] = {scale_[0] + column, has_zero_point_ ? zero_point_[0] + column : nullptr, kBlockPanels * kPanel};
          const int64_t cell = (static_cast<int64_t>(panel + p) * unit_.rows + row) * kPanel + lane;
          sums[s] = {group_sums_ + cell, total_ + cell};
        }
        Tile<lying>(rows, here, codes, flip, row == 0 ? ahead : 0, stretch, x, scales, sums);
      }
    }
  }

  template <int lying>
  JQ_INLINE void Tile(int rows, int strips, const uint8_t* const* codes, int flip, int64_t ahead,
                      const Stretch& stretch, const Span* const* x, const GroupScales* scales, const Sums* sums) {
    constexpr bool kSmall = bits < 8;
#define JQ_TILE(T, S)                                                                             \
  if constexpr (T <= kTileRows && S <= kTileStrips) {                                             \
    if (rows == T && strips == S) {                                                               \
      return Multiply<lying, kSmall, T, S>(codes, flip, ahead, stretch, x, scales, sums, kPanel); \
    }                                                                                             \
  }
    JQ_TILE(1, 1)
    JQ_TILE(2, 1)
    JQ_TILE(3, 1)
    JQ_TILE(4, 1)
    JQ_TILE(1, 2)
    JQ_TILE(2, 2)
    JQ_TILE(3, 2)
    JQ_TILE(4, 2)
#undef JQ_TILE
  }

  template <typename Real>
  void Store() const {
    for (int t = 0; t < unit_.rows; ++t) {
      Real* out = static_cast<Real*>(a_.out) + (unit_.matrix * a_.rows + unit_.first_row + t) * codes_.n;
      for (int c = 0; c < unit_.columns; c += kPanel) {
        const float* total = total_ + (c / kPanel * unit_.rows + t) * kPanel;
        const int columns = unit_.columns - c < kPanel ? unit_.columns - c : kPanel;
        for (int i = 0; i < columns; ++i) out[unit_.first_column + c + i] = Convert<Real>(total[i]);
      }
    }
  }

  const Arguments& a_;
  const Codes codes_;
  const Unit unit_;
  const int64_t group_, spans_of_group_;
  int64_t spans_;
  const Span* x_;
  bool in_place_, has_zero_point_ = false;
  int panels_;
  alignas(64) float total_[kMaxCells];
  alignas(64) float group_sums_[kMaxCells];
  alignas(64) uint8_t gathered_[kBlockPanels][kGatheredSpans * kSpan * kPanel];
  alignas(64) float scale_[kStretchSpans][kBlockPanels * kPanel] = {};
  alignas(64) float zero_point_[kStretchSpans][kBlockPanels * kPanel] = {};
};

template <typename F>
void ForEachUnit(const Arguments& a, const Plan& plan, int64_t columns, int64_t begin, int64_t end, const F& f) {
  for (int64_t i = begin; i < end; ++i) {
    Unit unit;
    const int64_t column = i % plan.column_units, rest = i / plan.column_units;
    unit.matrix = rest / plan.row_units;
    unit.first_row = rest % plan.row_units * plan.rows_per_unit;
    unit.first_column = column * plan.columns_per_unit;
    const int64_t rows = a.rows - unit.first_row, left = columns - unit.first_column;
    unit.rows = static_cast<int>(rows < plan.rows_per_unit ? rows : plan.rows_per_unit);
    unit.columns = static_cast<int>(left < plan.columns_per_unit ? left : plan.columns_per_unit);
    f(unit);
  }
}

template <int bits>
void Products(const Arguments& a, const Plan& plan, const void* scratch, int64_t begin, int64_t end) {
  ForEachUnit(a, plan, a.codes.n, begin, end,
              [&](const Unit& unit) { UnitProduct<bits>(a, unit, static_cast<const Span*>(scratch)).Run(); });
}
template <int bits>
void Gradients(const Arguments& a, const Plan& plan, int64_t begin, int64_t end) {
  ForEachUnit(a, plan, a.codes.k, begin, end, [&](const Unit& u) {
    if (a.type == DType::kF32) GradientUnit<bits, float>(a, u.matrix, u.first_row, u.rows, u.first_column, u.columns);
    if (a.type == DType::kF16) GradientUnit<bits, Float16>(a, u.matrix, u.first_row, u.rows, u.first_column, u.columns);
    if (a.type == DType::kBF16) {
      GradientUnit<bits, BFloat16>(a, u.matrix, u.first_row, u.rows, u.first_column, u.columns);
    }
  });
}

void AnyProducts(const Arguments& a, const Plan& plan, const void* scratch, int64_t begin, int64_t end) {
  if (a.codes.bits == 8) Products<8>(a, plan, scratch, begin, end);
  if (a.codes.bits == 4) Products<4>(a, plan, scratch, begin, end);
  if (a.codes.bits == 2) Products<2>(a, plan, scratch, begin, end);
}
void AnyGradients(const Arguments& a, const Plan& plan, int64_t begin, int64_t end) {
  if (a.codes.bits == 8) Gradients<8>(a, plan, begin, end);
  if (a.codes.bits == 4) Gradients<4>(a, plan, begin, end);
  if (a.codes.bits == 2) Gradients<2>(a, plan, begin, end);
}

}  // namespace

const Kernels weight_only_kernels = {Prepare, AnyProducts, AnyGradients};

}  // namespace JQ_ISA
}  // namespace weight_only
}  // namespace jq
