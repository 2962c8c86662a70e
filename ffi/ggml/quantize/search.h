// Searches for the scale (and offset) under which a few values lose the least, each lane its own: the same candidates
// in the same order as ggml's reference, and sums in its order. Codes and scales of a better candidate are not copied
// as they come; the candidate is remembered instead, and its codes are computed once in the end.
#pragma once

#include "ffi/ggml/quantize/lanes.h"

namespace jq {
namespace ggml {

constexpr float kGroupMaximum = 1e-15f;  // groups of smaller values count as zero

// The value of largest magnitude, the first of several.
template <typename V>
struct Extreme {
  V value = {};
  V magnitude = {};
  JQ_HOST_DEVICE void Add(V v) {
    const V a = Abs(v);
    const MaskOf<V> larger = a > magnitude;
    magnitude = Choose(larger, a, magnitude);
    value = Choose(larger, v, value);
  }
};
template <int kCount, typename V>
JQ_HOST_DEVICE Extreme<V> ExtremeOf(const V* x) {
  Extreme<V> extreme;
  for (int i = 0; i < kCount; ++i) extreme.Add(x[i]);
  return extreme;
}

// x = scale * (code - kTop), codes 0 ... 2 * kTop - 1. Weights: x^2 where null.
template <int kCount, int kTop, typename V>
JQ_HOST_DEVICE V SearchSymmetric(const V* x, const V* weights, IntOf<V>* codes) {
  using Int = IntOf<V>;
  const Extreme<V> extreme = ExtremeOf<kCount>(x);
  const MaskOf<V> empty = extreme.magnitude < kGroupMaximum;
  V w[kCount], wx[kCount];
  for (int i = 0; i < kCount; ++i) {
    w[i] = weights ? weights[i] : x[i] * x[i];
    wx[i] = w[i] * x[i];
  }
  V best_inverse = {}, scale = {}, best = {};
  for (int step = 0; step < 19; ++step) {  // 0, then -9 ... 9 without 0
    const int shift = step == 0 ? 0 : step <= 9 ? step - 10 : step - 9;
    const V inverse = -(kTop + 0.1f * shift) / extreme.value;
    V sum_lx = {}, sum_l2 = {};
    for (int i = 0; i < kCount; ++i) {
      const V l = NearestReal(inverse * x[i], -kTop, kTop - 1);
      sum_lx += wx[i] * l;
      sum_l2 += w[i] * l * l;
    }
    const V quotient = sum_lx / sum_l2;
    if (step == 0) {
      best_inverse = inverse;
      scale = Choose(sum_l2 != 0.0f, quotient, V{});
      best = scale * sum_lx;
    } else {
      const MaskOf<V> better = (sum_l2 > 0.0f) & (sum_lx * sum_lx > best * sum_l2);
      best_inverse = Choose(better, inverse, best_inverse);
      scale = Choose(better, quotient, scale);
      best = Choose(better, scale * sum_lx, best);
    }
  }
  for (int i = 0; i < kCount; ++i) {
    const Int l = Clamp(NearestInt(best_inverse * x[i]), -kTop, kTop - 1) + kTop;
    codes[i] = Choose(empty, Int{}, l);
  }
  return Choose(empty, V{}, scale);
}

// The same by moving one code at a time, as long as that helps and at most five times around: kGroups groups of kCount
// values, one after the other, searched side by side since each is one long chain of dependent operations.
template <int kGroups, int kCount, int kTop, typename V>
JQ_HOST_DEVICE void SearchByMoves(const V* x, IntOf<V>* codes, V* scales) {
  using Int = IntOf<V>;
  V w[kGroups * kCount], wx[kGroups * kCount], l[kGroups * kCount];
  V sum_lx[kGroups] = {}, sum_l2[kGroups] = {};
  MaskOf<V> empty[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    const Extreme<V> extreme = ExtremeOf<kCount>(x + g * kCount);
    empty[g] = extreme.magnitude < kGroupMaximum;
    const V inverse = -static_cast<float>(kTop) / extreme.value;
    for (int i = g * kCount; i < (g + 1) * kCount; ++i) {
      l[i] = NearestReal(inverse * x[i], -kTop, kTop - 1);
      w[i] = x[i] * x[i];
      wx[i] = w[i] * x[i];
      sum_lx[g] += wx[i] * l[i];
      sum_l2[g] += w[i] * l[i] * l[i];
    }
  }
  bool moving[kGroups];
  for (bool& m : moving) m = true;
  for (int around = 0; around < 5; ++around) {
    MaskOf<V> moved[kGroups] = {};
    for (int j = 0; j < kCount; ++j) {
      for (int g = 0; g < kGroups; ++g) {
        if (!moving[g]) continue;
        const int i = g * kCount + j;
        V lx = sum_lx[g] - wx[i] * l[i];
        V l2 = sum_l2[g] - w[i] * l[i] * l[i];
        const V next = NearestReal(x[i] * l2 / lx, -kTop, kTop - 1);
        const MaskOf<V> considered = (lx > 0.0f) & (next != l[i]);
        lx += wx[i] * next;
        l2 += w[i] * next * next;
        const MaskOf<V> better = considered & (l2 > 0.0f) & (lx * lx * sum_l2[g] > sum_lx[g] * sum_lx[g] * l2);
        l[i] = Choose(better, next, l[i]);
        sum_lx[g] = Choose(better, lx, sum_lx[g]);
        sum_l2[g] = Choose(better, l2, sum_l2[g]);
        moved[g] = moved[g] | better;
      }
    }
    bool any = false;
    for (int g = 0; g < kGroups; ++g) any |= moving[g] = moving[g] && Any<V>(moved[g]);
    if (!any) break;
  }
  for (int g = 0; g < kGroups; ++g) {
    for (int i = g * kCount; i < (g + 1) * kCount; ++i) codes[i] = Choose(empty[g], Int{}, Truncate(l[i]) + kTop);
    scales[g] = Choose(empty[g], V{}, Choose(sum_l2[g] > 0.0f, sum_lx[g] / sum_l2[g], V{}));
  }
}

// Candidates 0 ... count of SearchAffine: code scales of (first + step * i + top) / range.
struct Candidates {
  float first;
  float step;
  int count;
};

// The weighted error of scale * l + low.
template <int kCount, bool kAbsolute, typename V>
JQ_HOST_DEVICE V ErrorOf(const V* x, const V* w, const V* l, V scale, V low) {
  V sum = {};
  for (int i = 0; i < kCount; ++i) {
    const V difference = scale * l[i] + low - x[i];
    sum += w[i] * (kAbsolute ? Abs(difference) : difference * difference);
  }
  return sum;
}

// x = scale * code - *offset, codes 0 ... kTop. kAbsolute: the error is |difference|, not its square.
template <int kCount, int kTop, bool kAbsolute, typename V>
JQ_HOST_DEVICE V SearchAffine(const V* x, const V* w, Candidates candidates, IntOf<V>* codes, V* offset) {
  using Int = IntOf<V>;
  V low = x[0], high = x[0], sum_w = w[0], sum_x = w[0] * x[0];
  for (int i = 1; i < kCount; ++i) {
    low = Choose(x[i] < low, x[i], low);
    high = Choose(x[i] > high, x[i], high);
    sum_w += w[i];
    sum_x += w[i] * x[i];
  }
  low = Choose(low > 0.0f, V{}, low);
  const MaskOf<V> constant = high == low;
  const V first_low = low;
  V best_inverse = static_cast<float>(kTop) / (high - low), best_low = low;
  V scale = 1.0f / best_inverse;
  V l[kCount];
  for (int i = 0; i < kCount; ++i) l[i] = NearestReal(best_inverse * (x[i] - low), 0, kTop);
  V best_error = ErrorOf<kCount, kAbsolute>(x, w, l, scale, low);
  for (int step = 0; step <= candidates.count; ++step) {
    // The range is that of the best so far, as in the reference.
    const V inverse = (candidates.first + candidates.step * step + kTop) / (high - low);
    V sum_l = {}, sum_l2 = {}, sum_xl = {};
    for (int i = 0; i < kCount; ++i) {
      l[i] = NearestReal(inverse * (x[i] - low), 0, kTop);
      const V wl = w[i] * l[i];
      sum_l += wl;
      sum_l2 += wl * l[i];
      sum_xl += wl * x[i];
    }
    const V determinant = sum_w * sum_l2 - sum_l * sum_l;
    V this_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    V this_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
    const MaskOf<V> positive = this_low > 0.0f;
    this_low = Choose(positive, V{}, this_low);
    this_scale = Choose(positive, sum_xl / sum_l2, this_scale);
    const V this_error = ErrorOf<kCount, kAbsolute>(x, w, l, this_scale, this_low);
    const MaskOf<V> better = (determinant > 0.0f) & (this_error < best_error);
    best_inverse = Choose(better, inverse, best_inverse);
    best_low = Choose(better, low, best_low);
    best_error = Choose(better, this_error, best_error);
    scale = Choose(better, this_scale, scale);
    low = Choose(better, this_low, low);
  }
  for (int i = 0; i < kCount; ++i) {
    codes[i] = Choose(constant, Int{}, Clamp(NearestInt(best_inverse * (x[i] - best_low)), 0, kTop));
  }
  *offset = -Choose(constant, first_low, low);
  return Choose(constant, V{}, scale);
}

// x = scale * code, codes 0 ... kTop: for scales and offsets of sub-blocks.
template <int kCount, int kTop, typename V>
JQ_HOST_DEVICE V SearchPositive(const V* x, const V* w, IntOf<V>* codes) {
  using Int = IntOf<V>;
  V high = {};
  for (int i = 0; i < kCount; ++i) high = Choose(high > x[i], high, x[i]);
  const MaskOf<V> empty = high < kGroupMaximum;
  V inverse = {}, best_error = {};
  for (int step = 0; step < 9; ++step) {  // 0, then -4 ... 4 without 0
    const int shift = step == 0 ? 0 : step <= 4 ? step - 5 : step - 4;
    const V this_inverse = (0.1f * shift + kTop) / high;
    const V scale = 1.0f / this_inverse;
    V error = {};
    for (int i = 0; i < kCount; ++i) {
      const Int nearest = NearestInt(this_inverse * x[i]);
      const V difference = x[i] - scale * ToReal<V>(step == 0 ? nearest & 0xff : Min(nearest, kTop));
      error += w[i] * difference * difference;
    }
    if (step == 0) {
      best_error = error;
      inverse = this_inverse;
    } else {
      const MaskOf<V> better = error < best_error;
      best_error = Choose(better, error, best_error);
      inverse = Choose(better, this_inverse, inverse);
    }
  }
  V sum_lx = {}, sum_l2 = {};
  for (int i = 0; i < kCount; ++i) {
    const Int nearest = Min(NearestInt(inverse * x[i]), kTop);
    const V l = ToReal<V>(nearest);
    codes[i] = nearest & 0xff;
    sum_lx += w[i] * x[i] * l;
    sum_l2 += w[i] * l * l;
  }
  for (int around = 0; around < 5; ++around) {
    MaskOf<V> moved = {};
    for (int i = 0; i < kCount; ++i) {
      const V l = ToReal<V>(codes[i]);
      V lx = sum_lx - w[i] * x[i] * l;
      V l2 = sum_l2 - w[i] * l * l;
      const Int nearest = Min(NearestInt(x[i] * l2 / lx), kTop);
      const V next = ToReal<V>(nearest);
      const MaskOf<V> considered = (lx > 0.0f) & (l2 > 0.0f) & (nearest != codes[i]);
      lx += w[i] * x[i] * next;
      l2 += w[i] * next * next;
      const MaskOf<V> better = considered & (lx * lx * sum_l2 > sum_lx * sum_lx * l2);
      codes[i] = Choose(better, nearest & 0xff, codes[i]);
      sum_lx = Choose(better, lx, sum_lx);
      sum_l2 = Choose(better, l2, sum_l2);
      moved = moved | better;
    }
    if (!Any<V>(moved)) break;
  }
  for (int i = 0; i < kCount; ++i) codes[i] = Choose(empty, Int{}, codes[i]);
  return Choose(empty, V{}, Choose(sum_l2 > 0.0f, sum_lx / sum_l2, V{}));
}

}  // namespace ggml
}  // namespace jq
