// The CUDA kernels as host code: XLA FFI targets on the CPU platform, and calls without XLA. For tests only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/common/cuda_launch.h"
#include "ffi/cuda_platform.h"
#include "ffi/ggml/cuda_platform.h"
#include "ffi/matmul/cuda_platform.h"
#include "ffi/matmul/weight_only/cuda_platform.h"
#include "ffi/optim/cuda_platform.h"

namespace nb = nanobind;

namespace jq {

// What a handler gets in place of a stream.
struct NoStream {};

}  // namespace jq

template <>
struct xla::ffi::CtxDecoding<jq::NoStream> {
  using Type = jq::NoStream;
  // Whatever this version of XLA hands over.
  template <typename... Arguments>
  static std::optional<Type> Decode(Arguments&&...) {
    return Type{};
  }
};

namespace jq {
namespace {

struct Host {
  static constexpr const char* kName = "emulated CUDA";
  using Context = NoStream;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
  static auto Bind() { return ffi::Ffi::Bind().Ctx<NoStream>(); }
  static CudaStream Stream(NoStream) { return nullptr; }
};
using Emulated = CudaPlatform<Host>;
using GgmlEmulated = ggml::CudaPlatform<Host>;
using MatmulEmulated = matmul::CudaPlatform<Host>;

nb::dict Registrations() {
  nb::dict targets;
  const auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  ForEachTarget<Emulated>(add);
  ForEachDynamicTarget<Emulated>(add);
  ggml::ForEachTarget<GgmlEmulated>(add);
  matmul::ForEachTarget<MatmulEmulated>(add);
  weight_only::ForEachTarget<weight_only::CudaPlatform<Host>>(add);
  optim::ForEachTarget<optim::CudaPlatform<Host>>(add);
  return targets;
}

// A launch that cannot succeed, for the path that its error takes.
__global__ void WaitForNobody() {
  if (threadIdx.x == 0) __syncthreads();
}
XLA_FFI_Error* FailingHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ret<ffi::AnyBuffer>()
                             .To([](ffi::Result<ffi::AnyBuffer>) {
                               JQ_LAUNCH(WaitForNobody, 1, 32, 0, nullptr);
                               return Emulated::Result("failing", LaunchError());
                             })
                             .release();
  return handler->Call(frame);
}

// ---- Without XLA, whose buffers are always well aligned: operands anywhere in memory

// A buffer's address, shape and type.
struct Array {
  void* data;
  std::vector<int64_t> shape;
  DType type;
};

DType TypeNamed(const std::string& name) {
  const std::pair<const char*, DType> names[] = {
      {"float32", DType::kF32}, {"float64", DType::kF64}, {"float16", DType::kF16}, {"bfloat16", DType::kBF16},
      {"int8", DType::kI8},     {"uint8", DType::kU8},    {"int16", DType::kI16},   {"uint16", DType::kU16}};
  for (const auto& [known, type] : names) {
    if (name == known) return type;
  }
  throw std::invalid_argument("type: " + name);
}

Array Read(nb::handle array) {
  if (array.is_none()) return {};
  return {reinterpret_cast<void*>(nb::cast<uintptr_t>(array.attr("ctypes").attr("data"))),
          nb::cast<std::vector<int64_t>>(nb::list(array.attr("shape"))),
          TypeNamed(nb::cast<std::string>(array.attr("dtype").attr("name")))};
}

Op OpNamed(const std::string& name) {
  for (const Op op : {Op::kFakeQuantize, Op::kQuantize, Op::kDequantize}) {
    if (name == NameOf(op)) return op;
  }
  throw std::invalid_argument("operation: " + name);
}

ScaleView ViewOf(const Array& x, const Array& scale, const Array& zero_point) {
  ScaleView view;
  int axis;
  const int rank = static_cast<int>(x.shape.size());
  if (MakeScaleView(x.shape.data(), rank, scale.shape.data(), static_cast<int>(scale.shape.size()),
                    zero_point.shape.data(), static_cast<int>(zero_point.shape.size()), &view,
                    &axis) != ScaleViewError::kOk) {
    throw std::invalid_argument("scale or zero_point");
  }
  return view;
}

PackArguments PackingOf(const Array& codes, int bits) {
  PackArguments p{};
  p.bits = bits;
  p.is_signed = codes.type == DType::kI8;
  p.rows = 1;
  p.row_size = codes.shape.back();
  for (size_t d = 0; d + 1 < codes.shape.size(); ++d) p.rows *= codes.shape[d];
  if (p.row_size * bits % 8 == 0) {
    p.row_size *= p.rows;
    p.rows = 1;
  }
  return p;
}

void Throw(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}
void Throw(const ffi::Error& error) {
  if (error.failure()) throw std::runtime_error(error.message());
}

// dy: None, or the gradient in x is computed. All are NumPy arrays, contiguous, of x's rank.
void Map(const std::string& name, nb::handle dy_array, nb::handle x_array, nb::handle scale_array,
         nb::handle zero_array, nb::handle out_array, double qmin, double qmax, int packed_bits) {
  const Array dy = Read(dy_array), x = Read(x_array), scale = Read(scale_array), zero = Read(zero_array);
  const Array out = Read(out_array);
  const ScaleView view = ViewOf(x, scale, zero);
  MapArguments a{};
  a.view = &view;
  a.x_type = x.type;
  a.out_type = out.type;
  a.wide = scale.type == DType::kF64;
  a.dy = dy.data;
  a.x = x.data;
  a.scale = scale.data;
  a.zero_point = zero.data;
  a.out = out.data;
  a.qmin = qmin;
  a.qmax = qmax;
  if (packed_bits != 0) {
    PackArguments p = PackingOf(x, packed_bits);
    p.out = out.data;
    a.out_type = DType::kI8;
    Throw(Emulated::PackedMap(NoStream{}, OpNamed(name), a, p));
  } else {
    Throw(Emulated::Map(NoStream{}, OpNamed(name), a, dy.data != nullptr));
  }
}

// dx, dscale, dzero_point: arrays, or None where not wanted.
void Gradient(const std::string& name, nb::handle dy_array, nb::handle x_array, nb::handle scale_array,
              nb::handle zero_array, nb::handle dx, nb::handle dscale, nb::handle dzero_point, double qmin,
              double qmax) {
  const Array x = Read(x_array), scale = Read(scale_array), zero = Read(zero_array);
  const ScaleView view = ViewOf(x, scale, zero);
  GradientArguments a{};
  a.view = &view;
  a.type = x.type;
  a.wide = scale.type == DType::kF64;
  a.dy = Read(dy_array).data;
  a.x = x.data;
  a.scale = scale.data;
  a.zero_point = zero.data;
  a.dx = Read(dx).data;
  a.dscale = Read(dscale).data;
  a.dzero_point = Read(dzero_point).data;
  a.qmin = qmin;
  a.qmax = qmax;
  // Of the exact size, so that AddressSanitizer sees an access beyond it.
  std::vector<double> scratch(static_cast<size_t>(2 * ScratchSize(view.ReducedSize(), view.scale_size)));
  std::vector<float> narrow_scratch(a.wide ? 0 : scratch.size());
  a.scratch = a.wide ? static_cast<void*>(scratch.data()) : static_cast<void*>(narrow_scratch.data());
  Throw(Emulated::Gradient(NoStream{}, OpNamed(name), a));
}

void Pack(nb::handle codes_array, nb::handle packed, int bits) {
  const Array codes = Read(codes_array);
  PackArguments p = PackingOf(codes, bits);
  p.in = codes.data;
  p.out = Read(packed).data;
  Throw(PackOnCuda(p, nullptr));
}
void Unpack(nb::handle packed, nb::handle codes_array, int bits) {
  const Array codes = Read(codes_array);
  PackArguments p = PackingOf(codes, bits);
  p.in = Read(packed).data;
  p.out = codes.data;
  Throw(UnpackOnCuda(p, nullptr));
}

// The block formats on bytes that begin anywhere. data: uint8 [rows, row_bytes]; ids: None, or int32 [result rows].
void GgmlDequantize(int type_id, nb::handle data_array, nb::handle ids, nb::handle out_array) {
  const Array data = Read(data_array), out = Read(out_array);
  ggml::DequantizeArguments a{};
  Throw(ggml::FindFormat("ggml_dequantize", type_id, &a.size));
  a.type_id = type_id;
  a.rows = out.shape.at(0);
  a.k = out.shape.at(1);
  a.data = static_cast<const uint8_t*>(data.data);
  a.data_rows = data.shape.at(0);
  if (!ids.is_none()) {
    a.ids = reinterpret_cast<const int32_t*>(nb::cast<uintptr_t>(ids.attr("ctypes").attr("data")));
  }
  a.out = out.data;
  a.out_type = out.type;
  Throw(GgmlEmulated::Dequantize(NoStream{}, a));
}

// x: float32 [rows, k]; imatrix: None, or float32 [1 or rows, k].
void GgmlQuantize(int type_id, nb::handle x_array, nb::handle imatrix_array, nb::handle out) {
  const Array x = Read(x_array), imatrix = Read(imatrix_array);
  ggml::QuantizeArguments a{};
  Throw(ggml::FindFormat("ggml_quantize", type_id, &a.size));
  a.type_id = type_id;
  a.rows = x.shape.at(0);
  a.k = x.shape.at(1);
  a.x = static_cast<const float*>(x.data);
  a.data = static_cast<uint8_t*>(Read(out).data);
  if (imatrix.data != nullptr) {
    a.imatrix = static_cast<const float*>(imatrix.data);
    a.leading = 1;
    a.dims[0] = a.rows;
    a.imatrix_stride[0] = imatrix.shape.at(0) == 1 ? 0 : a.k;
  }
  Throw(GgmlEmulated::Quantize(NoStream{}, a));
}

// uint8 [matrices, n, row_bytes] to [matrices, eights, 8 row_bytes], or back
void GgmlArrange(int type_id, nb::handle data_array, bool prepare, nb::handle out_array) {
  const Array data = Read(data_array), out = Read(out_array);
  const std::vector<int64_t>& plain = prepare ? data.shape : out.shape;
  ggml::ArrangeArguments a{};
  Throw(ggml::FindFormat("ggml_prepare", type_id, &a.size));
  a.type_id = type_id;
  a.matrices = plain.at(0);
  a.n = plain.at(1);
  a.k = plain.at(2) / a.size.bytes * a.size.block;
  a.prepare = prepare;
  a.in = static_cast<const uint8_t*>(data.data);
  a.out = static_cast<uint8_t*>(out.data);
  Throw(GgmlEmulated::Arrange(NoStream{}, a));
}

}  // namespace
}  // namespace jq

