// Moving the bytes of blocks, which begin anywhere.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_storage.h"

namespace jq {
namespace ggml {

constexpr int kWarp = 32;

template <int kBytes, int kWidth>
__device__ __forceinline__ void CopyInSteps(const void* from, void* to, int bytes, int lane) {
  constexpr int kStep = kWarp * kWidth;
#pragma unroll
  for (int i = 0; i < (kBytes + kStep - 1) / kStep; ++i) {
    const int at = i * kStep + lane * kWidth;
    if (at < bytes) StoreWords(LoadWords<kWidth>(static_cast<const char*>(from) + at), static_cast<char*>(to) + at);
  }
}

// Copies `bytes`, at most kBytes, between shared and global memory: in steps of 16 (or 8) bytes where the place and
// the number allow it, as they do for whole tiles of aligned arrays. The shared one is aligned to 16.
template <int kBytes>
__device__ __forceinline__ void CopyByWarp(const void* from, void* to, int bytes, int lane) {
  constexpr int kWide = kBytes % 16 == 0 ? 16 : 8;
  static_assert(kBytes % kWide == 0, "whole tiles are copied in wide steps");
  const uintptr_t places = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | bytes;
  if (places % kWide == 0) {
    CopyInSteps<kBytes, kWide>(from, to, bytes, lane);
  } else {
    // No unrolling: rare, and long.
    const bool pairs = places % 2 == 0;
#pragma unroll 1
    for (int at = lane * (pairs ? 2 : 1); at < bytes; at += kWarp * (pairs ? 2 : 1)) {
      const char* source = static_cast<const char*>(from) + at;
      char* target = static_cast<char*>(to) + at;
      if (pairs) {
        StoreWords(LoadWords<2>(source), target);
      } else {
        StoreWords(LoadWords<1>(source), target);
      }
    }
  }
}

// The first `count` elements, of 4 or 2 bytes, one by one.
template <int kBytes>
__device__ __forceinline__ void StoreElements(const Words<kBytes>& words, int element_bytes, char* to,
                                              int count = kBytes) {
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    if (element_bytes == 4) {
      if (i < count) StoreWords(Words<4>{{words.w[i]}}, to + 4 * i);
    } else {
      if (2 * i < count) StoreWords(Words<2>{{words.w[i]}}, to + 4 * i);
      if (2 * i + 1 < count) StoreWords(Words<2>{{words.w[i] >> 16}}, to + 4 * i + 2);
    }
  }
}

}  // namespace ggml
}  // namespace jq
