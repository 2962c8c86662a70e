// Adam on CPU: a block at a time, which stays in L1 between choosing its exponents and coding it. Compiled once per
// instruction set.
#include "ffi/affine/cpu_kernels.h"
#include "ffi/common/fetch.h"
#include "ffi/optim/math.h"

namespace jq {
namespace JQ_ISA {
namespace {

using namespace optim;

// Loops of one width each: those that mix bytes and words leave compilers with too many vectors at once. The padding
// keeps equal places of the arrays apart in the cache.
template <typename T>
struct Row {
  alignas(64) T at[kMostBlock + 48];
};
struct Tile {
  Row<float> g, first, second, update;
  Row<int32_t> m;
  Row<uint32_t> v, hash, salt;
};

template <typename From, typename To>
JQ_HOST_DEVICE void ConvertRow(const From* __restrict in, To* __restrict out, int n) {
  for (int i = 0; i < n; ++i) out[i] = Convert<To>(in[i]);
}
template <typename Word>
JQ_HOST_DEVICE void Narrow(const Word* __restrict in, uint8_t* __restrict out, int n) {
  for (int i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(in[i]);
}

struct Magnitudes {
  uint32_t first, second;
};

// update may be g.
template <Check check>
JQ_HOST_DEVICE Magnitudes StepBlock(Tile& t, const float* g, float* update, int n, uint32_t m_offset, uint32_t v_offset,
                                    const Factors f) {
  const float zero = Second::Zero(v_offset);
  uint32_t first = 0, second = 0;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float gi = g[i];
    const Moments m =
        Advance<check>(gi, {First::Decode(t.m.at[i], m_offset), Second::Decode(t.v.at[i], v_offset, zero)}, f);
    t.first.at[i] = m.first;
    t.second.at[i] = m.second;
    const uint32_t m_bits = Magnitude(m.first), v_bits = BitCast<uint32_t>(m.second);
    first = m_bits > first ? m_bits : first;
    second = v_bits > second ? v_bits : second;
    t.hash.at[i] = Hash(m.first, m.second, t.salt.at[i]);
    update[i] = Update<check>(gi, m, f);
  }
  return {first, second};
}

// Block b, of kSize values, or of place.size where that is 0.
template <typename G, int kSize>
void OneBlock(const AdamArguments& a, int64_t b, const Place& place, Tile& t) {
  const int n = kSize != 0 ? kSize : static_cast<int>(place.size);
  const Factors& f = a.factors[place.factors];
  const G* gradient = static_cast<const G*>(a.g) + place.first;
  G* result = static_cast<G*>(a.update) + place.first;
  const float* g = t.g.at;
  float* update = t.update.at;
  if constexpr (sizeof(G) == sizeof(float)) {
    g = gradient;
    update = result;
  } else {
    ConvertRow(gradient, t.g.at, n);
  }

  // The next block, fetched while this one is computed.
  FetchSoon(gradient + n, n * sizeof(G));
  FetchSoon(a.m + place.first + n, n);
  FetchSoon(a.v + place.first + n, n);
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) most = Magnitude(g[i]) > most ? Magnitude(g[i]) : most;
  ConvertRow(reinterpret_cast<const int8_t*>(a.m + place.first), t.m.at, n);
  ConvertRow(a.v + place.first, t.v.at, n);
  const uint32_t old_m = First::Offset(a.m_exponent[b]), old_v = Second::Offset(a.v_exponent[b]);
  const Magnitudes largest = NeedsChecks(most, f) ? StepBlock<Check::kAll>(t, g, update, n, old_m, old_v, f)
                                                  : StepBlock<Check::kNone>(t, g, update, n, old_m, old_v, f);
  if constexpr (sizeof(G) != sizeof(float)) ConvertRow(t.update.at, result, n);

  a.new_m_exponent[b] = ExponentOf(largest.first);
  a.new_v_exponent[b] = ExponentOf(largest.second);
  const uint32_t new_m = First::Offset(a.new_m_exponent[b]), new_v = Second::Offset(a.new_v_exponent[b]);
  for (int i = 0; i < n; ++i) {
    t.m.at[i] = static_cast<int32_t>(First::Word(t.first.at[i], new_m, t.hash.at[i]));
    t.v.at[i] = Second::Word(t.second.at[i], new_v, t.hash.at[i]);
  }
  Narrow(t.m.at, a.new_m + place.first, n);
  Narrow(t.v.at, a.new_v + place.first, n);
}

template <typename G>
void Blocks(const AdamArguments& a, int64_t begin, int64_t end) {
  // A length known to the compiler saves each of the loops its tail.
  constexpr int kUsual = 256;
  Tile t;
  int64_t factors = -1;
  for (int64_t b = begin; b < end; ++b) {
    const Place place = PlaceOf(a, b);
    if (place.factors != factors) {
      factors = place.factors;
      const int most = static_cast<int>(a.block);
      for (int i = 0; i < most; ++i) t.salt.at[i] = Salt(static_cast<uint32_t>(i), a.seed[factors]);
    }
    (place.size == kUsual ? OneBlock<G, kUsual> : OneBlock<G, 0>)(a, b, place, t);
  }
}

}  // namespace

void Adam8bit(const AdamArguments& a, int64_t begin, int64_t end);
void Adam8bit(const AdamArguments& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case DType::kF16: return Blocks<Float16>(a, begin, end);
    case DType::kBF16: return Blocks<BFloat16>(a, begin, end);
    default: return Blocks<float>(a, begin, end);
  }
}

}  // namespace JQ_ISA
}  // namespace jq
