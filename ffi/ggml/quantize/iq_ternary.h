// The quantisers of IQ1: values are -1, 0 or 1 plus or minus a shift. For a sub-block all ways to cut its sorted values
// into three runs are tried; groups of eight whose codes are no point of the lattice move to the nearest.
#pragma once

#include "ffi/ggml/quantize/iq_lanes.h"

namespace jq {
namespace JQ_ISA {
namespace {

constexpr float kShiftIQ1 = 0.125f;
// What the codes 0, 1, 2 stand for, shifted up and down; at the code mod 8, whose upper bit belongs to the next one.
#define JQ_TERNARY(shift) {-1 + (shift), shift, 1 + (shift), 0, -1 + (shift), shift, 1 + (shift), 0}
constexpr float kUp[8] = JQ_TERNARY(kShiftIQ1);
constexpr float kDown[8] = JQ_TERNARY(-kShiftIQ1);
#undef JQ_TERNARY

template <typename F>
struct TernaryRules;
template <>
struct TernaryRules<ggml::IQ1_S> {
  static constexpr int kSub = 32;
  static constexpr float kLeast = 1e-12f;
};
template <>
struct TernaryRules<ggml::IQ1_M> {
  static constexpr int kSub = 16;
  static constexpr float kLeast = 1e-7f;
};

// The best cut of each sub-block: values ranked below `first` have code 0, from `second` on code 2. shifts: bit 1 for
// even groups of eight, bit 0 for odd ones, set for down.
struct Cut {
  Floats scale;
  Floats score = Splat<Floats>(-FLT_MAX);
  Ints first = Ints{} - 1;
  Ints second = {};
  Ints shifts = {};

  JQ_INLINE Ints Better(Floats qx, Floats q2) const { return (q2 > 0.0f) & (qx * qx > score * q2); }

