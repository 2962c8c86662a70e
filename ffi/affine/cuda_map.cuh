// Element-wise kernels: out = f(x) or, for gradients, f(dy, x).
//
// They are bound by memory, so each thread moves 16 bytes at a time on the side of the wider type, several loads in
// flight, and the arithmetic stays off the slow pipelines. Three ways through a tensor:
//   vectors     x as one line. A vector lies in a run that shares a scale, or crosses into the next.
//   columns     consecutive x have consecutive scales: a thread keeps its columns' reciprocals and goes down the rows.
//   elements    one by one, with IEEE division: what comes before and after the vectors, buffers that no common offset
//               aligns, runs shorter than a vector, and vectors whose scale does not suit the fast quotient.
#pragma once

#include <cstdint>

#include "ffi/affine/arguments.h"
#include "ffi/affine/cuda_noise.cuh"
#include "ffi/common/cuda_index.h"
#include "ffi/common/cuda_launch.h"
#include "ffi/common/cuda_storage.h"

namespace jq {

template <typename M>
struct ValueOf {
  using Math = M;
  static constexpr bool kGradient = false;
  template <typename Real>
  static __device__ __forceinline__ Real At(Real, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range,
                                            Real u) {
    return Rounded<Math, Real>::Value(x, scale, zero_point, range, u);
  }
};
template <typename M>
struct GradientOf {
  using Math = M;
  static constexpr bool kGradient = true;
  template <typename Real>
  static __device__ __forceinline__ Real At(Real dy, Real x, Divisor<Real> scale, Real zero_point, Range<Real> range,
                                            Real u) {
    return Rounded<Math, Real>::Gradient(dy, x, scale, zero_point, range, u).dx;
  }
};

template <typename F, typename Real>
struct MapParameters {
  DeviceView view;
  DeviceNoise<kKeyed<typename F::Math>> noise;
  const void* dy;
  const void* x;
  const Real* scale;
  const Real* zero_point;
  void* out;
  DType x_type, out_type;  // of AnyFloat
  CodeSign sign;
  Range<Real> range;
  int64_t size;
  int64_t head, vectors;  // elements before the first vector; vectors
  int64_t units;          // what is left: elements, or bytes of packed codes
  // Rows that begin a byte of packed codes each; row_size 0: one line.
  FastDivider row_bytes;
  int64_t row_size;
  // Columns: threads side by side (a power of two), their vectors in a row, tiles of them in a row, rows.
  int across_log2;
  int64_t row_vectors, rows;
  FastDivider tiles;
};

// Zero points are used rounded; adding +0 makes +0 of the -0 that -0.3 rounds to.
template <typename Real>
__device__ __forceinline__ Real ZeroPoint(const Real* zero_point, int64_t i) {
  return RoundHalfToEven(__ldg(zero_point + i)) + Real(0);
}

template <typename F, typename Real, typename X, typename Out>
class MapKernel {
  using XStorage = StorageOf<X>;
  using OutStorage = StorageOf<Out>;
  using Parameters = MapParameters<F, Real>;
  static constexpr int kWide = XStorage::kBytes > OutStorage::kBytes ? XStorage::kBytes : OutStorage::kBytes;
  static constexpr int kGroup = OutStorage::kGroup;

 public:
  // Of a vector: 16 bytes of the wider type. Where x is wider than the result, 32 of x: the arithmetic is dearest
  // beside the fewest bytes there, and what a vector costs besides is shared by twice the elements. (Not where the
  // result is wider: neighbouring threads' loads of half a sector meet in L1, their stores do not.)
  static constexpr int kElements = 16 / kWide * (XStorage::kBytes > OutStorage::kBytes ? 2 : 1);
  static constexpr int kXBytes = kVectorBytes<X, kElements>, kOutBytes = kVectorBytes<Out, kElements>;
  // Vectors. Half as many where random words are drawn: these take the registers, and the time that loads have.
  static constexpr int kInFlight = kElements >= 16 ? 1 : (kElements >= 8 ? 2 : 4) / (kKeyed<typename F::Math> ? 2 : 1);

