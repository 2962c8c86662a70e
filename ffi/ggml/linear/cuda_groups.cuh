// Which rows of a product belong to which matrix, in tiles of some positions. A batch of matrices needs no lists: its
// tiles follow from sizes. Those of routed rows are made on the device: count, add up, scatter. What order the scatter
// gives the rows of a matrix is left to chance, and no result depends on it.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_launch.h"
#include "ffi/common/cuda_portable.h"
#include "ffi/ggml/arguments.h"

namespace jq {
namespace ggml {

// As a kernel parameter.
struct Groups {
  int64_t experts, rows;  // rows: of out
  int64_t tile;           // positions of a tile, at most
  int64_t most_tiles;
  bool shared_x;  // all matrices of a batch see the same rows
  int64_t slots, x_slots;

  int64_t tokens;      // of each matrix of a batch
  int64_t tiles_each;  // ditto

  // Null for a batch.
  const int32_t* ids;
  int32_t* begin;       // of each matrix's positions; experts + 1
  int32_t* first_tile;  // ditto
  int32_t* next;        // counters
  int32_t* row;         // of out, at each position

  __device__ __forceinline__ int64_t OutRow(int64_t position) const {
    return ids == nullptr ? position : row[position];
  }
  __device__ __forceinline__ int64_t XRow(int64_t position) const {
    if (ids == nullptr) return shared_x ? position % tokens : position;
    return x_slots == 1 ? row[position] / slots : row[position];
  }
};

struct Tile {
  int64_t expert, first;  // position
  int count;
};

__device__ __forceinline__ int64_t TileCount(const Groups& g) {
  return g.ids == nullptr ? g.most_tiles : g.first_tile[g.experts];
}

__device__ __forceinline__ Tile FindTile(const Groups& g, int64_t tile) {
  int64_t expert, within, begin, end;
  if (g.ids == nullptr) {
    expert = tile / g.tiles_each;
    within = tile - expert * g.tiles_each;
    begin = expert * g.tokens;
    end = begin + g.tokens;
  } else {
    int64_t low = 0, high = g.experts;  // first_tile[low] <= tile < first_tile[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (g.first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    expert = low;
    within = tile - g.first_tile[expert];
    begin = g.begin[expert];
    end = g.begin[expert + 1];
  }
  const int64_t first = begin + within * g.tile;
  return {expert, first, static_cast<int>(end - first < g.tile ? end - first : g.tile)};
}

// f(tile, block of columns) for the block's share of the work. Tiles that share weights follow each other, and find
// them in the second cache.
template <typename F>
__device__ __forceinline__ void ForEachTile(const Groups& g, int64_t column_blocks, const F& f) {
  for (int64_t work = blockIdx.x;; work += gridDim.x) {
    const int64_t tiles = TileCount(g);  // every time: f needs the registers
    if (work >= tiles * column_blocks) return;
    const int64_t column = work / tiles;
    f(FindTile(g, work - column * tiles), column);
  }
}

namespace {

__device__ __forceinline__ bool IsKnown(const Groups& g, int32_t id) { return id >= 0 && id < g.experts; }

// All four move 4 to 12 bytes a routed row, and zeros where there is no matrix: microseconds, most of it their
// launches.
__global__ void __launch_bounds__(kThreads) CountKernel(const Groups g) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; r < g.rows; r += stride) {
    if (IsKnown(g, g.ids[r])) atomicAdd(g.next + g.ids[r], 1);
  }
}

// One block: where each matrix's positions and tiles begin. The counters become the next free positions.
__global__ void __launch_bounds__(kThreads) AddUpKernel(const Groups g) {
  JQ_SHARED(int32_t, sums, 2, 2, kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  int32_t positions = 0, tiles = 0;  // before the matrices at hand
  for (int64_t first = 0; first < g.experts; first += kThreads) {
    const int64_t e = first + thread;
    const int32_t count = e < g.experts ? g.next[e] : 0;
    const int32_t its_tiles = static_cast<int32_t>((count + g.tile - 1) / g.tile);
    sums[0][0][thread] = count;
    sums[0][1][thread] = its_tiles;
    __syncthreads();
    int from = 0;
    for (int distance = 1; distance < kThreads; distance *= 2) {
      for (int i = 0; i < 2; ++i) {
        sums[1 - from][i][thread] = sums[from][i][thread] + (thread >= distance ? sums[from][i][thread - distance] : 0);
      }
      from = 1 - from;
      __syncthreads();
    }
    if (e < g.experts) {
      g.begin[e] = g.next[e] = positions + sums[from][0][thread] - count;
      g.first_tile[e] = tiles + sums[from][1][thread] - its_tiles;
    }
    positions += sums[from][0][kThreads - 1];
    tiles += sums[from][1][kThreads - 1];
    __syncthreads();
  }
  if (thread == 0) {
    g.begin[g.experts] = positions;
    g.first_tile[g.experts] = tiles;
  }
}

__global__ void __launch_bounds__(kThreads) ScatterKernel(const Groups g) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; r < g.rows; r += stride) {
    if (IsKnown(g, g.ids[r])) g.row[atomicAdd(g.next + g.ids[r], 1)] = static_cast<int32_t>(r);
  }
}