  JQ_INLINE void Offer(Floats qx, Floats q2, int i1, int i2, int shift) {
    const Ints better = Better(qx, q2);
    scale = better ? qx / q2 : scale;
    score = better ? scale * qx : score;
    first = better ? Ints{} + i1 : first;
    second = better ? Ints{} + i2 : second;
    shifts = better ? Ints{} + shift : shifts;
  }
};

// One shift for the sub-block: sums over runs are differences of sums from the start.
JQ_INLINE void FindCut(const Floats (&x)[32], const Floats (&w)[32], const Ints*, Cut* cut) {
  constexpr int kSub = 32;
  Floats sum_x[kSub + 1], sum_w[kSub + 1];
  sum_x[0] = sum_w[0] = Floats{};
  for (int i = 0; i < kSub; ++i) {
    sum_x[i + 1] = sum_x[i] + w[i] * x[i];
    sum_w[i + 1] = sum_w[i] + w[i];
  }
  // What the last run adds, by its start.
  Floats last_x_up[kSub + 1], last_x_down[kSub + 1], last_w_up[kSub + 1], last_w_down[kSub + 1];
  for (int i = 0; i <= kSub; ++i) {
    last_x_up[i] = (sum_x[kSub] - sum_x[i]) * kUp[2];
    last_x_down[i] = (sum_x[kSub] - sum_x[i]) * kDown[2];
    last_w_up[i] = (sum_w[kSub] - sum_w[i]) * kUp[2] * kUp[2];
    last_w_down[i] = (sum_w[kSub] - sum_w[i]) * kDown[2] * kDown[2];
  }
  for (int i1 = 0; i1 <= kSub; ++i1) {
    const Floats first_x = sum_x[i1] - sum_x[0], first_w = sum_w[i1] - sum_w[0];
    const Floats first_x_up = first_x * kUp[0], first_w_up = first_w * kUp[0] * kUp[0];
    const Floats first_x_down = first_x * kDown[0], first_w_down = first_w * kDown[0] * kDown[0];
    for (int i2 = i1; i2 <= kSub; ++i2) {
      const Floats middle_x = (sum_x[i2] - sum_x[i1]) * kUp[1];  // down: its negative
      const Floats middle_w = (sum_w[i2] - sum_w[i1]) * kUp[1] * kUp[1];
      const Floats up_x = first_x_up + middle_x + last_x_up[i2];
      const Floats up_w = first_w_up + middle_w + last_w_up[i2];
      const Floats down_x = first_x_down - middle_x + last_x_down[i2];
      const Floats down_w = first_w_down + middle_w + last_w_down[i2];
      // Mostly none is better, which saves the divisions.
      if (!Any<Floats>(cut->Better(up_x, up_w) | cut->Better(down_x, down_w))) continue;
      cut->Offer(up_x, up_w, i1, i2, 0);
      cut->Offer(down_x, down_w, i1, i2, 3);
    }
  }
}

// A shift for each group of eight; sums are over the values one by one, in their sorted order. odd: which values belong
// to the second group.
JQ_INLINE void FindCut(const Floats (&x)[16], const Floats (&w)[16], const Ints* odd, Cut* cut) {
  constexpr int kSub = 16;
  struct Pair {
    Floats qx, q2;
  };
  struct Sums {
    Pair of[4];  // by shifts
    JQ_INLINE void Add(const Sums& term) {
      for (int k = 0; k < 4; ++k) {
        of[k].qx += term.of[k].qx;
        of[k].q2 += term.of[k].q2;
      }
    }
  };
  Sums terms[3][kSub];  // by code and value
  for (int code = 0; code < 3; ++code) {
    for (int i = 0; i < kSub; ++i) {
      const Floats up = w[i] * kUp[code], down = w[i] * kDown[code];
      const Pair pairs[2] = {{up * x[i], up * kUp[code]}, {down * x[i], down * kDown[code]}};
      for (int k = 0; k < 4; ++k) {
        const Pair& even_pair = pairs[k >> 1];
        const Pair& odd_pair = pairs[k & 1];
        terms[code][i].of[k] = {odd[i] ? odd_pair.qx : even_pair.qx, odd[i] ? odd_pair.q2 : even_pair.q2};
      }
    }
  }
  Sums first{};
  for (int i1 = 0; i1 <= kSub; ++i1) {
    Sums middle = first;
    for (int i2 = i1; i2 <= kSub; ++i2) {
      Sums all = middle;
      for (int i = i2; i < kSub; ++i) all.Add(terms[2][i]);
      Ints better = {};
      for (int k = 0; k < 4; ++k) better |= cut->Better(all.of[k].qx, all.of[k].q2);
      if (Any<Floats>(better)) {
        for (int k = 0; k < 4; ++k) cut->Offer(all.of[k].qx, all.of[k].q2, i1, i2, k);
      }
      if (i2 < kSub) middle.Add(terms[1][i2]);
    }
    if (i1 < kSub) first.Add(terms[0][i1]);
  }
}

// kWidth sub-blocks side by side.
template <int kSub>
class TernarySearch {
  static constexpr int kWords = kSub / 8;

 public:
  TernarySearch(const ggml::Lattice& lattice, const float* x, const float* weight)
      : lattice_(lattice), rows_(x), weights_(weight) {
    TransposeSubBlocks<kSub>(x, x_);
    TransposeSubBlocks<kSub>(weight, w_);
  }

  // False when the reference would give up.
  bool Run(float least) {
    Floats largest = Abs(x_[0]);
    for (int i = 1; i < kSub; ++i) {
      const Floats v = Abs(x_[i]);
      largest = largest > v ? largest : v;
    }
    Ints rank[kSub];
    Cut cut;
    cut.scale = largest;
    SortAndCut(rank, &cut);
    const Ints active = ~(largest < least) & (cut.first >= 0);

    const Ints negative = cut.scale < 0.0f;
    Floats scale = negative ? -cut.scale : cut.scale;
    shifts = (negative ? 3 - cut.shifts : cut.shifts) & active;
    Ints any_off = {};
    for (int k = 0; k < kWords; ++k) {
      Ints word = {};
      for (int i = 0; i < 8; ++i) {
        const Ints r = rank[8 * k + i];
        const Ints code = 2 + (r < cut.first) + (r < cut.second);
        word |= (negative ? 2 - code : code) << (2 * i);
      }
      words[k] = word & active;
      any_off |= Resolve(k, scale, active);
    }
    if (Any<Floats>(any_off)) {
      Floats sum_qx = {}, sum_q2 = {};
      for (int k = 0; k < kWords; ++k) {
        const Floats shift = Down(k) ? Splat<Floats>(-kShiftIQ1) : Splat<Floats>(kShiftIQ1);
        for (int i = 0; i < 8; ++i) {
          const Floats q = ToReal<Floats>(((words[k] >> (2 * i)) & 3) - 1) + shift;
          const Floats wq = w_[8 * k + i] * q;
          sum_qx += wq * x_[8 * k + i];
          sum_q2 += wq * q;
        }
      }
      scale = (any_off & (sum_qx > 0.0f) & (sum_q2 > 0.0f)) ? sum_qx / sum_q2 : scale;
    }
    used = active;
    scales = active ? scale : Floats{};
    return !failed_ && !Any<Floats>(active & ~(scale >= 0.0f));
  }

