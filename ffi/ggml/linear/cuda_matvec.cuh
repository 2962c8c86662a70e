// Products for few activations: every byte of the weights is read once, and straight into the fragments of a tensor
// core, where those of the prepared layout lie side by side (the same word of eight rows, 32 bytes; four words of them,
// a warp's load). One such product takes 8 rows of activations, so that 1 and 8 cost the same.
//
// A block has 16 rows of weights, and each of its warps a chunk of 256 columns at a time. The order of the sum, which
// the kernel for many activations keeps to: a chunk's spans one after the other, then the chunks.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_portable.h"
#include "ffi/common/cuda_storage.h"
#include "ffi/ggml/linear/cuda_activations.cuh"
#include "ffi/ggml/linear/cuda_fragments.cuh"
#include "ffi/ggml/linear/cuda_groups.cuh"
#include "ffi/ggml/linear/cuda_spans.cuh"

namespace jq {
namespace ggml {

struct Product {
  DeviceWeights w;
  Activations x;
  Groups groups;
  void* out;
  DType out_type;
};

namespace {

constexpr int kTileRows = 16;      // weights of a tensor core's product
constexpr int kTilePositions = 8;  // activations of one

// How kPositions (4, 8 or 16) lie in tensor cores' products: four in their even columns, which saves a lane half its
// sums.
template <int kPositions>
struct Columns {
  static constexpr int kTiles = kPositions < kTilePositions ? 1 : kPositions / kTilePositions;
  static constexpr int kEach = kPositions < kTilePositions ? 1 : 2;  // of a lane, in each tile
  // The position in column 2 q + j of a tile.
  static __device__ __forceinline__ int Position(int tile, int q, int j) {
    return kEach == 1 ? q : kTilePositions * tile + 2 * q + j;
  }
};

// The activations that a lane reads, from a span on: as fragments, and the scales of its sums.
template <int kPositions>
struct ActivationChunk {
  using C = Columns<kPositions>;
  const uint2* codes[C::kTiles];
  const float4* scale[C::kTiles][C::kEach];

  __device__ __forceinline__ ActivationFragment Fragment(int i, int s) const {
    const uint2 two = __ldg(codes[i] + kSpan / 8 * s);
    return {{two.x, two.y}};
  }
  template <bool kOffset>
  __device__ __forceinline__ ActivationScales Scales(int i, int s) const {
    ActivationScales scales;
#pragma unroll
    for (int j = 0; j < C::kEach; ++j) {
      if constexpr (kOffset) {
        const float4 all = __ldg(scale[i][j] + s);
        scales.scale[j] = all.x;
        scales.sums[0][j] = all.y;
        scales.sums[1][j] = all.z;
      } else {
        scales.scale[j] = __ldg(&scale[i][j][s].x);
      }
    }
    return scales;
  }
};

// The rows of a tile's positions.
template <int kPositions>
struct TileRows {
  uint32_t x[kPositions];  // in spans
  int64_t out[kPositions];
};

template <int kPositions>
struct ActivationReader {
  using C = Columns<kPositions>;
  uint32_t row[C::kTiles];  // of the lane's fragments; in spans
  uint32_t scale_row[C::kTiles][C::kEach];

  __device__ __forceinline__ ActivationReader(const TileRows<kPositions>& rows, int lane) {
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
      row[i] = rows.x[C::Position(i, lane / 8, lane / 4 % 2)];
#pragma unroll
      for (int j = 0; j < C::kEach; ++j) scale_row[i][j] = rows.x[C::Position(i, lane % 4, j)];
    }
  }
  __device__ __forceinline__ ActivationChunk<kPositions> From(const Activations& x, int64_t span, int q) const {
    ActivationChunk<kPositions> chunk;
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
      chunk.codes[i] = reinterpret_cast<const uint2*>(x.codes) + (row[i] + span) * (kSpan / 8) + q;
#pragma unroll
      for (int j = 0; j < C::kEach; ++j) chunk.scale[i][j] = x.scale + (scale_row[i][j] + span);
    }
    return chunk;
  }
};

// The sums of a lane, four for each of a tensor core's products; every other one where kEach is 1.
template <int kPositions>
struct Sums {
  float of[Columns<kPositions>::kTiles][4];
};

// ---- Weights as fragments, from their blocks

template <typename F, Place kPlace, int kPositions>
__device__ __forceinline__ void AddBlockSpan(const BlockView<F, kPlace> (&rows)[2], int s, int at, int q,
                                             const ActivationChunk<kPositions>& x, Sums<kPositions>& out) {
  using C = CodeWords<F>;
  constexpr int kGroup = Decoder<F>::kGroup;
  constexpr bool kOffset = Decoder<F>::kOffset;
  WeightFragment w;
  WeightScales scales;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    w.w[j] = C::template Codes<0>(rows[j], s, q);
    w.w[2 + j] = C::template Codes<1>(rows[j], s, q);
#pragma unroll
    for (int half = 0; half < kSpan / kGroup; ++half) {
      scales.scale[half][j] = C::Scale(rows[j], s, half);
      if constexpr (kOffset) scales.offset[half][j] = C::Offset(rows[j], s, half);
    }
  }
#pragma unroll
  for (int i = 0; i < Columns<kPositions>::kTiles; ++i) {
    AddSpan<kGroup, kOffset, Columns<kPositions>::kEach>(out.of[i], w, x.Fragment(i, at), scales,
                                                         x.template Scales<kOffset>(i, at));
  }
}

