#include "ffi/ggml/quantize/iq_tables.h"

#include <vector>

#include "ffi/ggml/tables.h"

namespace jq {
namespace ggml {
namespace {

struct BuiltLattice {
  Lattice lattice;
  std::vector<int32_t> entries;
  std::vector<uint16_t> neighbours;
};

// kCodes: how many codes a coordinate has. kShells: how many distances a list of neighbours covers.
template <int kBits, int kCodes, int kShells, int kPoints>
const Lattice& Build(const uint16_t (&grid)[kPoints]) {
  constexpr int kCoordinates = kBits == 2 ? 8 : 4;
  const auto code = [](int word, int i) { return (word >> kBits * i) & ((1 << kBits) - 1); };

  int words = 1, last = 0;
  for (int i = 0; i < kCoordinates; ++i) {
    words *= kCodes;
    last |= (kCodes - 1) << kBits * i;
  }

  // Never freed: a thread may still quantise while the process ends.
  BuiltLattice& built = *new BuiltLattice;
  built.entries.assign(last + 1, -1);
  for (int point = 0; point < kPoints; ++point) built.entries[grid[point]] = point;

  std::vector<uint8_t> coordinates(kCoordinates * kPoints), distance(kPoints);
  for (int i = 0; i < kCoordinates; ++i) {
    for (int point = 0; point < kPoints; ++point) coordinates[i * kPoints + point] = code(grid[point], i);
  }
  for (int number = 0; number < words; ++number) {
    int word = 0;
    for (int i = 0, rest = number; i < kCoordinates; ++i, rest /= kCodes) word |= rest % kCodes << kBits * i;
    if (built.entries[word] >= 0) continue;

    for (int point = 0; point < kPoints; ++point) distance[point] = 0;
    for (int i = 0; i < kCoordinates; ++i) {
      const int here = code(word, i);
      for (int point = 0; point < kPoints; ++point) {
        const int apart = coordinates[i * kPoints + point] - here;
        distance[point] = static_cast<uint8_t>(distance[point] + apart * apart);
      }
    }

    const size_t first = built.neighbours.size();
    for (int shell = 0, previous = -1; shell < kShells; ++shell) {
      int nearest = 256;
      for (int point = 0; point < kPoints; ++point) {
        if (distance[point] > previous && distance[point] < nearest) nearest = distance[point];
      }
      for (int point = 0; point < kPoints; ++point) {
        if (distance[point] == nearest) built.neighbours.push_back(grid[point]);
      }
      previous = nearest;
    }
    while (built.neighbours.size() % Lattice::kChunk != 0) built.neighbours.push_back(built.neighbours[first]);
    const size_t chunks = (built.neighbours.size() - first) / Lattice::kChunk;
    built.entries[word] = ~static_cast<int32_t>(first / Lattice::kChunk << 8 | chunks);
  }
  built.lattice = {built.entries.data(), built.neighbours.data()};
  return built.lattice;
}

}  // namespace

#define JQ_LATTICE(format, bits, codes, shells, grid)                 \
  template <>                                                         \
  const Lattice& LatticeOf<format>() {                                \
    static const Lattice& lattice = Build<bits, codes, shells>(grid); \
    return lattice;                                                   \
  }
JQ_LATTICE(IQ2_XXS, 2, 3, 2, kGridIQ2_XXS)
JQ_LATTICE(IQ2_XS, 2, 3, 2, kGridIQ2_XS)
JQ_LATTICE(IQ2_S, 2, 3, 1, kGridIQ2_S)
JQ_LATTICE(IQ3_XXS, 3, 8, 2, kGridIQ3_XXS)
JQ_LATTICE(IQ3_S, 3, 8, 3, kGridIQ3_S)
JQ_LATTICE(IQ1_S, 2, 3, 3, kGridIQ1_S)
#undef JQ_LATTICE

template <>
const Lattice& LatticeOf<IQ1_M>() {
  return LatticeOf<IQ1_S>();
}

}  // namespace ggml
}  // namespace jq
