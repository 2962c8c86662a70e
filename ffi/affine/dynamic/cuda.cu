// Dynamic quantisation on CUDA. Rows of consecutive elements that fit the registers of a thread block are read once: a
// row stays there while its range, its scale and then its codes are computed. Anything else has its ranges found first,
// by atomic extremes of integer keys: they are associative, so the order changes no bit.
#include "ffi/affine/cuda_table.cuh"
#include "ffi/affine/dynamic/cuda_kernels.h"
#include "ffi/affine/dynamic/math.h"
#include "ffi/affine/fake_quantize/math.h"
#include "ffi/affine/quantize/math.h"

namespace jq {
namespace {

constexpr int kWarp = 32;
using Bits = Keys<float>;

__device__ __forceinline__ int32_t Least(int32_t a, int32_t b) { return b < a ? b : a; }
__device__ __forceinline__ int32_t Most(int32_t a, int32_t b) { return b > a ? b : a; }

struct Extremes {
  int32_t low = Bits::kLowest, high;

  explicit __device__ __forceinline__ Extremes(bool absolute) : high(absolute ? 0 : Bits::kHighest) {}

  __device__ __forceinline__ void Add(float value, bool absolute) {
    const int32_t bits = BitCast<int32_t>(value);
    if (absolute) {
      high = Most(high, Bits::Magnitude(bits));
    } else {
      low = Least(low, Bits::Low(bits));
      high = Most(high, Bits::High(bits));
    }
  }
  // Over groups of `width` lanes.
  __device__ __forceinline__ void Combine(int width, bool absolute) {
    for (int distance = 1; distance < width; distance *= 2) {
      high = Most(high, __shfl_xor_sync(~0u, high, distance));
      if (!absolute) low = Least(low, __shfl_xor_sync(~0u, low, distance));
    }
  }
};

// ------------------------------------------------------------------------------------------------------------- ranges

// Where keys accumulate: in the results themselves.
struct KeyParameters {
  DeviceView view;
  const void* x;
  int32_t* low;  // not touched where absolute
  int32_t* high;
  int64_t stride, count;  // of the keys: 2 where the result is double
  bool absolute;
  // Runs that share a scale: pieces of a run. Runs of consecutive scales: tiles of a run, in bands of runs.
  int64_t runs, run_size;
  FastDivider parts;
};

__global__ void __launch_bounds__(kThreads) ClearKeys(const KeyParameters p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.count; i += step) {
    const Extremes none(p.absolute);
    p.high[i * p.stride] = none.high;
    if (!p.absolute) p.low[i * p.stride] = none.low;
  }
}

__device__ __forceinline__ void Accumulate(const KeyParameters& p, int64_t scale, const Extremes& extremes) {
  atomicMax(p.high + scale * p.stride, extremes.high);
  if (!p.absolute) atomicMin(p.low + scale * p.stride, extremes.low);
}

constexpr int64_t kPiece = 4096;

// A warp takes a piece of a run.
template <typename X>
__global__ void __launch_bounds__(kThreads) FoldRuns(const KeyParameters p) {
  const X* x = static_cast<const X*>(p.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t parts = static_cast<int64_t>(p.parts.divisor);
  for (int64_t unit = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp; unit < p.runs * parts;
       unit += step) {
    const int64_t run = static_cast<int64_t>(p.parts.Divide(static_cast<uint64_t>(unit)));
    const int64_t begin = (unit - run * parts) * kPiece;
    const int64_t end = begin + kPiece < p.run_size ? begin + kPiece : p.run_size;
    const X* row = x + run * p.run_size;
    Extremes extremes(p.absolute);
#pragma unroll 8
    for (int64_t i = begin + lane; i < end; i += kWarp) extremes.Add(ToRange(row[i]), p.absolute);
    extremes.Combine(kWarp, p.absolute);
    if (lane == 0) Accumulate(p, p.view.FindRun(run).scale, extremes);
  }
}

constexpr int64_t kBand = 64;

// A lane goes down a column of a band of runs.
template <typename X>
__global__ void __launch_bounds__(kThreads) FoldColumns(const KeyParameters p) {
  const X* x = static_cast<const X*>(p.x);
  const int64_t lane = threadIdx.x % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t tiles = static_cast<int64_t>(p.parts.divisor), bands = (p.runs + kBand - 1) / kBand;
  for (int64_t unit = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp; unit < bands * tiles;
       unit += step) {
    const int64_t band = static_cast<int64_t>(p.parts.Divide(static_cast<uint64_t>(unit)));
    const int64_t column = (unit - band * tiles) * kWarp + lane;
    if (column >= p.run_size) continue;
    const int64_t end = (band + 1) * kBand < p.runs ? (band + 1) * kBand : p.runs;
    int64_t scale = p.view.FindRun(band * kBand).scale;
    Extremes extremes(p.absolute);
    for (int64_t run = band * kBand; run < end; ++run) {
      const int64_t here = p.view.FindRun(run).scale;
      if (here != scale) {
        Accumulate(p, scale + column, extremes);
        extremes = Extremes(p.absolute);
        scale = here;
      }
      extremes.Add(ToRange(x[run * p.run_size + column]), p.absolute);
    }
    Accumulate(p, scale + column, extremes);
  }
}

__global__ void __launch_bounds__(kThreads) KeysToValues(const KeyParameters p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.count; i += step) {
    p.high[i] = BitCast<int32_t>(FromKey(p.high[i]));
    if (!p.absolute) p.low[i] = BitCast<int32_t>(FromKey(p.low[i]));
  }
}

// The keys of a block lie where its scale and zero point go.
template <typename Real>
__global__ void __launch_bounds__(kThreads)
    ChooseKernel(const KeyParameters p, Real* scale, Real* zero_point, Range<float> range) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.count; i += step) {
    const int32_t high = p.high[i * p.stride], low = p.absolute ? 0 : p.low[i * p.stride];
    const ScaleAndZero chosen = Choose(low, high, p.absolute, range);
    scale[i] = static_cast<Real>(chosen.scale);
    zero_point[i] = static_cast<Real>(chosen.zero_point);
  }
}

