// The formats whose blocks have one scale: legacy, 8-bit, ternary and 4-bit floats. Quantize(format, tile, writer).
#pragma once

#include <cstddef>

#include "ffi/ggml/formats.h"
#include "ffi/ggml/quantize/search.h"
#include "ffi/ggml/tables.h"

namespace jq {
namespace ggml {

// A block per lane.
template <typename V>
struct Tile {
  const V* x;
  const V* weights;  // the importance matrix, or null
  V sigma2;          // mean square of the row, for the legacy formats under weights
};

template <typename F, typename V>
using Writer = BlockWriter<V, static_cast<int>(sizeof(F))>;

// 1 / d, or zero where d is. finite: where it did not overflow; codes are zero elsewhere.
template <typename V>
struct Reciprocal {
  V value;
  IntOf<V> finite;  // all bits, or none

  static JQ_HOST_DEVICE Reciprocal Of(V d) {
    using Int = IntOf<V>;
    const V value = Choose(d != 0.0f, 1.0f / d, V{});
    return {value, Choose(Abs(value) <= 3.402823466e38f, Int{} - 1, Int{})};
  }
};

// Codes of 4 bits: byte j holds those of values j and j + count / 2.
template <int kCount, typename V, typename Out>
JQ_HOST_DEVICE void PutNibbles(const IntOf<V>* codes, const Out& out, int offset) {
  for (int j = 0; j < kCount / 2; j += 4) {
    IntOf<V> bytes[4];
    for (int b = 0; b < 4; ++b) bytes[b] = (codes[j + b] & 15) | ((codes[j + b + kCount / 2] & 15) << 4);
    out.template Put<4>(offset + j, Word(bytes));
  }
}
// The fifth bits of 32 codes.
template <typename V, typename Out>
JQ_HOST_DEVICE void PutFifthBits(const IntOf<V>* codes, const Out& out, int offset) {
  IntOf<V> word = {};
  for (int j = 0; j < 32; ++j) word |= ShiftLeft((codes[j] >> 4) & 1, j);
  out.template Put<4>(offset, word);
}

// ---- Q4_0, Q5_0: x = d * (code - kTop); Q4_1, Q5_1: x = d * code + m

template <int kTop, typename F, typename V>
JQ_HOST_DEVICE void QuantizeSymmetric(const Tile<V>& tile, IntOf<V>* codes, const Writer<F, V>& out) {
  using Int = IntOf<V>;
  V d;
  if (tile.weights) {
    V weights[32];
    for (int j = 0; j < 32; ++j) weights[j] = tile.weights[j] * Sqrt(tile.sigma2 + tile.x[j] * tile.x[j]);
    d = SearchSymmetric<32, kTop>(tile.x, weights, codes);
  } else {
    d = ExtremeOf<32>(tile.x).value / -static_cast<float>(kTop);
    const Reciprocal<V> inverse = Reciprocal<V>::Of(d);
    for (int j = 0; j < 32; ++j) {
      const Int code = Truncate(tile.x[j] * inverse.value + (kTop + 0.5f)) & inverse.finite;
      codes[j] = Min(code, 2 * kTop - 1);
    }
  }
  out.template Put<2>(offsetof(F, d), HalfBits(d));
}

template <int kTop, typename F, typename V>
JQ_HOST_DEVICE void QuantizeAffine(const Tile<V>& tile, IntOf<V>* codes, const Writer<F, V>& out) {
  using Int = IntOf<V>;
  V d, low;
  if (tile.weights) {
    V weights[32], offset;
    for (int j = 0; j < 32; ++j) weights[j] = tile.weights[j] * Sqrt(tile.sigma2 + tile.x[j] * tile.x[j]);
    d = SearchAffine<32, kTop, false>(tile.x, weights, Candidates{-0.9f, 0.05f, 36}, codes, &offset);
    low = -offset;
  } else {
    low = tile.x[0];
    V high = tile.x[0];
    for (int j = 1; j < 32; ++j) {
      low = Choose(tile.x[j] < low, tile.x[j], low);
      high = Choose(tile.x[j] > high, tile.x[j], high);
    }
    d = (high - low) / static_cast<float>(kTop);
    const Reciprocal<V> inverse = Reciprocal<V>::Of(d);
    // A range that overflows has zero codes too: its reciprocal is zero, and inf * 0 NaN.
    const Int finite = Choose(d <= 3.402823466e38f, inverse.finite, Int{});
    for (int j = 0; j < 32; ++j) {
      codes[j] = Min(Truncate((tile.x[j] - low) * inverse.value + 0.5f) & finite, kTop);
    }
  }
  out.template Put<2>(offsetof(F, d), HalfBits(d));
  out.template Put<2>(offsetof(F, m), HalfBits(low));
}

template <typename V>
JQ_HOST_DEVICE void Quantize(Q4_0, const Tile<V>& tile, const Writer<Q4_0, V>& out) {
  IntOf<V> codes[32];
  QuantizeSymmetric<8, Q4_0>(tile, codes, out);
  PutNibbles<32, V>(codes, out, offsetof(Q4_0, qs));
}
template <typename V>
JQ_HOST_DEVICE void Quantize(Q5_0, const Tile<V>& tile, const Writer<Q5_0, V>& out) {
  IntOf<V> codes[32];
  QuantizeSymmetric<16, Q5_0>(tile, codes, out);
  PutFifthBits<V>(codes, out, offsetof(Q5_0, qh));
  PutNibbles<32, V>(codes, out, offsetof(Q5_0, qs));
}
template <typename V>
JQ_HOST_DEVICE void Quantize(Q4_1, const Tile<V>& tile, const Writer<Q4_1, V>& out) {
  IntOf<V> codes[32];
  QuantizeAffine<15, Q4_1>(tile, codes, out);
  PutNibbles<32, V>(codes, out, offsetof(Q4_1, qs));
}
template <typename V>
JQ_HOST_DEVICE void Quantize(Q5_1, const Tile<V>& tile, const Writer<Q5_1, V>& out) {
  IntOf<V> codes[32];
  QuantizeAffine<31, Q5_1>(tile, codes, out);
  PutFifthBits<V>(codes, out, offsetof(Q5_1, qh));
  PutNibbles<32, V>(codes, out, offsetof(Q5_1, qs));
}

// ---- 8 bits

template <int kCount, typename V>
JQ_HOST_DEVICE V Magnitude(const V* x) {
  V magnitude = {};
  for (int j = 0; j < kCount; ++j) {
    const V a = Abs(x[j]);
    magnitude = Choose(magnitude > a, magnitude, a);
  }
  return magnitude;
}

// Writes d and the codes, and gives d and the sum of the codes.
template <typename F, typename V>
JQ_HOST_DEVICE V QuantizeBytes(const V* x, const Writer<F, V>& out, IntOf<V>* sum) {
  using Int = IntOf<V>;
  const V d = Magnitude<32>(x) / 127.0f;
  const Reciprocal<V> inverse = Reciprocal<V>::Of(d);
  out.template Put<2>(offsetof(F, d), HalfBits(d));
  *sum = Int{};
  for (int j = 0; j < 32; j += 4) {
    Int q[4];
    for (int b = 0; b < 4; ++b) {
      q[b] = RoundAway(x[j + b] * inverse.value) & inverse.finite;
      *sum += q[b];
    }
    out.template Put<4>(offsetof(F, qs) + j, Word<Int>(q[0] & 255, q[1] & 255, q[2] & 255, q[3] & 255));
  }
  return d;
}
template <typename V>
JQ_HOST_DEVICE void Quantize(Q8_0, const Tile<V>& tile, const Writer<Q8_0, V>& out) {
  IntOf<V> sum;
  QuantizeBytes<Q8_0>(tile.x, out, &sum);
}
template <typename V>
JQ_HOST_DEVICE void Quantize(Q8_1, const Tile<V>& tile, const Writer<Q8_1, V>& out) {
  IntOf<V> sum;
  const V d = QuantizeBytes<Q8_1>(tile.x, out, &sum);
  out.template Put<2>(offsetof(Q8_1, s), HalfBits(ToReal<V>(sum) * d));
}
template <typename V>
JQ_HOST_DEVICE void Quantize(Q8_K, const Tile<V>& tile, const Writer<Q8_K, V>& out) {
  using Int = IntOf<V>;
  const Extreme<V> extreme = ExtremeOf<256>(tile.x);
  const Int used = Choose(extreme.magnitude != 0.0f, Int{} - 1, Int{});
  const V inverse = -127.0f / extreme.value;
  out.template Put<4>(offsetof(Q8_K, d), BitCast<Int>(1.0f / inverse) & used);
  for (int j = 0; j < 256; j += 16) {
    Int sum = {};
    for (int i = 0; i < 16; i += 4) {
      Int q[4];
      for (int b = 0; b < 4; ++b) {
        q[b] = Min(NearestInt(inverse * tile.x[j + i + b]), 127) & used & 255;
        sum += ((q[b] ^ 128) - 128);
      }
      out.template Put<4>(offsetof(Q8_K, qs) + j + i, Word(q));
    }
    out.template Put<2>(offsetof(Q8_K, bsums) + j / 8, sum);
  }
}

// ---- 1 and 2 bits, ternary

template <typename V>
JQ_HOST_DEVICE void Quantize(Q1_0, const Tile<V>& tile, const Writer<Q1_0, V>& out) {
  using Int = IntOf<V>;
  V sum = {};
  for (int j = 0; j < 128; ++j) sum += Abs(tile.x[j]);
  out.template Put<2>(offsetof(Q1_0, d), HalfBits(sum / 128.0f));
  for (int j = 0; j < 128; j += 32) {
    Int word = {};
    for (int b = 0; b < 32; ++b) {
      word |= Choose(tile.x[j + b] >= 0.0f, Int{} + static_cast<int>(1u << b), Int{});
    }
    out.template Put<4>(offsetof(Q1_0, qs) + j / 8, word);
  }
}

template <typename V>
JQ_HOST_DEVICE void Quantize(Q2_0, const Tile<V>& tile, const Writer<Q2_0, V>& out) {
  using Int = IntOf<V>;
  const V d = Magnitude<64>(tile.x);
  const Reciprocal<V> inverse = Reciprocal<V>::Of(d);
  out.template Put<2>(offsetof(Q2_0, d), HalfBits(d));
  for (int j = 0; j < 64; j += 16) {
    Int word = {};
    for (int b = 0; b < 16; ++b) {
      const Int code = Clamp(RoundAway(tile.x[j + b] * inverse.value) + 1, 0, 3) & inverse.finite;
      word |= ShiftLeft(code, 2 * b);
    }
    out.template Put<4>(offsetof(Q2_0, qs) + j / 4, word);
  }
}

// Digits 0, 1, 2 of a ternary block; 1 where the scale has no finite reciprocal.
template <typename V>
struct Ternary {
  const V* x;
  V d;
  Reciprocal<V> inverse;

