// Weights as device code reads them: where the bytes of a block lie in either layout, and the codes of those formats
// that have a prepared form, four to a word.
//
//   CodeWords<F>::Codes<high>(block, s, q)   codes 4 q + 16 high ... + 3 of span s, q < 4: what a lane multiplies
//   CodeWords<F>::Scale(block, s, half)      of the span, or of its half where groups are of 16
//   CodeWords<F>::Offset(block, s, half)     where Decoder<F>::kOffset
//
// They say what Decoder<F>::Group says (decode.h), a word at a time.
#pragma once

#include <cstdint>

#include "ffi/common/cuda_portable.h"
#include "ffi/common/cuda_storage.h"
#include "ffi/ggml/decode.h"
#include "ffi/ggml/linear/cuda_fragments.cuh"
#include "ffi/ggml/linear/layout.h"

namespace jq {
namespace ggml {

// Weights of a launch; 16-byte aligned.
struct DeviceWeights {
  int type_id;
  bool prepared;
  const uint8_t* data;
  int64_t n, k, row_bytes;
  int64_t matrix_bytes;

  __device__ __forceinline__ const uint8_t* Matrix(int64_t expert) const { return data + expert * matrix_bytes; }
};

// A row of a matrix.
struct Row {
  const uint8_t* matrix;
  int64_t row, row_bytes;
  bool interleaved;  // with those of its eight
};
__device__ __forceinline__ Row RowOf(const DeviceWeights& w, const uint8_t* matrix, int64_t row) {
  return {matrix, row, w.row_bytes, w.prepared};
}

// ---- The bytes of a block

template <typename F>
constexpr int kAlignment = sizeof(F) % 4 == 0   ? 4
                           : sizeof(F) % 2 == 0 ? 2
                                                : 1;

__device__ __forceinline__ uint32_t LoadHalf(const uint8_t* from) {
  return from[0] | static_cast<uint32_t>(from[1]) << 8;
}
template <int kAligned>
__device__ __forceinline__ uint32_t LoadWord(const uint8_t* from) {
  CheckAligned<kAligned>(from);
  if constexpr (kAligned == 4) {
    return __ldg(reinterpret_cast<const unsigned*>(from));
  } else if constexpr (kAligned == 2) {
    const unsigned short* halves = reinterpret_cast<const unsigned short*>(from);
    return __ldg(halves) | static_cast<uint32_t>(__ldg(halves + 1)) << 16;
  } else {
    return LoadHalf(from) | LoadHalf(from + 2) << 16;
  }
}

// How a block lies. Eight interleaved rows have eight times the bytes of one: their words are aligned.
enum class Place { kPlain, kInterleaved };

// A block of a format that has a prepared form.
template <typename F, Place kPlace>
class BlockView {
 public:
  static constexpr Units kOf = kUnits<F>;

  // The first block of a row.
  __device__ __forceinline__ explicit BlockView(const Row& row) {
    if (kPlace == Place::kInterleaved) {
      const int i = static_cast<int>(row.row % kLanes);
      const uint8_t* block = row.matrix + (row.row - i) * row.row_bytes;
      lead_ = block + i * kOf.lead;
      words_ = block + kLanes * kOf.lead + 4 * i;
      tail_ = block + kLanes * (kOf.lead + 4 * kOf.words) + i * kOf.tail;
    } else {
      lead_ = row.matrix + row.row * row.row_bytes;
      words_ = lead_ + kOf.lead;
      tail_ = words_ + 4 * kOf.words;
    }
  }
  __device__ __forceinline__ BlockView At(int64_t b) const {
    const int64_t skip = b * static_cast<int64_t>(sizeof(F)) * (kStride / 4);
    BlockView view = *this;
    view.lead_ += skip;
    view.words_ += skip;
    view.tail_ += skip;
    return view;
  }

  __device__ __forceinline__ uint32_t Word(int i) const {
    return LoadWord<kPlace == Place::kInterleaved ? 4 : kAlignment<F>>(words_ + kStride * i);
  }
  __device__ __forceinline__ uint32_t Byte(int i) const { return Word(i / 4) >> (i % 4 * 8) & 255; }
  __device__ __forceinline__ const uint8_t* lead() const { return lead_; }
  __device__ __forceinline__ const uint8_t* tail() const { return tail_; }

 private:
  static constexpr int kStride = kPlace == Place::kPlain ? 4 : 4 * kLanes;  // from a word to the next

