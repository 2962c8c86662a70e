// What stochastic rounding draws for consecutive elements of x, as the loops take it. Compiled once per instruction
// set.
#pragma once

#include "ffi/affine/arguments.h"

namespace jq {
namespace JQ_ISA {
namespace {

// Of n consecutive indices from `index` on. Plain 32-bit additions, rotations and exclusive ors: they vectorise.
template <typename Real>
void DrawRun(uint32_t key0, uint32_t key1, uint64_t index, int64_t n, Real* __restrict u) {
  if (n > 0 && index % 2 == 1) {
    const uint64_t i = index / 2;
    *u++ = Uniform<Real>(Threefry(key0, key1, static_cast<uint32_t>(i >> 32), static_cast<uint32_t>(i)).odd);
    ++index;
    --n;
  }
  while (n > 1) {
    const uint64_t i = index / 2;
    const uint32_t high = static_cast<uint32_t>(i >> 32), low = static_cast<uint32_t>(i);
    // The low word does not wrap within a loop.
    const int64_t most = (int64_t{1} << 32) - low, pairs = n / 2 < most ? n / 2 : most;
    for (int64_t j = 0; j < pairs; ++j) {
      const RandomWords words = Threefry(key0, key1, high, low + static_cast<uint32_t>(j));
      u[2 * j] = Uniform<Real>(words.even);
      u[2 * j + 1] = Uniform<Real>(words.odd);
    }
    u += 2 * pairs;
    index += static_cast<uint64_t>(2 * pairs);
    n -= 2 * pairs;
  }
  if (n > 0) {
    const uint64_t i = index / 2;
    *u = Uniform<Real>(Threefry(key0, key1, static_cast<uint32_t>(i >> 32), static_cast<uint32_t>(i)).even);
  }
}

// Of elements [begin, begin + n) of x.
template <typename Real>
void Draw(const KeyArguments& key, int64_t begin, int64_t n, Real* u) {
  const PlaceView& view = *key.view;
  const uint64_t origin = static_cast<uint64_t>(key.origin[1]) << 32 | key.origin[0];
  const int64_t run = view.run().size;
  while (n > 0) {
    int64_t at = begin, k = 0;
    uint64_t index = origin;
    if (view.dims > 1) {
      at = begin % run;
      int64_t rest = begin / run;
      for (int d = view.dims - 2; d >= 0; --d) {
        const PlaceView::Dim& dim = view.dim[d];
        const int64_t i = d == 0 ? rest : rest % dim.size;
        if (d > 0) rest /= dim.size;
        index += static_cast<uint64_t>(i * dim.index_stride);
        k += i * dim.key_stride;
      }
    }
    const int64_t take = run - at < n ? run - at : n;
    DrawRun(key.key0[k], key.key1[k], index + static_cast<uint64_t>(at), take, u);
    begin += take;
    n -= take;
    u += take;
  }
}

}  // namespace
}  // namespace JQ_ISA
}  // namespace jq
