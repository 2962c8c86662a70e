// Proof by exhaustion that three operations give the IEEE quotient x / s in float, once 1 / s is known:
//
//     q = -x * n;  e = fma(q, s, -x);  fma(e, n, q)        where n = -1 / s, rounded
//
// and a test of the division that the CUDA kernels build on it (Divisor<float> of ffi/common/numeric.h), for operands
// of all sizes and kinds. It takes 10 seconds of processor time, 30 without -march=native. From the root of the
// repository:
//
//   g++ -std=c++17 -O3 -march=native -ffp-contract=off -Wall -Wextra -pthread -DJQ_CUDA_ON_HOST -I.
//       -o /tmp/quotient_proof tests/cpp/quotient_proof.cc && /tmp/quotient_proof
//
// 1. Only few pairs can fail. Signs and powers of two pass through every step as long as nothing over- or underflows.
//    So let x = A 2^-23 and s = B 2^-23 with integers 2^23 <= A, B < 2^24. The floats next to x / s are one `ulp`
//    apart, 2^-23 if A >= B and 2^-24 if A < B. Let u = 2^-24.
//      -n = (1 + a) / s with |a| <= u, and |n + 1 / s| <= 2^-25, since 1/2 < 1 / s <= 1.
//      -x n misses x / s by at most x 2^-25, that is by less than 1 ulp; rounded, q misses it by less than 1.5 ulp.
//      e = (q s - x)(1 + b) with |b| <= u, a rounding that only happens if q was more than 1 ulp off.
//      q + e n = q - (q - x / s)(1 + a)(1 + b), off by less than 1.5 ulp (2 u + u^2) < 3.01 2^-24 ulp before rounding.
//    So the result is wrong only if x / s is that close to the middle between two floats, (M + 1/2) ulp. With k = 23
//    for A >= B and k = 24 for A < B,
//      x / s - (M + 1/2) ulp = (A 2^(k+1) - B N) / (2 B) ulp        N = 2 M + 1, 2^24 < N < 2^25,
//    so that the integer c = A 2^(k+1) - B N satisfies |c| < 2 B 3.01 2^-24 < 6.03. (Below 1 the floats are denser, but
//    for A >= B the nearest middle there is 1/4 ulp away. c = 0 is impossible: N, odd and of 25 bits, would divide the
//    odd part of A 2^(k+1), which has at most 24.)
//
// 2. All of these are found and tried, up to |c| <= 64. N is odd, so B and c have the same power of two 2^t, and
//      N = -(c / 2^t) (B / 2^t)^-1   modulo 2^(k+1-t).
//
// 3. Nothing over- or underflows, even with subnormals flushed to zero, if
//      2^-46 <= s <= 2^24       n is normal
//      2^-100 <= |x| <= 2^80    x / s, and with it q, is between 2^-124 and 2^126. Only e may be flushed. It is a
//                               multiple of ulp(q) ulp(s) >= 2^-47 2^-100, of which 2^21 make a normal number; if fewer
//                               are lost, q is less than 2^21 / B <= 1/4 ulp away from x / s and needs no correction.
//    x = 0 is fine as well: q has its sign, e is +0 and e n is -0 for either sign, and adding -0 leaves both zeros
//    alone. This is why s must be positive, why n is the negative reciprocal, and why e must not be turned round:
//    -0 / s would become +0. (GCC turns it round itself if e is negated later.) An infinite x would give NaN.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <xmmintrin.h>

#include <atomic>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/common/numeric.h"