  const uint8_t *lead_, *words_, *tail_;
};

__device__ __forceinline__ float LowHalf(uint32_t word) {
  return StorageOf<Float16>::Decode<float>({word}, 0, CodeSign{});
}
__device__ __forceinline__ float HighHalf(uint32_t word) { return LowHalf(word >> 16); }
// The one half before or behind the words.
__device__ __forceinline__ float HalfAt(const uint8_t* half) {
  return LowHalf(__ldg(reinterpret_cast<const unsigned short*>(half)));
}

// Of an integer between -2^22 and 2^22, by an addition (see cuda_fragments.cuh).
__device__ __forceinline__ float SmallToFloat(int value) { return BitCast<float>(kMagic + value) - kMagicFloat; }
__device__ __forceinline__ float ByteToFloat(uint32_t word, int i) {
  return BitCast<float>(__byte_perm(word, 0x4b000000u, 0x7440u | static_cast<uint32_t>(i))) - 8388608.0f;
}

// ---- Four codes at once

// Less `zero` in each byte; all stay within 8 bits.
template <int zero>
__device__ __forceinline__ uint32_t Minus(uint32_t codes) {
  return ((codes | 0x80808080u) - 0x01010101u * zero) ^ 0x80808080u;
}
// Four bits, each to bit 4 of a byte.
__device__ __forceinline__ uint32_t FifthBits(uint32_t bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }

// Values of 4-bit codes, as bytes of four words: the eight nibbles of `codes`, low ones first in each byte.
struct NibbleValues {
  uint32_t low, high;
};
template <uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3>
__device__ __forceinline__ NibbleValues LookUpNibbles(uint32_t codes) {
  const uint32_t index = codes & 0x77777777u;
  const uint32_t choice = (codes >> 1 & 0x44444444u) | 0x32103210u;
  const uint32_t first =
      __byte_perm(__byte_perm(t0, t1, index & 0xffffu), __byte_perm(t2, t3, index & 0xffffu), choice & 0xffffu);
  const uint32_t second = __byte_perm(__byte_perm(t0, t1, index >> 16), __byte_perm(t2, t3, index >> 16), choice >> 16);
  return {__byte_perm(first, second, 0x6420), __byte_perm(first, second, 0x7531)};
}
// Of tables.h.
__device__ __forceinline__ NibbleValues LookUpIQ4(uint32_t codes) {
  return LookUpNibbles<0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u>(codes);
}
__device__ __forceinline__ NibbleValues LookUpFP4(uint32_t codes) {
  return LookUpNibbles<0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu>(codes);
}

// ---- The formats

template <typename F>
struct CodeWords;

// 32 values with 16 bytes of nibbles; `first` of them.
template <int first, int zero>
struct NibbleWords {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int, int q) {
    const uint32_t codes = b.Word(first + q) >> (4 * high) & 0x0f0f0f0fu;
    return zero == 0 ? codes : Minus<zero>(codes);
  }
};
// With a fifth bit each, before the nibbles.
template <int first, int zero>
struct FiveBitWords {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int, int q) {
    const uint32_t fifth = FifthBits(b.Word(first - 1) >> (4 * q + 16 * high));
    const uint32_t codes = (b.Word(first + q) >> (4 * high) & 0x0f0f0f0fu) | fifth;
    return zero == 0 ? codes : Minus<zero>(codes);
  }
};
struct LeadScale {
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int, int) {
    return HalfAt(b.lead());
  }
};
struct WordScaleAndOffset {
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int, int) {
    return LowHalf(b.Word(0));
  }
  template <typename Block>
  static __device__ __forceinline__ float Offset(const Block& b, int, int) {
    return HighHalf(b.Word(0));
  }
};
template <>
struct CodeWords<Q4_0> : NibbleWords<0, 8>, LeadScale {};
template <>
struct CodeWords<Q4_1> : NibbleWords<1, 0>, WordScaleAndOffset {};
template <>
struct CodeWords<Q5_0> : FiveBitWords<1, 16>, LeadScale {};
template <>
struct CodeWords<Q5_1> : FiveBitWords<2, 0>, WordScaleAndOffset {};

template <>
struct CodeWords<Q8_0> : LeadScale {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int, int q) {
    return b.Word(4 * high + q);
  }
};

template <>
struct CodeWords<Q8_1> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int, int q) {
    return b.Word(1 + 4 * high + q);
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int, int) {
    return LowHalf(b.Word(0));
  }
};
template <>
struct CodeWords<Q8_K> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    return b.Word(1 + 8 * s + 4 * high + q);
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int, int) {
    return BitCast<float>(b.Word(0));
  }
};

