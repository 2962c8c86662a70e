// Asking for memory before it is read.
#pragma once

#include <cstdint>

namespace jq {

// Where one loop is bound by arithmetic and the next by memory: what the next one reads, fetched during the first. A
// hint, to any address: past the end of an array it does nothing. Always inlined, as all that is compiled for several
// instruction sets.
inline __attribute__((always_inline)) void FetchSoon(const void* data, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(data) + i, 0, 2);
}

}  // namespace jq
