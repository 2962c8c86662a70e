// Integer products for many activations: tiles of kRows weights by kPositions activations, 128 columns at a time in
// shared memory, the weights decoded once for all positions of the tile. Bits as those of cuda_matvec.cuh.
//
// Counted in sm_90 code, tiles of 128 x 64: a product of 16 x 8 x 32 comes with 17 instructions (23 with offsets), 12
// of which scale its sums, so that a multiprocessor of an H200 issues one in 4.5 cycles: 480 Tops (340; 270 where
// groups are of 16), where the products alone could be twice as many. Decoding adds 3 to 6 instructions a weight, that
// is 5 to 10 %.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_portable.h"
#include "ffi/common/cuda_storage.h"
#include "ffi/ggml/linear/cuda_matvec.cuh"

namespace jq {
namespace ggml {
namespace {

constexpr int kStageSpans = 4;                            // half a chunk
constexpr int kStageWords = kStageSpans * kSpan / 4 + 4;  // of a row; no two rows of a fragment in one bank
constexpr int kRowWarps = 4, kPositionWarps = 2;
static_assert(kSpans % kStageSpans == 0, "chunks are whole stages");

template <int kRows, int kPositions>
struct Stage {
  uint32_t w[kRows][kStageWords], x[kPositions][kStageWords];
  float w_scale[kStageSpans][2][kRows], w_offset[kStageSpans][2][kRows];
  float x_scale[kStageSpans][kPositions], x_sums[kStageSpans][2][kPositions];
  int64_t x_row[kPositions], out_row[kPositions];
  const uint8_t* matrix;
  int count;  // of positions
};

// The formats that are decoded in the kernel. A call would cost it the registers of the largest of all.
template <int kGroup, bool kOffset>
__device__ __forceinline__ void StoreSpanHere(int type_id, const Row& row, int64_t span, const SpanTarget& to) {
  switch (type_id) {
#define JQ_CASE(F)                                                                                           \
  case F::kId:                                                                                               \
    if constexpr (kUnits<F>.interleaved && Decoder<F>::kGroup == kGroup && Decoder<F>::kOffset == kOffset) { \
      StoreSpanOf<F>(row, span, to);                                                                         \
    }                                                                                                        \
    break;
    JQ_GGML_QUANTISED(JQ_CASE)
#undef JQ_CASE
    default: break;
  }
}

template <int kGroup, bool kOffset, bool kCalls, int kRows, int kPositions>
__device__ __forceinline__ void LoadStage(const Product& p, int first_row, int first, int spans,
                                          Stage<kRows, kPositions>& stage) {
  const int thread = Opaque(static_cast<int>(threadIdx.x));
  const uint8_t* matrix = stage.matrix;
  for (int task = thread; task < kRows * spans; task += kThreads) {
    const int i = task % kRows, s = task / kRows;
    const int64_t row = first_row + i < p.w.n ? first_row + i : p.w.n - 1;
    const SpanTarget to = {stage.w[i] + 8 * s, &stage.w_scale[s][0][i], &stage.w_offset[s][0][i], kRows};
    if constexpr (kCalls) {
      StoreSpan(p.w.type_id, RowOf(p.w, matrix, row), first + s, to);
    } else {
      StoreSpanHere<kGroup, kOffset>(p.w.type_id, RowOf(p.w, matrix, row), first + s, to);
    }
  }
#pragma unroll 2
  for (int task = thread; task < kPositions * 2 * spans; task += kThreads) {
    const int t = task / (2 * spans), part = task % (2 * spans);
    const uint32_t* codes = p.x.codes + (stage.x_row[t] + first) * (kSpan / 4) + 4 * part;
    StoreWords(LoadWords<16>(codes), stage.x[t] + 4 * part);
  }
#pragma unroll 1
  for (int task = thread; task < kPositions * spans; task += kThreads) {
    const int t = task % kPositions, s = task / kPositions;
    const int64_t at = stage.x_row[t] + first + s;
    const float4 all = p.x.scale[at];
    stage.x_scale[s][t] = all.x;
    stage.x_sums[s][0][t] = all.y;
    stage.x_sums[s][1][t] = all.z;
  }
}

template <int kRows, int kPositions, int kGroup, bool kOffset, bool kCalls>
__global__ void __launch_bounds__(kThreads, kCalls ? 1 : 2) MatmulKernel(const Product p) {
  constexpr int kRowTiles = kRows / (kRowWarps * kTileRows);
  constexpr int kPositionTiles = kPositions / (kPositionWarps * kTilePositions);
  using Shared = Stage<kRows, kPositions>;
  JQ_SHARED(Shared, all, 1);
  Shared& stage = all[0];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, q = thread % 4;
  const int warp_row = warp % kRowWarps * (kRowTiles * kTileRows);
  const int warp_position = warp / kRowWarps * (kPositionTiles * kTilePositions);
  ForEachTile(p.groups, (p.w.n + kRows - 1) / kRows, [&](const Tile& tile, int64_t column) {
    const int first_row = static_cast<int>(column * kRows);
    if (thread < kPositions) {  // positions beyond the tile's stand for its first
      const int64_t position = tile.first + (thread < tile.count ? thread : 0);
      stage.x_row[thread] = p.groups.XRow(position) * p.x.spans;
      stage.out_row[thread] = p.groups.OutRow(position);
    }
    if (thread == 0) {
      stage.matrix = p.w.Matrix(tile.expert);
      stage.count = tile.count;
    }
    __syncthreads();
    float totals[kRowTiles][kPositionTiles][4] = {}, sums[kRowTiles][kPositionTiles][4] = {};
    const int all_spans = static_cast<int>(p.x.spans);
    for (int first = 0; first < all_spans; first += kStageSpans) {
      const int spans = all_spans - first < kStageSpans ? all_spans - first : kStageSpans;
      LoadStage<kGroup, kOffset, kCalls>(p, first_row, first, spans, stage);
      __syncthreads();
#pragma unroll 1
      for (int s = 0; s < spans; ++s) {
        WeightFragment w[kRowTiles];
        WeightScales ws[kRowTiles];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int row = warp_row + r * kTileRows + g + 8 * j;
            w[r].w[j] = stage.w[row][8 * s + q];
            w[r].w[2 + j] = stage.w[row][8 * s + 4 + q];
#pragma unroll
            for (int half = 0; half < kSpan / kGroup; ++half) {
              ws[r].scale[half][j] = stage.w_scale[s][half][row];
              if constexpr (kOffset) ws[r].offset[half][j] = stage.w_offset[s][half][row];
            }
          }
        }
#pragma unroll
        for (int t = 0; t < kPositionTiles; ++t) {
          const int position = warp_position + t * kTilePositions;
          const Words<8> codes = LoadWords<8>(stage.x[position + g] + 8 * s + 2 * q);
          const ActivationFragment x = {{codes.w[0], codes.w[1]}};
          ActivationScales xs;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            xs.scale[j] = stage.x_scale[s][position + 2 * q + j];
            if constexpr (kOffset) {
              xs.sums[0][j] = stage.x_sums[s][0][position + 2 * q + j];
              xs.sums[1][j] = stage.x_sums[s][1][position + 2 * q + j];
            }
          }
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) AddSpan<kGroup, kOffset, 2>(sums[r][t], w[r], x, ws[r], xs);
        }
      }
      __syncthreads();
      if ((first + kStageSpans) % kSpans != 0 && first + kStageSpans < all_spans) continue;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int t = 0; t < kPositionTiles; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            totals[r][t][i] = totals[r][t][i] + sums[r][t][i];
            sums[r][t][i] = 0.0f;
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kPositionTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = warp_position + t * kTilePositions + 2 * q + i % 2;
        if (position >= stage.count) continue;
        const int64_t out = stage.out_row[position] * p.w.n;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          const int64_t row = first_row + warp_row + r * kTileRows + g + i / 2 * 8;
          if (row < p.w.n) StoreAny<float>(p.out, out + row, p.out_type, totals[r][t][i]);
        }
      }
    }
    __syncthreads();
  });
}

}  // namespace
}  // namespace ggml
}  // namespace jq
