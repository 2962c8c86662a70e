// K-quants: super-blocks of 256 values, whose sub-blocks' scales (and offsets) are quantised too. Each is quantised in
// three steps: search a scale per sub-block, quantise those, round the values once more under the scales so stored.
#pragma once

#include "ffi/ggml/quantize/simple.h"

namespace jq {
namespace ggml {

template <typename V>
JQ_HOST_DEVICE V SumOfSquares(const V* x, int count) {
  V sum = {};
  for (int j = 0; j < count; ++j) sum += x[j] * x[j];
  return sum;
}

// The weights of a sub-block of kCount values under an importance matrix, and their sum.
template <int kCount, typename V>
JQ_HOST_DEVICE V ImportanceOf(const V* x, const V* importance, V sigma2, V* weights) {
  V sum = {};
  for (int i = 0; i < kCount; ++i) {
    weights[i] = importance[i] * Sqrt(sigma2 + x[i] * x[i]);
    sum += weights[i];
  }
  return sum;
}

// Codes of values under their sub-block's scale d (and offset m); where d is zero the codes of the search stay.
template <int kCount, typename V>
JQ_HOST_DEVICE void RoundOnce(const V* x, V d, V m, int low, int high, IntOf<V>* codes) {
  const MaskOf<V> zero = d == 0.0f;
  for (int i = 0; i < kCount; ++i) {
    const IntOf<V> code = Clamp(NearestInt((x[i] + m) / d), low, high) - low;
    codes[i] = Choose(zero, codes[i], code);
  }
}
template <int kCount, typename V>
JQ_HOST_DEVICE void RoundOnce(const V* x, V d, int low, int high, IntOf<V>* codes) {
  const MaskOf<V> zero = d == 0.0f;
  for (int i = 0; i < kCount; ++i) {
    const IntOf<V> code = Clamp(NearestInt(x[i] / d), low, high) - low;
    codes[i] = Choose(zero, codes[i], code);
  }
}

// Scales of sub-blocks that are not negative as codes 0 ... kTop with one scale, which is the return value.
template <int kCount, int kTop, typename V>
JQ_HOST_DEVICE V QuantizeScales(const V* scales, IntOf<V>* codes) {
  using Int = IntOf<V>;
  V high = {};
  for (int j = 0; j < kCount; ++j) high = Choose(scales[j] > high, scales[j], high);
  const MaskOf<V> any = high > 0.0f;
  const V inverse = Choose(any, static_cast<float>(kTop) / high, V{});
  for (int j = 0; j < kCount; ++j) codes[j] = Choose(any, NearestInt(inverse * scales[j]) & 255, Int{});
  return high / static_cast<float>(kTop);
}

// Two bits, from `shift` on, of the codes at 128 i + l, 128 i + l + 32, ... + 64, ... + 96 together, as bytes 32 i + l.
template <typename V, typename Out>
JQ_HOST_DEVICE void PutPairs(const IntOf<V>* codes, int shift, const Out& out, int offset) {
  for (int j = 0; j < 64; j += 4) {
    IntOf<V> bytes[4] = {};
    for (int b = 0; b < 4; ++b) {
      const IntOf<V>* c = codes + j / 32 * 128 + j % 32 + b;
      for (int n = 0; n < 4; ++n) bytes[b] |= ((c[32 * n] >> shift) & 3) << (2 * n);
    }
    out.template Put<4>(offset + j, Word(bytes));
  }
}

// One bit of the codes at l, l + 32, ... + 224 together, as byte l.
template <typename V, typename Out>
JQ_HOST_DEVICE void PutBits(const IntOf<V>* codes, int shift, const Out& out, int offset) {
  for (int j = 0; j < 32; j += 4) {
    IntOf<V> bytes[4] = {};
    for (int b = 0; b < 4; ++b) {
      for (int n = 0; n < 8; ++n) bytes[b] |= ((codes[j + b + 32 * n] >> shift) & 1) << n;
    }
    out.template Put<4>(offset + j, Word(bytes));
  }
}

// ---- Q2_K: 16 sub-blocks with scale and offset of 4 bits

template <typename V>
JQ_HOST_DEVICE void Quantize(Q2_K, const Tile<V>& tile, const Writer<Q2_K, V>& out) {
  using Int = IntOf<V>;
  Int codes[256], scale_codes[16], offset_codes[16];
  V scales[16], offsets[16], sums[16];
  const V sigma2 = tile.weights ? SumOfSquares(tile.x, 256) / 256.0f : V{};
  for (int j = 0; j < 16; ++j) {
    const V* x = tile.x + 16 * j;
    V weights[16];
    if (tile.weights) {
      sums[j] = ImportanceOf<16>(x, tile.weights + 16 * j, sigma2, weights);
      scales[j] = SearchAffine<16, 3, false>(x, weights, Candidates{-0.9f, 0.05f, 36}, codes + 16 * j, &offsets[j]);
    } else {
      for (int i = 0; i < 16; ++i) weights[i] = Abs(x[i]);
      scales[j] = SearchAffine<16, 3, true>(x, weights, Candidates{-0.5f, 0.1f, 15}, codes + 16 * j, &offsets[j]);
    }
  }
  V d, m;
  if (tile.weights) {
    d = SearchPositive<16, 15>(scales, sums, scale_codes);
    m = SearchPositive<16, 15>(offsets, sums, offset_codes);
  } else {
    d = QuantizeScales<16, 15>(scales, scale_codes);
    m = QuantizeScales<16, 15>(offsets, offset_codes);
  }
  const Int d_bits = HalfBits(d), m_bits = HalfBits(m);
  d = HalfValue<V>(d_bits);
  m = HalfValue<V>(m_bits);
  for (int j = 0; j < 16; ++j) {
    scale_codes[j] = (scale_codes[j] | (offset_codes[j] << 4)) & 255;
    const V sub_d = d * ToReal<V>(scale_codes[j] & 15);
    RoundOnce<16>(tile.x + 16 * j, sub_d, m * ToReal<V>(scale_codes[j] >> 4), 0, 3, codes + 16 * j);
  }
  for (int j = 0; j < 16; j += 4) {
    out.template Put<4>(offsetof(Q2_K, scales) + j, Word(scale_codes + j));
  }
  PutPairs<V>(codes, 0, out, offsetof(Q2_K, qs));
  out.template Put<2>(offsetof(Q2_K, d), d_bits);
  out.template Put<2>(offsetof(Q2_K, dmin), m_bits);
}

// ---- Q3_K: 16 sub-blocks with a scale of 6 bits

template <typename V>
JQ_HOST_DEVICE void Quantize(Q3_K, const Tile<V>& tile, const Writer<Q3_K, V>& out) {
  using Int = IntOf<V>;
  Int codes[256], scale_codes[16];
  V scales[16], d;
  if (tile.weights) {
    V sums[16];
    const V sigma2 = SumOfSquares(tile.x, 256) * 2.0f / 256.0f;
    for (int j = 0; j < 16; ++j) {
      V weights[16];
      sums[j] = ImportanceOf<16>(tile.x + 16 * j, tile.weights + 16 * j, sigma2, weights);
      scales[j] = SearchSymmetric<16, 4>(tile.x + 16 * j, weights, codes + 16 * j);
    }
    d = SearchSymmetric<16, 32>(scales, sums, scale_codes);
  } else {
    for (int j = 0; j < 16; j += 8) SearchByMoves<8, 16, 4>(tile.x + 16 * j, codes + 16 * j, scales + j);
    const V extreme = ExtremeOf<16>(scales).value;
    const MaskOf<V> any = extreme != 0.0f;
    const V inverse = -32.0f / extreme;
    for (int j = 0; j < 16; ++j) {
      const Int nearest = ((NearestInt(inverse * scales[j]) & 255) ^ 128) - 128;
      scale_codes[j] = Choose(any, Clamp(nearest, -32, 31) + 32, Int{});
    }
    d = Choose(any, 1.0f / inverse, V{});
  }
  const Int d_bits = HalfBits(d);
  d = HalfValue<V>(d_bits);
  for (int j = 0; j < 16; ++j) {
    RoundOnce<16>(tile.x + 16 * j, d * ToReal<V>(scale_codes[j] - 32), -4, 3, codes + 16 * j);
  }
  PutBits<V>(codes, 2, out, offsetof(Q3_K, hmask));
  PutPairs<V>(codes, 0, out, offsetof(Q3_K, qs));
  // Four low bits of sub-blocks j and j + 8, then two high bits of j, j + 4, j + 8, j + 12.
  Int bytes[12] = {};
  for (int j = 0; j < 16; ++j) {
    bytes[j % 8] |= (scale_codes[j] & 15) << (j / 8 * 4);
    bytes[8 + j % 4] |= (scale_codes[j] >> 4) << (j / 4 * 2);
  }
  for (int j = 0; j < 12; j += 4) out.template Put<4>(offsetof(Q3_K, scales) + j, Word(bytes + j));
  out.template Put<2>(offsetof(Q3_K, d), d_bits);
}

// ---- Q4_K, Q5_K: 8 sub-blocks with scale and offset of 6 bits

template <int kTop, typename F, typename V>
JQ_HOST_DEVICE void QuantizeEight(const Tile<V>& tile, Candidates candidates, IntOf<V>* codes,
                                  const Writer<F, V>& out) {
  using Int = IntOf<V>;
  Int scale_codes[8], offset_codes[8];
  V scales[8], offsets[8], sums[8], d, m;
  const V sigma2 = tile.weights ? SumOfSquares(tile.x, 256) * 2.0f / 256.0f : V{};
  for (int j = 0; j < 8; ++j) {
    const V* x = tile.x + 32 * j;
    V weights[32];
    if (tile.weights) {
      sums[j] = ImportanceOf<32>(x, tile.weights + 32 * j, sigma2, weights);
    } else {
      const V average = Sqrt(SumOfSquares(x, 32) / 32.0f);
      for (int i = 0; i < 32; ++i) weights[i] = average + Abs(x[i]);
    }
    scales[j] = SearchAffine<32, kTop, false>(x, weights, candidates, codes + 32 * j, &offsets[j]);
  }
  if (tile.weights) {
    d = SearchPositive<8, 63>(scales, sums, scale_codes);
    m = SearchPositive<8, 63>(offsets, sums, offset_codes);
  } else {
    d = QuantizeScales<8, 63>(scales, scale_codes);
    m = QuantizeScales<8, 63>(offsets, offset_codes);
  }
  const Int d_bits = HalfBits(d), m_bits = HalfBits(m);
  d = HalfValue<V>(d_bits);
  m = HalfValue<V>(m_bits);
  for (int j = 0; j < 8; ++j) {
    scale_codes[j] = Min(scale_codes[j], 63);
    offset_codes[j] = Min(offset_codes[j], 63);
  }
  // Scales and offsets of 0 ... 3 in bytes 0 ... 7, with the high bits of 4 ... 7; the low bits of those in 8 ... 11.
  Int bytes[12];
  for (int j = 0; j < 4; ++j) {
    bytes[j] = scale_codes[j] | ((scale_codes[j + 4] >> 4) << 6);
    bytes[j + 4] = offset_codes[j] | ((offset_codes[j + 4] >> 4) << 6);
    bytes[j + 8] = (scale_codes[j + 4] & 15) | ((offset_codes[j + 4] & 15) << 4);
  }
  for (int j = 0; j < 12; j += 4) out.template Put<4>(offsetof(F, scales) + j, Word(bytes + j));
  for (int j = 0; j < 8; ++j) {
    const V sub_d = d * ToReal<V>(scale_codes[j]), sub_m = m * ToReal<V>(offset_codes[j]);
    RoundOnce<32>(tile.x + 32 * j, sub_d, sub_m, 0, kTop, codes + 32 * j);
    if (j % 2) PutNibbles<64, V>(codes + 32 * (j - 1), out, offsetof(F, qs) + 16 * (j - 1));
  }
  out.template Put<2>(offsetof(F, d), d_bits);
  out.template Put<2>(offsetof(F, dmin), m_bits);
}

constexpr Candidates kWithImportance = {-0.9f, 0.05f, 36};

template <typename V>
JQ_HOST_DEVICE void Quantize(Q4_K, const Tile<V>& tile, const Writer<Q4_K, V>& out) {
  IntOf<V> codes[256];
  QuantizeEight<15, Q4_K>(tile, tile.weights ? kWithImportance : Candidates{-1.0f, 0.1f, 20}, codes, out);
}

template <typename V>
JQ_HOST_DEVICE void Quantize(Q5_K, const Tile<V>& tile, const Writer<Q5_K, V>& out) {
  IntOf<V> codes[256];
  QuantizeEight<31, Q5_K>(tile, tile.weights ? kWithImportance : Candidates{-0.5f, 0.1f, 15}, codes, out);
  PutBits<V>(codes, 4, out, offsetof(Q5_K, qh));
}

// ---- Q6_K: 16 sub-blocks with a scale of 8 bits

template <typename V>
JQ_HOST_DEVICE void Quantize(Q6_K, const Tile<V>& tile, const Writer<Q6_K, V>& out) {
  using Int = IntOf<V>;
  Int codes[256], scale_codes[16];
  V scales[16];
  for (int j = 0; j < 16; ++j) {
    const V* weights = tile.weights ? tile.weights + 16 * j : nullptr;
    scales[j] = SearchSymmetric<16, 32>(tile.x + 16 * j, weights, codes + 16 * j);
  }
  const Extreme<V> extreme = ExtremeOf<16>(scales);
  const Int used = Choose(extreme.magnitude < kGroupMaximum, Int{}, Int{} - 1);  // a block of zeros is zero bytes
  const V inverse = -128.0f / extreme.value;
  const Int d_bits = HalfBits(1.0f / inverse) & used;
  const V d = HalfValue<V>(d_bits);
  for (int j = 0; j < 16; ++j) {
    const Int nearest = Min(NearestInt(inverse * scales[j]), 127) & used & 255;
    scale_codes[j] = nearest;
    RoundOnce<16>(tile.x + 16 * j, d * ToReal<V>((nearest ^ 128) - 128), -32, 31, codes + 16 * j);
  }
  for (int i = 0; i < 256; ++i) codes[i] &= used;
  PutNibbles<128, V>(codes, out, offsetof(Q6_K, ql));
  PutNibbles<128, V>(codes + 128, out, offsetof(Q6_K, ql) + 64);
  PutPairs<V>(codes, 4, out, offsetof(Q6_K, qh));
  for (int j = 0; j < 16; j += 4) {
    out.template Put<4>(offsetof(Q6_K, scales) + j, Word(scale_codes + j));
  }
  out.template Put<2>(offsetof(Q6_K, d), d_bits);
}

}  // namespace ggml
}  // namespace jq