 private:
  static constexpr int V = kElements;

  static __device__ __forceinline__ const void* At(const void* data, int64_t e) {
    return static_cast<const char*>(data) + e * XStorage::kBytes;
  }
  static __device__ __forceinline__ void* OutAt(const Parameters& p, int64_t e) {
    return static_cast<char*>(p.out) + (kGroup == 1 ? e * OutStorage::kBytes : e / kGroup);
  }
  static __device__ __forceinline__ Real LoadOne(const Parameters& p, const void* data, int64_t e) {
    return XStorage::template Decode<Real>(LoadWords<XStorage::kBytes>(At(data, e)).w, 0, p.sign);
  }

  // n <= kGroup elements from e on, which one store writes to `to`. A loop of one copy: this code is all over the
  // place, and slow anyway.
  static __device__ __forceinline__ void Unit(const Parameters& p, int64_t e, int64_t n, void* to) {
    Words<kGroup == 1 ? OutStorage::kBytes : 1> words;
    if constexpr (kGroup == 1) {
      const Real x = LoadOne(p, p.x, e);
      const Real value[1] = {One(p, F::kGradient ? LoadOne(p, p.dy, e) : Real(0), x, e)};
      OutStorage::template Encode<1>(value, words.w);
    } else {
      constexpr int kBits = 8 / kGroup;
      words.w[0] = 0;
#pragma unroll 1
      for (int i = 0; i < kGroup && i < n; ++i) {
        const uint32_t code = CodeBits(One(p, Real(0), LoadOne(p, p.x, e + i), e + i));
        words.w[0] |= (code & ((1u << kBits) - 1)) << (i * kBits);
      }
    }
    StoreWords(words, to);
  }
  static __device__ __forceinline__ Real One(const Parameters& p, Real dy, Real x, int64_t e) {
    const DeviceView::Place place = p.view.Find(e);
    const DeviceView::Dim& run = p.view.dim[p.view.dims - 1];
    const Real s = __ldg(p.scale + place.scale + place.at * run.scale_stride);
    const Real z = ZeroPoint(p.zero_point, place.zero_point + place.at * run.zero_point_stride);
    return F::At(dy, x, Divisor<Real>::Of(s), z, p.range, p.noise.template One<Real>(e));
  }
  // The element that unit u stands for, where each is one.
  static __device__ __forceinline__ int64_t Element(const Parameters& p, int64_t u) {
    return u >= p.head ? u + p.vectors * V : u;
  }
  // words[k], without an address: they stay in registers.
  template <typename W, int n>
  static __device__ __forceinline__ W Pick(const W (&words)[n], int k) {
    W picked = words[0];
#pragma unroll
    for (int i = 1; i < n; ++i) picked = i == k ? words[i] : picked;
    return picked;
  }
  // A vector, element by element.
  static __device__ __forceinline__ void Slowly(const Parameters& p, int64_t e) {
#pragma unroll 1
    for (int i = 0; i < V; i += kGroup) Unit(p, e + i, kGroup, OutAt(p, e + i));
  }

  struct Vector {
    Words<kXBytes> x, dy;
  };
  static __device__ __forceinline__ Vector Load(const Parameters& p, int64_t e) {
    Vector v;
    v.x = LoadWords<kXBytes>(At(p.x, e));
    if constexpr (F::kGradient) v.dy = LoadWords<kXBytes>(At(p.dy, e));
    return v;
  }
  // divisor(i), zero(i): of element i.
  template <typename DivisorAt, typename ZeroAt>
  static __device__ __forceinline__ Words<kOutBytes> Compute(const Parameters& p, const Vector& v, int64_t e,
                                                             const DivisorAt& divisor, const ZeroAt& zero) {
    Real values[V], u[V];
    p.noise.template Vector<V>(e, u);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const Real x = XStorage::template Decode<Real>(v.x.w, i, p.sign);
      Real dy = Real(0);
      if constexpr (F::kGradient) dy = XStorage::template Decode<Real>(v.dy.w, i, p.sign);
      values[i] = F::At(dy, x, divisor(i), zero(i), p.range, u[i]);
    }
    Words<kOutBytes> out;
    OutStorage::template Encode<V>(values, out.w);
    return out;
  }

