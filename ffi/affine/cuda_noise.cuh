// What stochastic rounding draws for elements of x, in the kernels of cuda_map.cuh and cuda_gradient.cuh.
#pragma once

#include "ffi/affine/arguments.h"
#include "ffi/common/cuda_index.h"

namespace jq {

// Of rounding to nearest: nothing.
template <bool keyed>
struct DeviceNoise {
  DeviceNoise() = default;
  explicit DeviceNoise(const KeyArguments*) {}
  bool SuitsVectors(int, int64_t) const { return true; }

  template <typename Real>
  __device__ __forceinline__ Real One(int64_t) const {
    return Real(0);
  }
  template <int n, typename Real>
  __device__ __forceinline__ void Vector(int64_t, Real (&u)[n]) const {
#pragma unroll
    for (int i = 0; i < n; ++i) u[i] = Real(0);
  }
};

template <>
struct DeviceNoise<true> {
  struct Dim {
    FastDivider size;
    int64_t index_stride, key_stride;
  };
  int dims = 0;
  Dim dim[PlaceView::kMaxDims];
  const uint32_t* key0;
  const uint32_t* key1;
  const uint32_t* origin;

  DeviceNoise() = default;
  explicit DeviceNoise(const KeyArguments* key)
      : dims(key->view->dims), key0(key->key0), key1(key->key1), origin(key->origin) {
    for (int d = 0; d < dims; ++d) {
      const PlaceView::Dim& from = key->view->dim[d];
      dim[d] = {FastDivider(from.size), from.index_stride, from.key_stride};
    }
  }

  // Whether vectors of n elements, the first at `head`, all lie in one run.
  bool SuitsVectors(int n, int64_t head) const {
    return dims == 1 || (head == 0 && dim[dims - 1].size.divisor % static_cast<uint64_t>(n) == 0);
  }

  // Of element e.
  template <typename Real>
  __device__ __forceinline__ Real One(int64_t e) const {
    const Place place = Find(e);
    const RandomWords words = Block(place, place.index >> 1);
    return Uniform<Real>((place.index & 1) != 0 ? words.odd : words.even);
  }

  // Of n elements of one run.
  template <int n, typename Real>
  __device__ __forceinline__ void Vector(int64_t e, Real (&u)[n]) const {
    static_assert(n % 2 == 0, "elements come in pairs");
    const Place place = Find(e);
    const bool odd = (place.index & 1) != 0;
    RandomWords words = Block(place, place.index >> 1);
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const bool another = i + 2 < n;
      RandomWords next = words;
      // After the last pair only an odd begin needs another block.
      if (another || odd) next = Block(place, (place.index >> 1) + static_cast<uint64_t>(i / 2 + 1));
      u[i] = Uniform<Real>(odd ? words.odd : words.even);
      u[i + 1] = Uniform<Real>(odd ? next.even : words.odd);
      words = next;
    }
  }

 private:
  struct Place {
    uint64_t index;
    uint32_t key0, key1;
  };

  static __device__ __forceinline__ RandomWords Block(const Place& place, uint64_t i) {
    return Threefry(place.key0, place.key1, static_cast<uint32_t>(i >> 32), static_cast<uint32_t>(i));
  }

  __device__ __forceinline__ Place Find(int64_t e) const {
    uint64_t index = static_cast<uint64_t>(__ldg(origin + 1)) << 32 | __ldg(origin);
    int64_t key = 0;
    uint64_t rest = static_cast<uint64_t>(e);
#pragma unroll 1
    for (int d = dims - 1; d > 0; --d) {
      const uint64_t outer = dim[d].size.Divide(rest);
      const int64_t i = static_cast<int64_t>(rest - outer * dim[d].size.divisor);
      index += static_cast<uint64_t>(i * dim[d].index_stride);
      key += i * dim[d].key_stride;
      rest = outer;
    }
    index += rest * static_cast<uint64_t>(dim[0].index_stride);
    key += static_cast<int64_t>(rest) * dim[0].key_stride;
    return {index, __ldg(key0 + key), __ldg(key1 + key)};
  }
};

}  // namespace jq
