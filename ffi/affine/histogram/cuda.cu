// Histograms on CUDA: a table in shared memory for each slice of a group; where groups are small or lie in columns,
// straight into the result. Atomic additions of integers: any order gives the same counts.
#include "ffi/affine/cuda_kernels.h"
#include "ffi/affine/histogram/math.h"
#include "ffi/common/cuda_launch.h"

namespace jq {
namespace {

constexpr int64_t kSharedBytes = 48 << 10;
constexpr int kMostCopies = 4;  // tables of a block, so that equal values of a warp collide less

struct Parameters {
  HistogramArguments a;
  ScaleView view;
  int64_t slices, slice, reduced;
  int copies, stride;
};

__device__ __forceinline__ float Load(float value) { return value; }
__device__ __forceinline__ float Load(Float16 value) { return ToFloat(value); }
__device__ __forceinline__ float Load(BFloat16 value) { return ToFloat(value); }

// What a table of a group counts.
template <bool kBins>
struct Slots {
  Binning binning;
  uint32_t mask;

  __device__ __forceinline__ Slots(const HistogramArguments& a, int64_t group, int64_t)
      : binning(Binning::Of(a.low[group], a.high[group], a.size)), mask(MagnitudeMask(a.magnitude)) {}
  __device__ __forceinline__ bool Of(float value, uint32_t* slot) const {
    const float v = BitCast<float>(BitCast<uint32_t>(value) & mask);
    *slot = binning.Bin(v);
    return IsFinite(v);
  }
};
template <>
struct Slots<false> {
  Digit digit;
  uint32_t prefix;
  bool magnitude;

  __device__ __forceinline__ Slots(const HistogramArguments& a, int64_t group, int64_t table)
      : digit{a.shift, a.width}, prefix(a.prefix[group * a.tables + table]), magnitude(a.magnitude) {}
  __device__ __forceinline__ bool Of(float value, uint32_t* slot) const {
    const uint32_t key = OrderedKey(BitCast<uint32_t>(value), magnitude);
    *slot = digit.Of(key);
    return IsFinite(value) && digit.Before(key) == prefix;
  }
};

// Offset in x of the first element of a group, and of a group's element i from there.
__device__ __forceinline__ int64_t OfGroup(const ScaleView& view, int64_t group) {
  int64_t offset = 0;
  for (int d = 0; d < view.dims; ++d) {
    const ScaleView::Dim& dim = view.dim[d];
    if (dim.scale_stride != 0) offset += group / dim.scale_stride % dim.size * dim.stride;
  }
  return offset;
}
__device__ __forceinline__ int64_t OfElement(const ScaleView& view, int64_t i) {
  int64_t offset = 0;
  for (int d = view.dims - 1; d >= 0 && i > 0; --d) {
    const ScaleView::Dim& dim = view.dim[d];
    if (dim.scale_stride != 0) continue;
    if (i < dim.size) return offset + i * dim.stride;
    offset += i % dim.size * dim.stride;
    i /= dim.size;
  }
  return offset;
}

template <typename T, bool kBins>
__global__ void __launch_bounds__(kThreads) SharedKernel(const Parameters p) {
  JQ_DYNAMIC_SHARED(uint32_t, tables);
  uint32_t* mine = tables + static_cast<int>(threadIdx.x) % p.copies * p.stride;
  const int64_t units = p.view.scale_size * p.a.tables * p.slices;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t table = unit / p.slices, group = table / p.a.tables;
    const int64_t first = unit % p.slices * p.slice;
    const int64_t last = first + p.slice < p.reduced ? first + p.slice : p.reduced;
    for (int i = static_cast<int>(threadIdx.x); i < p.copies * p.stride; i += kThreads) tables[i] = 0;
    __syncthreads();
    const Slots<kBins> slots(p.a, group, table % p.a.tables);
    const T* x = static_cast<const T*>(p.a.x) + OfGroup(p.view, group);
    for (int64_t i = first + static_cast<int64_t>(threadIdx.x); i < last; i += kThreads) {
      uint32_t slot;
      if (slots.Of(Load(x[OfElement(p.view, i)]), &slot)) atomicAdd(mine + slot, 1u);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < p.a.size; i += kThreads) {
      uint32_t sum = 0;
      for (int c = 0; c < p.copies; ++c) sum += tables[c * p.stride + i];
      if (sum != 0) atomicAdd(p.a.counts + table * p.a.size + i, static_cast<int32_t>(sum));
    }
    __syncthreads();
  }
}

template <typename T, bool kBins>
__global__ void __launch_bounds__(kThreads) DirectKernel(const Parameters p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < p.view.size; e += step) {
    int64_t group = 0;
    for (int d = 0; d < p.view.dims; ++d) {
      const ScaleView::Dim& dim = p.view.dim[d];
      if (dim.scale_stride != 0) group += e / dim.stride % dim.size * dim.scale_stride;
    }
    const float value = Load(static_cast<const T*>(p.a.x)[e]);
    for (int64_t t = 0; t < p.a.tables; ++t) {
      uint32_t slot;
      if (Slots<kBins>(p.a, group, t).Of(value, &slot)) {
        atomicAdd(p.a.counts + (group * p.a.tables + t) * p.a.size + slot, 1);
      }
    }
  }
}

