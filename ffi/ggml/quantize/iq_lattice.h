// The quantisers of IQ2 and IQ3: magnitudes are points of a lattice, signs are apart. For a sub-block many scales are
// tried; each gives the nearest codes, these the nearest points, and these the best scale.
#pragma once

#include "ffi/ggml/quantize/iq_lanes.h"
#include "ffi/ggml/quantize/search.h"

namespace jq {
namespace JQ_ISA {
namespace {

// What a last pass, at the best scale found, looks up anew.
enum class LastPass {
  kEverything,    // in any case
  kAllIfOffGrid,  // everything, when a word was off the grid
  kOffGridWords,  // the words that were off the grid
};

// kTries scales below and above the largest value's, kStep codes apart; sub-blocks whose values stay below kLeast are
// zero; weights take kSigma times the mean square; the block's scale is stored times kScale; kEvenSigns: seven of eight
// signs are stored; kStartsFromSearch: scales are tried around one that a search without a lattice finds.
template <typename F>
struct LatticeRules;
template <>
struct LatticeRules<ggml::IQ2_XXS> {
  static constexpr int kBits = 2, kSub = 32, kTries = 6;
  static constexpr float kStep = 0.1f, kLeast = 1e-15f, kSigma = 1.0f, kScale = 1.0f;
  static constexpr bool kEvenSigns = true, kStartsFromSearch = true;
  static constexpr LastPass kLastPass = LastPass::kEverything;
};
template <>
struct LatticeRules<ggml::IQ2_XS> {
  static constexpr int kBits = 2, kSub = 16, kTries = 9;
  static constexpr float kStep = 0.1f, kLeast = 1e-15f, kSigma = 1.0f, kScale = 1.0f;
  static constexpr bool kEvenSigns = true, kStartsFromSearch = false;
  static constexpr LastPass kLastPass = LastPass::kOffGridWords;
};
template <>
struct LatticeRules<ggml::IQ2_S> {
  static constexpr int kBits = 2, kSub = 16, kTries = 9;
  static constexpr float kStep = 0.1f, kLeast = 1e-8f, kSigma = 2.0f, kScale = 0.9875f;
  static constexpr bool kEvenSigns = false, kStartsFromSearch = false;
  static constexpr LastPass kLastPass = LastPass::kOffGridWords;
};
template <>
struct LatticeRules<ggml::IQ3_XXS> {
  static constexpr int kBits = 3, kSub = 32, kTries = 15;
  static constexpr float kStep = 0.2f, kLeast = 1e-8f, kSigma = 2.0f, kScale = 1.0125f;
  static constexpr bool kEvenSigns = true, kStartsFromSearch = false;
  static constexpr LastPass kLastPass = LastPass::kOffGridWords;
};
template <>
struct LatticeRules<ggml::IQ3_S> {
  static constexpr int kBits = 3, kSub = 32, kTries = 9;
  static constexpr float kStep = 0.2f, kLeast = 0x1p-149f, kSigma = 2.0f, kScale = 1.033f;
  static constexpr bool kEvenSigns = false, kStartsFromSearch = false;
  static constexpr LastPass kLastPass = LastPass::kAllIfOffGrid;
};

// Without an imatrix; the formats that need one have none.
JQ_INLINE float PlainWeight(const ggml::IQ2_S*, float x, float sigma2) { return 0.25f * sigma2 + x * x; }
JQ_INLINE float PlainWeight(const void*, float x, float) { return x * x; }

// kWidth sub-blocks side by side.
template <typename F>
class LatticeSearch {
  using Rules = LatticeRules<F>;
  static constexpr int kBits = Rules::kBits, kSub = Rules::kSub;
  static constexpr int kCoordinates = kBits == 2 ? 8 : 4;
  static constexpr int kWords = kSub / kCoordinates;
  static constexpr int kTop = kBits == 2 ? 2 : 7;  // largest code
  static constexpr float kTopValue = 2 * kTop + 1;

 public:
  // x: magnitudes; root_weight: square roots of weight.
  LatticeSearch(const ggml::Lattice& lattice, const float* x, const float* weight, const float* root_weight)
      : lattice_(lattice), rows_(x), root_weights_(root_weight) {
    TransposeSubBlocks<kSub>(x, x_);
    TransposeSubBlocks<kSub>(weight, w_);
    for (int i = 0; i < kSub; ++i) wx_[i] = w_[i] * x_[i];
  }

