// Tests of the CUDA emulation's threads, memory and errors (ffi/common/cuda_on_host.h). From the root:
//   g++ -std=c++17 -O2 -Wall -Wextra -ffp-contract=off -pthread -DJQ_CUDA_ON_HOST -I. -o /tmp/test_cuda_on_host
//       tests/cpp/test_cuda_on_host.cc && /tmp/test_cuda_on_host
//
// It must also pass with -fsanitize=address,undefined, with -DJQ_CUDA_ON_HOST_UCONTEXT (the switch of other processors)
// and under any JAXQUANT_EMULATION_SEED.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "ffi/common/cuda_portable.h"
#include "tests/cpp/check.h"

namespace {

// The launch before succeeded.
#define CHECK_LAUNCH()                                                                 \
  do {                                                                                 \
    const cudaError_t launch_error = cudaGetLastError();                               \
    if (launch_error != cudaSuccess) printf("%s\n", cudaGetErrorString(launch_error)); \
    CHECK(launch_error == cudaSuccess);                                                \
  } while (false)

__global__ void Nothing() {}

// The launch before failed for a reason that has `text` in it, and the next one is not affected.
void CheckFailed(cudaError_t expected, const std::string& text) {
  CHECK(cudaPeekAtLastError() == expected);
  const cudaError_t error = cudaGetLastError();
  CHECK(error == expected);
  CHECK(cudaGetLastError() == cudaSuccess);
  const std::string message = cudaGetErrorString(error);
  if (message.find(text) == std::string::npos) {
    ++failures;
    printf("expected \"%s\" in: %s\n", text.c_str(), message.c_str());
  }
  JQ_LAUNCH(Nothing, 2, 64, 0, nullptr);
  CHECK_LAUNCH();
}

std::vector<float> Iota(int n) {
  std::vector<float> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 1.0f);
  return values;
}

// ---- Indices, arguments, vector types ----

__global__ __launch_bounds__(256) void Saxpy(int64_t n, float a, const float* __restrict__ x, float* __restrict__ y) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) y[i] = a * x[i] + y[i];
}

void TestGridStride() {
  const int n = 10007;
  const std::vector<float> x = Iota(n);
  for (const unsigned grid : {1u, 3u, 100u}) {
    std::vector<float> y(x.size(), 1.0f);
    JQ_LAUNCH(Saxpy, grid, 128, 0, nullptr, n, 2, x.data(), y.data());  // int to int64_t and float, as with <<<>>>
    CHECK_LAUNCH();
    bool right = true;
    for (size_t i = 0; i < y.size(); ++i) right = right && y[i] == 2 * x[i] + 1;
    CHECK(right);
  }
}

__global__ void CountIndices(unsigned* seen) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  atomicAdd(&seen[block * blockDim.x * blockDim.y * blockDim.z + thread], 1);
}

void TestIndices() {
  std::vector<unsigned> seen(2 * 3 * 4 * 5 * 6 * 7);
  JQ_LAUNCH(CountIndices, dim3(2, 3, 4), dim3(5, 6, 7), 0, nullptr, seen.data());
  CHECK_LAUNCH();
  CHECK(seen == std::vector<unsigned>(seen.size(), 1u));
}

template <typename T, int kFactor>
__global__ void ScaleVectors(const float* x, T* y) {
  float4 v = reinterpret_cast<const float4*>(x)[threadIdx.x];
  v.x *= kFactor, v.y *= kFactor, v.z *= kFactor, v.w *= kFactor;
  *reinterpret_cast<float4*>(y + 4 * threadIdx.x) = v;
}

void TestVectorTypesAndTemplates() {
  alignas(16) float x[128], y[128];
  std::iota(x, x + 128, 0.0f);
  JQ_LAUNCH((ScaleVectors<float, 3>), 1, 32, 0, nullptr, x, y);
  CHECK_LAUNCH();
  for (int i = 0; i < 128; ++i) CHECK(y[i] == 3.0f * static_cast<float>(i));
}

// ---- Shared memory and barriers ----

enum class Broken { kNothing, kNoBarrierAfterWrite, kNoBarrierInLoop };