namespace {

constexpr float kMinScale = 0x1p-46f, kMaxScale = 0x1p24f;
constexpr float kMinValue = 0x1p-100f, kMaxValue = 0x1p80f;

inline uint32_t Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float FromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float Quotient(float x, float s, float n) {
  const float q = -x * n;
  const float e = fmaf(q, s, -x);
  return fmaf(e, n, q);
}

// 1 / s, rounded, from any of the five floats around it; rcp.approx.ftz.f32 promises to be closer. Two steps of
// Newton's method give it for all mantissas of s but one, that of all ones, where the result may be a power of two
// instead of the next float, whose last bit is set.
inline float RefinedReciprocal(float approximation, float s) {
  float r = fmaf(fmaf(-s, approximation, 1.0f), approximation, approximation);
  r = fmaf(fmaf(-s, r, 1.0f), r, r);
  return FromBits(Bits(r) | ((Bits(s) & 0x007fffffu) == 0x007fffffu));
}

constexpr uint32_t kFirst = 1u << 23, kEnd = 1u << 24;
constexpr int kMaxDistance = 64;
constexpr int kThreads = 2;

std::atomic<int64_t> failures{0};

void Fail(const char* what, float x, float s, float got, float expected) {
  if (failures++ < 10) {
    printf("%s: %a / %a gives %a, not %a\n", what, static_cast<double>(x), static_cast<double>(s),
           static_cast<double>(got), static_cast<double>(expected));
  }
}

// Calls function(i) for first <= i < end.
template <typename Function>
void ParallelFor(uint32_t first, uint32_t end, Function function) {
  std::atomic<uint32_t> next{first};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      constexpr uint32_t kChunk = 1 << 12;
      for (uint32_t start; (start = next.fetch_add(kChunk)) < end;) {
        for (uint32_t i = start; i < end && i < start + kChunk; ++i) function(i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

uint32_t InverseModulo32Bits(uint32_t odd) {
  uint32_t inverse = odd;  // right in 3 bits; each step doubles them
  for (int i = 0; i < 4; ++i) inverse *= 2 - odd * inverse;
  return inverse;
}

// Calls function(A, N, c, k) for each A whose quotient by B is |c| / (2 B) ulp away from a middle, |c| <= kMaxDistance.
template <typename Function>
void ForEachHardNumerator(uint32_t B, Function function) {
  const int t = __builtin_ctz(B);
  const uint32_t inverse = InverseModulo32Bits(B >> t);
  for (int k = 23; k <= 24 && t <= 6; ++k) {
    const uint32_t modulus = 1u << (k + 1 - t);
    for (int odd = -(kMaxDistance >> t) | 1; odd <= kMaxDistance >> t; odd += 2) {
      const int64_t c = static_cast<int64_t>(odd) * (1 << t);
      // The least N of its class above 2^24; every number of the class is odd.
      const uint32_t residue = (0u - static_cast<uint32_t>(odd) * inverse) & (modulus - 1);
      for (uint32_t N = (kEnd & ~(modulus - 1)) + residue; N < 2 * kEnd; N += modulus) {
        if (N < kEnd) continue;
        const uint64_t scaled = static_cast<uint64_t>(static_cast<int64_t>(uint64_t{B} * N) + c);
        const uint64_t A = scaled >> (k + 1);
        if (A >= kFirst && A < kEnd && (A >= B) == (k == 23)) function(static_cast<uint32_t>(A), N, c, k);
      }
    }
  }
}

void ProveHardCases() {
  std::atomic<int64_t> total{0};
  ParallelFor(kFirst, kEnd, [&](uint32_t B) {
    const float s = static_cast<float>(B), n = -1.0f / s;
    int64_t count = 0;
    ForEachHardNumerator(B, [&](uint32_t A, uint32_t N, int64_t c, int k) {
      ++count;
      const float x = static_cast<float>(A);
      const float expected = ldexpf(static_cast<float>(N / 2 + (c > 0)), -k);  // known without any division
      const float quotient = Quotient(x, s, n);
      if (quotient != expected) Fail("hard case", x, s, quotient, expected);
      if (x / s != expected) Fail("the processor's division", x, s, x / s, expected);
    });
    total += count;
  });
  printf("%lld pairs within %d of a middle\n", static_cast<long long>(total), kMaxDistance);
}

// The search finds what going through all numerators finds.
void CheckSearch(const std::vector<uint32_t>& divisors) {
  for (const uint32_t B : divisors) {
    int64_t found = 0, expected = 0;
    ForEachHardNumerator(B, [&](uint32_t A, uint32_t N, int64_t c, int k) {
      ++found;
      if ((static_cast<int64_t>(A) << (k + 1)) - static_cast<int64_t>(B) * N != c || N % 2 == 0) ++failures;
    });
    for (uint32_t A = kFirst; A < kEnd; ++A) {
      // The distance to an odd multiple of B, which is B modulo 2 B.
      const int64_t rest = static_cast<int64_t>((uint64_t{A} << (A >= B ? 24 : 25)) % (2 * B)) - B;
      expected += rest >= -kMaxDistance && rest <= kMaxDistance;
    }
    if (found != expected) {
      ++failures;
      printf("divisor %u: found %lld of %lld\n", B, static_cast<long long>(found), static_cast<long long>(expected));
    }
  }
}

// Not needed for the proof, but it would show an error in its first part: every numerator, for some divisors.
void CheckAllNumerators(const std::vector<uint32_t>& divisors) {
  ParallelFor(0, static_cast<uint32_t>(divisors.size()), [&](uint32_t i) {
    const float s = static_cast<float>(divisors[i]), n = -1.0f / s;
    int wrong = 0;
    for (uint32_t A = kFirst; A < kEnd; ++A) {
      const float x = static_cast<float>(static_cast<int>(A));
      wrong += Quotient(x, s, n) != x / s;
    }
    failures += wrong;
    if (wrong != 0) printf("divisor %u: %d numerators fail\n", divisors[i], wrong);
  });
}

void ProveReciprocal() {
  ParallelFor(kFirst, kEnd, [](uint32_t B) {
    const float s = static_cast<float>(B), exact = 1.0f / s;
    for (int off = -2; off <= 2; ++off) {
      const float refined = RefinedReciprocal(FromBits(Bits(exact) + static_cast<uint32_t>(off)), s);
      if (refined != exact) Fail("reciprocal", 1.0f, s, refined, exact);
    }
  });
}

// ---- All sizes and kinds of operands, subnormals flushed to zero ----

bool Same(float a, float b) { return Bits(a) == Bits(b) || (a != a && b != b); }

float Float(int exponent, uint32_t mantissa) {
  return FromBits(static_cast<uint32_t>(exponent + 127) << 23 | (mantissa & 0x7fffffu));
}

// Mantissas of x and s for which the correction matters or the quotient is special, and others.
std::vector<std::pair<uint32_t, uint32_t>> Mantissas(std::mt19937* random) {
  std::vector<std::pair<uint32_t, uint32_t>> pairs = {
      {kFirst, kFirst}, {kFirst, kEnd - 1}, {kEnd - 1, kFirst}, {kEnd - 1, kEnd - 1}, {kEnd - 2, kEnd - 1}};
  while (pairs.size() < 400) {
    const uint32_t B = kFirst + (*random)() % kFirst;
    pairs.push_back({B, B});
    pairs.push_back({kFirst + (*random)() % kFirst, B});
    ForEachHardNumerator(B, [&](uint32_t A, uint32_t, int64_t c, int) {
      if (c >= -1 && c <= 1) pairs.push_back({A, B});
    });
  }
  return pairs;
}

void CheckValue(float x, float s) {
  const float expected = x / s;
  if (s >= kMinScale && s <= kMaxScale && (x == 0 || (fabsf(x) >= kMinValue && fabsf(x) <= kMaxValue))) {
    const float quotient = Quotient(x, s, -1.0f / s);
    if (!Same(quotient, expected)) Fail("three operations", x, s, quotient, expected);
  }
  if (!jq::Divisor<float>::Suits(s, 0.0f)) return;
  const auto divisor = jq::Divisor<float>::Fast(s);
  const float divided = divisor.Divide(x), quotient = divisor.Quotient(x), rounded = divisor.RoundedQuotient(x);
  if (!Same(divided, expected)) Fail("Divide", x, s, divided, expected);
  if (fabsf(expected) < 0x1p30f || expected != expected) {
    if (!Same(quotient, expected)) Fail("Quotient", x, s, quotient, expected);
    if (!Same(rounded, rintf(expected))) Fail("RoundedQuotient", x, s, rounded, rintf(expected));
  } else {
    // Beyond every range of codes, with the right sign.
    if (!(copysignf(1.0f, expected) * quotient >= 0x1p29f)) Fail("Quotient", x, s, quotient, expected);
    if (!(copysignf(1.0f, expected) * rounded >= 0x1p29f)) Fail("RoundedQuotient", x, s, rounded, expected);
  }
}

void CheckAllExponents(std::mt19937* random) {
  for (const auto& [A, B] : Mantissas(random)) {
    for (int s_exponent = -126; s_exponent <= 127; ++s_exponent) {
      for (int x_exponent = -126; x_exponent <= 127; ++x_exponent) {
        CheckValue(Float(x_exponent, A), Float(s_exponent, B));
        CheckValue(-Float(x_exponent, A), Float(s_exponent, B));
      }
    }
  }
}

void CheckSpecials() {
  std::vector<float> values = {0.0f, INFINITY, NAN, 0x1p-149f, 0x1.fffffcp-127f, 0x1p-126f, 0x1.fffffep127f};
  for (const float edge : {kMinScale, kMaxScale, kMinValue, kMaxValue, 1.0f, 0.1f, 0x1p30f, 0x1p54f}) {
    values.insert(values.end(), {nextafterf(edge, 0.0f), edge, nextafterf(edge, INFINITY)});
  }
  for (size_t i = 0, n = values.size(); i < n; ++i) values.push_back(-values[i]);
  for (const float s : values) {
    for (const float x : values) CheckValue(x, s);
  }
}

// The limits are there for a reason: beyond them the three operations alone do fail.
void CheckLimitsMatter(std::mt19937* random) {
  int small = 0, large = 0, negative = 0;
  for (const auto& [A, B] : Mantissas(random)) {
    const float s = Float(-20, B), n = -1.0f / s;
    for (int exponent = -104; exponent < -100; ++exponent) {
      small += !Same(Quotient(Float(exponent, A), s, n), Float(exponent, A) / s);
    }
    const float x = Float(127, A);
    large += !Same(Quotient(x, s, n), x / s);
    negative += !Same(Quotient(0.0f, -s, -n), 0.0f / -s);
  }
  if (small == 0 || large == 0 || negative == 0) {
    ++failures;
    printf("limits that do not matter: %d %d %d\n", small, large, negative);
  }
}

}  // namespace

int main() {
  std::mt19937 random(20240229);
  std::vector<uint32_t> divisors = {kFirst, kFirst + 1, kFirst + 2, kFirst + 96, kEnd - 1, kEnd - 2, kEnd - 64};
  while (divisors.size() < 256) divisors.push_back(kFirst + random() % kFirst);

  ProveHardCases();
  ProveReciprocal();
  CheckSearch({divisors.begin(), divisors.begin() + 12});
  CheckAllNumerators(divisors);

  _mm_setcsr(_mm_getcsr() | 0x8040);  // as CUDA's -ftz=true
  CheckAllExponents(&random);
  CheckSpecials();
  CheckLimitsMatter(&random);

  if (failures == 0) printf("the quotient is exact\n");
  if (failures != 0) printf("%lld failures\n", static_cast<long long>(failures));
  return failures == 0 ? 0 : 1;
}
