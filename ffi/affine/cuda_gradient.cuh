// dx with the sums dscale and dzero_point, in one pass over x and dy. The order of the sums is that of arguments.h, so
// that they have the bits of the CPU's: a chunk of 256 terms is 32 lanes of up to 8 terms, and a tree over the lanes.
//
// Rows (consecutive x share a scale): 32 / V threads take a chunk, each V neighbouring lanes. It reads their terms as
// vectors of V elements, 32 apart, so that each lane adds its own in ascending order without a word to other threads;
// shuffles then combine the lanes.
// Columns (consecutive x have consecutive scales): a thread takes one lane of V neighbouring sums; the lanes combine in
// shared memory.
//
// A thread accumulates in registers and writes each chunk sum once; further launches sum the chunk sums.
#pragma once

#include <cstdint>

#include "ffi/affine/arguments.h"
#include "ffi/affine/cuda_map.cuh"
#include "ffi/common/cuda_index.h"
#include "ffi/common/cuda_launch.h"
#include "ffi/common/cuda_storage.h"

namespace jq {

// The dimensions of x over which a sum goes, or those it keeps: offsets of the i-th element of them.
struct DeviceDims {
  struct Dim {
    FastDivider size;
    int64_t stride, zero_point_stride;
  };
  int dims = 0;
  Dim dim[ScaleView::kMaxDims];

  void Add(const ScaleView::Dim& d) { dim[dims++] = {FastDivider(d.size), d.stride, d.zero_point_stride}; }

  struct Offsets {
    int64_t x, zero_point;
  };
  __device__ __forceinline__ Offsets Find(uint64_t i) const {
    Offsets at{0, 0};
#pragma unroll 1
    for (int d = dims - 1; d > 0; --d) {
      const uint64_t outer = dim[d].size.Divide(i);
      const int64_t index = static_cast<int64_t>(i - outer * dim[d].size.divisor);
      at.x += index * dim[d].stride;
      at.zero_point += index * dim[d].zero_point_stride;
      i = outer;
    }
    if (dims > 0) {
      at.x += static_cast<int64_t>(i) * dim[0].stride;
      at.zero_point += static_cast<int64_t>(i) * dim[0].zero_point_stride;
    }
    return at;
  }
};

template <typename Math, typename Real>
struct GradientParameters {
  DeviceDims kept, reduced;
  DeviceNoise<kKeyed<Math>> noise;
  const void* dy;
  const void* x;
  const Real* scale;
  const Real* zero_point;
  void* dx;      // null: not wanted; likewise the sums
  Real* dscale;  // chunk sums: [chunks, scale_size]
  Real* dzero_point;
  Range<Real> range;
  int64_t reduced_size, scale_size;
  FastDivider chunks;
  bool vectors;  // vectors are aligned and lie in a row
  int64_t units;
  // Columns
  int64_t width, zero_point_stride;
  FastDivider tiles;
};

template <typename Math, typename Real, typename X>
class GradientKernel {
  using Storage = StorageOf<X>;
  using Parameters = GradientParameters<Math, Real>;
  using Terms = Rounded<Math, Real>;

 public:
  static constexpr int V = 16 / Storage::kBytes;
  static constexpr int kThreadsPerChunk = kLanes / V;
  static constexpr int kChunksPerBlock = kThreads / kThreadsPerChunk;
  static constexpr int kColumnVectors = kThreads / kLanes;  // side by side in a block
  static constexpr int kColumns = kColumnVectors * V;

 private:
  static constexpr int kRowBatch = 4, kColumnBatch = 2;  // vectors of each operand in flight

  struct Sums {
    Real scale[V] = {}, zero_point[V] = {};
  };

  static __device__ __forceinline__ const char* At(const void* data, int64_t e) {
    return static_cast<const char*>(data) + e * Storage::kBytes;
  }
  static __device__ __forceinline__ Real LoadOne(const void* data, int64_t e) {
    return Storage::template Decode<Real>(LoadWords<Storage::kBytes>(At(data, e)).w, 0, CodeSign{});
  }
  static __device__ __forceinline__ void StoreOne(void* data, int64_t e, Real value) {
    const Real values[1] = {value};
    Words<Storage::kBytes> words;
    Storage::template Encode<1>(values, words.w);
    StoreWords(words, const_cast<char*>(At(data, e)));
  }

