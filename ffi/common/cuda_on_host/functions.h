// The device functions of CUDA that kernels may use. Those that wait for other threads go through the worker.
// See cuda_on_host.h. Sums and products are only fused where a kernel says so: compile with -ffp-contract=off.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>

#include "ffi/common/cuda_on_host/worker.h"

#pragma GCC visibility push(hidden)

// ---- Barriers, votes, shuffles ----

inline void __syncthreads() { jq::cuda_on_host::current_worker->Barrier(false); }
inline int __syncthreads_count(int predicate) { return jq::cuda_on_host::current_worker->Barrier(predicate != 0); }
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(predicate == 0) == 0; }

inline void __syncwarp(unsigned mask = ~0u) { jq::cuda_on_host::current_worker->Vote(__func__, mask, false); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return jq::cuda_on_host::current_worker->Vote(__func__, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return jq::cuda_on_host::current_worker->Vote(__func__, mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return jq::cuda_on_host::current_worker->Vote(__func__, mask, predicate != 0) == mask;
}

namespace jq {
namespace cuda_on_host {

template <typename T>
T Shuffle(const char* function, unsigned mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t), "a shuffle moves 8 bytes at most");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = current_worker->Exchange(function, mask, bits, source);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// The lanes of the segment of `width` lanes (a power of two) around this one. As on the device, a lane that would read
// beyond the end of its segment reads its own value.
struct Segment {
  int lane, first, last;
  explicit Segment(int width) : lane(current_worker->Lane()), first(lane & -width), last(first + width - 1) {}
};

}  // namespace cuda_on_host
}  // namespace jq

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const jq::cuda_on_host::Segment segment(width);
  return jq::cuda_on_host::Shuffle(__func__, mask, value, segment.first + (source & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = warpSize) {
  const jq::cuda_on_host::Segment segment(width);
  const int source = segment.lane - static_cast<int>(distance);
  return jq::cuda_on_host::Shuffle(__func__, mask, value, source >= segment.first ? source : segment.lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = warpSize) {
  const jq::cuda_on_host::Segment segment(width);
  const int source = segment.lane + static_cast<int>(distance);
  return jq::cuda_on_host::Shuffle(__func__, mask, value, source <= segment.last ? source : segment.lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize) {
  const jq::cuda_on_host::Segment segment(width);
  const int source = segment.lane ^ lane_mask;
  return jq::cuda_on_host::Shuffle(__func__, mask, value, source <= segment.last ? source : segment.lane);
}

// ---- Memory ----

inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// The hints say how to cache, not what to load.
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, std::common_type_t<T> value) {
  *address = value;
}
template <typename T>
void __stcg(T* address, std::common_type_t<T> value) {
  *address = value;
}

namespace jq {
namespace cuda_on_host {

template <typename T, typename Function>
T AtomicUpdate(T* address, Function function) {
  T old, wanted;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    wanted = function(old);
  } while (!__atomic_compare_exchange(address, &old, &wanted, /*weak=*/true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

}  // namespace cuda_on_host
}  // namespace jq

// common_type_t: T comes from the address alone, so that 1 can be added to an unsigned.
template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  return jq::cuda_on_host::AtomicUpdate(address, [=](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicMax(T* address, std::common_type_t<T> value) {
  return jq::cuda_on_host::AtomicUpdate(address, [=](T old) { return old < value ? value : old; });
}
template <typename T>
T atomicMin(T* address, std::common_type_t<T> value) {
  return jq::cuda_on_host::AtomicUpdate(address, [=](T old) { return value < old ? value : old; });
}
template <typename T>
T atomicOr(T* address, std::common_type_t<T> value) {
  return jq::cuda_on_host::AtomicUpdate(address, [=](T old) { return old | value; });
}
template <typename T>
T atomicExch(T* address, std::common_type_t<T> value) {
  return jq::cuda_on_host::AtomicUpdate(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return jq::cuda_on_host::AtomicUpdate(address, [=](T old) { return old == expected ? value : old; });
}

// ---- Bits and integers ----

namespace jq {
namespace cuda_on_host {

template <typename To, typename From>
To Reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From), "only between types of one size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace cuda_on_host
}  // namespace jq

inline int __float_as_int(float value) { return jq::cuda_on_host::Reinterpret<int>(value); }
inline unsigned __float_as_uint(float value) { return jq::cuda_on_host::Reinterpret<unsigned>(value); }
inline float __int_as_float(int value) { return jq::cuda_on_host::Reinterpret<float>(value); }
inline float __uint_as_float(unsigned value) { return jq::cuda_on_host::Reinterpret<float>(value); }
inline long long __double_as_longlong(double value) { return jq::cuda_on_host::Reinterpret<long long>(value); }
inline double __longlong_as_double(long long value) { return jq::cuda_on_host::Reinterpret<double>(value); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}

inline int __mulhi(int a, int b) { return static_cast<int>(int64_t{a} * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

// The sum wraps, as on the device, hence unsigned.
inline int __dp4a(int a, int b, int c) {
  unsigned sum = static_cast<unsigned>(c);
  for (int shift = 0; shift < 32; shift += 8) {
    sum += static_cast<unsigned>(static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift));
  }
  return static_cast<int>(sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int shift = 0; shift < 32; shift += 8) c += (a >> shift & 0xff) * (b >> shift & 0xff);
  return c;
}

// Byte i of the result is byte (selector >> 4 i & 7) of b:a, or its sign spread over the byte where bit 4 i + 3 is set.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

namespace jq {
namespace cuda_on_host {

template <typename Function>
unsigned ForEachByte(unsigned a, unsigned b, Function function) {
  unsigned result = 0;
  for (int shift = 0; shift < 32; shift += 8) {
    result |= static_cast<unsigned>(function(a >> shift & 0xff, b >> shift & 0xff) & 0xff) << shift;
  }
  return result;
}

}  // namespace cuda_on_host
}  // namespace jq

// The four bytes of a word, each for itself; comparisons give 0xff or 0.
inline unsigned __vadd4(unsigned a, unsigned b) {
  return jq::cuda_on_host::ForEachByte(a, b, [](unsigned x, unsigned y) { return x + y; });
}
inline unsigned __vsub4(unsigned a, unsigned b) {
  return jq::cuda_on_host::ForEachByte(a, b, [](unsigned x, unsigned y) { return x - y; });
}
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
  return jq::cuda_on_host::ForEachByte(a, b, [](unsigned x, unsigned y) { return x == y ? 0xffu : 0u; });
}
inline unsigned __vcmpgeu4(unsigned a, unsigned b) {
  return jq::cuda_on_host::ForEachByte(a, b, [](unsigned x, unsigned y) { return x >= y ? 0xffu : 0u; });
}

using std::max;
using std::min;

// ---- Floating point, rounded to nearest ----

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// As on the device: saturates, and NaN gives 0.
inline int __float2int_rn(float value) {
  if (value != value) return 0;
  if (value >= 2147483648.0f) return std::numeric_limits<int>::max();
  if (value < -2147483648.0f) return std::numeric_limits<int>::min();
  return static_cast<int>(rintf(value));
}
inline float __int2float_rn(int value) { return static_cast<float>(value); }

#pragma GCC visibility pop
