// Products in floating point, with the weights as dequantised: x @ w.T, and the gradient dy @ w. Tiles in shared
// memory, decoded where they are used; sums of a stage one after the other, then the stages.
//
// For many positions 8 loads from shared memory go with 16 multiply-adds, which binds an H200 to 33 Tflops, half of
// what its registers could do. For few, every multiply-add has two loads: for 8 positions 32 instructions a weight,
// less than half of the bandwidth of float16 weights.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_portable.h"
#include "ffi/common/cuda_storage.h"
#include "ffi/ggml/linear/cuda_groups.cuh"
#include "ffi/ggml/linear/cuda_spans.cuh"

namespace jq {
namespace ggml {

struct ValueProduct {
  DeviceWeights w;
  Groups groups;
  const void* x;  // rows of k, or of n for the gradient
  void* out;      // rows of n, or of k
  DType type;
};

namespace {

// kColumns of out by kPositions, kDepth of the sum at a time.
template <bool kGradient, int kColumns, int kPositions, int kDepth>
struct ValueTile {
  static constexpr int kThreadColumns = kColumns < 32 ? kColumns : kColumns == 32 ? 32 : 16;
  static constexpr int kThreadPositions = kThreads / kThreadColumns;
  static constexpr int kColumnsEach = kColumns / kThreadColumns, kPositionsEach = kPositions / kThreadPositions;
  // Spans lie along k.
  static constexpr int kRows = kGradient ? kDepth : kColumns, kRowSpans = (kGradient ? kColumns : kDepth) / kSpan;
  static constexpr int kStride = kRowSpans * kSpan + 1;
  static_assert(kColumnsEach * kThreadColumns == kColumns && kPositionsEach * kThreadPositions == kPositions, "tile");

  alignas(16) uint32_t scratch[kRows * kRowSpans][kScratchWords];
  float w[kRows * kStride], x[kPositions][kDepth + 1];
  int64_t x_row[kPositions];

  __device__ __forceinline__ float Weight(int column, int depth) const {
    return kGradient ? w[depth * kStride + column] : w[column * kStride + depth];
  }
};

template <bool kGradient, int kColumns, int kPositions, int kDepth>
__global__ void __launch_bounds__(kThreads, 2) ValueKernel(const ValueProduct p) {
  using Shared = ValueTile<kGradient, kColumns, kPositions, kDepth>;
  constexpr int kColumnsEach = Shared::kColumnsEach, kPositionsEach = Shared::kPositionsEach;
  JQ_SHARED(Shared, all, 1);
  Shared& stage = all[0];
  const int thread = static_cast<int>(threadIdx.x);
  const int own_column = thread % Shared::kThreadColumns, own_position = thread / Shared::kThreadColumns;
  const int64_t columns = kGradient ? p.w.k : p.w.n, depth = kGradient ? p.w.n : p.w.k;
  ForEachTile(p.groups, (columns + kColumns - 1) / kColumns, [&](const Tile& tile, int64_t block) {
    const uint8_t* matrix = p.w.Matrix(tile.expert);
    const int64_t first_column = block * kColumns;
    if (thread < kPositions) {
      stage.x_row[thread] = p.groups.XRow(tile.first + (thread < tile.count ? thread : 0)) * depth;
    }
    __syncthreads();
    float totals[kColumnsEach][kPositionsEach] = {};
    for (int64_t first = 0; first < depth; first += kDepth) {
      for (int task = thread; task < Shared::kRows * Shared::kRowSpans; task += kThreads) {
        const int i = task % Shared::kRows, s = task / Shared::kRows;
        const int64_t row = (kGradient ? first : first_column) + i;
        const int64_t span = (kGradient ? first_column : first) / kSpan + s;
        float* to = stage.w + i * Shared::kStride + s * kSpan;
        if (row < p.w.n && span * kSpan < p.w.k) {
          StoreValues(p.w.type_id, RowOf(p.w, matrix, row), p.w.k, span, stage.scratch[task], to);
        } else {
          for (int j = 0; j < kSpan; ++j) to[j] = 0.0f;
        }
      }
      for (int task = thread; task < kPositions * kDepth; task += kThreads) {
        const int t = task / kDepth, i = task % kDepth;
        stage.x[t][i] = first + i < depth ? LoadAny<float>(p.x, stage.x_row[t] + first + i, p.type) : 0.0f;
      }
      __syncthreads();
      float sums[kColumnsEach][kPositionsEach] = {};
#pragma unroll 8
      for (int i = 0; i < kDepth; ++i) {
        float w[kColumnsEach], x[kPositionsEach];
#pragma unroll
        for (int c = 0; c < kColumnsEach; ++c) w[c] = stage.Weight(own_column + c * Shared::kThreadColumns, i);
#pragma unroll
        for (int t = 0; t < kPositionsEach; ++t) x[t] = stage.x[own_position + t * Shared::kThreadPositions][i];
#pragma unroll
        for (int c = 0; c < kColumnsEach; ++c) {
#pragma unroll
          for (int t = 0; t < kPositionsEach; ++t) sums[c][t] = __fmaf_rn(w[c], x[t], sums[c][t]);
        }
      }
#pragma unroll
      for (int c = 0; c < kColumnsEach; ++c) {
#pragma unroll
        for (int t = 0; t < kPositionsEach; ++t) totals[c][t] = totals[c][t] + sums[c][t];
      }
      __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < kPositionsEach; ++t) {
      const int position = own_position + t * Shared::kThreadPositions;
      if (position >= tile.count) continue;
      const int64_t out = p.groups.OutRow(tile.first + position) * columns;
#pragma unroll
      for (int c = 0; c < kColumnsEach; ++c) {
        const int64_t column = first_column + own_column + c * Shared::kThreadColumns;
        if (column < columns) StoreAny<float>(p.out, out + column, p.type, totals[c][t]);
      }
    }
    __syncthreads();
  });
}

}  // namespace
}  // namespace ggml
}  // namespace jq