  // V terms from vectors of dy and x at e.
  template <typename DivisorAt, typename ZeroAt>
  static __device__ __forceinline__ void AddVector(const Parameters& p, const Words<16>& dy, const Words<16>& x,
                                                   int64_t e, const DivisorAt& divisor, const ZeroAt& zero,
                                                   Sums* sums) {
    Real dx[V], u[V];
    p.noise.template Vector<V>(e, u);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const auto g =
          Terms::Gradient(Storage::template Decode<Real>(dy.w, i, CodeSign{}),
                          Storage::template Decode<Real>(x.w, i, CodeSign{}), divisor(i), zero(i), p.range, u[i]);
      dx[i] = g.dx;
      sums->scale[i] += g.dscale;
      sums->zero_point[i] += g.dzero_point;
    }
    if (p.dx != nullptr) {
      Words<16> words;
      Storage::template Encode<V>(dx, words.w);
      StoreWords(words, const_cast<char*>(At(p.dx, e)));
    }
  }
  // The term of element e, to the i-th of the thread's sums; i is only known at run time.
  static __device__ __forceinline__ void AddOne(const Parameters& p, int64_t e, int i, Real scale, Real zero,
                                                Sums* sums) {
    const auto g = Terms::Gradient(LoadOne(p.dy, e), LoadOne(p.x, e), Divisor<Real>::Of(scale), zero, p.range,
                                   p.noise.template One<Real>(e));
    if (p.dx != nullptr) StoreOne(p.dx, e, g.dx);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      // A sum that begins at +0 never is -0: adding +0 changes nothing.
      sums->scale[k] += k == i ? g.dscale : Real(0);
      sums->zero_point[k] += k == i ? g.dzero_point : Real(0);
    }
  }

  // The lanes of a chunk, V in each of kThreadsPerChunk threads, to lane 0 of the first.
  static __device__ __forceinline__ Real Combine(Real (&lanes)[V]) {
#pragma unroll
    for (int distance = kLanes / 2; distance >= V; distance /= 2) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        lanes[i] += __shfl_down_sync(~0u, lanes[i], static_cast<unsigned>(distance / V), kThreadsPerChunk);
      }
    }
