// What the FFI registry wants of a target, made from the signature of the function that serves it.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jq {

namespace ffi = xla::ffi;

// Binds a handler's parameters in their order: buffers, results, and attributes, which take the names; then the
// handler.
template <typename Platform, typename Binding, typename Function>
auto* BindParameters(Binding&& binding, const char* const*, Function* function) {
  return std::move(binding).To(function, Platform::kTraits).release();
}
template <typename Platform, typename First, typename... Rest, typename Binding, typename Function>
auto* BindParameters(Binding&& binding, const char* const* names, Function* function) {
  if constexpr (std::is_same_v<First, ffi::AnyBuffer>) {
    return BindParameters<Platform, Rest...>(std::move(binding).template Arg<First>(), names, function);
  } else if constexpr (std::is_same_v<First, ffi::Result<ffi::AnyBuffer>>) {
    return BindParameters<Platform, Rest...>(std::move(binding).template Ret<ffi::AnyBuffer>(), names, function);
  } else {
    return BindParameters<Platform, Rest...>(std::move(binding).template Attr<First>(*names), names + 1, function);
  }
}

// A handler for `function`, whose first parameter is the platform's context. It lives as long as the process.
template <typename Platform, typename Context, typename... Parameters, typename... Names>
auto* MakeHandler(ffi::Error (*function)(Context, Parameters...), Names... names) {
  constexpr bool kBuffers[] = {std::is_same_v<Parameters, ffi::AnyBuffer> ||
                               std::is_same_v<Parameters, ffi::Result<ffi::AnyBuffer>>...};
  constexpr size_t kAttributes = [](const auto& buffers) {
    size_t count = 0;
    for (bool buffer : buffers) count += !buffer;
    return count;
  }(kBuffers);
  static_assert(kAttributes == sizeof...(Names), "a name for each attribute");
  const char* const all[] = {names..., nullptr};
  return BindParameters<Platform, Parameters...>(Platform::Bind(), all, function);
}

}  // namespace jq

// JQ_HANDLER(function, names of its attributes...), where Platform is known: the C function of a target.
#define JQ_HANDLER(...)                                                    \
  (+[](XLA_FFI_CallFrame* frame) -> XLA_FFI_Error* {                       \
    static auto* const handler = ::jq::MakeHandler<Platform>(__VA_ARGS__); \
    return handler->Call(frame);                                           \
  })