// sum[block] = the sum of its 256 elements, as a tree.
template <Broken kBroken>
__global__ void BlockSum(const float* x, float* sum) {
  JQ_SHARED(float, values, 256);
  values[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  if (kBroken != Broken::kNoBarrierAfterWrite) __syncthreads();
  for (unsigned distance = 128; distance > 0; distance /= 2) {
    if (threadIdx.x < distance) values[threadIdx.x] += values[threadIdx.x + distance];
    if (kBroken != Broken::kNoBarrierInLoop) __syncthreads();
  }
  if (threadIdx.x == 0) sum[blockIdx.x] = values[0];
}

template <Broken kBroken>
int WrongBlockSums() {
  const int blocks = 50;
  const std::vector<float> x = Iota(256 * blocks);
  std::vector<float> sum(blocks, -1.0f);
  JQ_LAUNCH(BlockSum<kBroken>, blocks, 256, 0, nullptr, x.data(), sum.data());
  CHECK_LAUNCH();
  int wrong = 0;
  for (int b = 0; b < blocks; ++b) wrong += sum[static_cast<size_t>(b)] != 65536.0f * static_cast<float>(b) + 32896.0f;
  return wrong;
}

void TestMissingBarriersShow() {
  CHECK(WrongBlockSums<Broken::kNothing>() == 0);
  CHECK(WrongBlockSums<Broken::kNoBarrierAfterWrite>() > 25);
  CHECK(WrongBlockSums<Broken::kNoBarrierInLoop>() > 25);
}

// Reads its neighbour's value in each round; without the second barrier, a fast neighbour has overwritten it.
template <bool kBroken>
__global__ void Rotate(int* y, int rounds) {
  JQ_SHARED(int, values, 64);
  int value = static_cast<int>(threadIdx.x);
  for (int i = 0; i < rounds; ++i) {
    values[threadIdx.x] = value;
    __syncthreads();
    value = values[(threadIdx.x + 1) % 64];
    if (!kBroken) __syncthreads();
  }
  y[threadIdx.x] = value;
}

template <bool kBroken>
bool RotatesRightly() {
  int y[64];
  JQ_LAUNCH(Rotate<kBroken>, 1, 64, 0, nullptr, y, 10);
  CHECK_LAUNCH();
  bool right = true;
  for (int i = 0; i < 64; ++i) right = right && y[i] == (i + 10) % 64;
  return right;
}

void TestOverwritingTooEarlyShows() {
  CHECK(RotatesRightly<false>());
  CHECK(!RotatesRightly<true>());
}

// Each thread appends its number: the order in which they ran.
__global__ void RecordOrder(unsigned* next, unsigned* order) { order[atomicAdd(next, 1)] = threadIdx.x; }

std::vector<unsigned> Order() {
  unsigned next = 0;
  std::vector<unsigned> order(256);
  JQ_LAUNCH(RecordOrder, 1, 256, 0, nullptr, &next, order.data());
  CHECK_LAUNCH();
  return order;
}

void TestOrderChanges() {
  const std::vector<unsigned> first = Order(), second = Order();
  CHECK(first != second);
  std::vector<unsigned> sorted = first;
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted != first && sorted[0] == 0 && sorted[255] == 255);
}

// Transposes a 4 x 8 tile; the dynamic array, of another type in each instance, counts the elements.
template <typename T>
__global__ void Transpose(const T* x, T* y, T* count, bool* poisoned) {
  JQ_SHARED(T, tile, 4, 8);
  JQ_SHARED(double, other, 1);
  JQ_DYNAMIC_SHARED(T, counts);
  if (threadIdx.x == 0) {
    unsigned char bytes[sizeof(tile)];
    memcpy(bytes, tile, sizeof(tile));
    *poisoned = other[0] != other[0];
    for (const unsigned char byte : bytes) *poisoned = *poisoned && byte == 0xff;
    memcpy(bytes, counts, 32);
    for (int i = 0; i < 32; ++i) *poisoned = *poisoned && bytes[i] == 0xff;
  }
  __syncthreads();
  const unsigned row = threadIdx.x / 8, column = threadIdx.x % 8;
  tile[row][column] = x[threadIdx.x];
  counts[threadIdx.x] = 1;
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x % 4][threadIdx.x / 4];
  if (threadIdx.x == 0) {
    for (int i = 1; i < 32; ++i) counts[0] += counts[i];
    *count = counts[0];
  }
}