#pragma unroll
    for (int distance = V / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < distance; ++i) lanes[i] += lanes[i + distance];
    }
    return lanes[0];
  }

 public:
  static __device__ __forceinline__ void Rows(const Parameters& p) {
    const int place = threadIdx.x % kThreadsPerChunk;
    const int64_t chunks = static_cast<int64_t>(p.chunks.divisor);
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kChunksPerBlock;
    // The whole block goes round together: shuffles need every lane.
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kChunksPerBlock; first < p.units; first += stride) {
      const int64_t unit = first + threadIdx.x / kThreadsPerChunk;
      Sums sums;
      int64_t element = 0, chunk = 0;
      if (unit < p.units) {
        element = static_cast<int64_t>(p.chunks.Divide(static_cast<uint64_t>(unit)));
        chunk = unit - element * chunks;
        const DeviceDims::Offsets base = p.kept.Find(static_cast<uint64_t>(element));
        const Real s = __ldg(p.scale + element);
        const Real zero = ZeroPoint(p.zero_point, base.zero_point);
        const int64_t begin = chunk * kChunk + place * V;
        const int64_t end = begin - place * V + kChunk < p.reduced_size ? begin - place * V + kChunk : p.reduced_size;
        if (p.vectors && Divisor<Real>::Suits(s, zero)) {
          const Divisor<Real> divisor = Divisor<Real>::Fast(s);
#pragma unroll 1
          for (int64_t j = begin; j < end; j += kRowBatch * kLanes) {
            Words<16> dy[kRowBatch], x[kRowBatch];
            int64_t e[kRowBatch];
#pragma unroll
            for (int k = 0; k < kRowBatch; ++k) {
              const int64_t at = j + k * kLanes;
              if (at >= end) break;
              e[k] = base.x + (p.reduced.dims == 1 ? at : p.reduced.Find(static_cast<uint64_t>(at)).x);
              dy[k] = LoadWords<16>(At(p.dy, e[k]));
              x[k] = LoadWords<16>(At(p.x, e[k]));
            }
#pragma unroll
            for (int k = 0; k < kRowBatch; ++k) {
              if (j + k * kLanes >= end) break;
              AddVector(p, dy[k], x[k], e[k], [&](int) { return divisor; }, [&](int) { return zero; }, &sums);
            }
          }
        } else {
#pragma unroll 1
          for (int64_t j = begin; j < end; j += kLanes) {
#pragma unroll 1
            for (int i = 0; i < V && j + i < end; ++i) {
              AddOne(p, base.x + p.reduced.Find(static_cast<uint64_t>(j + i)).x, i, s, zero, &sums);
            }
          }
        }
      }
      const Real scale_sum = Combine(sums.scale), zero_sum = Combine(sums.zero_point);
      if (unit < p.units && place == 0) {
        if (p.dscale != nullptr) p.dscale[chunk * p.scale_size + element] = scale_sum;
        if (p.dzero_point != nullptr) p.dzero_point[chunk * p.scale_size + element] = zero_sum;
      }
    }
  }

  static __device__ __forceinline__ void Columns(const Parameters& p) {
    JQ_SHARED(Real, scale_lanes, kLanes / 2, kColumns);
    JQ_SHARED(Real, zero_lanes, kLanes / 2, kColumns);
    const int lane = threadIdx.x / kColumnVectors, vector = threadIdx.x % kColumnVectors;
    const int64_t chunks = static_cast<int64_t>(p.chunks.divisor), tiles = static_cast<int64_t>(p.tiles.divisor);
    for (int64_t unit = blockIdx.x; unit < p.units; unit += gridDim.x) {
      // unit = (outer * chunks + chunk) * tiles + tile
      const int64_t row = static_cast<int64_t>(p.tiles.Divide(static_cast<uint64_t>(unit)));
      const int64_t outer = static_cast<int64_t>(p.chunks.Divide(static_cast<uint64_t>(row)));
      const int64_t chunk = row - outer * chunks;
      const int64_t column = (unit - row * tiles) * kColumns + vector * V;
      const DeviceDims::Offsets base = p.kept.Find(static_cast<uint64_t>(outer));
      const int64_t element = outer * p.width + column;
      const int64_t end = (chunk + 1) * kChunk < p.reduced_size ? (chunk + 1) * kChunk : p.reduced_size;
      const int columns = column + V <= p.width ? V : column < p.width ? static_cast<int>(p.width - column) : 0;
      Sums sums;
      if (columns > 0) {
        Divisor<Real> divisor[V];
        Real zero[V];
        bool suits = p.vectors && columns == V;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const int c = i < columns ? i : 0;
          const Real s = __ldg(p.scale + element + c);
          zero[i] = ZeroPoint(p.zero_point, base.zero_point + (column + c) * p.zero_point_stride);
          suits = suits && Divisor<Real>::Suits(s, zero[i]);
          divisor[i] = Divisor<Real>::Fast(s);
        }
        if (suits) {
#pragma unroll 1
          for (int64_t j = chunk * kChunk + lane; j < end; j += kColumnBatch * kLanes) {
            Words<16> dy[kColumnBatch], x[kColumnBatch];
            int64_t e[kColumnBatch];
#pragma unroll
            for (int k = 0; k < kColumnBatch; ++k) {
              const int64_t at = j + k * kLanes;
              if (at >= end) break;
              e[k] = base.x + column + p.reduced.Find(static_cast<uint64_t>(at)).x;
              dy[k] = LoadWords<16>(At(p.dy, e[k]));
              x[k] = LoadWords<16>(At(p.x, e[k]));
            }
#pragma unroll
            for (int k = 0; k < kColumnBatch; ++k) {
              if (j + k * kLanes >= end) break;
              AddVector(p, dy[k], x[k], e[k], [&](int i) { return divisor[i]; }, [&](int i) { return zero[i]; }, &sums);
            }
          }
        } else {
#pragma unroll 1
          for (int64_t j = chunk * kChunk + lane; j < end; j += kLanes) {
            const int64_t e = base.x + column + p.reduced.Find(static_cast<uint64_t>(j)).x;
#pragma unroll 1
            for (int i = 0; i < columns; ++i) {
              const Real s = __ldg(p.scale + element + i);
              const Real z = ZeroPoint(p.zero_point, base.zero_point + (column + i) * p.zero_point_stride);
              AddOne(p, e + i, i, s, z, &sums);
            }
          }
        }
      }
      // The upper half of the lanes hands its sums to the lower half, and so on.
#pragma unroll 1
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        if (lane >= distance && lane < 2 * distance) {
#pragma unroll
          for (int i = 0; i < V; ++i) {
            scale_lanes[lane - distance][vector * V + i] = sums.scale[i];
            zero_lanes[lane - distance][vector * V + i] = sums.zero_point[i];
          }
        }
        __syncthreads();
        if (lane < distance) {
#pragma unroll
          for (int i = 0; i < V; ++i) {
            sums.scale[i] += scale_lanes[lane][vector * V + i];
            sums.zero_point[i] += zero_lanes[lane][vector * V + i];
          }
        }
        __syncthreads();
      }
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (i >= columns) break;
          const int64_t at = chunk * p.scale_size + element + i;
          if (p.dscale != nullptr) p.dscale[at] = sums.scale[i];
          if (p.dzero_point != nullptr) p.dzero_point[at] = sums.zero_point[i];
        }
      }
    }
  }
};