template <typename X>
const char* LaunchFold(KeyParameters p, const ScaleView& view, CudaStream stream) {
  const ScaleView::Dim run = view.run();
  p.run_size = run.size;
  p.runs = view.size / run.size;
  if (run.scale_stride == 0) {
    p.parts = FastDivider((run.size + kPiece - 1) / kPiece);
    const int64_t units = p.runs * static_cast<int64_t>(p.parts.divisor);
    JQ_LAUNCH((FoldRuns<X>), GridSize(units, kThreads / kWarp), kThreads, 0, stream, p);
  } else {
    p.parts = FastDivider((run.size + kWarp - 1) / kWarp);
    const int64_t units = (p.runs + kBand - 1) / kBand * static_cast<int64_t>(p.parts.divisor);
    JQ_LAUNCH((FoldColumns<X>), GridSize(units, kThreads / kWarp), kThreads, 0, stream, p);
  }
  return LaunchError();
}

const char* FindKeys(const KeyParameters& p, DType type, const ScaleView& view, CudaStream stream) {
  JQ_LAUNCH(ClearKeys, GridSize(p.count, kThreads), kThreads, 0, stream, p);
  if (const char* error = LaunchError()) return error;
  if (view.size == 0) return nullptr;
  switch (type) {
    case DType::kF32: return LaunchFold<float>(p, view, stream);
    case DType::kF64: return LaunchFold<double>(p, view, stream);
    case DType::kF16: return LaunchFold<Float16>(p, view, stream);
    case DType::kBF16: return LaunchFold<BFloat16>(p, view, stream);
    default: return "no kernel for this type";
  }
}

KeyParameters ReadKeys(const ScaleView& view, const void* x, void* low, void* high, bool absolute, bool wide) {
  KeyParameters p{};
  p.view = DeviceView(view);
  p.x = x;
  p.low = static_cast<int32_t*>(low);
  p.high = static_cast<int32_t*>(high);
  p.stride = wide ? 2 : 1;
  p.count = view.scale_size;
  p.absolute = absolute;
  return p;
}

// --------------------------------------------------------------------------------------------------- rows in registers

constexpr int kMostThreads = 1024;

template <typename Real>
struct RowParameters {
  const void* x;
  void* out;
  Real* scale;
  Real* zero_point;
  int64_t rows, row_size;  // in elements
  int threads;             // of a row: a power of two
  bool symmetric;
  Range<float> range;
};

template <typename Math, typename Real, typename X, typename Out, int V>
struct RowKernel {
  using XStorage = StorageOf<X>;
  using OutStorage = StorageOf<Out>;
  static constexpr int kXBytes = kVectorBytes<X, V>, kOutBytes = kVectorBytes<Out, V>;
  static constexpr int kVectors = V == 1 ? 8 : 4;  // of a thread