  // False when the reference would give up.
  bool Run() {
    Floats largest = x_[0];
    for (int i = 1; i < kSub; ++i) largest = largest > x_[i] ? largest : x_[i];
    Ints active = ~(largest < Rules::kLeast);
    Floats scale = largest / kTopValue;
    if constexpr (Rules::kStartsFromSearch) {
      Ints codes[kSub];
      scale = ggml::SearchPositive<kSub, kTop + 2>(x_, w_, codes);
      largest = scale * 3.0f;
      active &= ~(largest <= 0.0f);
    }

    Ints off_grid[kWords], wanted[kWords];
    for (int k = 0; k < kWords; ++k) {
      wanted[k] = active;
      words[k] = Ints{};
      off_grid[k] = Ints{} - (Rules::kLastPass == LastPass::kOffGridWords ? 0 : 1);
    }
    Floats best = {};
    for (int step = -Rules::kTries; step <= Rules::kTries; ++step) {
      const Floats inverse = (kTopValue + step * Rules::kStep) / largest;
      Ints tried[kWords], tried_off[kWords];
      Resolve(inverse, 1.0f / inverse, wanted, tried, tried_off);
      Floats sum_qx, sum_q2;
      Sums(tried, &sum_qx, &sum_q2);
      const Ints better = (sum_q2 > 0.0f) & (sum_qx * sum_qx > best * sum_q2);
      scale = better ? sum_qx / sum_q2 : scale;
      best = better ? scale * sum_qx : best;
      for (int k = 0; k < kWords; ++k) {
        words[k] = better ? tried[k] : words[k];
        if constexpr (Rules::kLastPass != LastPass::kEverything) off_grid[k] = better ? tried_off[k] : off_grid[k];
      }
    }

    Ints any_off = off_grid[0];
    for (int k = 1; k < kWords; ++k) any_off |= off_grid[k];
    const Ints again = active & any_off & (scale > 0.0f);
    if (Any<Floats>(again)) {
      Ints found[kWords], ignored[kWords];
      for (int k = 0; k < kWords; ++k) {
        wanted[k] = Rules::kLastPass == LastPass::kOffGridWords ? again & off_grid[k] : again;
      }
      Resolve(1.0f / scale, scale, wanted, found, ignored);
      for (int k = 0; k < kWords; ++k) words[k] = wanted[k] ? found[k] : words[k];
      Floats sum_qx, sum_q2;
      Sums(words, &sum_qx, &sum_q2);
      scale = (again & (sum_q2 > 0.0f)) ? sum_qx / sum_q2 : scale;
    }

    negative = active & (scale < 0.0f);
    scale = negative ? -scale : scale;
    used = active;
    scales = active ? scale : Floats{};
    for (int k = 0; k < kWords; ++k) words[k] &= active;
    return !failed_ && !Any<Floats>(active & ~(scale >= 0.0f));
  }

  Ints words[kWords];  // a point of the grid each
  Floats scales;
  Ints negative;  // the scale came out negative: signs are to be flipped
  Ints used;      // other sub-blocks count as zero

 private:
  // The points for the wanted words and lanes at a scale, and where the nearest codes themselves were none.
  JQ_INLINE void Resolve(Floats inverse, Floats scale, const Ints* wanted, Ints* points, Ints* off_grid) {
    // In memory: lanes are picked from it one by one.
    alignas(32) int32_t words[kWords * kWidth], off[kWords * kWidth];
    alignas(32) float scales[kWidth];
    memcpy(scales, &scale, sizeof(scales));
    for (int k = 0; k < kWords; ++k) {
      Ints nearest = {};
      for (int i = 0; i < kCoordinates; ++i) {
        const Floats v = 0.5f * (inverse * x_[k * kCoordinates + i] - 1.0f);
        nearest |= Clamp(NearestInt(v), 0, kTop) << (kBits * i);
      }
      memcpy(words + k * kWidth, &nearest, sizeof(nearest));
      memcpy(off + k * kWidth, &wanted[k], sizeof(off[0]) * kWidth);
    }
    // A queue, since whether a word is on the grid is hard to predict.
    uint8_t queue[kWords * kWidth];
    int queued = 0;
    for (int at = 0; at < kWords * kWidth; ++at) {
      off[at] &= lattice_.entries[words[at]] >> 31;
      queue[queued] = static_cast<uint8_t>(at);
      queued -= off[at];
    }
    constexpr float kValues2[8] = {1, 3, 5, 0, 1, 3, 5, 0}, kValues3[8] = {1, 3, 5, 7, 9, 11, 13, 15};
    const float* values = kBits == 2 ? kValues2 : kValues3;
    for (int i = 0; i < queued; ++i) {
      const int at = queue[i], lane = at % kWidth;
      const int row = lane * kSub + at / kWidth * kCoordinates;
      const int point = NearestNeighbour<kBits>(lattice_, lattice_.entries[words[at]], values, scales[lane],
                                                rows_ + row, root_weights_ + row);
      failed_ |= point == kNoPoint;
      words[at] = point & 0xffff;
    }
    memcpy(points, words, sizeof(words));
    memcpy(off_grid, off, sizeof(off));
  }