 public:
  // Everything outside the vectors. Several loads in flight, as each is narrow.
  static __device__ __forceinline__ void Units(const Parameters& p) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
    int64_t u = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if constexpr (kGroup > 1) {
      for (; u < p.units; u += stride) {
        int64_t e = u * kGroup, left = p.size - e;
        if (p.row_size != 0) {
          const int64_t row = static_cast<int64_t>(p.row_bytes.Divide(static_cast<uint64_t>(u)));
          const int64_t column = (u - row * static_cast<int64_t>(p.row_bytes.divisor)) * kGroup;
          e = row * p.row_size + column;
          left = p.row_size - column;
          Unit(p, e, left, static_cast<char*>(p.out) + u);
          continue;
        }
        if (e >= p.head) {
          e += p.vectors * V;
          left -= p.vectors * V;
        }
        Unit(p, e, left, OutAt(p, e));
      }
    } else {
      constexpr int kBatch = 4;
      for (; u < p.units; u += kBatch * stride) {
        Words<XStorage::kBytes> x[kBatch], dy[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int64_t e = Element(p, u + k * stride < p.units ? u + k * stride : u);
          x[k] = LoadWords<XStorage::kBytes>(At(p.x, e));
          if constexpr (F::kGradient) dy[k] = LoadWords<XStorage::kBytes>(At(p.dy, e));
        }
#pragma unroll 1
        for (int k = 0; k < kBatch && u + k * stride < p.units; ++k) {
          const int64_t e = Element(p, u + k * stride);
          Real upstream = Real(0);
          if constexpr (F::kGradient) upstream = XStorage::template Decode<Real>(Pick(dy, k).w, 0, p.sign);
          const Real value[1] = {One(p, upstream, XStorage::template Decode<Real>(Pick(x, k).w, 0, p.sign), e)};
          Words<OutStorage::kBytes> words;
          OutStorage::template Encode<1>(value, words.w);
          StoreWords(words, OutAt(p, e));
        }
      }
    }
  }

  // kOne: one scale for all. kRuns: a scale for each run of a whole number of vectors. kCrossing: runs of at least V.
  enum Mode { kOne, kRuns, kCrossing };

  // Returns whether this thread left out vectors, whose scale does not suit the fast quotient.
  template <Mode mode>
  static __device__ __forceinline__ bool Vectors(const Parameters& p) {
    constexpr int U = mode == kCrossing ? 1 : kInFlight;
    bool all_suit = true;
    Divisor<Real> one = Divisor<Real>::One();
    Real one_zero = Real(0);
    if constexpr (mode == kOne) {
      const Real s = __ldg(p.scale);
      one_zero = ZeroPoint(p.zero_point, 0);
      if (!Divisor<Real>::Suits(s, one_zero)) return true;
      one = Divisor<Real>::Fast(s);
    }
    const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads * U);
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * U) + threadIdx.x; first < p.vectors;
         first += stride) {
      Vector v[U];
      int64_t e[U];
      bool store[U];
      Divisor<Real> divisor[U], next[U];
      Real zero[U], next_zero[U];
      int left[U];
      // Loads and arithmetic for all, stores for those there are: no branch keeps the loads apart.
#pragma unroll
      for (int k = 0; k < U; ++k) {
        const int64_t i = first + k * kThreads;
        store[k] = i < p.vectors;
        e[k] = p.head + (store[k] ? i : first) * V;
        v[k] = Load(p, e[k]);
      }
#pragma unroll
      for (int k = 0; k < U; ++k) {
        if constexpr (mode == kOne) {
          divisor[k] = one;
          zero[k] = one_zero;
        } else {
          const DeviceView::Place place = p.view.Find(e[k]);
          const Real s = __ldg(p.scale + place.scale);
          zero[k] = ZeroPoint(p.zero_point, place.zero_point);
          bool suits = Divisor<Real>::Suits(s, zero[k]);
          divisor[k] = Divisor<Real>::Fast(s);
          if constexpr (mode == kCrossing) {
            const int64_t rest = static_cast<int64_t>(p.view.dim[p.view.dims - 1].size.divisor) - place.at;
            left[k] = rest < V ? static_cast<int>(rest) : V;
            const DeviceView::Place after = p.view.Find(e[k] + V - 1);
            const Real t = __ldg(p.scale + after.scale);
            next_zero[k] = ZeroPoint(p.zero_point, after.zero_point);
            suits = suits && Divisor<Real>::Suits(t, next_zero[k]);
            next[k] = Divisor<Real>::Fast(t);
          }
          store[k] = store[k] && suits;
          all_suit = all_suit && suits;
        }
      }
#pragma unroll
      for (int k = 0; k < U; ++k) {
        const auto out = Compute(
            p, v[k], e[k],
            [&](int i) {
              if constexpr (mode != kCrossing) return divisor[k];
              Divisor<Real> d = divisor[k];
              if (i >= left[k]) d = next[k];
              return d;
            },
            [&](int i) {
              if constexpr (mode != kCrossing) return zero[k];
              return i < left[k] ? zero[k] : next_zero[k];
            });
        if (store[k]) StoreWords(out, OutAt(p, e[k]));
      }
    }
    return !all_suit;
  }

  // The vectors that Vectors() left out. Each thread goes through its own again, so that x may be out.
  static __device__ __forceinline__ void Unsuited(const Parameters& p, int in_flight) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads * in_flight);
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * in_flight) + threadIdx.x; first < p.vectors;
         first += stride) {
#pragma unroll 1
      for (int k = 0; k < in_flight && first + k * kThreads < p.vectors; ++k) {
        const int64_t e = p.head + (first + k * kThreads) * V;
        bool suits = true;
#pragma unroll 1
        for (int i = 0; i < V; i += V - 1) {
          const DeviceView::Place place = p.view.Find(e + i);
          suits =
              suits && Divisor<Real>::Suits(__ldg(p.scale + place.scale), ZeroPoint(p.zero_point, place.zero_point));
        }
        if (!suits) Slowly(p, e);
      }
    }
  }

  // Blocks take tiles of (rows, columns); each thread its vector of columns in every kThreads >> across_log2 th row.
  static constexpr int kRowsPerThread = 8;

  // Fast: the vectors whose scales all suit the fast quotient; returns whether there are others. Not fast: those.
  template <bool kFast>
  static __device__ __forceinline__ bool Columns(const Parameters& p) {
    constexpr int U = kFast ? kInFlight : 1;
    const int down = kThreads >> p.across_log2;
    const int64_t run = static_cast<int64_t>(p.view.dim[p.view.dims - 1].size.divisor);
    const int64_t zero_stride = p.view.dim[p.view.dims - 1].zero_point_stride;
    const int64_t tiles = static_cast<int64_t>(p.tiles.divisor);
    const int64_t bands = (p.rows + down * kRowsPerThread - 1) / (down * kRowsPerThread);
    bool all_suit = true;
    for (int64_t unit = blockIdx.x; unit < bands * tiles; unit += gridDim.x) {
      const int64_t band = static_cast<int64_t>(p.tiles.Divide(static_cast<uint64_t>(unit)));
      const int64_t column = ((unit - band * tiles) << p.across_log2) + (threadIdx.x & ((1 << p.across_log2) - 1));
      if (column >= p.row_vectors) continue;
      Divisor<Real> divisor[V];
      Real zero[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        divisor[i] = Divisor<Real>::One();
        zero[i] = Real(0);
      }
      bool suits = true;
      int64_t loaded = -1;  // where these begin
      int64_t row = band * down * kRowsPerThread + (threadIdx.x >> p.across_log2);
#pragma unroll 1
      for (int done = 0; done < kRowsPerThread && row < p.rows; done += U, row += U * down) {
        Vector v[U];
#pragma unroll
        for (int k = 0; k < U; ++k) {
          const int64_t r = row + k * down < p.rows ? row + k * down : row;
          if (kFast) v[k] = Load(p, r * run + column * V);
        }
#pragma unroll
        for (int k = 0; k < U; ++k) {
          const int64_t r = row + k * down;
          const int64_t e = r * run + column * V;
          if (r >= p.rows) break;
          const DeviceView::Place place = p.view.FindRun(r);
          if (place.scale != loaded) {
            loaded = place.scale;
            suits = true;
#pragma unroll
            for (int i = 0; i < V; ++i) {
              const Real s = __ldg(p.scale + place.scale + column * V + i);
              zero[i] = ZeroPoint(p.zero_point, place.zero_point + (column * V + i) * zero_stride);
              suits = suits && Divisor<Real>::Suits(s, zero[i]);
              divisor[i] = Divisor<Real>::Fast(s);
            }
          }
          if constexpr (kFast) {
            all_suit = all_suit && suits;
            const auto out = Compute(p, v[k], e, [&](int i) { return divisor[i]; }, [&](int i) { return zero[i]; });
            if (suits) StoreWords(out, OutAt(p, e));
          } else if (!suits) {
            Slowly(p, e);
          }
        }
      }
    }
    return !all_suit;
  }
};