template <typename T, bool kBins>
const char* Launch(const HistogramArguments& a, CudaStream stream) {
  Parameters p{};
  p.a = a;
  p.view = *a.view;
  p.a.view = nullptr;
  p.reduced = p.view.ReducedSize();
  const int64_t bytes = p.view.scale_size * a.tables * a.size * 4;
  if (const cudaError_t error = cudaMemsetAsync(a.counts, 0, static_cast<size_t>(bytes), stream);
      error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  if (p.view.size == 0) return nullptr;
  // Tables one word apart modulo the banks.
  p.stride = static_cast<int>(a.size) + 1;
  p.copies = static_cast<int>(std::min<int64_t>(kMostCopies, kSharedBytes / (4 * p.stride)));
  const bool columns = p.view.run().scale_stride != 0;
  if (columns || p.copies == 0 || p.reduced < 2 * a.size) {
    JQ_LAUNCH((DirectKernel<T, kBins>), GridSize(p.view.size, kThreads), kThreads, 0, stream, p);
    return LaunchError();
  }
  const int64_t groups = p.view.scale_size * a.tables;
  const int64_t wanted = (GridSize(p.view.size, kThreads) + groups - 1) / groups;
  p.slices = std::clamp<int64_t>(p.reduced / (4 * a.size), 1, wanted);
  p.slice = (p.reduced + p.slices - 1) / p.slices;
  const size_t shared = static_cast<size_t>(4 * p.copies * p.stride);
  JQ_LAUNCH((SharedKernel<T, kBins>), GridSize(groups * p.slices, 1), kThreads, shared, stream, p);
  return LaunchError();
}

template <typename T>
const char* LaunchFor(const HistogramArguments& a, CudaStream stream) {
  return a.low != nullptr ? Launch<T, true>(a, stream) : Launch<T, false>(a, stream);
}

template <typename T>
const char* LoadKernels() {
  for (auto* kernel :
       {&SharedKernel<T, true>, &SharedKernel<T, false>, &DirectKernel<T, true>, &DirectKernel<T, false>}) {
    if (const char* error = LoadKernel(kernel)) return error;
  }
  return nullptr;
}

}  // namespace

const char* HistogramOnCuda(const HistogramArguments& a, CudaStream stream) {
  switch (a.type) {
    case DType::kF32: return LaunchFor<float>(a, stream);
    case DType::kF16: return LaunchFor<Float16>(a, stream);
    case DType::kBF16: return LaunchFor<BFloat16>(a, stream);
    default: return "no kernel for the type";
  }
}

const char* LoadHistogramOnCuda() {
  const char* error = LoadKernels<float>();
  if (error == nullptr) error = LoadKernels<Float16>();
  if (error == nullptr) error = LoadKernels<BFloat16>();
  return error;
}

}  // namespace jq