template <typename Math, typename Real, typename X>
__global__ void __launch_bounds__(kThreads, 2) RowGradient(const GradientParameters<Math, Real> p) {
  GradientKernel<Math, Real, X>::Rows(p);
}
template <typename Math, typename Real, typename X>
__global__ void __launch_bounds__(kThreads, 2) ColumnGradient(const GradientParameters<Math, Real> p) {
  GradientKernel<Math, Real, X>::Columns(p);
}

// Sums of sums, [terms, width] -> [ChunkCount(terms), width] for up to two quantities: a warp for each, a lane a
// thread. They are few: one for every 256 elements of x.
template <typename Real>
struct SumParameters {
  const Real* in[2];
  Real* out[2];
  int quantities;
  int64_t terms, units;  // units: chunks * width
  FastDivider width;
};

template <typename Real>
__global__ void __launch_bounds__(kThreads) SumChunks(const SumParameters<Real> p) {
  constexpr int kWarps = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t width = static_cast<int64_t>(p.width.divisor);
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes; unit < p.units;
       unit += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t chunk = static_cast<int64_t>(p.width.Divide(static_cast<uint64_t>(unit)));
    const int64_t column = unit - chunk * width;
    const int64_t end = (chunk + 1) * kChunk < p.terms ? (chunk + 1) * kChunk : p.terms;
#pragma unroll
    for (int q = 0; q < 2; ++q) {  // unrolled: a parameter that is indexed at run time is copied to the stack
      if (q >= p.quantities) break;
      Real sum = 0;
      for (int64_t j = chunk * kChunk + lane; j < end; j += kLanes) sum += p.in[q][j * width + column];
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(~0u, sum, static_cast<unsigned>(distance));
      }
      if (lane == 0) p.out[q][chunk * width + column] = sum;
    }
  }
}

