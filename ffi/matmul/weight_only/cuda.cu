// Weight-only products on CUDA, in float32 with the values that dequantisation gives. Nothing here allocates or waits.
//
// Up to eight rows with a prepared matrix read it once, 16 bytes a lane; everything else goes through tiles in shared
// memory. The two sum in different orders: on CUDA the bits of a row depend on whether there are more than eight.
#include "ffi/common/cuda_launch.h"
#include "ffi/common/cuda_storage.h"
#include "ffi/matmul/weight_only/cuda_kernels.h"

namespace jq {
namespace weight_only {
namespace {

constexpr int kMatvecRows = 8;

// What a code stands for, at a row of w.
struct Affine {
  float scale, zero_point;
  __device__ __forceinline__ Affine(const Arguments& a, int64_t matrix, int64_t row, int64_t column) {
    const int64_t group = a.groups == 1 ? 0 : row / a.Group();
    const int64_t at = (matrix * a.groups + group) * a.scale_columns + (a.scale_columns == 1 ? 0 : column);
    scale = a.scale[at];
    zero_point = a.zero_point == nullptr ? 0.0f : a.zero_point[at];
  }
  __device__ __forceinline__ float operator()(int code) const {
    return (static_cast<float>(code) - zero_point) * scale;
  }
};

// ---- Few rows

constexpr int kLanesOfWord = 4;  // 16 bytes of the 64 of a panel's word each
constexpr int kWordsOfBlock = kThreads / kLanesOfWord;

template <int bits, int T>
__global__ void __launch_bounds__(kThreads) MatvecKernel(const Arguments a) {
  constexpr int kPer = 8 / bits, kDepth = 4 * kPer, kWarps = kThreads / 32;
  JQ_SHARED(float, sums, kWarps, T, kPanel);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t panels = (a.codes.n + kPanel - 1) / kPanel, words = (a.codes.k + kDepth - 1) / kDepth;
  for (int64_t tile = blockIdx.x; tile < a.batch * panels; tile += gridDim.x) {
    const int64_t matrix = tile / panels, panel = tile % panels;
    const int first_of_lane = lane % kLanesOfWord * 4;
    const uint8_t* data = a.Matrix(matrix).data + panel * a.codes.PanelBytes() + 4 * first_of_lane;
    const int64_t x_first = (a.x_batch == 1 ? 0 : matrix) * a.rows * a.codes.k;
    float own[T][4] = {};
    for (int64_t word = thread / kLanesOfWord; word < words; word += kWordsOfBlock) {
      const Words<16> columns = LoadWords<16>(data + word * (4 * kPanel));
      const int64_t row = word * kDepth;
      float value[4][kDepth];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t column = panel * kPanel + first_of_lane + c;
        const Affine affine(a, matrix, row, column < a.codes.n ? column : a.codes.n - 1);
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
          int code = static_cast<int>(columns.w[c] >> (i % 4 * 8 + i / 4 * bits)) & ((1 << bits) - 1);
          if (a.codes.is_signed) code = (code ^ a.codes.Offset()) - a.codes.Offset();
          value[c][i] = affine(code);
        }
      }
      for (int i = 0; i < kDepth && row + i < a.codes.k; ++i) {
#pragma unroll
        for (int t = 0; t < T; ++t) {
          if (t >= a.rows) break;
          const float x = LoadAny<float>(a.x, x_first + t * a.codes.k + row + i, a.type);
#pragma unroll
          for (int c = 0; c < 4; ++c) own[t][c] = own[t][c] + x * value[c][i];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float sum = own[t][c];
        for (int distance = kLanesOfWord; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane < kLanesOfWord) sums[warp][t][first_of_lane + c] = sum;
      }
    }
    __syncthreads();
    for (int task = thread; task < T * kPanel; task += kThreads) {
      const int t = task / kPanel, c = task % kPanel;
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum = sum + sums[w][t][c];
      const int64_t column = panel * kPanel + c;
      if (t < a.rows && column < a.codes.n) {
        StoreAny<float>(a.out, (matrix * a.rows + t) * a.codes.n + column, a.type, sum);
      }
    }
    __syncthreads();
  }
}

template <int bits>
const char* Matvec(const Arguments& a, CudaStream stream) {
  const unsigned grid = GridSize(a.batch * ((a.codes.n + kPanel - 1) / kPanel), 1);
  // A row's sums are the same whatever the number of rows.
  if (a.rows == 1) {
    JQ_LAUNCH((MatvecKernel<bits, 1>), grid, kThreads, 0, stream, a);
  } else {
    JQ_LAUNCH((MatvecKernel<bits, kMatvecRows>), grid, kThreads, 0, stream, a);
  }
  return LaunchError();
}

// ---- Tiles

constexpr int kTileRows = 32, kTileColumns = 64, kTileDepth = 32;
constexpr int kThreadColumns = 16, kColumnsEach = 4, kRowsEach = 2;
static_assert(kThreads == kThreadColumns * kTileRows / kRowsEach, "a thread's part");
static_assert(kTileColumns == kThreadColumns * kColumnsEach, "a thread's part");

template <bool kGradient>
__global__ void __launch_bounds__(kThreads) TileKernel(const Arguments a) {
  JQ_SHARED(float, w, kTileDepth, kTileColumns + 1);
  JQ_SHARED(float, x, kTileRows, kTileDepth + 1);
  const int thread = static_cast<int>(threadIdx.x);
  const int own_column = thread % kThreadColumns, own_row = thread / kThreadColumns;
  const int64_t width = kGradient ? a.codes.k : a.codes.n, depth = kGradient ? a.codes.n : a.codes.k;
  const int64_t column_tiles = (width + kTileColumns - 1) / kTileColumns;
  const int64_t row_tiles = (a.rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = blockIdx.x; tile < a.batch * row_tiles * column_tiles; tile += gridDim.x) {
    const int64_t matrix = tile / (row_tiles * column_tiles);
    const int64_t first_row = tile / column_tiles % row_tiles * kTileRows;
    const int64_t first_column = tile % column_tiles * kTileColumns;
    const Codes codes = a.Matrix(matrix);
    const int offset = codes.is_signed ? codes.Offset() : 0;
    const int64_t x_first = ((a.x_batch == 1 ? 0 : matrix) * a.rows + first_row) * depth;
    float sums[kRowsEach][kColumnsEach] = {};
    for (int64_t first = 0; first < depth; first += kTileDepth) {
      for (int task = thread; task < kTileDepth * kTileColumns; task += kThreads) {
        // Neighbours along n, as codes lie.
        const int d = kGradient ? task % kTileDepth : task / kTileColumns;
        const int c = kGradient ? task / kTileDepth : task % kTileColumns;
        const int64_t row = kGradient ? first_column + c : first + d, column = kGradient ? first + d : first_column + c;
        const bool inside = row < codes.k && column < codes.n;
        w[d][c] = inside ? Affine(a, matrix, row, column)(codes.At(row, column) - offset) : 0.0f;
      }
      for (int task = thread; task < kTileRows * kTileDepth; task += kThreads) {
        const int t = task / kTileDepth, d = task % kTileDepth;
        const bool inside = first_row + t < a.rows && first + d < depth;
        x[t][d] = inside ? LoadAny<float>(a.x, x_first + t * depth + first + d, a.type) : 0.0f;
      }
      __syncthreads();
      for (int d = 0; d < kTileDepth; ++d) {
#pragma unroll
        for (int t = 0; t < kRowsEach; ++t) {
#pragma unroll
          for (int c = 0; c < kColumnsEach; ++c) {
            sums[t][c] = sums[t][c] + x[own_row * kRowsEach + t][d] * w[d][own_column + c * kThreadColumns];
          }
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < kRowsEach; ++t) {
#pragma unroll
      for (int c = 0; c < kColumnsEach; ++c) {
        const int64_t row = first_row + own_row * kRowsEach + t;
        const int64_t column = first_column + own_column + c * kThreadColumns;
        if (row < a.rows && column < width) {
          StoreAny<float>(a.out, (matrix * a.rows + row) * width + column, a.type, sums[t][c]);
        }
      }
    }
  }
}

template <bool kGradient>
const char* Tiles(const Arguments& a, CudaStream stream) {
  const int64_t width = kGradient ? a.codes.k : a.codes.n;
  const int64_t tiles = a.batch * ((a.rows + kTileRows - 1) / kTileRows) * ((width + kTileColumns - 1) / kTileColumns);
  JQ_LAUNCH((TileKernel<kGradient>), GridSize(tiles, 1), kThreads, 0, stream, a);
  return LaunchError();
}

}  // namespace

const char* MatmulOnCuda(const Arguments& a, CudaStream stream) {
  const bool whole_words = a.groups == 1 || a.Group() % (4 * a.codes.Per()) == 0;
  if (!a.codes.prepared || a.rows > kMatvecRows || !whole_words || !IsAligned(a.codes.data, 16)) {
    return Tiles<false>(a, stream);
  }
  return a.codes.bits == 8 ? Matvec<8>(a, stream) : a.codes.bits == 4 ? Matvec<4>(a, stream) : Matvec<2>(a, stream);
}

const char* GradientOnCuda(const Arguments& a, CudaStream stream) { return Tiles<true>(a, stream); }

const char* LoadOnCuda() {
  const char* error = LoadKernel(TileKernel<false>);
  if (error == nullptr) error = LoadKernel(TileKernel<true>);
#define JQ_LOAD(bits)                                              \
  if (error == nullptr) error = LoadKernel(MatvecKernel<bits, 1>); \
  if (error == nullptr) error = LoadKernel(MatvecKernel<bits, kMatvecRows>);
  JQ_LOAD(8)
  JQ_LOAD(4)
  JQ_LOAD(2)
#undef JQ_LOAD
  return error;
}

}  // namespace weight_only
}  // namespace jq
