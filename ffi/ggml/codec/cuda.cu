// Dequantisation and the prepared layout on CUDA.
//
// A warp takes a tile of 1024 values. Blocks begin at any byte, so it copies theirs to shared memory by wide,
// consecutive loads. Each thread decodes 32 values; they return through shared memory, so that the warp's stores are
// consecutive too, 16 bytes a thread.
#include <type_traits>

#include "ffi/common/cuda_index.h"
#include "ffi/common/cuda_launch.h"
#include "ffi/ggml/cuda_kernels.h"
#include "ffi/ggml/cuda_memory.h"
#include "ffi/ggml/decode.h"
#include "ffi/ggml/linear/layout.h"

namespace jq {
namespace ggml {
namespace {

constexpr int kTile = 1024, kEach = kTile / kWarp;  // values of a warp and of a thread
constexpr int kTileWarps = 4;
constexpr int kValueVectors = kEach * 4 / 16 + 1;  // of a thread's float32 values, and one that keeps banks apart

struct Parameters {
  const uint8_t* data;
  char* out;
  DType out_type;
  bool out_aligned;  // every tile of the result, to 16 bytes
  DequantizeArguments rows;
  int64_t row_blocks, tiles;
  FastDivider row_tiles;
};

// Where a warp's next values come from and go to.
struct Place {
  int64_t row, first;  // row of the result, first block
  int count;           // blocks
  int64_t source;      // row of the data, or -1
};
template <int kBlocks>
__device__ __forceinline__ Place PlaceOf(const Parameters& p, int64_t tile) {
  Place place;
  place.row = static_cast<int64_t>(p.row_tiles.Divide(static_cast<uint64_t>(tile)));
  place.first = (tile - place.row * static_cast<int64_t>(p.row_tiles.divisor)) * kBlocks;
  place.count = static_cast<int>(min(static_cast<int64_t>(kBlocks), p.row_blocks - place.first));
  place.source = p.rows.Source(place.row);
  return place;
}

// Blocks of a row of eight in the prepared layout (words aligned) to plain ones in shared memory.
template <typename F>
__device__ __forceinline__ void CopyPrepared(const uint8_t* eight, int64_t first, int count, int row, uint8_t* to,
                                             int lane) {
  constexpr Units kOf = kUnits<F>;
  constexpr int kLead = kOf.lead != 0, kAll = kLead + kOf.words + (kOf.tail != 0);
  constexpr int kBytes = static_cast<int>(sizeof(F));
  const uint8_t* from = eight + first * (kLanes * kBytes);
#pragma unroll 2
  for (int i = lane; i < count * kAll; i += kWarp) {
    const int block = i / kAll, unit = i % kAll, word = unit - kLead;
    const int offset = unit < kLead ? 0 : kOf.lead + 4 * word;
    const int size = unit < kLead ? kOf.lead : word < kOf.words ? 4 : kOf.tail;
    const uint8_t* source = from + kLanes * (block * kBytes + offset) + row * size;
    uint8_t* target = to + block * kBytes + offset;
    if (size == 4) {
      const uint32_t bytes = LoadWords<4>(source).w[0];
      memcpy(target, &bytes, 4);
    } else {
      for (int j = 0; j < size; ++j) target[j] = source[j];
    }
  }
}

// V values as words of a 16-bit type, two each.
template <typename To, int V>
__device__ __forceinline__ Words<2 * V> Halves(const float* values) {
  Words<2 * V> words;
#pragma unroll
  for (int i = 0; i < V; i += 2) words.w[i / 2] = StorageOf<To>::Pair(values[i], values[i + 1]);
  return words;
}

// A thread's values, to its part of the tile.
__device__ __forceinline__ void PutValues(const float* values, DType type, uint4* to) {
  if (type == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      Words<16> words;
      for (int j = 0; j < 4; ++j) words.w[j] = BitCast<uint32_t>(values[i + j]);
      StoreWords(words, to + i / 4);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; i += 8) {
      StoreWords(type == DType::kF16 ? Halves<Float16, 8>(values + i) : Halves<BFloat16, 8>(values + i), to + i / 8);
    }
  }
}

// One format needs a few registers more than ptxas keeps to on sm_100 (0: its choice).
template <typename F>
constexpr int kDequantizeBlocks = std::is_same<F, IQ4_XS>::value ? 8 : 0;

template <typename F>
__global__ void __launch_bounds__(kTileWarps* kWarp, kDequantizeBlocks<F>) DequantizeKernel(Parameters p) {
  using D = Decoder<F>;
  constexpr int kBlocks = kTile / F::kBlock;
  constexpr int kBytes = kBlocks * static_cast<int>(sizeof(F));
  JQ_SHARED(uint4, packed, kTileWarps, (kBytes + 15) / 16);
  JQ_SHARED(uint4, decoded, kTileWarps, kWarp * kValueVectors);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int value_bytes = p.out_type == DType::kF32 ? 4 : 2;
  const int each = p.out_type == DType::kF32 ? 8 : 4, stride = each + 1;  // vectors of a thread's values
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileWarps + warp; tile < p.tiles;
       tile += static_cast<int64_t>(gridDim.x) * kTileWarps) {
    const Place place = PlaceOf<kBlocks>(p, tile);
    if (place.source >= 0) {
      const int64_t row_bytes = p.row_blocks * static_cast<int64_t>(sizeof(F));
      bool copied = false;
      if constexpr (kUnits<F>.interleaved) {
        if (p.rows.prepared) {
          const int row = static_cast<int>(place.source % kLanes);
          CopyPrepared<F>(p.data + (place.source - row) * row_bytes, place.first, place.count, row,
                          reinterpret_cast<uint8_t*>(packed[warp]), lane);
          copied = true;
        }
      }
      if (!copied) {
        const uint8_t* from = p.data + place.source * row_bytes + place.first * static_cast<int64_t>(sizeof(F));
        CopyByWarp<kBytes>(from, packed[warp], place.count * static_cast<int>(sizeof(F)), lane);
      }
    }
    __syncwarp();
    if (lane * kEach < place.count * F::kBlock) {
      float values[kEach] = {};
      if (place.source >= 0) {
        const F& block = reinterpret_cast<const F*>(packed[warp])[lane * kEach / F::kBlock];
#pragma unroll
        for (int i = 0; i < kEach; i += D::kGroup) {
          DecodeValues(block, (lane * kEach % F::kBlock + i) / D::kGroup, values + i);
        }
      }
      PutValues(values, p.out_type, decoded[warp] + lane * stride);
    }
    __syncwarp();
    char* out = p.out + (place.row * p.row_blocks + place.first) * F::kBlock * value_bytes;
    const int vectors = place.count * F::kBlock * value_bytes / 16;
    // Vector lane + 32 i of the tile.
    const uint4* from = decoded[warp] + (p.out_type == DType::kF32 ? lane / 8 * 9 + lane % 8 : lane / 4 * 5 + lane % 4);
    const int step = kWarp / each * stride;
    out += lane * 16;
    if (p.out_aligned) {
#pragma unroll
      for (int i = 0; i < kEach * 4 / 16; ++i) {
        if (lane + i * kWarp < vectors) StoreWords(LoadWords<16>(from + i * step), out + i * kWarp * 16);
      }
    } else {
#pragma unroll 1
      for (int i = 0; lane + i * kWarp < vectors; ++i) {
        StoreElements(LoadWords<16>(from + i * step), value_bytes, out + i * kWarp * 16);
      }
    }
  }
}

// F32, F16 and BF16: values, each a block.
template <typename F>
__global__ void __launch_bounds__(kTileWarps* kWarp) ConvertKernel(Parameters p) {
  constexpr int kVector = 4, kBytes = kVector * static_cast<int>(sizeof(F));
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int value_bytes = p.out_type == DType::kF32 ? 4 : 2;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileWarps + warp; tile < p.tiles;
       tile += static_cast<int64_t>(gridDim.x) * kTileWarps) {
    const Place place = PlaceOf<kTile>(p, tile);
    const F* in = reinterpret_cast<const F*>(p.data) + place.source * p.row_blocks + place.first;
    char* out = p.out + (place.row * p.row_blocks + place.first) * value_bytes;
    const bool in_aligned = reinterpret_cast<uintptr_t>(in) % kBytes == 0;
    const bool out_aligned = reinterpret_cast<uintptr_t>(out) % (kVector * value_bytes) == 0;
#pragma unroll 4
    for (int i = 0; i < kTile / kVector; i += kWarp) {
      const int at = (i + lane) * kVector, count = min(kVector, place.count - at);
      if (count <= 0) break;
      float values[kVector] = {};
      if (place.source >= 0) {
        if (in_aligned && count == kVector) {
          F four[kVector];
          const Words<kBytes> words = LoadWords<kBytes>(in + at);
          memcpy(four, words.w, sizeof(four));
          for (int j = 0; j < kVector; ++j) values[j] = LoadValue(four[j]);
        } else {
          for (int j = 0; j < kVector; ++j) values[j] = j < count ? LoadValue(in[at + j]) : 0.0f;
        }
      }
      char* to = out + at * value_bytes;
      if (p.out_type == DType::kF32) {
        Words<16> words;
        memcpy(words.w, values, sizeof(values));
        if (out_aligned && count == kVector) {
          StoreWords(words, to);
        } else {
          StoreElements(words, 4, to, count);
        }
      } else {
        const Words<8> words =
            p.out_type == DType::kF16 ? Halves<Float16, kVector>(values) : Halves<BFloat16, kVector>(values);
        if (out_aligned && count == kVector) {
          StoreWords(words, to);
        } else {
          StoreElements(words, 2, to, count);
        }
      }
    }
  }
}

