// Rows of x as integer products read them: the codes and scales of activations.h, in arrays of their own.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_launch.h"
#include "ffi/common/cuda_portable.h"
#include "ffi/common/cuda_storage.h"
#include "ffi/common/numeric.h"
#include "ffi/ggml/arguments.h"
#include "ffi/ggml/linear/blocking.h"

namespace jq {
namespace ggml {

// As a kernel parameter. Of row r and span s, with i = r * spans + s:
struct Activations {
  int64_t spans;
  // 8 from 8 i, in the order 0, 4, 1, 5, ...: the two of a fragment side by side.
  uint32_t* codes;
  // The scale, then twice scale * (sum of the codes): of each half, or of all.
  float4* scale;

  Activations() = default;
  Activations(const ProductArguments& a, void* memory) : spans(a.k / kSpan) {
    const int64_t all = a.x_batch * a.tokens * spans;
    codes = static_cast<uint32_t*>(memory);
    scale = reinterpret_cast<float4*>(codes + all * (kSpan / 4));
  }
  static int64_t Bytes(const ProductArguments& a) { return a.x_batch * a.tokens * (a.k / kSpan) * 48; }
};

namespace {

// Four values, 16-byte aligned rows or not.
template <typename Real>
__device__ __forceinline__ void LoadFour(const Real* from, bool aligned, float (&values)[4]) {
  if (aligned) {
    const Words<4 * sizeof(Real)> words = LoadWords<4 * sizeof(Real)>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = StorageOf<Real>::template Decode<float>(words.w, i, CodeSign{});
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = Convert<float>(from[i]);
  }
}

// Eight threads to a span. About 20 instructions a value, most of them for the four divisions: rows of x are small
// beside the weights they meet.
template <typename Real>
__global__ void __launch_bounds__(kThreads)
    QuantizeActivationsKernel(const Real* x, int64_t quads, bool aligned, bool halves, const Activations to) {
  constexpr int kQuads = kSpan / 4;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t lane = threadIdx.x % 32;
  for (int64_t quad = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; quad - lane < quads; quad += stride) {
    float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (quad < quads) LoadFour(x + 4 * quad, aligned, values);
    // As integers: the largest magnitude, and above every number an infinity or NaN.
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t magnitude = BitCast<uint32_t>(values[i]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
#pragma unroll
    for (int distance = 1; distance < kQuads; distance *= 2) {
      const uint32_t other = __shfl_xor_sync(~0u, largest, distance);
      largest = other > largest ? other : largest;
    }
    const bool finite = largest < 0x7f800000u;
    const float scale = finite ? BitCast<float>(largest) / 127.0f : BitCast<float>(0x7fc00000u);
    // Where the scale underflows to 0, and in spans without numbers, the codes are 0.
    const bool divides = finite && scale > 0.0f;
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float code = ClampNumber(RoundHalfToEven(values[i] / scale), Range<float>{-127.0f, 127.0f});
      codes |= (divides ? static_cast<uint32_t>(static_cast<int32_t>(code)) & 255 : 0) << (8 * i);
    }
    int sum = __dp4a(static_cast<int>(codes), 0x01010101, 0);
#pragma unroll
    for (int distance = 1; distance < kQuads / 2; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    const int other_half = __shfl_xor_sync(~0u, sum, kQuads / 2);
    if (!halves) sum += other_half;  // place 0 has the first half
    if (quad >= quads) continue;
    const int place = static_cast<int>(quad % kQuads);
    to.codes[quad - place + place % 4 * 2 + place / 4] = codes;
    if (place == 0) {
      float4 all;
      all.x = scale;
      all.y = scale * static_cast<float>(sum);
      all.z = scale * static_cast<float>(halves ? other_half : sum);
      all.w = 0.0f;
      to.scale[quad / kQuads] = all;
    }
  }
}

// halves: sums of sixteens.
inline const char* QuantizeActivations(const ProductArguments& a, bool halves, const Activations& to,
                                       CudaStream stream) {
  const int64_t quads = a.x_batch * a.tokens * a.k / 4;
  if (quads == 0) return nullptr;
  const unsigned grid = GridSize(quads, kThreads);
  const bool aligned = IsAligned(a.x, 4 * SizeOf(a.x_type));
  if (a.x_type == DType::kF32) {
    JQ_LAUNCH((QuantizeActivationsKernel<float>), grid, kThreads, 0, stream, static_cast<const float*>(a.x), quads,
              aligned, halves, to);
  } else if (a.x_type == DType::kF16) {
    JQ_LAUNCH((QuantizeActivationsKernel<Float16>), grid, kThreads, 0, stream, static_cast<const Float16*>(a.x), quads,
              aligned, halves, to);
  } else {
    JQ_LAUNCH((QuantizeActivationsKernel<BFloat16>), grid, kThreads, 0, stream, static_cast<const BFloat16*>(a.x),
              quads, aligned, halves, to);
  }
  return LaunchError();
}

}  // namespace
}  // namespace ggml
}  // namespace jq
