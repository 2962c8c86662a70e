// What a handler hands to a kernel of the block formats, on every platform. Plain data.
#pragma once

#include <cstdint>

#include "ffi/common/numeric.h"

namespace jq {
namespace ggml {

constexpr int kMaxLeading = 15;  // axes before the row

struct FormatSize {
  int64_t block, bytes;  // values in a block, and its bytes
};

struct QuantizeArguments {
  int type_id;
  FormatSize size;
  int64_t rows, k;
  const float* x;
  uint8_t* data;
  // Null without. The imatrix row of a row of x: its index, digit by digit over the leading axes, times strides (0
  // where an axis shares).
  const float* imatrix;
  int leading;
  int64_t dims[kMaxLeading], imatrix_stride[kMaxLeading];

  JQ_HOST_DEVICE const float* ImatrixOf(int64_t row) const {
    if (imatrix == nullptr) return nullptr;
    int64_t at = 0;
    for (int d = leading - 1; d >= 0; --d) {
      at += row % dims[d] * imatrix_stride[d];
      row /= dims[d];
    }
    return imatrix + at;
  }
};

// Rows of blocks to rows of values; with ids, row i of the result is row ids[i] of the data, or zeros.
struct DequantizeArguments {
  int type_id;
  FormatSize size;
  int64_t rows, k;
  const uint8_t* data;
  bool prepared;
  int64_t n, data_n;  // rows of a matrix, in the result and with those that fill up its last eight
  const int32_t* ids;
  int64_t data_rows;
  void* out;
  DType out_type;

  // The row of the data that row i of the result is; -1: none.
  JQ_HOST_DEVICE int64_t Source(int64_t i) const {
    if (ids == nullptr) return i / n * data_n + i % n;
    return ids[i] >= 0 && ids[i] < data_rows ? ids[i] : -1;
  }
};

// Between the file's order of bytes and the one that products prefer.
struct ArrangeArguments {
  int type_id;
  FormatSize size;
  int64_t matrices, n, k;
  bool prepare;
  const uint8_t* in;
  uint8_t* out;
};

// Products with `experts` matrices of n rows of k values. Without ids: matrix e by its own tokens, x [x_batch, tokens,
// ...] where x_batch is 1 or experts. With ids [tokens, slots]: x [tokens, x_batch, ...] where x_batch is 1 or slots.
// Forward: x has rows of k and out rows of n; gradient: x is dy, with rows of n, and out rows of k.
struct ProductArguments {
  int type_id;
  FormatSize size;
  bool prepared, int8_lhs;
  const uint8_t* w;
  int64_t experts, n, k;
  const void* x;
  DType x_type;  // of out as well
  int64_t tokens, x_batch;
  const int32_t* ids;
  int64_t slots;
  void* out;
  void* scratch;  // ProductScratchBytes() of them; the CPU has its own
};

// Bytes of the second result of a product, memory for its kernels alone: of 32 quantised activations 32 codes and 16
// bytes for their scale and sums; for the lists of a product with ids, four words for each id and each expert's end.
// jaxquant/ggml/products.py says the same.
constexpr int64_t ProductScratchBytes(const ProductArguments& a) {
  const int64_t activations = a.int8_lhs ? a.x_batch * a.tokens * (a.k / 32) * 48 : 0;
  return activations + (a.ids == nullptr ? 0 : 16 * (a.tokens * a.slots + a.experts + 1));
}

}  // namespace ggml
}  // namespace jq