  Ints words[kWords];  // a point of the grid each
  Floats scales;
  Ints shifts;  // as in Cut
  Ints used;    // other sub-blocks count as zero

 private:
  // Ranks, the first of equals first, and the best cut of the sorted values.
  JQ_INLINE void SortAndCut(Ints* rank, Cut* cut) const {
    for (int i = 0; i < kSub; ++i) rank[i] = Ints{};
    for (int i = 0; i < kSub; ++i) {
      for (int j = 0; j < i; ++j) {
        const Ints after = x_[i] < x_[j];  // all ones: -1
        rank[j] -= after;
        rank[i] += 1 + after;
      }
    }
    alignas(32) float x[kSub][kWidth], w[kSub][kWidth];
    alignas(32) int32_t odd[kSub][kWidth];
    for (int i = 0; i < kSub; ++i) {
      for (int lane = 0; lane < kWidth; ++lane) {
        const int to = rank[i][lane];
        x[to][lane] = x_[i][lane];
        w[to][lane] = w_[i][lane];
        odd[to][lane] = -((i >> 3) & 1);
      }
    }
    Floats sorted_x[kSub], sorted_w[kSub];
    Ints sorted_odd[kSub];
    memcpy(sorted_x, x, sizeof(x));
    memcpy(sorted_w, w, sizeof(w));
    memcpy(sorted_odd, odd, sizeof(odd));
    FindCut(sorted_x, sorted_w, sorted_odd, cut);
  }

  // Which lanes shift group k down.
  JQ_INLINE Ints Down(int k) const { return -((k % 2 == 0 ? shifts >> 1 : shifts) & 1); }

  // Moves word k to a grid point; which lanes had to move.
  JQ_INLINE Ints Resolve(int k, Floats scale, Ints active) {
    Ints off = {};
    const Ints down = Down(k);
    for (int lane = 0; lane < kWidth; ++lane) {
      if (!active[lane]) continue;
      const int32_t entry = lattice_.entries[words[k][lane]];
      if (entry >= 0) continue;
      const int at = lane * kSub + 8 * k;
      const int point =
          NearestNeighbour<2>(lattice_, entry, down[lane] ? kDown : kUp, scale[lane], rows_ + at, weights_ + at);
      failed_ |= point == kNoPoint;
      off[lane] = -1;
      words[k][lane] = point & 0xffff;
    }
    return off;
  }