  static __device__ __forceinline__ void Run(const RowParameters<Real>& p) {
    JQ_SHARED(int32_t, keys, 2, kMostThreads / kWarp);
    const int thread = static_cast<int>(threadIdx.x) & (p.threads - 1), in_block = threadIdx.x / p.threads;
    const int rows_at_once = static_cast<int>(blockDim.x) / p.threads;
    const int64_t vectors = p.row_size / V;
    const Range<Real> range{static_cast<Real>(p.range.qmin), static_cast<Real>(p.range.qmax)};
    // The same number of rounds for every thread of a block: all of them reach every barrier.
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < p.rows;
         first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
      const int64_t row = first + in_block;
      const int64_t mine = row < p.rows ? vectors : 0;
      const char* x = static_cast<const char*>(p.x) + row * p.row_size * XStorage::kBytes;
      Words<kXBytes> words[kVectors];
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int64_t v = thread + static_cast<int64_t>(k) * p.threads;
        if (v < mine) words[k] = LoadWords<kXBytes>(x + v * kXBytes);
      }
      Extremes extremes(p.symmetric);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (thread + static_cast<int64_t>(k) * p.threads >= mine) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          extremes.Add(ToRange(XStorage::template Decode<Real>(words[k].w, i, CodeSign{})), p.symmetric);
        }
      }
      extremes.Combine(p.threads < kWarp ? p.threads : kWarp, p.symmetric);
      if (p.threads > kWarp) {
        const int warp = static_cast<int>(threadIdx.x) / kWarp, warps = p.threads / kWarp;
        if (threadIdx.x % kWarp == 0) {
          keys[0][warp] = extremes.low;
          keys[1][warp] = extremes.high;
        }
        __syncthreads();
        for (int i = 0; i < warps; ++i) {
          extremes.low = Least(extremes.low, keys[0][in_block * warps + i]);
          extremes.high = Most(extremes.high, keys[1][in_block * warps + i]);
        }
        __syncthreads();
      }
      const ScaleAndZero chosen = Choose(extremes.low, extremes.high, p.symmetric, p.range);
      const Real scale = static_cast<Real>(chosen.scale), zero = static_cast<Real>(chosen.zero_point);
      if (thread == 0 && row < p.rows) {
        p.scale[row] = scale;
        p.zero_point[row] = zero;
      }
      char* out = static_cast<char*>(p.out) + row * vectors * kOutBytes;
      const auto store = [&](Divisor<Real> divisor) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          const int64_t v = thread + static_cast<int64_t>(k) * p.threads;
          if (v >= mine) continue;
          Real values[V];
#pragma unroll
          for (int i = 0; i < V; ++i) {
            values[i] = Math::Value(XStorage::template Decode<Real>(words[k].w, i, CodeSign{}), divisor, zero, range);
          }
          Words<kOutBytes> codes;
          OutStorage::template Encode<V>(values, codes.w);
          StoreWords(codes, out + v * kOutBytes);
        }
      };
      if (Divisor<Real>::Suits(scale, zero)) {
        store(Divisor<Real>::Fast(scale));
      } else {
        store(Divisor<Real>::Of(scale));
      }
    }
  }
};

template <typename Math, typename Real, typename X, typename Out, int V>
__global__ void __launch_bounds__(kMostThreads) RowsInRegisters(const RowParameters<Real> p) {
  RowKernel<Math, Real, X, Out, V>::Run(p);
}

// False: rows too long for it, or not aligned.
template <typename Math, typename Real, typename X, typename Out, int V>
bool LaunchRows(RowParameters<Real> p, CudaStream stream) {
  using Kernel = RowKernel<Math, Real, X, Out, V>;
  const int64_t vectors = p.row_size / V;
  if (p.row_size % V != 0 || vectors > kMostThreads * Kernel::kVectors) return false;
  if (!IsAligned(p.x, std::min(16, Kernel::kXBytes)) || !IsAligned(p.out, std::min(16, Kernel::kOutBytes)))
    return false;
  p.threads = 4;
  while (p.threads * Kernel::kVectors < vectors) p.threads *= 2;
  const int block = std::max(kThreads, p.threads);
  const int64_t groups = (p.rows + block / p.threads - 1) / (block / p.threads);
  JQ_LAUNCH((RowsInRegisters<Math, Real, X, Out, V>), GridSize(groups, 1), block, 0, stream, p);
  return true;
}

enum class Output { kBytes, kPacked4, kPacked2, kValues, kOther };

template <typename Real, typename X>
bool LaunchRowsTo(Output output, const RowParameters<Real>& p, CudaStream stream) {
  constexpr int V = 16 / StorageOf<X>::kBytes;
  switch (output) {
    case Output::kBytes:
      return LaunchRows<Quantize, Real, X, Code8, V>(p, stream) || LaunchRows<Quantize, Real, X, Code8, 1>(p, stream);
    case Output::kValues:
      return LaunchRows<FakeQuantize, Real, X, X, V>(p, stream) || LaunchRows<FakeQuantize, Real, X, X, 1>(p, stream);
    case Output::kPacked4: return LaunchRows<Quantize, Real, X, Packed<4>, V>(p, stream);
    case Output::kPacked2:
      if constexpr (V >= 4) return LaunchRows<Quantize, Real, X, Packed<2>, V>(p, stream);
      return false;
    default: return false;
  }
}

