// The lattices of the IQ formats as their quantisers walk them, built from the grids of tables.h on first use.
#pragma once

#include <cstdint>

#include "ffi/ggml/formats.h"

namespace jq {
namespace ggml {

// A word holds the codes of one group: 8 of 2 bits or 4 of 3 bits, the first in the lowest.
struct Lattice {
  static constexpr int kChunk = 8;

  // By word: the index of the grid point, or for a word off the grid, ~(first << 8 | count): where among the chunks of
  // `neighbours` its list starts and how many it has.
  const int32_t* entries;

  // Chunks of eight words: the grid points in the nearest few distances, nearest first, then by index. The order
  // decides ties. A list is padded with its first point, which cannot win a second time.
  const uint16_t* neighbours;
};

// Safe to call from any thread; what it returns lives as long as the process.
template <typename F>
const Lattice& LatticeOf();

template <>
const Lattice& LatticeOf<IQ2_XXS>();
template <>
const Lattice& LatticeOf<IQ2_XS>();
template <>
const Lattice& LatticeOf<IQ2_S>();
template <>
const Lattice& LatticeOf<IQ3_XXS>();
template <>
const Lattice& LatticeOf<IQ3_S>();
template <>
const Lattice& LatticeOf<IQ1_S>();
template <>
const Lattice& LatticeOf<IQ1_M>();

}  // namespace ggml
}  // namespace jq
