// Integer products on CUDA: dp4a for up to eight rows, where a multiprocessor waits for w, tensor cores for more.
// Nothing here allocates or waits.
#include "ffi/matmul/cuda_kernels.h"
#include "ffi/matmul/cuda_mma.cuh"
#include "ffi/matmul/cuda_tiles.cuh"

namespace jq {
namespace matmul {
namespace {

// f(matrix, first row, first column) for each tile of the block.
template <int kRows, int kColumns, typename F>
__device__ __forceinline__ void ForEachTile(const Product& p, const F& f) {
  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int64_t column = tile % p.column_tiles, rest = tile / p.column_tiles;
    f(rest / p.row_tiles, rest % p.row_tiles * kRows, column * kColumns);
  }
}

__device__ __forceinline__ const uint8_t* MatrixOf(const Product& p, int64_t matrix) {
  if (p.a.one_w) return p.a.w.data;
  const int bits = p.a.w.bits, each = 32 / bits;
  const int64_t plain = p.a.k * ((p.a.n * bits + 7) / 8);
  const int64_t prepared = (p.a.n + kPanel - 1) / kPanel * ((p.a.k + each - 1) / each) * kPanelBytes;
  return p.a.w.data + matrix * (p.a.w.prepared ? prepared : plain);
}

// ---- Few rows: a column to a thread, the words of a stage divided among four of them

constexpr int kFewRows = 8, kFewColumns = 64, kParts = kThreads / kFewColumns;

__global__ void __launch_bounds__(kThreads) FewRowsKernel(const Product p) {
  JQ_SHARED(uint32_t, a, kFewRows, kStride);
  JQ_SHARED(uint32_t, w, kFewColumns, kStride);
  JQ_SHARED(int32_t, partial, kParts, kFewRows + 1, kFewColumns);
  JQ_SHARED(int32_t, row_sums, kFewRows);
  constexpr int kEach = kFewRows * kFewColumns / kThreads;
  const int thread = static_cast<int>(threadIdx.x), c = thread % kFewColumns, part = thread / kFewColumns;
  ForEachTile<kFewRows, kFewColumns>(p, [&](int64_t matrix, int64_t first_row, int64_t first_column) {
    const uint8_t* data = MatrixOf(p, matrix);
    float t[kEach] = {};
    for (int64_t group = 0; group < p.a.groups; ++group) {
      int32_t sums[kFewRows] = {}, column_sum = 0, row_sum = 0;
      for (int64_t k = 0; k < p.group_size; k += kStageCodes) {
        LoadRows(p, matrix, first_row, group, k, a);
        LoadColumns(p, data, first_column, group, k, w);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kStageWords / kParts; ++i) {
          const int word = i * kParts + part;
          const int codes = static_cast<int>(w[c][word]);
          if (p.column_sums) column_sum = __dp4a(codes, 0x01010101, column_sum);
#pragma unroll
          for (int r = 0; r < kFewRows; ++r) sums[r] = __dp4a(static_cast<int>(a[r][word]), codes, sums[r]);
        }
        if (p.row_sums && thread < kFewRows) row_sum = SumOfWords(a[thread], row_sum);
        __syncthreads();
      }
#pragma unroll
      for (int r = 0; r < kFewRows; ++r) partial[part][r][c] = sums[r];
      partial[part][kFewRows][c] = column_sum;
      if (thread < kFewRows) row_sums[thread] = row_sum;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int r = part + e * kParts;
        const int64_t row = first_row + r, column = first_column + c;
        if (row >= p.a.m || column >= p.a.n) continue;
        int32_t sum = 0, of_column = 0;
        for (int i = 0; i < kParts; ++i) {
          sum = WrappingSum(sum, partial[i][r][c]);
          of_column = WrappingSum(of_column, partial[i][kFewRows][c]);
        }
        const int32_t value = GroupInteger(p, matrix, row, column, group, sum, row_sums[r], of_column);
        if (p.a.out_type == ResultType::kInt32) {
          StoreInteger(p, matrix, row, column, value);
        } else {
          t[e] = Scaled(p, matrix, column, group, value, t[e]);
          if (group + 1 == p.a.groups) StoreFloat(p, matrix, row, column, t[e]);
        }
      }
      __syncthreads();
    }
  });
}

// ---- Many: warps of 16 rows by 32 columns

constexpr int kRows = 64, kColumns = 64, kColumnWarps = 2, kWarpTiles = kColumns / kColumnWarps / 8;