template <typename Real, typename X>
const char* LoadRows() {
  constexpr int V = 16 / StorageOf<X>::kBytes;
  const char* error = LoadKernel(&RowsInRegisters<Quantize, Real, X, Code8, V>);
  if (error == nullptr) error = LoadKernel(&RowsInRegisters<Quantize, Real, X, Code8, 1>);
  if (error == nullptr) error = LoadKernel(&RowsInRegisters<FakeQuantize, Real, X, X, V>);
  if (error == nullptr) error = LoadKernel(&RowsInRegisters<FakeQuantize, Real, X, X, 1>);
  if (error == nullptr) error = LoadKernel(&RowsInRegisters<Quantize, Real, X, Packed<4>, V>);
  if constexpr (V >= 4) {
    if (error == nullptr) error = LoadKernel(&RowsInRegisters<Quantize, Real, X, Packed<2>, V>);
  }
  if (error == nullptr) error = LoadKernel(&FoldRuns<X>);
  return error != nullptr ? error : LoadKernel(&FoldColumns<X>);
}

Output OutputOf(const DynamicArguments& d, bool fake) {
  if (fake) return Output::kValues;
  if (d.packing != nullptr) {
    if (d.packing->rows != 1) return Output::kOther;
    return d.packing->bits == 4 ? Output::kPacked4 : Output::kPacked2;
  }
  return SizeOf(d.map.out_type) == 1 ? Output::kBytes : Output::kOther;
}

template <typename Real>
bool InRegisters(const DynamicArguments& d, bool fake, CudaStream stream) {
  const ScaleView& view = *d.map.view;
  if (view.size == 0 || view.run().scale_stride != 0 || view.dims > 2) return false;
  if (view.dims == 2 && view.dim[0].scale_stride == 0) return false;
  RowParameters<Real> p{};
  p.x = d.map.x;
  p.out = d.map.out;
  p.scale = static_cast<Real*>(d.scale);
  p.zero_point = static_cast<Real*>(d.zero_point);
  p.row_size = view.run().size;
  p.rows = view.size / p.row_size;
  p.symmetric = d.symmetric;
  p.range = {static_cast<float>(d.map.qmin), static_cast<float>(d.map.qmax)};
  const Output output = OutputOf(d, fake);
  if constexpr (sizeof(Real) == 8) {
    return LaunchRowsTo<double, double>(output, p, stream);
  } else {
    switch (d.map.x_type) {
      case DType::kF32: return LaunchRowsTo<float, float>(output, p, stream);
      case DType::kF16: return LaunchRowsTo<float, Float16>(output, p, stream);
      default: return LaunchRowsTo<float, BFloat16>(output, p, stream);
    }
  }
}

template <typename Real>
const char* ChooseScales(const DynamicArguments& d, CudaStream stream) {
  const MapArguments& a = d.map;
  const KeyParameters p = ReadKeys(*a.view, a.x, d.scale, d.zero_point, d.symmetric, a.wide);
  if (const char* error = FindKeys(p, a.x_type, *a.view, stream)) return error;
  const Range<float> range{static_cast<float>(a.qmin), static_cast<float>(a.qmax)};
  JQ_LAUNCH((ChooseKernel<Real>), GridSize(p.count, kThreads), kThreads, 0, stream, p, static_cast<Real*>(d.scale),
            static_cast<Real*>(d.zero_point), range);
  return LaunchError();
}

}  // namespace

const char* RangeOnCuda(const RangeArguments& a, CudaStream stream) {
  const KeyParameters p = ReadKeys(*a.view, a.x, a.low, a.high, a.absolute, false);
  if (const char* error = FindKeys(p, a.type, *a.view, stream)) return error;
  JQ_LAUNCH(KeysToValues, GridSize(p.count, kThreads), kThreads, 0, stream, p);
  return LaunchError();
}

const char* DynamicOnCuda(const DynamicArguments& d, bool fake, CudaStream stream, bool* complete) {
  *complete = d.map.wide ? InRegisters<double>(d, fake, stream) : InRegisters<float>(d, fake, stream);
  if (*complete) return LaunchError();
  return d.map.wide ? ChooseScales<double>(d, stream) : ChooseScales<float>(d, stream);
}

const char* LoadDynamicOnCuda() {
  const char* error = LoadRows<float, float>();
  if (error == nullptr) error = LoadRows<float, Float16>();
  if (error == nullptr) error = LoadRows<float, BFloat16>();
  if (error == nullptr) error = LoadRows<double, double>();
  if (error == nullptr) error = LoadKernel(&ClearKeys);
  if (error == nullptr) error = LoadKernel(&KeysToValues);
  if (error == nullptr) error = LoadKernel(&ChooseKernel<float>);
  return error != nullptr ? error : LoadKernel(&ChooseKernel<double>);
}

}  // namespace jq