  const ggml::Lattice& lattice_;
  const float* rows_;
  const float* weights_;
  bool failed_ = false;
  Floats x_[kSub], w_[kSub];
};

// A super-block before it is packed.
template <typename F>
struct TernaryBlock {
  static constexpr int kSub = TernaryRules<F>::kSub, kSubBlocks = ggml::kSuper / kSub;
  float weight[ggml::kSuper];
  uint16_t index[32];  // of grid points; of unused sub-blocks 0
  uint16_t words[32];  // their codes
  float scales[kSubBlocks];
  int shifts[kSubBlocks];
};

template <typename F>
JQ_INLINE bool SearchBlock(const ggml::Lattice& lattice, const float* x, const float* imatrix, float squares,
                           TernaryBlock<F>* result) {
  constexpr int kSub = TernaryRules<F>::kSub, kWords = kSub / 8;
  const float sigma2 = 2 * squares / ggml::kSuper;
  for (int i = 0; i < ggml::kSuper; ++i) {
    result->weight[i] = imatrix != nullptr ? imatrix[i] * __builtin_sqrtf(sigma2 + x[i] * x[i]) : x[i] * x[i];
  }
  for (int first = 0; first < TernaryBlock<F>::kSubBlocks; first += kWidth) {
    TernarySearch<kSub> search(lattice, x + first * kSub, result->weight + first * kSub);
    if (!search.Run(TernaryRules<F>::kLeast)) return false;
    for (int lane = 0; lane < kWidth; ++lane) {
      const int sub = first + lane;
      result->scales[sub] = search.scales[lane];
      result->shifts[sub] = search.shifts[lane];
      for (int k = 0; k < kWords; ++k) {
        // The first point of the grid is all zeros, as are the words of unused sub-blocks.
        const int word = search.words[k][lane];
        result->words[sub * kWords + k] = static_cast<uint16_t>(word);
        result->index[sub * kWords + k] = static_cast<uint16_t>(lattice.entries[word]);
      }
    }
  }
  return true;
}

JQ_INLINE int ScaleCodeIQ1(float inverse, float scale) {
  return ggml::Clamp(NearestInt(0.5f * (inverse * scale - 1)), 0, 7);
}

// ---- Packing, into a block of zeros

JQ_INLINE void Pack(const TernaryBlock<ggml::IQ1_S>& found, const float*, float largest, ggml::IQ1_S* block) {
  for (int i = 0; i < 32; ++i) {
    block->qs[i] = found.index[i] & 255;
    block->qh[i / 4] |= static_cast<uint16_t>((found.index[i] >> 8) << (3 * (i % 4)));
  }
  if (largest == 0.0f) return;
  const float d = largest / 15, inverse = 1 / d;
  block->d = ToFloat16(d * 1.125f);
  for (int sub = 0; sub < 8; ++sub) {
    const int down = found.shifts[sub] & 1;
    block->qh[sub] |= static_cast<uint16_t>((ScaleCodeIQ1(inverse, found.scales[sub]) | down << 3) << 12);
  }
}

// The scale is fitted once more, to the codes as they are.
JQ_INLINE void Pack(const TernaryBlock<ggml::IQ1_M>& found, const float* x, float largest, ggml::IQ1_M* block) {
  for (int i = 0; i < 32; ++i) {
    block->qs[i] = found.index[i] & 255;
    block->qh[i / 2] |= static_cast<uint8_t>((found.index[i] >> 8) << (4 * (i % 2)));
  }
  if (largest == 0.0f) return;
  float d = largest / 15;
  const float inverse = 1 / d;
  uint16_t scales[4] = {};
  float sum_qx = 0, sum_q2 = 0;
  for (int sub = 0; sub < 16; ++sub) {
    const int code = ScaleCodeIQ1(inverse, found.scales[sub]);
    scales[sub / 4] |= static_cast<uint16_t>(code << (3 * (sub % 4)));
    const int down[2] = {found.shifts[sub] >> 1, found.shifts[sub] & 1};
    block->qh[sub] |= static_cast<uint8_t>(down[0] << 3 | down[1] << 7);
    for (int i = 0; i < 16; ++i) {
      const int at = 16 * sub + i;
      const float* values = down[i / 8] ? kDown : kUp;
      const float q = values[(found.words[at / 8] >> (2 * (i % 8))) & 3] * static_cast<float>(2 * code + 1);
      const float wq = found.weight[at] * q;
      sum_qx += wq * x[at];
      sum_q2 += wq * q;
    }
  }
  if (sum_q2 > 0) d = sum_qx / sum_q2;
  const uint16_t half = ToFloat16(d * 1.1125f).bits;
  for (int i = 0; i < 4; ++i) scales[i] |= static_cast<uint16_t>((half >> (4 * i)) << 12);
  memcpy(block->scales, scales, sizeof(scales));
}

template <typename F>
const char* QuantizeTernary(const float* x, void* out, int64_t rows, int64_t n, const float* imatrix) {
  const ggml::Lattice& lattice = ggml::LatticeOf<F>();
  return ForEachSuperBlock<F>(x, out, rows, n, imatrix,
                              [&](const float* values, const float* weights, float squares, F* block) -> const char* {
                                TernaryBlock<F> found;
                                if (!SearchBlock<F>(lattice, values, weights, squares, &found)) return kOutOfRange;
                                float largest = 0;
                                for (const float scale : found.scales) largest = largest > scale ? largest : scale;
                                *block = F{};
                                Pack(found, values, largest, block);
                                return nullptr;
                              });
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace jq
