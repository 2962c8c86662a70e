// How elements lie in memory, and vectors of them in registers: up to 16 bytes a load or store, conversions that keep
// to the fast pipelines.
//
// A storage type S has
//   kBytes                    of one element (0: less than a byte)
//   kGroup                    elements that share a byte, else 1
//   Decode<Real>(words, i)    element i of a vector
//   Encode<V>(values, words)  the vector of V values
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "ffi/affine/arguments.h"
#include "ffi/affine/packing/math.h"
#include "ffi/common/cuda_portable.h"
#include "ffi/common/numeric.h"

namespace jq {

// The bytes of a vector, in whole words.
template <int kBytes>
struct Words {
  static constexpr int kCount = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t w[kCount];
};

// A GPU stops at a vector that is not aligned; so does the emulation.
template <int kBytes>
__device__ __forceinline__ void CheckAligned(const void* data) {
#if defined(JQ_CUDA_ON_HOST)
  if (reinterpret_cast<uintptr_t>(data) % (kBytes < 16 ? kBytes : 16) != 0) {
    fprintf(stderr, "access to %d bytes at the unaligned address %p\n", kBytes, data);
    abort();
  }
#else
  (void)data;
#endif
}

template <int kBytes>
__device__ __forceinline__ Words<kBytes> LoadWords(const void* from) {
  CheckAligned<kBytes>(from);
  Words<kBytes> words;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 v = static_cast<const uint4*>(from)[i];
      words.w[4 * i] = v.x;
      words.w[4 * i + 1] = v.y;
      words.w[4 * i + 2] = v.z;
      words.w[4 * i + 3] = v.w;
    }
  } else if constexpr (kBytes == 8) {
    const uint2 v = *static_cast<const uint2*>(from);
    words.w[0] = v.x;
    words.w[1] = v.y;
  } else if constexpr (kBytes == 4) {
    words.w[0] = *static_cast<const uint32_t*>(from);
  } else if constexpr (kBytes == 2) {
    words.w[0] = *static_cast<const uint16_t*>(from);
  } else {
    static_assert(kBytes == 1, "no load of this size");
    words.w[0] = *static_cast<const uint8_t*>(from);
  }
  return words;
}

template <int kBytes>
__device__ __forceinline__ void StoreWords(const Words<kBytes>& words, void* to) {
  CheckAligned<kBytes>(to);
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      uint4 v;
      v.x = words.w[4 * i];
      v.y = words.w[4 * i + 1];
      v.z = words.w[4 * i + 2];
      v.w = words.w[4 * i + 3];
      static_cast<uint4*>(to)[i] = v;
    }
  } else if constexpr (kBytes == 8) {
    uint2 v;
    v.x = words.w[0];
    v.y = words.w[1];
    *static_cast<uint2*>(to) = v;
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(to) = words.w[0];
  } else if constexpr (kBytes == 2) {
    *static_cast<uint16_t*>(to) = static_cast<uint16_t>(words.w[0]);
  } else {
    static_assert(kBytes == 1, "no store of this size");
    *static_cast<uint8_t*>(to) = static_cast<uint8_t>(words.w[0]);
  }
}

// What a kernel has to know at run time about codes it reads: signed and unsigned ones are then one kernel.
struct CodeSign {
  uint32_t flip;  // turns a two's complement code into an offset one
  float least;    // what the offset is added to: 2^23 + the offset
  static CodeSign Of(DType type) {
    switch (type) {
      case DType::kI8: return {0x80808080u, 8388608.0f + 128.0f};
      case DType::kI16: return {0x80008000u, 8388608.0f + 32768.0f};
      default: return {0, 8388608.0f};
    }
  }
};

template <typename T>
struct StorageOf;

template <>
struct StorageOf<float> {
  static constexpr int kBytes = 4, kGroup = 1;
  template <typename Real, int kWords>
  static __device__ __forceinline__ Real Decode(const uint32_t (&w)[kWords], int i, CodeSign) {
    return static_cast<Real>(BitCast<float>(w[i]));
  }
  template <int V, typename Real, int kWords>
  static __device__ __forceinline__ void Encode(const Real (&values)[V], uint32_t (&w)[kWords]) {
#pragma unroll
    for (int i = 0; i < V; ++i) w[i] = BitCast<uint32_t>(static_cast<float>(values[i]));
  }
};

