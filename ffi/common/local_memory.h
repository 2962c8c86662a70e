// Working memory of handlers.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jq {

// Aligned to a cache line; null where there is no memory.
using Memory = std::unique_ptr<uint8_t, void (*)(void*)>;
inline Memory Allocate(int64_t bytes) {
  return {static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64))), std::free};
}
inline xla::ffi::Error NoMemory(const char* name, int64_t bytes) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted,
                         std::string(name) + ": no memory for " + std::to_string(bytes) + " bytes.");
}

// Memory of this thread, kept from call to call: fresh pages would cost as much as small products.
inline uint8_t* LocalMemory(int64_t bytes) {
  thread_local Memory memory(nullptr, std::free);
  thread_local int64_t size = 0;
  if (bytes > size) {
    memory = Allocate(bytes);
    size = memory == nullptr ? 0 : bytes;
  }
  return memory.get();
}

}  // namespace jq