  JQ_INLINE void Sums(const Ints* points, Floats* sum_qx, Floats* sum_q2) const {
    Floats qx = {}, q2 = {};
    for (int k = 0; k < kWords; ++k) {
      const Ints doubled = points[k] << 1;
      for (int i = 0; i < kCoordinates; ++i) {
        const Floats q = ToReal<Floats>(((doubled >> (kBits * i)) & ((2 << kBits) - 2)) | 1);
        const int at = k * kCoordinates + i;
        qx += wx_[at] * q;
        q2 += w_[at] * q * q;
      }
    }
    *sum_qx = qx;
    *sum_q2 = q2;
  }

  const ggml::Lattice& lattice_;
  const float* rows_;
  const float* root_weights_;
  bool failed_ = false;
  Floats x_[kSub], w_[kSub], wx_[kSub];
};

// A super-block before it is packed.
template <typename F>
struct LatticeBlock {
  static constexpr int kGroups = LatticeRules<F>::kBits == 2 ? 32 : 64;
  static constexpr int kSubBlocks = ggml::kSuper / LatticeRules<F>::kSub;
  uint16_t index[kGroups];  // of grid points
  uint8_t signs[32];
  float scales[kSubBlocks];
  bool used[kSubBlocks];
};

// Magnitudes and sign bits of 8 values. With an even number of signs the least important value takes the wrong one.
template <bool kEven>
JQ_INLINE uint8_t SplitSigns(const float* x, const float* weight, float* magnitude) {
  uint32_t signs = 0;
  for (int i = 0; i < 8; ++i) {
    const bool negative = !(x[i] >= 0.0f);
    signs |= static_cast<uint32_t>(negative) << i;
    magnitude[i] = negative ? -x[i] : x[i];
  }
  if (!kEven) return static_cast<uint8_t>(signs);
  if (__builtin_popcount(signs) % 2 != 0) {
    int least = 0;
    float least_importance = weight[0] * x[0] * x[0];
    for (int i = 1; i < 8; ++i) {
      const float importance = weight[i] * x[i] * x[i];
      if (importance < least_importance) {
        least_importance = importance;
        least = i;
      }
    }
    magnitude[least] = -magnitude[least];
    signs ^= 1u << least;
  }
  return static_cast<uint8_t>(signs & 127);
}

template <typename F>
JQ_INLINE bool SearchBlock(const ggml::Lattice& lattice, const float* x, const float* imatrix, float squares,
                           LatticeBlock<F>* result) {
  using Rules = LatticeRules<F>;
  constexpr int kSub = Rules::kSub, kSubBlocks = ggml::kSuper / kSub;
  constexpr int kWords = kSub / (Rules::kBits == 2 ? 8 : 4), kSignGroups = kSub / 8;
  const float sigma2 = Rules::kSigma * squares / ggml::kSuper;
  float weight[ggml::kSuper], root_weight[ggml::kSuper], magnitude[ggml::kSuper];
  for (int i = 0; i < ggml::kSuper; ++i) {
    weight[i] = imatrix != nullptr ? imatrix[i] * __builtin_sqrtf(sigma2 + x[i] * x[i])
                                   : PlainWeight(static_cast<const F*>(nullptr), x[i], sigma2);
    root_weight[i] = __builtin_sqrtf(weight[i]);
  }
  for (int i = 0; i < 32; ++i) {
    result->signs[i] = SplitSigns<Rules::kEvenSigns>(x + 8 * i, weight + 8 * i, magnitude + 8 * i);
  }
  for (int first = 0; first < kSubBlocks; first += kWidth) {
    const int at = first * kSub;
    LatticeSearch<F> search(lattice, magnitude + at, weight + at, root_weight + at);
    if (!search.Run()) return false;
    for (int lane = 0; lane < kWidth; ++lane) {
      const int sub = first + lane;
      result->scales[sub] = search.scales[lane];
      result->used[sub] = search.used[lane] != 0;
      for (int k = 0; k < kWords; ++k) {
        result->index[sub * kWords + k] = static_cast<uint16_t>(lattice.entries[search.words[k][lane]]);
      }
      for (int k = 0; k < kSignGroups; ++k) {
        uint8_t& signs = result->signs[sub * kSignGroups + k];
        if (search.negative[lane]) signs = static_cast<uint8_t>(~signs) & (Rules::kEvenSigns ? 127 : 255);
        if (!search.used[lane]) signs = 0;
      }
    }
  }
  return true;
}

// ---- Packing, into a block of zeros

JQ_INLINE void PackPoints(const LatticeBlock<ggml::IQ2_XXS>& found, ggml::IQ2_XXS* block) {
  for (int sub = 0; sub < 8; ++sub) {
    uint32_t words[2] = {};  // points, signs
    for (int k = 0; k < 4; ++k) {
      words[0] |= static_cast<uint32_t>(found.index[4 * sub + k]) << (8 * k);
      words[1] |= static_cast<uint32_t>(found.signs[4 * sub + k]) << (7 * k);
    }
    memcpy(block->qs + 4 * sub, words, sizeof(words));
  }
}
JQ_INLINE void PackPoints(const LatticeBlock<ggml::IQ2_XS>& found, ggml::IQ2_XS* block) {
  for (int i = 0; i < 32; ++i) block->qs[i] = static_cast<uint16_t>(found.index[i] | found.signs[i] << 9);
}
JQ_INLINE void PackPoints(const LatticeBlock<ggml::IQ2_S>& found, ggml::IQ2_S* block) {
  for (int i = 0; i < 32; ++i) {
    block->qs[i] = found.index[i] & 255;
    block->qs[32 + i] = found.signs[i];
    block->qh[i / 4] |= static_cast<uint8_t>((found.index[i] >> 8) << (2 * (i % 4)));
  }
}
JQ_INLINE void PackPoints(const LatticeBlock<ggml::IQ3_XXS>& found, ggml::IQ3_XXS* block) {
  for (int i = 0; i < 64; ++i) block->qs[i] = static_cast<uint8_t>(found.index[i]);
  for (int sub = 0; sub < 8; ++sub) {
    uint32_t signs = 0;
    for (int k = 0; k < 4; ++k) signs |= static_cast<uint32_t>(found.signs[4 * sub + k]) << (7 * k);
    memcpy(block->qs + 64 + 4 * sub, &signs, sizeof(signs));
  }
}
// Bug for bug: behind a sub-block of zeros the points' low bits and the signs move up, the high bits do not.
JQ_INLINE void PackPoints(const LatticeBlock<ggml::IQ3_S>& found, ggml::IQ3_S* block) {
  int at = 0;
  for (int sub = 0; sub < 8; ++sub) {
    if (!found.used[sub]) continue;
    for (int k = 0; k < 8; ++k) {
      block->qs[8 * at + k] = found.index[8 * sub + k] & 255;
      block->qh[sub] |= static_cast<uint8_t>((found.index[8 * sub + k] >> 8) << k);
    }
    for (int k = 0; k < 4; ++k) block->signs[4 * at + k] = found.signs[4 * sub + k];
    ++at;
  }
}

template <typename F>
JQ_INLINE void PackScale(F* block, int sub, int scale) {
  block->scales[sub / 2] |= static_cast<uint8_t>(scale << (4 * (sub % 2)));
}
JQ_INLINE void PackScale(ggml::IQ2_XXS* block, int sub, int scale) {
  block->qs[4 * sub + 3] |= static_cast<uint16_t>(scale << 12);
}
JQ_INLINE void PackScale(ggml::IQ3_XXS* block, int sub, int scale) {
  block->qs[64 + 4 * sub + 3] |= static_cast<uint8_t>(scale << 4);
}

template <typename F>
const char* QuantizeLattice(const float* x, void* out, int64_t rows, int64_t n, const float* imatrix) {
  const ggml::Lattice& lattice = ggml::LatticeOf<F>();
  return ForEachSuperBlock<F>(
      x, out, rows, n, imatrix, [&](const float* values, const float* weights, float squares, F* block) -> const char* {
        LatticeBlock<F> found;
        if (!SearchBlock<F>(lattice, values, weights, squares, &found)) return kOutOfRange;
        float largest = 0;
        for (const float scale : found.scales) largest = largest > scale ? largest : scale;
        *block = F{};
        constexpr bool kKeepsPoints = !LatticeRules<F>::kEvenSigns;
        if (largest != 0.0f || kKeepsPoints) PackPoints(found, block);
        if (largest == 0.0f) return nullptr;
        const float d = largest / 31, inverse = 1 / d;
        block->d = ToFloat16(d * LatticeRules<F>::kScale);
        for (int sub = 0; sub < LatticeBlock<F>::kSubBlocks; ++sub) {
          PackScale(block, sub, ggml::Clamp(NearestInt(0.5f * (inverse * found.scales[sub] - 1)), 0, 15));
        }
        return nullptr;
      });
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace jq