using DequantizeKernelOf = void (*)(Parameters);
template <typename F>
DequantizeKernelOf KernelOf() {
  if constexpr (kIsFloat<F>) {
    return ConvertKernel<F>;
  } else {
    return DequantizeKernel<F>;
  }
}

// ---- Arrangement

struct Arrangement {
  const uint8_t* in;
  uint8_t* out;
  int64_t n, row_bytes, eights, work;
  bool prepare;
  uint32_t block_bytes, lead, words, tail;
};

// A thread block takes eight rows of a matrix at a time, a thread a unit of one of them. Rows are its fastest index:
// eight units follow one another in the prepared form.
__global__ void ArrangeKernel(Arrangement p) {
  const uint32_t units = (p.lead != 0) + p.words + (p.tail != 0);
  const int64_t blocks = p.row_bytes / p.block_bytes;
  const int64_t row_in_eight = threadIdx.x % kLanes;
  for (int64_t w = blockIdx.x; w < p.work; w += gridDim.x) {
    const int64_t row = w % p.eights * kLanes + row_in_eight;
    const int64_t of_plain = (w / p.eights * p.n + row) * p.row_bytes, of_prepared = w * kLanes * p.row_bytes;
    const bool filling = row >= p.n;
    if (filling && !p.prepare) continue;
    for (int64_t u = threadIdx.x / kLanes; u < blocks * units; u += blockDim.x / kLanes) {
      const int64_t block = u / units;
      const uint32_t unit = static_cast<uint32_t>(u % units);
      const uint32_t word = unit - (p.lead != 0);  // of the units of four
      const bool is_lead = p.lead != 0 && unit == 0;
      const uint32_t size = is_lead ? p.lead : word < p.words ? 4 : p.tail;
      const uint32_t offset = is_lead ? 0 : p.lead + 4 * word;
      const int64_t plain = of_plain + block * p.block_bytes + offset;
      const int64_t prepared = of_prepared + kLanes * (block * p.block_bytes + offset) + row_in_eight * size;
      uint8_t* to = p.out + (p.prepare ? prepared : plain);
      if (filling) {
        for (uint32_t i = 0; i < size; ++i) to[i] = 0;
        continue;
      }
      const uint8_t* from = p.in + (p.prepare ? plain : prepared);
      if (size == 4 && (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 4 == 0) {
        StoreWords(LoadWords<4>(from), to);
      } else {
        for (uint32_t i = 0; i < size; ++i) to[i] = from[i];
      }
    }
  }
}

Units UnitsOf(int type_id) {
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: return kUnits<F>;
    JQ_GGML_FORMATS(JQ_CASE)
#undef JQ_CASE
    default: return {};
  }
}

}  // namespace