template <typename T>
void TestSharedMemory() {
  T x[32], y[32], count = 0;
  bool poisoned = false;
  std::iota(x, x + 32, T(0));
  for (int repeat = 0; repeat < 3; ++repeat) {
    JQ_LAUNCH(Transpose<T>, 1, 32, 32 * sizeof(T), nullptr, x, y, &count, &poisoned);
    CHECK_LAUNCH();
    CHECK(poisoned);
    CHECK(count == 32);
    for (int i = 0; i < 32; ++i) CHECK(y[i] == x[i % 4 * 8 + i / 4]);
  }
}

__global__ void BarrierVotes(int* y) {
  const int below_ten = threadIdx.x < 10;
  const int count = __syncthreads_count(below_ten);
  y[threadIdx.x] = 100 * count + 10 * __syncthreads_or(below_ten) + __syncthreads_and(below_ten);
}

void TestBarrierVotes() {
  int y[70];
  JQ_LAUNCH(BarrierVotes, 1, 70, 0, nullptr, y);
  CHECK_LAUNCH();
  for (const int value : y) CHECK(value == 1010);
}

// ---- Warps ----

template <typename T>
__global__ void WarpSum(const T* x, T* y) {
  T xor_sum = x[threadIdx.x], down_sum = xor_sum;
  for (int distance = 16; distance > 0; distance /= 2) {
    xor_sum += __shfl_xor_sync(~0u, xor_sum, distance);
    down_sum += __shfl_down_sync(~0u, down_sum, static_cast<unsigned>(distance));
  }
  down_sum = __shfl_sync(~0u, down_sum, 0);
  y[threadIdx.x] = xor_sum == down_sum ? xor_sum : T(-1);
}

template <typename T>
void TestWarpSum() {
  T x[96], y[96];
  std::iota(x, x + 96, T(0));
  JQ_LAUNCH(WarpSum<T>, 1, 96, 0, nullptr, x, y);
  CHECK_LAUNCH();
  for (int i = 0; i < 96; ++i) CHECK(y[i] == T(496 + i / 32 * 1024));
}

// The table of the programming guide: what each lane of a segment of 8 receives.
__global__ void ShuffleSegments(int* up, int* down, int* across, int* broadcast) {
  const int lane = static_cast<int>(threadIdx.x);
  up[lane] = __shfl_up_sync(~0u, lane, 3, 8);
  down[lane] = __shfl_down_sync(~0u, lane, 3, 8);
  across[lane] = __shfl_xor_sync(~0u, lane, 5, 8);
  broadcast[lane] = __shfl_sync(~0u, lane, 10, 8);
}

void TestShuffleSegments() {
  int up[32], down[32], across[32], broadcast[32];
  JQ_LAUNCH(ShuffleSegments, 1, 32, 0, nullptr, up, down, across, broadcast);
  CHECK_LAUNCH();
  for (int lane = 0; lane < 32; ++lane) {
    CHECK(up[lane] == (lane % 8 < 3 ? lane : lane - 3));
    CHECK(down[lane] == (lane % 8 > 4 ? lane : lane + 3));
    CHECK(across[lane] == (lane ^ 5));
    CHECK(broadcast[lane] == lane / 8 * 8 + 2);
  }
}

// The two halves of each warp go their own ways, at their own pace, and meet again.
__global__ void HalfWarps(int* y) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int value = __shfl_xor_sync(~0u, lane, 31);
  if (lane < 16) {
    for (int i = 0; i < 5; ++i) value = __shfl_xor_sync(0x0000ffffu, value, 1);
  } else {
    value += __shfl_down_sync(0xffff0000u, value, 1);
  }
  y[threadIdx.x] = __shfl_sync(~0u, value, 31 - lane);
}

void TestHalfWarps() {
  int y[256];
  JQ_LAUNCH(HalfWarps, 1, 256, 0, nullptr, y);
  CHECK_LAUNCH();
  for (int i = 0; i < 256; ++i) {
    const int source = 31 - i % 32;
    const int expected = source < 16 ? 31 - (source ^ 1) : source < 31 ? 31 - source + 30 - source : 0;
    CHECK(y[i] == expected);
  }
}

__global__ void Votes(unsigned* y) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  unsigned bits = __ballot_sync(~0u, lane % 3 == 0);
  if (lane >= 4 && lane < 8) bits ^= __ballot_sync(0xf0, lane == 5);
  __syncwarp();
  const bool any = __any_sync(~0u, lane == 7), none = __any_sync(~0u, 0);
  const bool all = __all_sync(~0u, 2), not_all = __all_sync(~0u, lane != 7);
  y[threadIdx.x] = any && !none && all && !not_all ? bits : 0;
}