NB_MODULE(_cuda_emulation, m) {
  m.doc() = "CUDA kernels of jaxquant run on the host.";
  m.def("registrations", &jq::Registrations, "Target name (without prefix) -> handler capsule.");
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("failing_handler", [] { return nb::capsule(reinterpret_cast<void*>(&jq::FailingHandler)); });
  m.def("map", &jq::Map, nb::arg("name"), nb::arg("dy").none(), nb::arg("x"), nb::arg("scale"), nb::arg("zero_point"),
        nb::arg("out"), nb::arg("qmin"), nb::arg("qmax"), nb::arg("packed_bits") = 0);
  m.def("gradient", &jq::Gradient, nb::arg("name"), nb::arg("dy"), nb::arg("x"), nb::arg("scale"),
        nb::arg("zero_point"), nb::arg("dx").none(), nb::arg("dscale").none(), nb::arg("dzero_point").none(),
        nb::arg("qmin"), nb::arg("qmax"));
  m.def("pack", &jq::Pack);
  m.def("unpack", &jq::Unpack);
  m.def("ggml_dequantize", &jq::GgmlDequantize, nb::arg("type_id"), nb::arg("data"), nb::arg("ids").none(),
        nb::arg("out"));
  m.def("ggml_quantize", &jq::GgmlQuantize, nb::arg("type_id"), nb::arg("x"), nb::arg("imatrix").none(),
        nb::arg("out"));
  m.def("ggml_arrange", &jq::GgmlArrange);
}
