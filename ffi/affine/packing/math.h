// pack and unpack: codes of `bits` bits, 8 / bits to a byte, the first in the lowest bits.
#pragma once

#include "ffi/common/numeric.h"

namespace jq {

template <int kBits>
struct Packing {
  static constexpr int kPerByte = 8 / kBits;
  static constexpr uint8_t kMask = (1 << kBits) - 1;

  // The byte of the first n of kPerByte codes; missing ones are zero bits.
  static JQ_HOST_DEVICE uint8_t Pack(const uint8_t* codes, int64_t n = kPerByte) {
    uint32_t byte = 0;
    for (int i = 0; i < kPerByte; ++i) {
      if (i < n) byte |= static_cast<uint32_t>(codes[i] & kMask) << (i * kBits);
    }
    return static_cast<uint8_t>(byte);
  }

  // Code i of a byte, sign-extended where the codes are signed.
  static JQ_HOST_DEVICE uint8_t Unpack(uint8_t byte, int i, bool is_signed) {
    const uint32_t code = (static_cast<uint32_t>(byte) >> (i * kBits)) & kMask;
    const uint32_t sign = is_signed ? 1u << (kBits - 1) : 0u;
    return static_cast<uint8_t>((code ^ sign) - sign);
  }
};

}  // namespace jq
