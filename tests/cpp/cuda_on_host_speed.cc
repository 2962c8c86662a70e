// What the CUDA emulation costs, in processor time. From the root of the repository:
//
//   g++ -std=c++17 -O2 -ffp-contract=off -pthread -DJQ_CUDA_ON_HOST -I. -o /tmp/cuda_on_host_speed
//       tests/cpp/cuda_on_host_speed.cc && /tmp/cuda_on_host_speed
#include <stdint.h>
#include <stdio.h>
#include <time.h>

#include <algorithm>
#include <vector>

#include "ffi/common/cuda_portable.h"

namespace {

__global__ void Nothing() {}

__global__ void Saxpy(int64_t n, float a, const float* x, float* y) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) y[i] = a * x[i] + y[i];
}

__global__ void BlockSum(const float* x, float* sum) {
  JQ_SHARED(float, values, 256);
  values[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  __syncthreads();
  for (unsigned distance = 128; distance > 0; distance /= 2) {
    if (threadIdx.x < distance) values[threadIdx.x] += values[threadIdx.x + distance];
    __syncthreads();
  }
  if (threadIdx.x == 0) sum[blockIdx.x] = values[0];
}

__global__ void WarpSum(const float* x, float* y) {
  float sum = x[threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  y[threadIdx.x] = sum;
}

template <typename Launch>
void Print(const char* what, double threads, Launch launch) {
  constexpr int kLaunches = 20;
  double best = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const clock_t start = clock();
    for (int i = 0; i < kLaunches; ++i) launch();
    best = std::min(best, static_cast<double>(clock() - start) / CLOCKS_PER_SEC / kLaunches);
  }
  printf("%-28s %9.1f us a launch, %6.1f ns a thread\n", what, best * 1e6, best * 1e9 / threads);
}

}  // namespace

int main() {
  const std::vector<float> x(25600, 1.0f);
  std::vector<float> y = x;
  Print("nothing, 1 block of 32", 32, [&] { JQ_LAUNCH(Nothing, 1, 32, 0, nullptr); });
  Print("nothing, 16 blocks of 32", 512, [&] { JQ_LAUNCH(Nothing, 16, 32, 0, nullptr); });
  Print("saxpy", 25600, [&] { JQ_LAUNCH(Saxpy, 100, 256, 0, nullptr, 25600, 2, x.data(), y.data()); });
  Print("block sum, 9 barriers", 25600, [&] { JQ_LAUNCH(BlockSum, 100, 256, 0, nullptr, x.data(), y.data()); });
  Print("warp sum, 5 shuffles", 25600, [&] { JQ_LAUNCH(WarpSum, 100, 256, 0, nullptr, x.data(), y.data()); });
}
