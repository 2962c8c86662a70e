// Quantisation on CUDA: a thread has a block, and does what a lane does on the CPU (lanes.h). The bytes of a warp's
// blocks go through shared memory, to leave by wide, consecutive stores.
//
// A device cannot refuse values. Where the CPU's kernel returns an error, the scales here become NaN: of blocks with a
// value that is not finite (of whole rows, where legacy formats weigh a row as a whole), and of whole rows whose
// importance matrix has an infinity, NaN or a negative weight, or zeros alone. ggml.validate() finds them, and what is
// computed with them is NaN; but NVFP4's NaN counts as zero.
#if defined(__CUDACC__)
#pragma nv_diag_suppress 20091  // tables of the device, in functions that are for the host too but not called there
#endif

#include "ffi/common/cuda_launch.h"
#include "ffi/ggml/cuda_kernels.h"
#include "ffi/ggml/cuda_memory.h"
#include "ffi/ggml/quantize/iq4.h"
#include "ffi/ggml/quantize/k_quants.h"

namespace jq {
namespace ggml {
namespace {

// clang-format off
#define JQ_ON_DEVICE(X) \
  X(Q1_0) X(Q2_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q8_1) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(Q8_K) \
  X(IQ4_NL) X(IQ4_XS) X(TQ1_0) X(TQ2_0) X(MXFP4) X(NVFP4)
// clang-format on

template <typename F>
constexpr bool kLegacy = F::kId == Q4_0::kId || F::kId == Q4_1::kId || F::kId == Q5_0::kId || F::kId == Q5_1::kId;
template <typename F>
constexpr bool kUsesWeights =
    kLegacy<F> || (F::kId >= Q2_K::kId && F::kId <= Q6_K::kId) || F::kId == IQ4_NL::kId || F::kId == IQ4_XS::kId;

__device__ __forceinline__ bool IsFinite(float value) { return (BitCast<uint32_t>(value) & 0x7fffffffu) < 0x7f800000u; }

// In the reference's order, so by every thread for itself; those of a warp read the same values.
__device__ __forceinline__ float MeanSquare(const float* x, int64_t n, bool* finite) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    sum += x[i] * x[i];
    *finite &= IsFinite(x[i]);
  }
  return sum / static_cast<float>(n);
}

__device__ __forceinline__ bool MakeSense(const float* weights, int64_t n) {
  bool sensible = true, positive = false;
  for (int64_t i = 0; i < n; ++i) {
    sensible &= IsFinite(weights[i]) && weights[i] >= 0.0f;
    positive |= weights[i] > 0.0f;
  }
  return sensible && positive;
}

template <typename F, typename Out>
__device__ __forceinline__ void PutNaN(const Out& out) {
  if constexpr (F::kId == MXFP4::kId) {
    out.template Put<1>(offsetof(MXFP4, e), 0xff);
  } else if constexpr (F::kId == NVFP4::kId) {
    out.template Put<4>(offsetof(NVFP4, d), 0x7f7f7f7f);
  } else if constexpr (F::kId == Q8_K::kId) {
    out.template Put<4>(offsetof(Q8_K, d), 0x7fc00000);
  } else {
    out.template Put<2>(offsetof(F, d), 0x7e00);
  }
}

template <typename F>
__global__ void __launch_bounds__(kWarp) QuantizeKernel(QuantizeArguments a) {
  constexpr int kBlock = F::kBlock, kBytes = kWarp * static_cast<int>(sizeof(F));
  // Small blocks come through shared memory as well; the values of large ones are not read all at once.
  constexpr bool kStaged = kBlock == 32;
  JQ_SHARED(uint4, bytes, (kBytes + 15) / 16);
  JQ_SHARED(float, staged, kStaged ? kWarp : 1, kStaged ? kBlock + 1 : 1);
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t row_blocks = a.k / kBlock, blocks = a.rows * row_blocks;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kWarp; first < blocks;
       first += static_cast<int64_t>(gridDim.x) * kWarp) {
    const int count = static_cast<int>(min(static_cast<int64_t>(kWarp), blocks - first));
    if constexpr (kStaged) {
      for (int i = 0; i < count; ++i) staged[i][lane] = a.x[(first + i) * kBlock + lane];
      __syncwarp();
    }
    if (lane < count) {
      const int64_t block = first + lane, row = block / row_blocks;
      const float* x = a.x + block * kBlock;
      float values[kStaged ? kBlock : 1];
      if constexpr (kStaged) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) values[i] = staged[lane][i];
        x = values;
      }
      bool sensible = true;
      for (int i = 0; i < kBlock; ++i) sensible &= IsFinite(x[i]);
      Tile<float> tile = {x, nullptr, 0.0f};
      if constexpr (kUsesWeights<F>) {
        if (const float* weights = a.ImatrixOf(row)) {
          sensible &= MakeSense(weights, a.k);
          tile.weights = weights + (block - row * row_blocks) * kBlock;
          if (kLegacy<F>) tile.sigma2 = MeanSquare(a.x + row * a.k, a.k, &sensible);
        }
      }
      const Writer<F, float> out{reinterpret_cast<uint8_t*>(bytes) + lane * sizeof(F)};
      Quantize(F{}, tile, out);
      if (!sensible) PutNaN<F>(out);
    }
    __syncwarp();
    CopyByWarp<kBytes>(bytes, a.data + first * static_cast<int64_t>(sizeof(F)), count * static_cast<int>(sizeof(F)),
                       lane);
    __syncwarp();
  }
}