__global__ void __launch_bounds__(kThreads) TileKernel(const Product p) {
  JQ_SHARED(uint32_t, a, kRows, kStride);
  JQ_SHARED(uint32_t, w, kColumns, kStride);
  JQ_SHARED(int32_t, code_sums, kRows + kColumns);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, q = thread % 4;
  const int warp_row = warp / kColumnWarps * 16, warp_column = warp % kColumnWarps * (kColumns / kColumnWarps);
  ForEachTile<kRows, kColumns>(p, [&](int64_t matrix, int64_t first_row, int64_t first_column) {
    const uint8_t* data = MatrixOf(p, matrix);
    float t[kWarpTiles][4] = {};
    for (int64_t group = 0; group < p.a.groups; ++group) {
      int32_t sums[kWarpTiles][4] = {}, code_sum = 0;
      for (int64_t k = 0; k < p.group_size; k += kStageCodes) {
        LoadRows(p, matrix, first_row, group, k, a);
        LoadColumns(p, data, first_column, group, k, w);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kStageWords; i += 8) {
          const uint32_t rows[4] = {a[warp_row + g][i + q], a[warp_row + g + 8][i + q], a[warp_row + g][i + 4 + q],
                                    a[warp_row + g + 8][i + 4 + q]};
#pragma unroll
          for (int tile = 0; tile < kWarpTiles; ++tile) {
            const int column = warp_column + 8 * tile + g;
            const uint32_t columns[2] = {w[column][i + q], w[column][i + 4 + q]};
            Multiply(sums[tile], rows, columns);
          }
        }
        if (p.row_sums && thread < kRows) code_sum = SumOfWords(a[thread], code_sum);
        if (p.column_sums && thread >= kRows && thread < kRows + kColumns) {
          code_sum = SumOfWords(w[thread - kRows], code_sum);
        }
        __syncthreads();
      }
      if (thread < kRows + kColumns) code_sums[thread] = code_sum;
      __syncthreads();
#pragma unroll
      for (int tile = 0; tile < kWarpTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = warp_row + g + i / 2 * 8, c = warp_column + 8 * tile + 2 * q + i % 2;
          const int64_t row = first_row + r, column = first_column + c;
          if (row >= p.a.m || column >= p.a.n) continue;
          const int32_t value =
              GroupInteger(p, matrix, row, column, group, sums[tile][i], code_sums[r], code_sums[kRows + c]);
          if (p.a.out_type == ResultType::kInt32) {
            StoreInteger(p, matrix, row, column, value);
          } else {
            t[tile][i] = Scaled(p, matrix, column, group, value, t[tile][i]);
            if (group + 1 == p.a.groups) StoreFloat(p, matrix, row, column, t[tile][i]);
          }
        }
      }
      __syncthreads();
    }
  });
}

// ---- Between the layouts: a byte of the result to a thread

template <bool kPrepare>
__global__ void __launch_bounds__(kThreads)
    ArrangeKernel(const ArrangeArguments a, int64_t in_bytes, int64_t out_bytes) {
  const int64_t all = a.matrices * out_bytes, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all; i += stride) {
    const uint8_t* in = a.in + i / out_bytes * in_bytes;
    a.out[i] =
        kPrepare ? PreparedByte(in, i % out_bytes, a.k, a.n, a.bits) : PlainByte(in, i % out_bytes, a.k, a.n, a.bits);
  }
}

template <bool kPrepare>
const char* Arrange(const ArrangeArguments& a, CudaStream stream) {
  const int64_t prepared = PreparedBytes(a.k, a.n, a.bits), plain = PlainBytes(a.k, a.n, a.bits);
  const int64_t in = kPrepare ? plain : prepared, out = kPrepare ? prepared : plain;
  JQ_LAUNCH((ArrangeKernel<kPrepare>), GridSize(a.matrices * out, kThreads), kThreads, 0, stream, a, in, out);
  return LaunchError();
}

}  // namespace

const char* ProductOnCuda(const ProductArguments& a, CudaStream stream) {
  Product p{};
  p.a = a;
  p.group_size = a.k / a.groups;
  // Tensor cores take signed bytes: codes of 8 bits, if unsigned, are shifted; narrower ones fit as unsigned ones.
  p.a_shift = a.a_signed ? 0 : 128;
  p.a_flip = a.a_signed ? 0 : 0x80808080u;
  const bool wide = a.w.bits == 8;
  p.w_shift = !wide ? WeightShift(a.w) : a.w.is_signed ? 0 : 128;
  p.w_flip = wide ? (a.w.is_signed ? 0 : 0x80u) : a.w.is_signed ? 1u << (a.w.bits - 1) : 0;
  p.a_words = a.k % 4 == 0 && p.group_size % 4 == 0 && IsAligned(a.a, 4);
  p.w_words = a.w.prepared ? (a.groups == 1 || p.group_size % CodesPerWord(a.w.bits) == 0) && IsAligned(a.w.data, 4)
                           : a.n % 4 == 0 && IsAligned(a.w.data, 4);
  p.row_sums = p.w_shift != 0 || a.w_zero_point != nullptr;
  p.column_sums = p.a_shift != 0 || a.a_zero_point != nullptr;
  const bool few = a.m <= kFewRows;
  p.row_tiles = CeilDivide(a.m, few ? kFewRows : kRows);
  p.column_tiles = CeilDivide(a.n, few ? kFewColumns : kColumns);
  p.tiles = a.batch * p.row_tiles * p.column_tiles;
  const unsigned grid = GridSize(p.tiles, 1);
  if (few) {
    JQ_LAUNCH(FewRowsKernel, grid, kThreads, 0, stream, p);
  } else {
    JQ_LAUNCH(TileKernel, grid, kThreads, 0, stream, p);
  }
  return LaunchError();
}

const char* PrepareOnCuda(const ArrangeArguments& a, CudaStream stream) { return Arrange<true>(a, stream); }
const char* PlainOnCuda(const ArrangeArguments& a, CudaStream stream) { return Arrange<false>(a, stream); }

const char* LoadMatmulOnCuda() {
  const char* error = LoadKernel(FewRowsKernel);
  if (error == nullptr) error = LoadKernel(TileKernel);
  if (error == nullptr) error = LoadKernel(ArrangeKernel<true>);
  return error == nullptr ? LoadKernel(ArrangeKernel<false>) : error;
}

}  // namespace matmul
}  // namespace jq
