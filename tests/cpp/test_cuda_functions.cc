// Tests of the device functions that wait for nobody (ffi/common/cuda_on_host/functions.h). From the root of the
// repository:
//
//   g++ -std=c++17 -O2 -Wall -Wextra -ffp-contract=off -pthread -DJQ_CUDA_ON_HOST -I. -o /tmp/test_cuda_functions
//       tests/cpp/test_cuda_functions.cc && /tmp/test_cuda_functions
#include <math.h>
#include <stdint.h>

#include <limits>

#include "ffi/common/cuda_portable.h"
#include "tests/cpp/check.h"

int main() {
  CHECK(__popc(0xf0f00001u) == 9 && __ffs(8) == 4 && __ffs(0) == 0);
  CHECK(__clz(0) == 32 && __clz(1) == 31 && __clz(-1) == 0 && __clzll(1) == 63);
  CHECK(__umulhi(0xffffffffu, 0xffffffffu) == 0xfffffffeu && __mulhi(-1, 2) == -1);
  CHECK(__umul64hi(~0ull, ~0ull) == ~0ull - 1 && __mul64hi(-1, 2) == -1);
  CHECK(__dp4a(static_cast<int>(0x80ff0102u), static_cast<int>(0x7f020304u), 10) == -128 * 127 - 2 + 3 + 8 + 10);
  CHECK(__dp4a(0x80ff0102u, 0x7f020304u, 10u) == 128 * 127 + 255 * 2 + 3 + 8 + 10);
  CHECK(__dp4a(1, 1, std::numeric_limits<int>::max()) == std::numeric_limits<int>::min());
  CHECK(__byte_perm(0x33221180u, 0x77665544u, 0x7108) == 0x771180ffu);
  CHECK(__float_as_int(-0.0f) == std::numeric_limits<int>::min() && __int_as_float(0x3f800000) == 1.0f);
  CHECK(__float_as_uint(1.0f) == 0x3f800000u && __uint_as_float(0x40000000u) == 2.0f);
  CHECK(__double_as_longlong(1.0) == 0x3ff0000000000000 && __longlong_as_double(0) == 0.0);
  CHECK(__float2int_rn(2.5f) == 2 && __float2int_rn(3e9f) == std::numeric_limits<int>::max());
  CHECK(__float2int_rn(NAN) == 0 && __float2int_rn(-3e9f) == std::numeric_limits<int>::min());
  CHECK(__fmaf_rn(0x1.000002p0f, 0x1.000002p0f, -0x1.000004p0f) == 0x1p-46f);
  volatile float a = 0x1.000002p0f;
  CHECK(__fadd_rn(__fmul_rn(a, a), -0x1.000004p0f) == 0);  // not fused
  CHECK(__frcp_rn(4.0f) == 0.25f && __fdiv_rn(1.0f, 3.0f) == 1.0f / 3.0f);
  const float value = 7;
  CHECK(__ldg(&value) == 7);
  return CheckResult();
}
