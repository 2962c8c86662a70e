// The CUDA module: handlers on XLA's stream, and what was compiled in. It imports and registers without a driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <atomic>

#include "ffi/cuda_platform.h"

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

// Once for each device and target; an error is reported and tried again.
template <int index>
ffi::Error Load(const char* target) {
  constexpr int kDevices = 64;
  static std::atomic<bool> loaded[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess && device >= 0 && device < kDevices && loaded[device]) {
    return ffi::Error::Success();
  }
  ffi::Error error = Cuda::Load(target);
  if (error.success() && device >= 0 && device < kDevices) loaded[device] = true;
  return error;
}

constexpr int kTargets = 8;

template <int index>
XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame);

// Names in the order of ForEachTarget, for handlers that are given no attribute to know themselves by.
const char* target_names[kTargets];

template <int index>
XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To([](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
                               return Load<index>(target_names[index]);
                             })
                             .release();
  return handler->Call(frame);
}

template <int... index>
XLA_FFI_Handler* InitializeHandlerAt(int i, std::integer_sequence<int, index...>) {
  static XLA_FFI_Handler* const handlers[] = {InitializeHandler<index>...};
  return handlers[i];
}

nb::dict Registrations() {
  nb::dict targets;
  int count = 0;
  ForEachTarget<Cuda>([&](const char* name, XLA_FFI_Handler* handler) {
    nb::dict stages;
    target_names[count] = name;
    stages["initialize"] = nb::capsule(reinterpret_cast<void*>(
        InitializeHandlerAt(count++, std::make_integer_sequence<int, kTargets>())));
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(handler));
    targets[name] = stages;
  });
  return targets;
}

}  // namespace
}  // namespace jq

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jaxquant as XLA FFI targets.";
  m.def("registrations", &jq::Registrations, "Target name (without prefix) -> handler capsules by stage.");
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("architectures", [] { return JQ_CUDA_ARCHITECTURES; }, "What was compiled: machine code, and PTX for the rest.");
}