template <>
struct StorageOf<double> {
  static constexpr int kBytes = 8, kGroup = 1;
  template <typename Real, int kWords>
  static __device__ __forceinline__ Real Decode(const uint32_t (&w)[kWords], int i, CodeSign) {
    return static_cast<Real>(BitCast<double>(static_cast<uint64_t>(w[2 * i + 1]) << 32 | w[2 * i]));
  }
  template <int V, typename Real, int kWords>
  static __device__ __forceinline__ void Encode(const Real (&values)[V], uint32_t (&w)[kWords]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const uint64_t bits = BitCast<uint64_t>(static_cast<double>(values[i]));
      w[2 * i] = static_cast<uint32_t>(bits);
      w[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
    }
  }
};

// 16-bit floats go to memory in pairs.
template <typename Storage>
struct PairStorage {
  static constexpr int kBytes = 2, kGroup = 1;
  template <int V, typename Real, int kWords>
  static __device__ __forceinline__ void Encode(const Real (&values)[V], uint32_t (&w)[kWords]) {
#pragma unroll
    for (int i = 0; i < V; i += 2) {
      const float second = i + 1 < V ? static_cast<float>(values[i + 1 < V ? i + 1 : i]) : 0.0f;
      w[i / 2] = Storage::Pair(static_cast<float>(values[i]), second);
    }
  }
};

template <>
struct StorageOf<BFloat16> : PairStorage<StorageOf<BFloat16>> {
  template <typename Real, int kWords>
  static __device__ __forceinline__ Real Decode(const uint32_t (&w)[kWords], int i, CodeSign) {
    return static_cast<Real>(BitCast<float>(i % 2 == 0 ? w[i / 2] << 16 : w[i / 2] & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t Pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return ToBFloat16(low).bits | static_cast<uint32_t>(ToBFloat16(high).bits) << 16;
#endif
  }
};

template <>
struct StorageOf<Float16> : PairStorage<StorageOf<Float16>> {
  template <typename Real, int kWords>
  static __device__ __forceinline__ Real Decode(const uint32_t (&w)[kWords], int i, CodeSign) {
    const uint16_t half = static_cast<uint16_t>(w[i / 2] >> (i % 2 * 16));
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return static_cast<Real>(value);
#else
    return static_cast<Real>(ToFloat(Float16{half}));
#endif
  }
  static __device__ __forceinline__ uint32_t Pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return ToFloat16(low).bits | static_cast<uint32_t>(ToFloat16(high).bits) << 16;
#endif
  }
};

// An integer between -2^22 and 2^22 in two's complement: the low bits of its sum with 1.5 2^23. An addition is four
// times faster than a conversion.
__device__ __forceinline__ uint32_t CodeBits(float code) { return BitCast<uint32_t>(code + 12582912.0f); }
__device__ __forceinline__ uint32_t CodeBits(double code) { return static_cast<uint32_t>(static_cast<int32_t>(code)); }

// The low bytes of V codes.
template <int V, typename Real, int kWords>
__device__ __forceinline__ void EncodeBytes(const Real (&values)[V], uint32_t (&w)[kWords]) {
  static_assert(kWords >= (V + 3) / 4, "a byte each");
  if constexpr (V == 1) {
    w[0] = CodeBits(values[0]);
  } else if constexpr (V == 2) {
    w[0] = __byte_perm(CodeBits(values[0]), CodeBits(values[1]), 0x0040);
  } else {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const uint32_t low = __byte_perm(CodeBits(values[i]), CodeBits(values[i + 1]), 0x0040);
      const uint32_t high = __byte_perm(CodeBits(values[i + 2]), CodeBits(values[i + 3]), 0x0040);
      w[i / 4] = __byte_perm(low, high, 0x5410);
    }
  }
}

// int8 and uint8, int16 and uint16: the same bits are written for either, CodeSign tells them apart when read.
struct Code8 {};
struct Code16 {};

template <>
struct StorageOf<Code8> {
  static constexpr int kBytes = 1, kGroup = 1;
  template <typename Real, int kWords>
  static __device__ __forceinline__ Real Decode(const uint32_t (&w)[kWords], int i, CodeSign sign) {
    // The byte becomes the last of a float of the size 2^23, in one instruction.
    const uint32_t bits = __byte_perm(w[i / 4] ^ sign.flip, 0x4b000000u, 0x7440u | static_cast<uint32_t>(i % 4));
    return static_cast<Real>(BitCast<float>(bits) - sign.least);
  }
  template <int V, typename Real, int kWords>
  static __device__ __forceinline__ void Encode(const Real (&values)[V], uint32_t (&w)[kWords]) {
    EncodeBytes<V>(values, w);
  }
};