// Spans whose loads are asked for at once: a chunk's, where 128 registers hold them.
JQ_HOST_DEVICE constexpr int UnrollOf(Place place, int positions, size_t block_bytes) {
  return positions > kTilePositions                                   ? 2
         : place == Place::kInterleaved && block_bytes < sizeof(Q5_K) ? kSpans
                                                                      : kSpans / 2;
}

// The formats of most files. An H200 (132 multiprocessors of 1.98 GHz, 4.3 TB/s) has time for 7.8 instructions of a
// lane with each byte. Counted in sm_90 code of the prepared layout, loads included, for up to 4 and up to 8 positions:
//
//                         Q4_0     Q8_0     Q4_K     Q5_K     Q6_K     IQ4_XS   MXFP4
//   bytes a weight        0.563    1.063    0.563    0.688    0.820    0.531    0.531
//   instructions allowed  4.4      8.3      4.4      5.3      6.4      4.1      4.1
//   needed                2.1 2.6  1.3 1.6  2.6 3.1  3.2 3.9  4.5 6.0  3.8 4.4  3.5 3.9
//
// The exchange of sums after each chunk adds 0.7 to 1 to each (tools/cuda_report.py). So IQ4_XS and MXFP4, and Q6_K at
// 5 to 8, are bound by instructions, at 80 to 95 % of the bandwidth; the others by memory, at best.
template <typename F>
struct Direct {
  static constexpr int kWarps = 8, kBlocks = 2;  // 128 registers
  struct Shared {};

  template <Place kPlace, int kPositions>
  static __device__ __forceinline__ void AddWith(const Product& p, const uint8_t* matrix, const int (&row)[2],
                                                 int64_t chunk, int q, const ActivationReader<kPositions>& x,
                                                 Sums<kPositions>& out) {
    using View = BlockView<F, kPlace>;
    const int64_t first = chunk * kSpans, block = first * kSpan / F::kBlock;
    const View rows[2] = {View(RowOf(p.w, matrix, row[0])).At(block), View(RowOf(p.w, matrix, row[1])).At(block)};
    const ActivationChunk<kPositions> from = x.From(p.x, first, q);
    const auto add = [&](int s) {
      constexpr int kSpansOfBlock = F::kBlock / kSpan;
      const View blocks[2] = {rows[0].At(s / kSpansOfBlock), rows[1].At(s / kSpansOfBlock)};
      AddBlockSpan<F, kPlace, kPositions>(blocks, s % kSpansOfBlock, s, q, from, out);
    };
    if (F::kBlock == kSuper || first + kSpans <= p.x.spans) {
      // All loads of a chunk at once, where the registers hold them.
      [[maybe_unused]] constexpr int kUnroll = UnrollOf(kPlace, kPositions, sizeof(F));
#pragma unroll kUnroll
      for (int s = 0; s < kSpans; ++s) add(s);
    } else {
#pragma unroll 1
      for (int s = 0; first + s < p.x.spans; ++s) add(s);
    }
  }

  template <int kPositions>
  static __device__ __forceinline__ void Add(const Product& p, Shared&, const uint8_t* matrix, int first_row,
                                             int64_t chunk, int lane, const ActivationReader<kPositions>& x,
                                             Sums<kPositions>& out) {
    const int last = static_cast<int>(p.w.n) - 1, g = Opaque(first_row + lane / 4);
    const int row[2] = {g < last ? g : last, g + 8 < last ? g + 8 : last};
    if (p.w.prepared) {
      AddWith<Place::kInterleaved, kPositions>(p, matrix, row, chunk, lane % 4, x, out);
    } else {
      AddWith<Place::kPlain, kPositions>(p, matrix, row, chunk, lane % 4, x, out);
    }
  }
};

// ---- Any format, through shared memory: a warp decodes its chunk

struct Staged {
  static constexpr int kWarps = 4, kBlocks = 1;
  static constexpr int kRowWords = kStretch / 4 + 4;  // no two rows of a fragment in one bank
  struct Shared {
    uint32_t codes[kWarps][kTileRows * kRowWords];
    float scales[kWarps][2][kSpans][kTileRows], offsets[kWarps][2][kSpans][kTileRows];
  };