const char* DequantizeOnCuda(const DequantizeArguments& a, CudaStream stream) {
  Parameters p{};
  p.data = a.data;
  p.out = static_cast<char*>(a.out);
  p.out_type = a.out_type;
  if (a.prepared && !IsAligned(a.data, 4)) return "prepared data is not aligned to 4 bytes";
  // Plain rows without ids are one.
  const bool one = a.ids == nullptr && !a.prepared;
  const int64_t rows = one ? 1 : a.rows;
  p.rows = a;
  if (one) p.rows.n = p.rows.data_n = 1;
  p.row_blocks = (one ? a.rows : 1) * (a.k / a.size.block);
  p.out_aligned = IsAligned(a.out, 16) && p.row_blocks * a.size.block * SizeOf(a.out_type) % 16 == 0;
  const int64_t tile_blocks = kTile / a.size.block, row_tiles = (p.row_blocks + tile_blocks - 1) / tile_blocks;
  p.row_tiles = FastDivider(row_tiles);
  p.tiles = rows * row_tiles;
  const unsigned grid = GridSize(p.tiles, kTileWarps);
  switch (a.type_id) {
#define JQ_CASE(F)                                             \
  case F::kId: {                                               \
    const DequantizeKernelOf kernel = KernelOf<F>();           \
    JQ_LAUNCH(kernel, grid, kTileWarps * kWarp, 0, stream, p); \
    return LaunchError();                                      \
  }
    JQ_GGML_FORMATS(JQ_CASE)
#undef JQ_CASE
    default: return "no kernel for this type";
  }
}

const char* LoadDequantizeOnCuda() {
#define JQ_LOAD(F) \
  if (const char* error = LoadKernel(KernelOf<F>())) return error;
  JQ_GGML_FORMATS(JQ_LOAD)
#undef JQ_LOAD
  return nullptr;
}

const char* ArrangeOnCuda(const ArrangeArguments& a, CudaStream stream) {
  const Units units = UnitsOf(a.type_id);
  Arrangement p{};
  p.in = a.in;
  p.out = a.out;
  p.n = a.n;
  p.row_bytes = a.k / a.size.block * a.size.bytes;
  p.eights = EightsOf(a.n);
  p.work = a.matrices * p.eights;
  p.prepare = a.prepare;
  p.block_bytes = static_cast<uint32_t>(a.size.bytes);
  p.lead = static_cast<uint32_t>(units.lead);
  p.words = static_cast<uint32_t>(units.words);
  p.tail = static_cast<uint32_t>(units.tail);
  JQ_LAUNCH(ArrangeKernel, GridSize(p.work, 1), kThreads, 0, stream, p);
  return LaunchError();
}

const char* LoadArrangeOnCuda() { return LoadKernel(&ArrangeKernel); }

}  // namespace ggml
}  // namespace jq