// Gradients of float32 need a few registers more than the 64 that ptxas otherwise keeps to (0: its choice).
template <typename F, typename Real>
constexpr int kVectorMapBlocks = F::kGradient && sizeof(Real) == 4 ? 3 : 0;

template <typename F, typename Real, typename X, typename Out>
__global__ void __launch_bounds__(kThreads, (kVectorMapBlocks<F, Real>)) VectorMap(const MapParameters<F, Real> p) {
  using Kernel = MapKernel<F, Real, X, Out>;
  bool unsuited;
  int in_flight = Kernel::kInFlight;
  if (p.view.dims == 1) {
    unsuited = Kernel::template Vectors<Kernel::kOne>(p);
  } else if (p.head == 0 && p.view.dim[p.view.dims - 1].size.divisor % Kernel::kElements == 0) {
    unsuited = Kernel::template Vectors<Kernel::kRuns>(p);
  } else {
    in_flight = 1;
    unsuited = Kernel::template Vectors<Kernel::kCrossing>(p);
  }
  if (unsuited) Kernel::Unsuited(p, in_flight);
  Kernel::Units(p);
}

template <typename F, typename Real, typename X, typename Out>
__global__ void __launch_bounds__(kThreads, 2) ColumnMap(const MapParameters<F, Real> p) {
  using Kernel = MapKernel<F, Real, X, Out>;
  if (Kernel::template Columns<true>(p)) Kernel::template Columns<false>(p);
}

