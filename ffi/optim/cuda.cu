// Adam on CUDA: a warp for each block. It reads the block twice, once for the exponents: between, the block is in the
// cache, and no length of a block has to fit registers.
#include "ffi/common/cuda_launch.h"
#include "ffi/optim/math.h"

namespace jq {
namespace optim {
namespace {

constexpr int kWarp = 32;

// Consecutive values of a thread, read and written at once.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Values {
  T at[kWidth];
};
template <int kWidth, typename T>
__device__ __forceinline__ Values<T, kWidth> Load(const T* from) {
  return *reinterpret_cast<const Values<T, kWidth>*>(from);
}
template <int kWidth, typename T>
__device__ __forceinline__ void Store(const Values<T, kWidth>& values, T* to) {
  *reinterpret_cast<Values<T, kWidth>*>(to) = values;
}

__device__ __forceinline__ uint32_t Larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ uint32_t LargestOfWarp(uint32_t value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = Larger(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

template <typename G, int kWidth>
__global__ void __launch_bounds__(kThreads) AdamKernel(const AdamArguments a) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp), blocks = a.Blocks();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t b = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp; b < blocks;
       b += warps) {
    const Place place = PlaceOf(a, b);
    const int n = static_cast<int>(place.size);
    const Factors f = a.factors[place.factors];
    const uint32_t seed = a.seed[place.factors];
    const G* g = static_cast<const G*>(a.g) + place.first;
    G* update = static_cast<G*>(a.update) + place.first;
    const uint8_t *m = a.m + place.first, *v = a.v + place.first;
    const uint32_t old_m = First::Offset(a.m_exponent[b]), old_v = Second::Offset(a.v_exponent[b]);
    const float zero = Second::Zero(old_v);
    const auto advance = [&](float gi, uint8_t mi, uint8_t vi) {
      return Advance<Check::kAll>(gi, {First::Decode(static_cast<int8_t>(mi), old_m), Second::Decode(vi, old_v, zero)},
                                  f);
    };

    uint32_t first = 0, second = 0;
    for (int i = lane * kWidth; i < n; i += kWarp * kWidth) {
      const auto gs = Load<kWidth>(g + i);
      const auto ms = Load<kWidth>(m + i), vs = Load<kWidth>(v + i);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const Moments moments = advance(Convert<float>(gs.at[k]), ms.at[k], vs.at[k]);
        first = Larger(first, Magnitude(moments.first));
        second = Larger(second, BitCast<uint32_t>(moments.second));
      }
    }
    const uint8_t m_exponent = ExponentOf(LargestOfWarp(first)), v_exponent = ExponentOf(LargestOfWarp(second));
    const uint32_t new_m = First::Offset(m_exponent), new_v = Second::Offset(v_exponent);
    for (int i = lane * kWidth; i < n; i += kWarp * kWidth) {
      const auto gs = Load<kWidth>(g + i);
      auto ms = Load<kWidth>(m + i), vs = Load<kWidth>(v + i);
      Values<G, kWidth> us;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float gi = Convert<float>(gs.at[k]);
        const Moments moments = advance(gi, ms.at[k], vs.at[k]);
        const uint32_t hash = Hash(moments.first, moments.second, Salt(static_cast<uint32_t>(i + k), seed));
        us.at[k] = Convert<G>(Update<Check::kAll>(gi, moments, f));
        ms.at[k] = static_cast<uint8_t>(First::Word(moments.first, new_m, hash));
        vs.at[k] = static_cast<uint8_t>(Second::Word(moments.second, new_v, hash));
      }
      Store(us, update + i);
      Store(ms, a.new_m + place.first + i);
      Store(vs, a.new_v + place.first + i);
    }
    // The exponents may be their own new values: after every lane has read the old ones.
    __syncwarp();
    if (lane == 0) {
      a.new_m_exponent[b] = m_exponent;
      a.new_v_exponent[b] = v_exponent;
    }
  }
}

template <typename G>
const char* Launch(const AdamArguments& a, CUstream_st* stream) {
  constexpr int kWide = 4;
  const bool wide = a.block % kWide == 0 && a.row_size % kWide == 0 && IsAligned(a.g, kWide * sizeof(G)) &&
                    IsAligned(a.update, kWide * sizeof(G)) && IsAligned(a.m, kWide) && IsAligned(a.v, kWide) &&
                    IsAligned(a.new_m, kWide) && IsAligned(a.new_v, kWide);
  const unsigned grid = GridSize(a.Blocks(), kThreads / kWarp);
  if (wide) {
    JQ_LAUNCH((AdamKernel<G, kWide>), grid, kThreads, 0, stream, a);
  } else {
    JQ_LAUNCH((AdamKernel<G, 1>), grid, kThreads, 0, stream, a);
  }
  return LaunchError();
}

template <typename G>
const char* LoadFor() {
  const char* error = LoadKernel(AdamKernel<G, 4>);
  return error != nullptr ? error : LoadKernel(AdamKernel<G, 1>);
}

}  // namespace

const char* Adam8bitOnCuda(const AdamArguments& a, CUstream_st* stream) {
  switch (a.type) {
    case DType::kF16: return Launch<Float16>(a, stream);
    case DType::kBF16: return Launch<BFloat16>(a, stream);
    default: return Launch<float>(a, stream);
  }
}

const char* LoadAdam8bitOnCuda() {
  const char* error = LoadFor<float>();
  if (error == nullptr) error = LoadFor<Float16>();
  return error != nullptr ? error : LoadFor<BFloat16>();
}

}  // namespace optim
}  // namespace jq
