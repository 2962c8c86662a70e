// The CUDA module: handlers on XLA's stream, and what was compiled in. It imports and registers without a driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <atomic>
#include <stdexcept>
#include <utility>

#include "ffi/cuda_platform.h"
#include "ffi/ggml/cuda_platform.h"

namespace nb = nanobind;

namespace jq {
namespace {

struct Device {
  static constexpr const char* kName = "CUDA";
  using Context = cudaStream_t;
  // No handler allocates or waits, each uses nothing but its stream: XLA may record them into CUDA graphs.
  static constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};
  static auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }
  static cudaStream_t Stream(Context stream) { return stream; }
};
using Cuda = CudaPlatform<Device>;
using GgmlCuda = ggml::CudaPlatform<Device>;

constexpr int kTargets = 48;
// In the order of ForEachTarget: what an initialize handler loads. It is given no attribute to know itself by.
const char* target_names[kTargets];

// Loads kernels once for each device; an error is reported, and the next execution tries again.
template <int index>
ffi::Error Load() {
  constexpr int kDevices = 64;
  static std::atomic<bool> loaded[kDevices];
  int device = -1;
  const bool known = cudaGetDevice(&device) == cudaSuccess && device >= 0 && device < kDevices;
  if (known && loaded[device]) return ffi::Error::Success();
  ffi::Error error = Cuda::Load(target_names[index]);
  if (error.success()) error = GgmlCuda::Load(target_names[index]);
  if (known && error.success()) loaded[device] = true;
  return error;
}

template <int index>
XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To([](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) { return Load<index>(); })
                             .release();
  return handler->Call(frame);
}

template <int... index>
XLA_FFI_Handler* InitializeHandlerAt(int i, std::integer_sequence<int, index...>) {
  static XLA_FFI_Handler* const handlers[] = {InitializeHandler<index>...};
  return handlers[i];
}

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict Registrations() {
  nb::dict targets;
  int count = 0;
  const auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    if (count == kTargets) throw std::logic_error("kTargets is too small");
    nb::dict stages;
    stages["initialize"] = Capsule(InitializeHandlerAt(count, std::make_integer_sequence<int, kTargets>()));
    stages["execute"] = Capsule(handler);
    targets[name] = stages;
    target_names[count++] = name;
  };
  ForEachTarget<Cuda>(add);
  ForEachDynamicTarget<Cuda>(add);
  ggml::ForEachTarget<GgmlCuda>(add);
  return targets;
}

}  // namespace
}  // namespace jq

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jaxquant as XLA FFI targets.";
  m.def("registrations", &jq::Registrations, "Target name (without prefix) -> handler capsules by stage.");
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def(
      "architectures", [] { return JQ_CUDA_ARCHITECTURES; }, "What was compiled: machine code, and PTX for the rest.");
}