template <typename F, typename Real>
__global__ void __launch_bounds__(kThreads) AnyMap(const MapParameters<F, Real> p) {
  const DeviceView::Dim& run = p.view.dim[p.view.dims - 1];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < p.size; e += stride) {
    const DeviceView::Place place = p.view.Find(e);
    const Real s = __ldg(p.scale + place.scale + place.at * run.scale_stride);
    const Real z = ZeroPoint(p.zero_point, place.zero_point + place.at * run.zero_point_stride);
    const Real x = LoadAny<Real>(p.x, e, p.x_type);
    const Real u = p.noise.template One<Real>(e);
    StoreAny(p.out, e, p.out_type, F::At(Real(0), x, Divisor<Real>::Of(s), z, p.range, u));
  }
}

template <typename F, typename Real>
MapParameters<F, Real> ReadParameters(const MapArguments& a) {
  MapParameters<F, Real> p{};
  p.view = DeviceView(*a.view);
  p.noise = DeviceNoise<kKeyed<typename F::Math>>(a.key);
  p.dy = a.dy;
  p.x = a.x;
  p.scale = static_cast<const Real*>(a.scale);
  p.zero_point = static_cast<const Real*>(a.zero_point);
  p.out = a.out;
  p.x_type = a.x_type;
  p.out_type = a.out_type;
  p.sign = CodeSign::Of(a.x_type);
  p.range = {static_cast<Real>(a.qmin), static_cast<Real>(a.qmax)};
  p.size = a.view->size;
  return p;
}