// F32, F16 and BF16 hold every value.
template <typename F>
__global__ void EncodeKernel(const float* x, uint8_t* data, int64_t n) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    const F block = {Convert<decltype(F::value)>(x[i])};
    memcpy(data + i * static_cast<int64_t>(sizeof(F)), &block, sizeof(F));
  }
}

template <typename F>
const char* Launch(const QuantizeArguments& a, CudaStream stream) {
  if constexpr (F::kBlock == 1) {
    const int64_t n = a.rows * a.k;
    JQ_LAUNCH((EncodeKernel<F>), GridSize(n, kThreads), kThreads, 0, stream, a.x, a.data, n);
  } else {
    const int64_t blocks = a.rows * (a.k / F::kBlock);
    // A thread block is a warp: four times as many as usual.
    JQ_LAUNCH((QuantizeKernel<F>), GridSize(blocks, kWarp) * 4, kWarp, 0, stream, a);
  }
  return LaunchError();
}

}  // namespace

bool QuantizesOnCuda(int type_id) {
  switch (type_id) {
#define JQ_CASE(F) case F::kId:
    JQ_ON_DEVICE(JQ_CASE)
    JQ_CASE(F32)
    JQ_CASE(F16)
    JQ_CASE(BF16)
#undef JQ_CASE
    return true;
    default: return false;
  }
}

const char* QuantizeOnCuda(const QuantizeArguments& a, CudaStream stream) {
  switch (a.type_id) {
#define JQ_CASE(F) \
  case F::kId: return Launch<F>(a, stream);
    JQ_ON_DEVICE(JQ_CASE)
    JQ_CASE(F32)
    JQ_CASE(F16)
    JQ_CASE(BF16)
#undef JQ_CASE
    default: return "no kernel for this type";
  }
}

const char* LoadQuantizeOnCuda() {
#define JQ_LOAD(F) \
  if (const char* error = LoadKernel(&QuantizeKernel<F>)) return error;
  JQ_ON_DEVICE(JQ_LOAD)
#undef JQ_LOAD
  if (const char* error = LoadKernel(&EncodeKernel<F32>)) return error;
  if (const char* error = LoadKernel(&EncodeKernel<F16>)) return error;
  return LoadKernel(&EncodeKernel<BF16>);
}

}  // namespace ggml
}  // namespace jq
