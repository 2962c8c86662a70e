// pack and unpack on CPU: one row of codes, compiled once per instruction set.
#include "ffi/affine/cpu_kernels.h"
#include "ffi/affine/packing/math.h"

namespace jq {
namespace JQ_ISA {
namespace {

template <int kBits>
void PackRow(const uint8_t* __restrict in, uint8_t* __restrict out, int64_t n) {
  using P = Packing<kBits>;
  const int64_t whole = n / P::kPerByte;
  for (int64_t i = 0; i < whole; ++i) out[i] = P::Pack(in + i * P::kPerByte);
  if (whole * P::kPerByte < n) out[whole] = P::Pack(in + whole * P::kPerByte, n - whole * P::kPerByte);
}

template <int kBits>
void UnpackRow(const uint8_t* __restrict in, uint8_t* __restrict out, int64_t n, bool is_signed) {
  using P = Packing<kBits>;
  const int64_t whole = n / P::kPerByte;
  for (int64_t i = 0; i < whole; ++i) {
    for (int k = 0; k < P::kPerByte; ++k) out[i * P::kPerByte + k] = P::Unpack(in[i], k, is_signed);
  }
  for (int64_t i = whole * P::kPerByte; i < n; ++i) {
    out[i] = P::Unpack(in[whole], static_cast<int>(i % P::kPerByte), is_signed);
  }
}

void Pack(const uint8_t* in, uint8_t* out, int64_t n, int bits) {
  bits == 4 ? PackRow<4>(in, out, n) : PackRow<2>(in, out, n);
}

void Unpack(const uint8_t* in, uint8_t* out, int64_t n, int bits, bool is_signed) {
  bits == 4 ? UnpackRow<4>(in, out, n, is_signed) : UnpackRow<2>(in, out, n, is_signed);
}

}  // namespace

extern const PackingLoops packing_loops;
const PackingLoops packing_loops = {Pack, Unpack};

}  // namespace JQ_ISA
}  // namespace jq