  static JQ_HOST_DEVICE Ternary Of(const V* x) {
    const V d = Magnitude<256>(x);
    return {x, d, Reciprocal<V>::Of(d)};
  }
  JQ_HOST_DEVICE IntOf<V> Digit(int j) const { return (RoundAway(x[j] * inverse.value) & inverse.finite) + 1; }
};

// kStride bytes of kDigits values each, kStride apart from `first` on. A byte is the fraction 0.d0 d1 d2 d3 d4 of base
// 3 in 256ths, rounded up.
template <int kStride, int kDigits, typename V>
JQ_HOST_DEVICE void PutFractions(const Ternary<V>& ternary, int first, const Writer<TQ1_0, V>& out, int offset) {
  for (int j = 0; j < kStride; j += 4) {
    IntOf<V> bytes[4];
    for (int b = 0; b < 4; ++b) {
      IntOf<V> q = {};
      for (int n = 0; n < 5; ++n) {
        q *= 3;
        if (n < kDigits) q += ternary.Digit(first + j + b + n * kStride);
      }
      bytes[b] = ((q * 256 + 242) * 8631) >> 21;  // (q * 256 + 242) / 243, exact for q < 243
    }
    out.template Put<4>(offset + j, Word(bytes));
  }
}

template <typename V>
JQ_HOST_DEVICE void Quantize(TQ1_0, const Tile<V>& tile, const Writer<TQ1_0, V>& out) {
  const Ternary<V> ternary = Ternary<V>::Of(tile.x);
  PutFractions<32, 5>(ternary, 0, out, offsetof(TQ1_0, qs));
  PutFractions<16, 5>(ternary, 160, out, offsetof(TQ1_0, qs) + 32);
  PutFractions<4, 4>(ternary, 240, out, offsetof(TQ1_0, qh));
  out.template Put<2>(offsetof(TQ1_0, d), HalfBits(ternary.d));
}

template <typename V>
JQ_HOST_DEVICE void Quantize(TQ2_0, const Tile<V>& tile, const Writer<TQ2_0, V>& out) {
  const Ternary<V> ternary = Ternary<V>::Of(tile.x);
  for (int j = 0; j < 64; j += 4) {
    IntOf<V> bytes[4] = {};
    for (int b = 0; b < 4; ++b) {
      const int first = j / 32 * 128 + j % 32 + b;
      for (int n = 0; n < 4; ++n) bytes[b] |= ternary.Digit(first + 32 * n) << (2 * n);
    }
    out.template Put<4>(offsetof(TQ2_0, qs) + j, Word(bytes));
  }
  out.template Put<2>(offsetof(TQ2_0, d), HalfBits(ternary.d));
}

// ---- 4-bit floats

// The code of the value of kValuesFP4 nearest to x / d, the first of equals; bit 3 is the sign. Only values of x's sign
// can be nearer than zero.
template <typename V>
JQ_HOST_DEVICE IntOf<V> NearestFP4(V x, V d) {
  using Int = IntOf<V>;
  const V magnitude = Abs(x);
  V best = magnitude;
  Int code = {};
  for (int i = 1; i < 8; ++i) {
    const V error = Abs(static_cast<float>(kValuesFP4[i]) * d - magnitude);
    const MaskOf<V> nearer = error < best;
    best = Choose(nearer, error, best);
    code = Choose(nearer, Int{} + i, code);
  }
  return code | ((Choose(code != 0, BitCast<Int>(x), Int{}) >> 28) & 8);
}

template <int kCount, typename V, typename Out>
JQ_HOST_DEVICE void PutFP4(const V* x, V d, const Out& out, int offset) {
  IntOf<V> codes[kCount];
  for (int j = 0; j < kCount; ++j) codes[j] = NearestFP4(x[j], d);
  PutNibbles<kCount, V>(codes, out, offset);
}

// floorf(log2f(v)), v > 0, as a float logarithm gives it: values that close below a power of two count as the power.
// Their number grows with the power's own magnitude, since log2f rounds to fewer fractional bits there.
template <typename V>
JQ_HOST_DEVICE IntOf<V> FloorLog2(V v) {
  using Int = IntOf<V>;
  const MaskOf<V> subnormal = v < 1.17549435e-38f;
  const Int bits = BitCast<Int>(Choose(subnormal, v * 4294967296.0f, v));
  const Int bias = Choose(subnormal, Int{} + 159, Int{} + 127);
  const Int power = (bits >> 23) - bias + 1;  // the next one
  const Int span = Choose(power > 0, power - 1, -power);
  const V unit = BitCast<V>(BitCast<Int>(ToReal<V>(span)) & 0x7f800000);  // the power of two in span
  const Int close = Truncate(unit * 0.69314718f);
  return ((bits + close) >> 23) - bias;
}

template <typename V>
JQ_HOST_DEVICE void Quantize(MXFP4, const Tile<V>& tile, const Writer<MXFP4, V>& out) {
  using Int = IntOf<V>;
  const V magnitude = Magnitude<32>(tile.x);
  // A byte, so that exponents below it wrap around.
  const Int e = Choose(magnitude > 0.0f, (FloorLog2(magnitude) + 125) & 255, Int{});
  const Int half_scale = Choose(e < 2, Choose(e < 1, Int{} + 0x00200000, Int{} + 0x00400000), ShiftLeft(e - 1, 23));
  out.template Put<1>(offsetof(MXFP4, e), e);
  PutFP4<32>(tile.x, BitCast<V>(half_scale), out, offsetof(MXFP4, qs));
}

// Unsigned E4M3 with bias 7, half away from zero, at most 448.
template <typename V>
JQ_HOST_DEVICE IntOf<V> ToUE4M3(V v) {
  using Int = IntOf<V>;
  v = Choose(v > 448.0f, Splat<V>(448.0f), v);
  const Int bits = BitCast<Int>(v);
  const Int exponent = (bits >> 23) - 120;
  const Int subnormal = Min(Truncate(v * 512.0f + 0.5f), 7);
  const Int normal = exponent * 8 + ((bits >> 20) & 7) + ((bits >> 19) & 1);
  // ggml uses none of the codes between 256 and 448.
  return Choose(exponent <= 0, subnormal, Choose(normal >= 0x78, Int{} + 0x7e, normal));
}
// Half its value.
template <typename V>
JQ_HOST_DEVICE V HalfOfUE4M3(IntOf<V> code) {
  using Int = IntOf<V>;
  const Int bits = (((code >> 3) + 120) << 23) | ((code & 7) << 20);
  return Choose(code < 8, ToReal<V>(code) * 0.001953125f, BitCast<V>(bits)) * 0.5f;
}

template <typename V>
JQ_HOST_DEVICE void Quantize(NVFP4, const Tile<V>& tile, const Writer<NVFP4, V>& out) {
  for (int s = 0; s < 4; ++s) {
    const V* x = tile.x + 16 * s;
    const IntOf<V> scale = ToUE4M3(Magnitude<16>(x) / 6.0f);
    out.template Put<1>(offsetof(NVFP4, d) + s, scale);
    PutFP4<16>(x, HalfOfUE4M3<V>(scale), out, offsetof(NVFP4, qs) + 8 * s);
  }
}

}  // namespace ggml
}  // namespace jq