template <typename Real>
const char* LaunchSums(const GradientArguments& a, cudaStream_t stream) {
  const int64_t reduced = a.view->ReducedSize(), width = a.view->scale_size;
  Real* level = static_cast<Real*>(a.scratch);
  const int64_t scratch = ScratchSize(reduced, width);
  for (int64_t n = ChunkCount(reduced); n > 1; n = ChunkCount(n)) {
    SumParameters<Real> p{};
    p.terms = n;
    p.width = FastDivider(width);
    p.units = ChunkCount(n) * width;
    void* const results[2] = {a.dscale, a.dzero_point};
    for (int q = 0; q < 2; ++q) {
      if (results[q] == nullptr) continue;
      p.in[p.quantities] = level + q * scratch;
      Real* above = level + q * scratch + n * width;
      p.out[p.quantities++] = ChunkCount(n) == 1 ? static_cast<Real*>(results[q]) : above;
    }
    JQ_LAUNCH((SumChunks<Real>), GridSize(p.units, kThreads / kLanes), kThreads, 0, stream, p);
    if (const char* error = LaunchError()) return error;
    level += n * width;
  }
  return nullptr;
}

template <typename Math, typename Real, typename X>
const char* LaunchGradient(const GradientArguments& a, cudaStream_t stream) {
  using Kernel = GradientKernel<Math, Real, X>;
  const ScaleView& view = *a.view;
  if (view.size == 0) {  // sums of nothing
    for (void* result : {a.dscale, a.dzero_point}) {
      if (result == nullptr) continue;
      const cudaError_t error = cudaMemsetAsync(result, 0, static_cast<size_t>(view.scale_size) * sizeof(Real), stream);
      if (error != cudaSuccess) return cudaGetErrorString(error);
    }
    return nullptr;
  }
  GradientParameters<Math, Real> p{};
  p.noise = DeviceNoise<kKeyed<Math>>(a.key);
  const ScaleView::Dim run = view.run();
  const bool columns = run.scale_stride != 0;
  p.vectors = true;
  for (const void* data : {a.dy, a.x, static_cast<const void*>(a.dx)}) p.vectors = p.vectors && IsAligned(data, 16);
  for (int d = 0; d < view.dims; ++d) {
    const bool innermost = d == view.dims - 1;
    if (!innermost) p.vectors = p.vectors && view.dim[d].stride % Kernel::V == 0;
    if (view.dim[d].scale_stride == 0) {
      p.reduced.Add(view.dim[d]);
    } else if (!(columns && innermost)) {
      p.kept.Add(view.dim[d]);
    }
  }
  p.vectors = p.vectors && run.size % Kernel::V == 0 && p.noise.SuitsVectors(Kernel::V, 0);
  p.dy = a.dy;
  p.x = a.x;
  p.scale = static_cast<const Real*>(a.scale);
  p.zero_point = static_cast<const Real*>(a.zero_point);
  p.dx = a.dx;
  p.range = {static_cast<Real>(a.qmin), static_cast<Real>(a.qmax)};
  p.reduced_size = view.ReducedSize();
  p.scale_size = view.scale_size;
  p.chunks = FastDivider(ChunkCount(p.reduced_size));
  // The first level's sums go to scratch, or are the result where one chunk holds them all.
  const bool last = p.chunks.divisor == 1;
  Real* scratch = static_cast<Real*>(a.scratch);
  if (a.dscale != nullptr) p.dscale = last ? static_cast<Real*>(a.dscale) : scratch;
  if (a.dzero_point != nullptr) {
    p.dzero_point = last ? static_cast<Real*>(a.dzero_point) : scratch + ScratchSize(p.reduced_size, p.scale_size);
  }
  const int64_t chunks = static_cast<int64_t>(p.chunks.divisor);
  if (columns) {
    p.width = run.size;
    p.zero_point_stride = run.zero_point_stride;
    const int64_t tiles = (p.width + Kernel::kColumns - 1) / Kernel::kColumns;
    p.tiles = FastDivider(tiles);
    p.units = view.scale_size / p.width * chunks * tiles;
    JQ_LAUNCH((ColumnGradient<Math, Real, X>), GridSize(p.units, 1), kThreads, 0, stream, p);
  } else {
    p.units = view.scale_size * chunks;
    JQ_LAUNCH((RowGradient<Math, Real, X>), GridSize(p.units, Kernel::kChunksPerBlock), kThreads, 0, stream, p);
  }
  if (const char* error = LaunchError()) return error;
  return LaunchSums<Real>(a, stream);
}

}  // namespace jq