  template <int kGroup, bool kOffset, int kPositions>
  static __device__ __forceinline__ void AddSpans(const Shared& shared, int warp, int spans, int lane,
                                                  const ActivationChunk<kPositions>& x, Sums<kPositions>& out) {
    const int g = lane / 4, q = lane % 4;
#pragma unroll 1
    for (int s = 0; s < spans; ++s) {
      const uint32_t* codes = shared.codes[warp] + g * kRowWords + 8 * s + q;
      const WeightFragment w = {{codes[0], codes[8 * kRowWords], codes[4], codes[8 * kRowWords + 4]}};
      WeightScales scales;
#pragma unroll
      for (int half = 0; half < kSpan / kGroup; ++half) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          scales.scale[half][j] = shared.scales[warp][half][s][g + 8 * j];
          if constexpr (kOffset) scales.offset[half][j] = shared.offsets[warp][half][s][g + 8 * j];
        }
      }
#pragma unroll
      for (int i = 0; i < Columns<kPositions>::kTiles; ++i) {
        AddSpan<kGroup, kOffset, Columns<kPositions>::kEach>(out.of[i], w, x.Fragment(i, s), scales,
                                                             x.template Scales<kOffset>(i, s));
      }
    }
  }

  template <int kPositions>
  static __device__ __forceinline__ void Add(const Product& p, Shared& shared, const uint8_t* matrix, int first_row,
                                             int64_t chunk, int lane, const ActivationReader<kPositions>& x,
                                             Sums<kPositions>& out) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int64_t first = chunk * kSpans;
    const int spans = p.x.spans - first < kSpans ? static_cast<int>(p.x.spans - first) : kSpans;
    const int row = lane % kTileRows;
    const int64_t known = first_row + row < p.w.n ? first_row + row : p.w.n - 1;
    for (int s = lane / kTileRows; s < spans; s += 32 / kTileRows) {
      StoreSpan(p.w.type_id, RowOf(p.w, matrix, known), first + s,
                {shared.codes[warp] + row * kRowWords + 8 * s, &shared.scales[warp][0][s][row],
                 &shared.offsets[warp][0][s][row], kSpans * kTileRows});
    }
    __syncwarp();
    const bool offset = HasOffset(p.w.type_id);
    const ActivationChunk<kPositions> from = x.From(p.x, first, lane % 4);
    if (GroupOf(p.w.type_id) == kSpan) {
      if (offset) {
        AddSpans<32, true, kPositions>(shared, warp, spans, lane, from, out);
      } else {
        AddSpans<32, false, kPositions>(shared, warp, spans, lane, from, out);
      }
    } else {
      if (offset) {
        AddSpans<16, true, kPositions>(shared, warp, spans, lane, from, out);
      } else {
        AddSpans<16, false, kPositions>(shared, warp, spans, lane, from, out);
      }
    }
    __syncwarp();
  }
};

// ---- The kernel

template <typename Source, int kPositions>
__global__ void __launch_bounds__(Source::kWarps * 32, Source::kBlocks) MatvecKernel(const Product p) {
  constexpr int kWarps = Source::kWarps, kStride = 20;  // 16 rows, apart in the banks
  constexpr int kCells = kTileRows * kPositions, kBlockThreads = kWarps * 32;
  constexpr int kEach = kCells < kBlockThreads ? 1 : kCells / kBlockThreads;
  JQ_SHARED(typename Source::Shared, of_source, 1);
  JQ_SHARED(TileRows<kPositions>, rows, 1);
  JQ_SHARED(float, sums, 2, kWarps, kPositions* kStride);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int chunks = static_cast<int>((p.x.spans + kSpans - 1) / kSpans);
  ForEachTile(p.groups, (p.w.n + kTileRows - 1) / kTileRows, [&](const Tile& tile, int64_t column) {
    const uint8_t* matrix = p.w.Matrix(tile.expert);
    const int first_row = static_cast<int>(column * kTileRows);
    if (thread < kPositions) {  // positions beyond the tile's stand for its first
      const int64_t position = tile.first + (thread < tile.count ? thread : 0);
      rows[0].x[thread] = static_cast<uint32_t>(p.groups.XRow(position) * p.x.spans);
      rows[0].out[thread] = p.groups.OutRow(position) * p.w.n;
    }
    __syncthreads();
    const ActivationReader<kPositions> x(rows[0], lane);
    float totals[kEach] = {};
    int buffer = 0;
    for (int first = 0; first < chunks; first += kWarps, buffer ^= 1) {
      if (first + warp < chunks) {
        Sums<kPositions> out = {};
        Source::template Add<kPositions>(p, of_source[0], matrix, first_row, first + warp, lane, x, out);
        using C = Columns<kPositions>;
        float* to = sums[buffer][warp] + lane / 4;
#pragma unroll
        for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
          for (int j = 0; j < C::kEach; ++j) {
            const int at = C::Position(i, lane % 4, j) * kStride;
            to[at] = out.of[i][j];
            to[at + 8] = out.of[i][2 + j];
          }
        }
      }
      __syncthreads();
      const int here = chunks - first < kWarps ? chunks - first : kWarps;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int cell = i * kBlockThreads + thread;
        if (cell >= kCells) continue;
        for (int c = 0; c < here; ++c) {
          totals[i] = totals[i] + sums[buffer][c][cell / kTileRows * kStride + cell % kTileRows];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int cell = i * kBlockThreads + thread, position = cell / kTileRows;
      const int row = first_row + cell % kTileRows;
      if (position >= tile.count || row >= p.w.n) continue;
      StoreAny<float>(p.out, rows[0].out[position] + row, p.out_type, totals[i]);
    }
    __syncthreads();
  });
}

}  // namespace
}  // namespace ggml
}  // namespace jq
