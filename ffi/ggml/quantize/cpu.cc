// The quantisers of this instruction set: as many blocks at once as a vector has lanes.

#include "ffi/ggml/quantize/k_quants.h"
#include "ffi/ggml/quantize/kernels.h"

namespace jq {
namespace JQ_ISA {
namespace {

using namespace ggml;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
using Vector = float __attribute__((vector_size(kVectorBytes)));
using UnalignedVector = float __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
using Int = IntOf<Vector>;
constexpr int kWidth = kLanes<Vector>;

// The first (kHigh: second) halves of two vectors, interleaved.
template <bool kHigh>
JQ_HOST_DEVICE Vector Interleave(Vector a, Vector b) {
  Int index = {};
  for (int i = 0; i < kWidth; ++i) index[i] = i / 2 + (kHigh ? kWidth / 2 : 0) + (i % 2 ? kWidth : 0);
#if defined(__clang__)
  Vector result = {};
  for (int i = 0; i < kWidth; ++i) result[i] = index[i] < kWidth ? a[index[i]] : b[index[i] - kWidth];
  return result;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// columns[j] = values j of all lanes; lane i's values begin at rows(i).
template <int kCount, typename Rows>
JQ_HOST_DEVICE void Transpose(Rows rows, Vector* columns) {
  for (int j = 0; j < kCount; j += kWidth) {
    Vector v[kWidth], w[kWidth];
    for (int i = 0; i < kWidth; ++i) v[i] = *reinterpret_cast<const UnalignedVector*>(rows(i) + j);
    for (int stage = 1; stage < kWidth; stage *= 2) {
      for (int i = 0; i < kWidth / 2; ++i) {
        w[2 * i] = Interleave<false>(v[i], v[i + kWidth / 2]);
        w[2 * i + 1] = Interleave<true>(v[i], v[i + kWidth / 2]);
      }
      for (int i = 0; i < kWidth; ++i) v[i] = w[i];
    }
    for (int i = 0; i < kWidth; ++i) columns[j + i] = v[i];
  }
}

// The lanes that hold an infinite value or NaN.
template <int kCount>
JQ_HOST_DEVICE Int NotFinite(const Vector* x) {
  Int any = {};
  for (int j = 0; j < kCount; ++j) any |= (BitCast<Int>(x[j]) & 0x7fffffff) + 0x00800000;
  return any < 0;
}

const char* CheckWeights(const float* imatrix, int64_t n) {
  bool infinite = false, negative = false, positive = false;
  for (int64_t i = 0; i < n; ++i) {
    infinite |= imatrix[i] - imatrix[i] != 0.0f;
    negative |= imatrix[i] < 0.0f;
    positive |= imatrix[i] > 0.0f;
  }
  if (infinite) return "imatrix: expected finite weights, got inf or NaN";
  if (negative) return "imatrix: expected weights of at least 0, got a negative one";
  return n > 0 && !positive ? "imatrix: expected a weight above 0, got zeros alone" : nullptr;
}

// Formats whose quantiser looks at an importance matrix, and those of them that want the row's mean square too.
template <typename F>
constexpr bool kLegacy = F::kId == Q4_0::kId || F::kId == Q4_1::kId || F::kId == Q5_0::kId || F::kId == Q5_1::kId;
template <typename F>
constexpr bool kUsesWeights = kLegacy<F> || (F::kId >= Q2_K::kId && F::kId <= Q6_K::kId);

float MeanSquare(const float* x, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum / n;
}

template <typename F>
const char* QuantizeBlocks(const float* x, void* out, int64_t rows, int64_t n, const float* imatrix) {
  constexpr int kBlock = F::kBlock;
  if constexpr (kUsesWeights<F>) {
    const char* error = imatrix ? CheckWeights(imatrix, n) : nullptr;
    if (error) return error;
  }
  const int64_t per_row = n / kBlock, blocks = rows * per_row;
  alignas(64) float padded[kWidth * kBlock];
  F padded_out[kWidth];
  float mean_square = 0.0f;
  int64_t next_row = 0;  // the first whose mean square is not known yet
  for (int64_t first = 0; first < blocks; first += kWidth) {
    const int64_t count = blocks - first < kWidth ? blocks - first : kWidth;
    const float* source = x + first * kBlock;
    if (count < kWidth) {
      memset(padded, 0, sizeof(padded));
      memcpy(padded, source, count * kBlock * sizeof(float));
      source = padded;
    }
    Vector values[kBlock], weights[kUsesWeights<F> ? kBlock : 1];
    Transpose<kBlock>([source](int i) { return source + i * kBlock; }, values);
    if (Any<Vector>(NotFinite<kBlock>(values))) {
      return "x: expected finite values, got inf or NaN; the format holds neither";
    }
    Tile<Vector> tile = {values, nullptr, Vector{}};
    if constexpr (kUsesWeights<F>) {
      if (imatrix) {
        Transpose<kBlock>([&](int i) { return imatrix + (first + i) % per_row * kBlock; }, weights);
        tile.weights = weights;
        for (int i = 0; kLegacy<F> && i < count; ++i) {
          const int64_t row = (first + i) / per_row;
          if (row == next_row) mean_square = MeanSquare(x + next_row++ * n, n);
          tile.sigma2[i] = mean_square;
        }
      }
    }
    F* target = static_cast<F*>(out) + first;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(count < kWidth ? padded_out : target);
    Quantize(F{}, tile, Writer<F, Vector>{bytes});
    if (count < kWidth) memcpy(target, padded_out, count * sizeof(F));
  }
  return nullptr;
}

// F32, F16 and BF16 hold every value.
template <typename To>
const char* ConvertValues(const float* x, void* out, int64_t rows, int64_t n, const float*) {
  To* target = static_cast<To*>(out);
  for (int64_t i = 0; i < rows * n; ++i) target[i] = Convert<To>(x[i]);
  return nullptr;
}

}  // namespace

ggml::QuantizeRows QuantizerOf(int type_id) {
  switch (type_id) {
    case F32::kId: return ConvertValues<float>;
    case F16::kId: return ConvertValues<Float16>;
    case BF16::kId: return ConvertValues<BFloat16>;
#define JQ_CASE(F) \
  case F::kId: return QuantizeBlocks<F>;
      JQ_CASE(Q1_0)
      JQ_CASE(Q2_0)
      JQ_CASE(Q4_0)
      JQ_CASE(Q4_1)
      JQ_CASE(Q5_0)
      JQ_CASE(Q5_1)
      JQ_CASE(Q8_0)
      JQ_CASE(Q8_1)
      JQ_CASE(Q2_K)
      JQ_CASE(Q3_K)
      JQ_CASE(Q4_K)
      JQ_CASE(Q5_K)
      JQ_CASE(Q6_K)
      JQ_CASE(Q8_K)
      JQ_CASE(TQ1_0)
      JQ_CASE(TQ2_0)
      JQ_CASE(MXFP4)
      JQ_CASE(NVFP4)
#undef JQ_CASE
    default: return IqQuantizerOf(type_id);
  }
}

}  // namespace JQ_ISA
}  // namespace jq
