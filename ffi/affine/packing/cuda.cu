// pack and unpack on CUDA: 16 codes a thread where buffers and rows allow, else a byte of codes.
#include "ffi/affine/cuda_kernels.h"
#include "ffi/affine/packing/math.h"
#include "ffi/common/cuda_index.h"
#include "ffi/common/cuda_launch.h"
#include "ffi/common/cuda_storage.h"

namespace jq {
namespace {

constexpr int kVector = 16;   // codes
constexpr int kInFlight = 4;  // vectors of a thread

struct Parameters {
  const uint8_t* in;
  uint8_t* out;
  int64_t vectors;     // from the beginning
  int64_t first_byte;  // of those that are left
  int64_t bytes;       // in all
  int64_t row_size;    // codes
  FastDivider row_bytes;
  bool is_signed;
};

// f(first code, its byte, codes in the byte) for each byte that no vector covers.
template <int bits, typename F>
__device__ __forceinline__ void ForEachByte(const Parameters& p, const F& f) {
  constexpr int kPerByte = Packing<bits>::kPerByte;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t b = p.first_byte + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; b < p.bytes; b += stride) {
    const int64_t row = static_cast<int64_t>(p.row_bytes.Divide(static_cast<uint64_t>(b)));
    const int64_t column = (b - row * static_cast<int64_t>(p.row_bytes.divisor)) * kPerByte;
    const int64_t left = p.row_size - column;
    f(row * p.row_size + column, b, left < kPerByte ? static_cast<int>(left) : kPerByte);
  }
}

// f(vector) for kInFlight vectors at a time, in two steps: loads first.
template <typename Load, typename Store>
__device__ __forceinline__ void ForEachVector(const Parameters& p, const Load& load, const Store& store) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads * kInFlight);
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kInFlight) + threadIdx.x; first < p.vectors;
       first += stride) {
    decltype(load(first)) values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      values[k] = load(first + k * kThreads < p.vectors ? first + k * kThreads : first);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * kThreads < p.vectors) store(first + k * kThreads, values[k]);
    }
  }
}

template <int bits>
__global__ void __launch_bounds__(kThreads) PackKernel(const Parameters p) {
  constexpr int kBytes = kVector * bits / 8;
  ForEachVector(
      p, [&](int64_t v) { return LoadWords<kVector>(p.in + v * kVector); },
      [&](int64_t v, const Words<kVector>& codes) {
        Words<kBytes> packed;
        PackWords<bits, kVector>(codes.w, packed.w);
        StoreWords(packed, p.out + v * kBytes);
      });
  ForEachByte<bits>(p, [&](int64_t code, int64_t byte, int n) { p.out[byte] = Packing<bits>::Pack(p.in + code, n); });
}

// Sign-extends four codes, each in the low bits of its byte: sign has the sign bit of each, or is 0.
template <int bits>
__device__ __forceinline__ uint32_t SignExtend(uint32_t codes, uint32_t sign) {
  constexpr uint32_t kAbove = 0x100u - (1u << bits);  // the bits of a byte above its code
  return codes | ((codes & sign) >> (bits - 1)) * kAbove;
}

template <int bits>
__global__ void __launch_bounds__(kThreads) UnpackKernel(const Parameters p) {
  constexpr int kBytes = kVector * bits / 8;
  const uint32_t sign = p.is_signed ? 0x01010101u << (bits - 1) : 0;
  ForEachVector(
      p, [&](int64_t v) { return LoadWords<kBytes>(p.in + v * kBytes); },
      [&](int64_t v, const Words<kBytes>& packed) {
        Words<kVector> codes;
#pragma unroll
        for (int i = 0; i < kVector / 4; ++i) {
          uint32_t c;
          if constexpr (bits == 4) {
            // Bytes b0 b0 b1 b1 of the packed half, then one nibble of each.
            const uint32_t twice = __byte_perm(packed.w[i / 2], 0, i % 2 == 0 ? 0x1100 : 0x3322);
            c = (twice & 0x000f000fu) | (twice >> 4 & 0x0f000f00u);
          } else {
            const uint32_t all = __byte_perm(packed.w[0], 0, static_cast<uint32_t>(i) * 0x1111u);
            c = (all & 0x00000003u) | (all >> 2 & 0x00000300u) | (all >> 4 & 0x00030000u) | (all >> 6 & 0x03000000u);
          }
          codes.w[i] = SignExtend<bits>(c, sign);
        }
        StoreWords(codes, p.out + v * kVector);
      });
  ForEachByte<bits>(p, [&](int64_t code, int64_t byte, int n) {
    for (int i = 0; i < n; ++i) p.out[code + i] = Packing<bits>::Unpack(p.in[byte], i, p.is_signed);
  });
}

Parameters Read(const PackArguments& a, const void* codes, const void* bytes) {
  Parameters p{};
  p.in = static_cast<const uint8_t*>(a.in);
  p.out = static_cast<uint8_t*>(a.out);
  p.row_size = a.row_size;
  p.is_signed = a.is_signed;
  const int64_t row_bytes = (a.row_size * a.bits + 7) / 8;
  p.row_bytes = FastDivider(row_bytes);
  p.bytes = a.rows * row_bytes;
  const int64_t vector_bytes = kVector * a.bits / 8;
  if (a.rows == 1 && IsAligned(codes, kVector) && IsAligned(bytes, vector_bytes)) p.vectors = a.row_size / kVector;
  p.first_byte = p.vectors * vector_bytes;
  return p;
}

unsigned Grid(const Parameters& p) {
  return p.vectors > 0 ? GridSize(p.vectors, kThreads * kInFlight) : GridSize(p.bytes, kThreads);
}

}  // namespace

const char* PackOnCuda(const PackArguments& a, CudaStream stream) {
  const Parameters p = Read(a, a.in, a.out);
  if (a.bits == 4) {
    JQ_LAUNCH((PackKernel<4>), Grid(p), kThreads, 0, stream, p);
  } else {
    JQ_LAUNCH((PackKernel<2>), Grid(p), kThreads, 0, stream, p);
  }
  return LaunchError();
}

const char* UnpackOnCuda(const PackArguments& a, CudaStream stream) {
  const Parameters p = Read(a, a.out, a.in);
  if (a.bits == 4) {
    JQ_LAUNCH((UnpackKernel<4>), Grid(p), kThreads, 0, stream, p);
  } else {
    JQ_LAUNCH((UnpackKernel<2>), Grid(p), kThreads, 0, stream, p);
  }
  return LaunchError();
}

const char* LoadPackingOnCuda() {
  for (auto* kernel : {&PackKernel<4>, &PackKernel<2>, &UnpackKernel<4>, &UnpackKernel<2>}) {
    if (const char* error = LoadKernel(kernel)) return error;
  }
  return nullptr;
}

}  // namespace jq