template <>
struct CodeWords<Q2_K> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    return b.Word(4 + s / 4 * 8 + 4 * high + q) >> (s % 4 * 2) & 0x03030303u;
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int s, int half) {
    return LowHalf(b.Word(20)) * SmallToFloat(b.Byte(2 * s + half) & 15);
  }
  template <typename Block>
  static __device__ __forceinline__ float Offset(const Block& b, int s, int half) {
    return -(HighHalf(b.Word(20)) * SmallToFloat(b.Byte(2 * s + half) >> 4));
  }
};

template <>
struct CodeWords<Q3_K> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    const uint32_t low = b.Word(8 + s / 4 * 8 + 4 * high + q) >> (s % 4 * 2) & 0x03030303u;
    return Minus<4>(low | (b.Word(4 * high + q) >> s & 0x01010101u) << 2);
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int s, int half) {
    const int g = 2 * s + half;
    const uint32_t low = b.Byte(96 + g % 8) >> (g / 8 * 4) & 15, high = b.Byte(104 + g % 4) >> (g / 4 * 2) & 3;
    return HalfAt(b.tail()) * SmallToFloat(static_cast<int>(low | high << 4) - 32);
  }
};

// Q4_K and Q5_K: d and dmin, then twelve bytes of 6-bit scales and mins, four of which are put together at once.
struct SixBitScales {
  static __device__ __forceinline__ float Of(uint32_t own, uint32_t shared, int s) {
    return ByteToFloat(s < 4 ? own & 0x3f3f3f3fu : (shared & 0x0f0f0f0fu) | (own >> 2 & 0x30303030u), s % 4);
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int s, int) {
    return LowHalf(b.Word(0)) * Of(b.Word(1), b.Word(3), s);
  }
  template <typename Block>
  static __device__ __forceinline__ float Offset(const Block& b, int s, int) {
    return -(HighHalf(b.Word(0)) * Of(b.Word(2), b.Word(3) >> 4, s));
  }
};
template <>
struct CodeWords<Q4_K> : SixBitScales {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    return b.Word(4 + s / 2 * 8 + 4 * high + q) >> (s % 2 * 4) & 0x0f0f0f0fu;
  }
};
template <>
struct CodeWords<Q5_K> : SixBitScales {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    const uint32_t low = b.Word(12 + s / 2 * 8 + 4 * high + q) >> (s % 2 * 4) & 0x0f0f0f0fu;
    return low | (b.Word(4 + 4 * high + q) >> s & 0x01010101u) << 4;
  }
};

template <>
struct CodeWords<Q6_K> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    const int half = s / 4, quarter = s % 4;
    const uint32_t low = b.Word(half * 16 + quarter % 2 * 8 + 4 * high + q) >> (quarter / 2 * 4) & 0x0f0f0f0fu;
    const uint32_t upper = b.Word(32 + half * 8 + 4 * high + q) >> (quarter * 2) & 0x03030303u;
    return Minus<32>(low | upper << 4);
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int s, int half) {
    return HalfAt(b.tail()) * SmallToFloat(static_cast<int8_t>(b.Byte(192 + 2 * s + half)));
  }
};

template <>
struct CodeWords<IQ4_NL> : LeadScale {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int, int q) {
    const NibbleValues values = LookUpIQ4(b.Word(q));
    return high ? values.high : values.low;
  }
};
template <>
struct CodeWords<IQ4_XS> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    const NibbleValues values = LookUpIQ4(b.Word(2 + 4 * s + q));
    return high ? values.high : values.low;
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int s, int) {
    const uint32_t first = b.Word(0);
    const uint32_t scale = (b.Word(1) >> (4 * s) & 15) | (first >> (16 + 2 * s) & 3) << 4;
    return LowHalf(first) * SmallToFloat(static_cast<int>(scale) - 32);
  }
};

template <>
struct CodeWords<TQ2_0> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    return Minus<1>(b.Word(s / 4 * 8 + 4 * high + q) >> (s % 4 * 2) & 0x03030303u);
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int, int) {
    return HalfAt(b.tail());
  }
};

template <>
struct CodeWords<MXFP4> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int, int q) {
    const NibbleValues values = LookUpFP4(b.Word(q));
    return high ? values.high : values.low;
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int, int) {
    const uint32_t e = __ldg(b.lead());
    return BitCast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
};

template <>
struct CodeWords<NVFP4> {
  template <int high, typename Block>
  static __device__ __forceinline__ uint32_t Codes(const Block& b, int s, int q) {
    const NibbleValues values = LookUpFP4(b.Word(1 + 4 * s + 2 * high + q % 2));
    return q < 2 ? values.low : values.high;
  }
  template <typename Block>
  static __device__ __forceinline__ float Scale(const Block& b, int s, int half) {
    return Decoder<NVFP4>::HalfOf(b.Byte(2 * s + half));
  }
};

}  // namespace ggml
}  // namespace jq