template <>
struct StorageOf<Code16> {
  static constexpr int kBytes = 2, kGroup = 1;
  template <typename Real, int kWords>
  static __device__ __forceinline__ Real Decode(const uint32_t (&w)[kWords], int i, CodeSign sign) {
    const uint32_t bits = __byte_perm(w[i / 2] ^ sign.flip, 0x4b000000u, i % 2 == 0 ? 0x7410u : 0x7432u);
    return static_cast<Real>(BitCast<float>(bits) - sign.least);
  }
  template <int V, typename Real, int kWords>
  static __device__ __forceinline__ void Encode(const Real (&values)[V], uint32_t (&w)[kWords]) {
    if constexpr (V == 1) {
      w[0] = CodeBits(values[0]);
    } else {
#pragma unroll
      for (int i = 0; i < V; i += 2) w[i / 2] = __byte_perm(CodeBits(values[i]), CodeBits(values[i + 1]), 0x5410);
    }
  }
};

// Codes of some bits, several to a byte. Written only.
template <int bits>
struct Packed {};

// Packing<bits> on V codes at once: from a byte each to dense.
template <int bits, int V, int kCodeWords, int kWords>
__device__ __forceinline__ void PackWords(const uint32_t (&codes)[kCodeWords], uint32_t (&w)[kWords]) {
  uint32_t dense[kCodeWords];  // each in the bytes 0 and 2 (of 4 bits), or in byte 0 (of 2)
#pragma unroll
  for (int i = 0; i < kCodeWords; ++i) {
    if constexpr (bits == 4) {
      const uint32_t c = codes[i] & 0x0f0f0f0fu;
      dense[i] = c | c >> 4;
    } else {
      const uint32_t c = codes[i] & 0x03030303u;
      const uint32_t pairs = c | c >> 6;
      dense[i] = pairs | pairs >> 12;
    }
  }
  constexpr int kBytes = V * bits / 8;
  static_assert(kBytes >= 1, "at least one byte");
  if constexpr (bits == 4) {
    if constexpr (kBytes < 4) {
      w[0] = __byte_perm(dense[0], 0, 0x4420);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) w[i] = __byte_perm(dense[2 * i], dense[2 * i + 1], 0x6420);
    }
  } else {
    if constexpr (kBytes == 1) {
      w[0] = dense[0];
    } else if constexpr (kBytes == 2) {
      w[0] = __byte_perm(dense[0], dense[1], 0x0040);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        w[i] = __byte_perm(__byte_perm(dense[4 * i], dense[4 * i + 1], 0x0040),
                           __byte_perm(dense[4 * i + 2], dense[4 * i + 3], 0x0040), 0x5410);
      }
    }
  }
}

template <int bits>
struct StorageOf<Packed<bits>> {
  static constexpr int kBytes = 0, kGroup = 8 / bits;
  template <int V, typename Real, int kWords>
  static __device__ __forceinline__ void Encode(const Real (&values)[V], uint32_t (&w)[kWords]) {
    uint32_t codes[(V + 3) / 4];
    EncodeBytes<V>(values, codes);
    PackWords<bits, V>(codes, w);
  }
};

// Bytes that a vector of V elements takes.
template <typename T, int V>
constexpr int kVectorBytes = V * StorageOf<T>::kBytes / StorageOf<T>::kGroup;
template <int bits, int V>
constexpr int kVectorBytes<Packed<bits>, V> = V * bits / 8;

// Any floating type, known at run time alone: for pairs of types that nobody is in a hurry about.
struct AnyFloat {};

template <typename Real>
__device__ __forceinline__ Real LoadAny(const void* data, int64_t i, DType type) {
  switch (type) {
    case DType::kF64: return static_cast<Real>(static_cast<const double*>(data)[i]);
    case DType::kF16: return static_cast<Real>(ToFloat(static_cast<const Float16*>(data)[i]));
    case DType::kBF16: return static_cast<Real>(ToFloat(static_cast<const BFloat16*>(data)[i]));
    default: return static_cast<Real>(static_cast<const float*>(data)[i]);
  }
}
template <typename Real>
__device__ __forceinline__ void StoreAny(void* data, int64_t i, DType type, Real value) {
  switch (type) {
    case DType::kF64: static_cast<double*>(data)[i] = static_cast<double>(value); return;
    case DType::kF16: static_cast<Float16*>(data)[i] = ToFloat16(static_cast<float>(value)); return;
    case DType::kBF16: static_cast<BFloat16*>(data)[i] = ToBFloat16(static_cast<float>(value)); return;
    default: static_cast<float*>(data)[i] = static_cast<float>(value);
  }
}

}  // namespace jq