// rows: for packed codes, how rows lie in the output.
template <typename F, typename Real, typename X, typename Out>
const char* LaunchMap(const MapArguments& a, const PackArguments* rows, cudaStream_t stream) {
  using Kernel = MapKernel<F, Real, X, Out>;
  constexpr int V = Kernel::kElements, kGroup = StorageOf<Out>::kGroup;
  MapParameters<F, Real> p = ReadParameters<F, Real>(a);
  const ScaleView::Dim run = a.view->run();
  const bool ragged = rows != nullptr && rows->rows > 1;

  // The first element at which every buffer is aligned; V if there is none.
  int64_t head = ragged ? V : 0;
  for (; head < V; head += kGroup) {
    const char* x = static_cast<const char*>(a.x) + head * StorageOf<X>::kBytes;
    const char* dy = static_cast<const char*>(a.dy) + head * StorageOf<X>::kBytes;
    const char* out = static_cast<const char*>(a.out) + head * StorageOf<Out>::kBytes / kGroup;
    constexpr int kXAlignment = std::min(16, Kernel::kXBytes), kOutAlignment = std::min(16, Kernel::kOutBytes);
    if (kGroup > 1) out = static_cast<const char*>(a.out) + head / kGroup;
    if (IsAligned(x, kXAlignment) && (!F::kGradient || IsAligned(dy, kXAlignment)) && IsAligned(out, kOutAlignment)) {
      break;
    }
  }
  if (!p.noise.SuitsVectors(V, head)) head = V;

  if (run.scale_stride != 0 && head == 0 && run.size % V == 0) {
    p.row_vectors = run.size / V;
    p.rows = p.size / run.size;
    while (p.across_log2 < 5 && (1 << p.across_log2) < p.row_vectors) ++p.across_log2;
    p.tiles = FastDivider((p.row_vectors + (1 << p.across_log2) - 1) >> p.across_log2);
    const int64_t down = kThreads >> p.across_log2;
    const int64_t band = down * Kernel::kRowsPerThread;
    const unsigned grid = GridSize((p.rows + band - 1) / band * static_cast<int64_t>(p.tiles.divisor), 1);
    JQ_LAUNCH((ColumnMap<F, Real, X, Out>), grid, kThreads, 0, stream, p);
    return LaunchError();
  }

  if (head < V && head < p.size && run.scale_stride == 0 && run.size >= V) {
    p.head = head;
    p.vectors = (p.size - head) / V;
  }
  if (ragged) {
    p.row_size = rows->row_size;
    p.row_bytes = FastDivider((rows->row_size + kGroup - 1) / kGroup);
    p.units = rows->rows * static_cast<int64_t>(p.row_bytes.divisor);
  } else {
    p.units = (p.size - p.vectors * V + kGroup - 1) / kGroup;
  }
  const int64_t work = p.vectors > 0 ? p.vectors : p.units;
  const unsigned grid = GridSize(work, kThreads * (p.vectors > 0 ? Kernel::kInFlight : 4));
  JQ_LAUNCH((VectorMap<F, Real, X, Out>), grid, kThreads, 0, stream, p);
  return LaunchError();
}

template <typename F, typename Real>
const char* LaunchAnyMap(const MapArguments& a, const PackArguments*, cudaStream_t stream) {
  const MapParameters<F, Real> p = ReadParameters<F, Real>(a);
  JQ_LAUNCH((AnyMap<F, Real>), GridSize(p.size, kThreads), kThreads, 0, stream, p);
  return LaunchError();
}

}  // namespace jq