void TestVotes() {
  unsigned y[64], multiples_of_three = 0;
  for (int i = 0; i < 32; i += 3) multiples_of_three |= 1u << i;
  JQ_LAUNCH(Votes, 1, 64, 0, nullptr, y);
  CHECK_LAUNCH();
  for (int i = 0; i < 64; ++i) CHECK(y[i] == (i % 32 / 4 == 1 ? multiples_of_three ^ 0x20u : multiples_of_three));
}

__global__ void ShuffleFromOutside(float* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 20);
}

void TestShuffleFromOutsideIsPoison() {
  float y[16];
  JQ_LAUNCH(ShuffleFromOutside, 1, 32, 0, nullptr, y);
  CHECK_LAUNCH();
  for (const float value : y) CHECK(value != value);
}

// ---- Errors ----

__global__ void DivergentBarrier() {
  if (threadIdx.x < 40) __syncthreads();
}
__global__ void BarrierAgainstShuffle(int* y) {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    *y = __shfl_xor_sync(~0u, 1, 1);
  }
}
__global__ void LaneOutsideItsMask() { __syncwarp(threadIdx.x < 32 ? ~0u : 0xffu); }
__global__ void DifferentMasks() { __syncwarp(threadIdx.x < 16 ? ~0u : 0xffff0000u); }
__global__ void RingOfMasks() { __syncwarp(1u << threadIdx.x | 1u << (threadIdx.x + 1) % 32); }
__global__ void DifferentFunctions(unsigned* y) {
  y[threadIdx.x] = threadIdx.x < 16 ? __ballot_sync(~0u, 1) : static_cast<unsigned>(__any_sync(~0u, 1));
}
__global__ void FullMask() { __syncwarp(); }
__global__ void OneBlockFails(unsigned* finished) {
  if (blockIdx.x == 777 && threadIdx.x == 5) return;
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(finished, 1);
}
[[maybe_unused]] __global__ void LargeLocalArray(int* y, int used) {
  volatile char local[70 << 10];
  for (int i = 0; i < used; ++i) local[i] = 1;
  y[threadIdx.x] = used > 0 ? local[used - 1] : 1;
}

void TestErrors() {
  JQ_LAUNCH(DivergentBarrier, dim3(1, 1, 1), 64, 0, nullptr);
  CheckFailed(cudaErrorLaunchFailure,
              "DivergentBarrier: block (0, 0, 0): no thread can go on: of 64 threads, "
              "24 have returned, 40 wait in __syncthreads");
  int ignored = 0;
  unsigned bits[64];
  JQ_LAUNCH(BarrierAgainstShuffle, 1, 32, 0, nullptr, &ignored);
  CheckFailed(cudaErrorLaunchFailure,
              "1 wait in __syncthreads, 31 for lanes of their warp: thread (0, 0, 0) in "
              "__shfl_xor_sync with mask 0xffffffff for lane 3");
  JQ_LAUNCH(LaneOutsideItsMask, 1, 64, 0, nullptr);
  CheckFailed(cudaErrorLaunchFailure, "not in the mask 0x000000ff it gives to __syncwarp");
  JQ_LAUNCH(DifferentMasks, 1, 32, 0, nullptr);
  CheckFailed(cudaErrorLaunchFailure, "with mask 0xffffffff for lane 16");
  JQ_LAUNCH(RingOfMasks, 1, 32, 0, nullptr);
  CheckFailed(cudaErrorLaunchFailure,
              "32 for lanes of their warp: thread (0, 0, 0) in __syncwarp with mask "
              "0x00000003");
  JQ_LAUNCH(DifferentFunctions, 1, 32, 0, nullptr, bits);
  CheckFailed(cudaErrorLaunchFailure, "in __ballot_sync with mask 0xffffffff for lane 16");
  JQ_LAUNCH(FullMask, 1, 48, 0, nullptr);  // the second warp has 16 lanes only
  CheckFailed(cudaErrorLaunchFailure, "for lane 16");
  unsigned finished = 0;
  JQ_LAUNCH(OneBlockFails, 1000, 32, 0, nullptr, &finished);
  CheckFailed(cudaErrorLaunchFailure, "block (777, 0, 0)");
  CHECK(finished < 1000);
#if !defined(__SANITIZE_ADDRESS__)  // whose stacks are larger
  int ones[64];
  JQ_LAUNCH(LargeLocalArray, 1, 64, 0, nullptr, ones, 0);
  CHECK_LAUNCH();
  JQ_LAUNCH(LargeLocalArray, 1, 64, 0, nullptr, ones, 70 << 10);
  CheckFailed(cudaErrorLaunchFailure, "needs more stack than there is");
#endif

  JQ_LAUNCH(Nothing, 0, 32, 0, nullptr);
  CheckFailed(cudaErrorInvalidConfiguration, "Nothing: grid size (0, 1, 1)");
  JQ_LAUNCH(Nothing, dim3(1, 65536), 32, 0, nullptr);
  CheckFailed(cudaErrorInvalidConfiguration, "grid size");
  JQ_LAUNCH(Nothing, 1, 1025, 0, nullptr);
  CheckFailed(cudaErrorInvalidConfiguration, "block size (1025, 1, 1)");
  JQ_LAUNCH(Nothing, 1, dim3(1u << 31, 2), 0, nullptr);
  CheckFailed(cudaErrorInvalidConfiguration, "block size");
  JQ_LAUNCH(Nothing, 1, 32, 49153, nullptr);
  CheckFailed(cudaErrorInvalidValue, "49153 bytes of dynamic shared memory, 49152 allowed");
  CHECK(cudaFuncSetAttribute(Nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536) == cudaSuccess);
  JQ_LAUNCH(Nothing, 1, 32, 65536, nullptr);
  CHECK_LAUNCH();
}

