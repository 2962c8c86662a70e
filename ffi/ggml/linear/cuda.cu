// Products with block-quantised matrices on CUDA: which kernel, and how much of it. Nothing here allocates or waits.
#include "ffi/ggml/cuda_kernels.h"
#include "ffi/ggml/linear/cuda_matmul.cuh"
#include "ffi/ggml/linear/cuda_matvec.cuh"
#include "ffi/ggml/linear/cuda_values.cuh"

namespace jq {
namespace ggml {
namespace {

// Formats whose blocks go straight into fragments.
#define JQ_DIRECT(X) X(Q4_0) X(Q8_0) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS) X(MXFP4)

DeviceWeights WeightsOf(const ProductArguments& a) {
  const int64_t row_bytes = a.k / a.size.block * a.size.bytes;
  return {a.type_id, a.prepared, a.w, a.n, a.k, row_bytes, StoredRows(a.n, a.prepared) * row_bytes};
}

// Why the arguments are beyond these kernels; XLA's buffers are aligned to more.
const char* WhyNot(const ProductArguments& a) {
  if (!IsAligned(a.w, 16)) return "the weights are not aligned to 16 bytes";
  if (a.n >= int64_t{1} << 30 || a.k >= int64_t{1} << 30) return "2^30 rows or columns and more";
  if (!IsFloatFormat(a.type_id) && a.k % kSpan != 0) return "rows that are no multiple of 32";
  if (a.x_batch * a.tokens * (a.k / kSpan) >= int64_t{1} << 32) return "2^37 activations and more";
  return nullptr;
}

// Rows that a matrix serves, or should on average.
int64_t PositionsEach(const ProductArguments& a) {
  if (a.ids == nullptr) return a.tokens;
  const int64_t rows = a.tokens * a.slots, served = std::max<int64_t>(1, std::min(rows, a.experts));
  return (rows + served - 1) / served;
}

// ---- int8

template <int kPositions>
const char* Matvec(const Product& p, CudaStream stream) {
  const unsigned grid = TileGrid(p.groups, (p.w.n + kTileRows - 1) / kTileRows);
  switch (p.w.type_id) {
#define JQ_CASE(F) \
  case F::kId: JQ_LAUNCH((MatvecKernel<Direct<F>, kPositions>), grid, Direct<F>::kWarps * 32, 0, stream, p); break;
    JQ_DIRECT(JQ_CASE)
#undef JQ_CASE
    default: JQ_LAUNCH((MatvecKernel<Staged, kPositions>), grid, Staged::kWarps * 32, 0, stream, p);
  }
  return LaunchError();
}

template <int kRows, int kPositions, int kGroup, bool kOffset, bool kCalls>
const char* MatmulOf(const Product& p, CudaStream stream) {
  JQ_LAUNCH((MatmulKernel<kRows, kPositions, kGroup, kOffset, kCalls>), TileGrid(p.groups, (p.w.n + kRows - 1) / kRows),
            kThreads, 0, stream, p);
  return LaunchError();
}

template <int kRows, int kPositions>
const char* Matmul(const Product& p, CudaStream stream) {
  const bool whole = GroupOf(p.w.type_id) == kSpan;
  if (HasOffset(p.w.type_id)) {  // each has a prepared form
    return whole ? MatmulOf<kRows, kPositions, 32, true, false>(p, stream)
                 : MatmulOf<kRows, kPositions, 16, true, false>(p, stream);
  }
  if (HasPreparedForm(p.w.type_id)) {
    return whole ? MatmulOf<kRows, kPositions, 32, false, false>(p, stream)
                 : MatmulOf<kRows, kPositions, 16, false, false>(p, stream);
  }
  return whole ? MatmulOf<kRows, kPositions, 32, false, true>(p, stream)
               : MatmulOf<kRows, kPositions, 16, false, true>(p, stream);
}

const char* Int8Product(const ProductArguments& a, void* scratch, CudaStream stream) {
  const int64_t each = PositionsEach(a);
  // Tiles of 128 x 64 where they fill the device; before that, smaller ones.
  const int64_t large_tiles = a.experts * ((each + 63) / 64) * ((a.n + 127) / 128);
  const int64_t tile = each <= 4                                           ? 4
                       : each <= 8                                         ? 8
                       : each <= 16                                        ? 16
                       : each <= 32 || large_tiles < MultiprocessorCount() ? 32
                                                                           : 64;
  Product p{WeightsOf(a), Activations(a, scratch), {}, a.out, a.x_type};
  p.groups = GroupsOf(a, tile, static_cast<char*>(scratch) + Activations::Bytes(a));
  if (const char* error = Route(a, p.groups, a.n, stream)) return error;
  if (p.groups.most_tiles == 0) return nullptr;
  if (const char* error = QuantizeActivations(a, GroupOf(a.type_id) != kSpan, p.x, stream)) return error;
  switch (tile) {
    case 4: return Matvec<4>(p, stream);
    case 8: return Matvec<8>(p, stream);
    case 16: return Matvec<16>(p, stream);
    case 32: return Matmul<64, 32>(p, stream);
    default: return Matmul<128, 64>(p, stream);
  }
}

// ---- Floating point

template <bool kGradient>
const char* FloatProduct(const ProductArguments& a, void* lists, CudaStream stream) {
  const int64_t columns = kGradient ? a.k : a.n;
  const bool few = PositionsEach(a) <= 8;
  const ValueProduct p{WeightsOf(a), GroupsOf(a, few ? 8 : 64, lists), a.x, a.out, a.x_type};
  if (const char* error = Route(a, p.groups, columns, stream)) return error;
  if (p.groups.most_tiles == 0) return nullptr;
  if (few) {
    JQ_LAUNCH((ValueKernel<kGradient, 32, 8, 128>), TileGrid(p.groups, (columns + 31) / 32), kThreads, 0, stream, p);
  } else {
    JQ_LAUNCH((ValueKernel<kGradient, 64, 64, 64>), TileGrid(p.groups, (columns + 63) / 64), kThreads, 0, stream, p);
  }
  return LaunchError();
}

template <typename... Kernels>
const char* LoadAll(Kernels*... kernels) {
  const char* error = nullptr;
  ((error = error == nullptr ? LoadKernel(kernels) : error), ...);
  return error;
}

template <int kRows, int kPositions>
const char* LoadMatmul() {
  return LoadAll(MatmulKernel<kRows, kPositions, 32, true, false>, MatmulKernel<kRows, kPositions, 16, true, false>,
                 MatmulKernel<kRows, kPositions, 32, false, false>, MatmulKernel<kRows, kPositions, 16, false, false>,
                 MatmulKernel<kRows, kPositions, 32, false, true>, MatmulKernel<kRows, kPositions, 16, false, true>);
}

}  // namespace

const char* LinearOnCuda(const ProductArguments& a, void* scratch, CudaStream stream) {
  if (const char* reason = WhyNot(a)) return reason;
  if (a.int8_lhs && !IsFloatFormat(a.type_id)) return Int8Product(a, scratch, stream);
  return FloatProduct<false>(a, scratch, stream);
}

const char* LinearGradientOnCuda(const ProductArguments& a, void* scratch, CudaStream stream) {
  if (const char* reason = WhyNot(a)) return reason;
  return FloatProduct<true>(a, scratch, stream);
}

const char* LoadProductsOnCuda() {
  const char* error = LoadAll(CountKernel, AddUpKernel, ScatterKernel, ZeroRowsKernel, QuantizeActivationsKernel<float>,
                              QuantizeActivationsKernel<Float16>, QuantizeActivationsKernel<BFloat16>,
                              MatvecKernel<Staged, 4>, MatvecKernel<Staged, 8>, MatvecKernel<Staged, 16>);
#define JQ_LOAD(F)                                                                                        \
  if (error == nullptr) {                                                                                 \
    error = LoadAll(MatvecKernel<Direct<F>, 4>, MatvecKernel<Direct<F>, 8>, MatvecKernel<Direct<F>, 16>); \
  }
  JQ_DIRECT(JQ_LOAD)
#undef JQ_LOAD
  if (error != nullptr) return error;
  error = LoadMatmul<64, 32>();
  if (error == nullptr) error = LoadMatmul<128, 64>();
  if (error != nullptr) return error;
  return LoadAll(ValueKernel<false, 32, 8, 128>, ValueKernel<true, 32, 8, 128>, ValueKernel<false, 64, 64, 64>,
                 ValueKernel<true, 64, 64, 64>);
}

}  // namespace ggml
}  // namespace jq