// Rows of out that belong to no matrix, a warp each; width in pairs of bytes.
__global__ void __launch_bounds__(kThreads) ZeroRowsKernel(const Groups g, uint16_t* out, int64_t width) {
  constexpr int kWarps = kThreads / 32;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; r < g.rows; r += stride) {
    if (IsKnown(g, g.ids[r])) continue;
    for (int64_t i = threadIdx.x % 32; i < width; i += 32) out[r * width + i] = 0;
  }
}

// ---- Launches

// `tile` positions to a tile at most. lists: 16 (rows + experts + 1) bytes where there are ids.
inline Groups GroupsOf(const ProductArguments& a, int64_t tile, void* lists) {
  Groups g{};
  g.experts = a.experts;
  g.tile = tile;
  g.slots = a.slots;
  g.x_slots = a.x_batch;
  if (a.ids == nullptr) {
    g.rows = a.experts * a.tokens;
    g.tokens = a.tokens;
    g.shared_x = a.x_batch != a.experts;
    g.tiles_each = (a.tokens + tile - 1) / tile;
    g.most_tiles = a.experts * g.tiles_each;
    return g;
  }
  g.rows = a.tokens * a.slots;
  g.most_tiles = g.rows / tile + std::min(g.rows, a.experts);
  g.ids = a.ids;
  g.row = static_cast<int32_t*>(lists);
  g.begin = g.row + g.rows;
  g.first_tile = g.begin + a.experts + 1;
  g.next = g.first_tile + a.experts + 1;
  return g;
}

// Fills the lists and the rows without a matrix, of `columns` values.
inline const char* Route(const ProductArguments& a, const Groups& g, int64_t columns, CudaStream stream) {
  if (a.ids == nullptr) return nullptr;
  if (g.rows >= (int64_t{1} << 31) || g.experts >= (int64_t{1} << 31)) return "2^31 rows or matrices and more";
  if (a.experts > 0) {
    const cudaError_t error = cudaMemsetAsync(g.next, 0, static_cast<size_t>(a.experts) * sizeof(int32_t), stream);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    JQ_LAUNCH(CountKernel, GridSize(g.rows, kThreads), kThreads, 0, stream, g);
    if (const char* failure = LaunchError()) return failure;
  }
  JQ_LAUNCH(AddUpKernel, 1, kThreads, 0, stream, g);
  if (const char* error = LaunchError()) return error;
  JQ_LAUNCH(ScatterKernel, GridSize(g.rows, kThreads), kThreads, 0, stream, g);
  if (const char* error = LaunchError()) return error;
  JQ_LAUNCH(ZeroRowsKernel, GridSize(g.rows, kThreads / 32), kThreads, 0, stream, g, static_cast<uint16_t*>(a.out),
            columns * SizeOf(a.x_type) / 2);
  return LaunchError();
}

// Blocks for ForEachTile.
inline unsigned TileGrid(const Groups& g, int64_t column_blocks) {
  return static_cast<unsigned>(std::clamp<int64_t>(g.most_tiles * column_blocks, 1, int64_t{1} << 30));
}

}  // namespace
}  // namespace ggml
}  // namespace jq