// ---- Floating-point mode and atomics ----

__global__ void Subnormals(const float* x, float* y) {
  y[0] = x[0] * x[1];  // normal operands, subnormal result
  y[1] = x[2] * x[3];  // subnormal operand
  y[2] = fmaf(x[0], x[1], x[2]);
}

void TestSubnormalsAreZero() {
#if defined(__x86_64__)
  volatile float tiny = std::numeric_limits<float>::min();
  const float x[4] = {tiny, 0.5f, tiny / 2, 1e10f};
  for (int blocks = 1; blocks <= 64; blocks *= 64) {
    float y[3] = {1, 1, 1};
    JQ_LAUNCH(Subnormals, static_cast<unsigned>(blocks), 1, 0, nullptr, x, y);
    CHECK_LAUNCH();
    CHECK(y[0] == 0 && y[1] == 0 && y[2] == 0);
  }
  CHECK(tiny * 0.5f > 0);  // the caller's mode is its own again
#endif
}

__global__ void Atomics(float* sum, int* largest, unsigned* count, unsigned* ticket) {
  atomicAdd(sum, 1.0f);
  atomicMax(largest, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) - 5000);
  atomicAdd(count, 2);
  if (atomicCAS(ticket, 0u, 1u) == 0) atomicAdd(count, 1);
}

void TestAtomics() {
  float sum = 0;
  int largest = -10000;
  unsigned count = 0, ticket = 0;
  JQ_LAUNCH(Atomics, 64, 128, 0, nullptr, &sum, &largest, &count, &ticket);
  CHECK_LAUNCH();
  CHECK(sum == 8192 && largest == 3191 && count == 16385 && ticket == 1);
}

// ---- Several launches at a time ----

void TestConcurrentLaunches() {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&wrong] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        float x[96], y[96];
        std::iota(x, x + 96, 0.0f);
        JQ_LAUNCH(WarpSum<float>, 3, 96, 0, nullptr, x, y);
        wrong += cudaGetLastError() != cudaSuccess || y[40] != 1520.0f;
        JQ_LAUNCH(DivergentBarrier, 2, 64, 0, nullptr);
        wrong += cudaGetLastError() != cudaErrorLaunchFailure;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

}  // namespace

int main() {
  TestGridStride();
  TestIndices();
  TestVectorTypesAndTemplates();
  TestMissingBarriersShow();
  TestOverwritingTooEarlyShows();
  TestOrderChanges();
  TestSharedMemory<float>();
  TestSharedMemory<double>();
  TestSharedMemory<int8_t>();
  TestBarrierVotes();
  TestWarpSum<int>();
  TestWarpSum<float>();
  TestWarpSum<double>();
  TestWarpSum<int64_t>();
  TestShuffleSegments();
  TestHalfWarps();
  TestVotes();
  TestShuffleFromOutsideIsPoison();
  TestErrors();
  TestSubnormalsAreZero();
  TestAtomics();
  TestConcurrentLaunches();
  return CheckResult();
}
