// The CPU module: handlers over XLA's thread pool, and what was compiled in.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "ffi/affine/cpu_platform.h"
#include "ffi/affine/dynamic/cpu_platform.h"
#include "ffi/ggml/cpu_platform.h"
#include "ffi/ggml/tables.h"
#include "ffi/matmul/cpu_platform.h"
#include "ffi/matmul/weight_only/cpu_platform.h"
#include "ffi/optim/cpu_platform.h"

namespace nb = nanobind;

namespace jq {
namespace {

nb::dict Registrations() {
  nb::dict targets;
  const auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  ForEachTarget<Cpu>(add);
  ForEachDynamicTarget<DynamicCpu>(add);
  ggml::ForEachTarget<ggml::Cpu>(add);
  matmul::ForEachTarget<matmul::Cpu>(add);
  weight_only::ForEachTarget<weight_only::Cpu>(add);
  optim::ForEachTarget<optim::Cpu>(add);
  return targets;
}

// Quantisation without XLA, for platforms whose values come to the host. x: rows of k values; imatrix: as many, or
// None.
void GgmlQuantize(int type_id, nb::ndarray<const float, nb::ndim<1>, nb::c_contig> x, int64_t k, nb::object imatrix,
                  nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig> out) {
  using Values = nb::ndarray<const float, nb::ndim<2>, nb::c_contig>;
  ggml::QuantizeArguments a{};
  const ffi::Error unknown = ggml::FindFormat("ggml_quantize", type_id, &a.size);
  if (unknown.failure()) throw std::invalid_argument(unknown.message());
  a.type_id = type_id;
  a.k = k;
  a.rows = k == 0 ? 0 : static_cast<int64_t>(x.size()) / k;
  const int64_t bytes = k % a.size.block == 0 ? a.rows * (k / a.size.block) * a.size.bytes : -1;
  if (static_cast<int64_t>(out.size()) != bytes) throw std::invalid_argument("ggml_quantize: out: another size");
  const ggml::QuantizeRows quantize = ggml::KernelsHere().quantizer(type_id);
  if (quantize == nullptr && type_id != ggml::F32::kId) throw std::invalid_argument("ggml_quantize: no kernel");
  a.x = x.data();
  a.data = out.data();
  Values weights;
  if (!imatrix.is_none()) {
    weights = nb::cast<Values>(imatrix);
    if (weights.size() != x.size()) throw std::invalid_argument("ggml_quantize: imatrix: another size");
    a.imatrix = weights.data();
    a.leading = 1;
    a.dims[0] = a.rows;
    a.imatrix_stride[0] = k;
  }
  const char* wrong = nullptr;
  {
    const nb::gil_scoped_release release;
    const IeeeMode plain;
    const int64_t each = a.imatrix == nullptr ? std::max<int64_t>(a.rows, 1) : 1;
    for (int64_t row = 0; row < a.rows && wrong == nullptr; row += each) {
      wrong = ggml::QuantizeRowsOnCpu(a, quantize, row, std::min(row + each, a.rows));
    }
  }
  if (wrong != nullptr) throw std::invalid_argument(std::string("ggml_quantize: ") + wrong + ".");
}

nb::dict GgmlGrids() {
  nb::dict grids;
  const auto add = [&](const char* name, const auto& words) {
    nb::list values;
    for (const uint16_t word : words) values.append(static_cast<int>(word));
    grids[name] = values;
  };
  add("IQ2_XXS", ggml::kGridIQ2_XXS);
  add("IQ2_XS", ggml::kGridIQ2_XS);
  add("IQ2_S", ggml::kGridIQ2_S);
  add("IQ3_XXS", ggml::kGridIQ3_XXS);
  add("IQ3_S", ggml::kGridIQ3_S);
  add("IQ1_S", ggml::kGridIQ1_S);
  return grids;
}

nb::dict GgmlFormats() {
  nb::dict formats;
#define JQ_FORMAT(F) formats[#F] = nb::make_tuple(ggml::F::kId, ggml::F::kBlock, sizeof(ggml::F));
  JQ_GGML_FORMATS(JQ_FORMAT)
#undef JQ_FORMAT
  return formats;
}

// Where the bytes of eight consecutive blocks, one of each of eight rows, lie in the prepared layout: source positions.
// Empty: there is no such layout of the format.
nb::list GgmlArrangement(int type_id) {
  ggml::FormatSize size;
  const ffi::Error unknown = ggml::FindFormat("ggml_arrangement", type_id, &size);
  if (unknown.failure()) throw std::invalid_argument(unknown.message());
  const int64_t bytes = ggml::kLanes * size.bytes;
  std::vector<uint8_t> low(bytes), high(bytes), low_out(bytes), high_out(bytes);
  for (int64_t i = 0; i < bytes; ++i) {
    low[i] = static_cast<uint8_t>(i);
    high[i] = static_cast<uint8_t>(i >> 8);
  }
  nb::list places;
  if (!ggml::ToPrepared(type_id, low.data(), low_out.data(), ggml::kLanes, size.block)) return places;
  ggml::ToPrepared(type_id, high.data(), high_out.data(), ggml::kLanes, size.block);
  for (int64_t i = 0; i < bytes; ++i) places.append(low_out[i] | high_out[i] << 8);
  return places;
}

}  // namespace
}  // namespace jq

NB_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of jaxquant as XLA FFI targets.";
  m.def("registrations", &jq::Registrations, "Target name (without prefix) -> handler capsule.");
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("isa", &jq::InstructionSet, "The instruction set in use.");
  m.def("compiled_isas", &jq::CompiledIsas);
  m.def("ggml_quantize", &jq::GgmlQuantize, nb::arg("type_id"), nb::arg("x"), nb::arg("k"), nb::arg("imatrix").none(),
        nb::arg("out"));
  m.def("ggml_formats", &jq::GgmlFormats, "Name -> (type id, values in a block, bytes of a block).");
  m.def("ggml_grids", &jq::GgmlGrids, "Name -> the points of an IQ lattice as words of codes.");
  m.def("ggml_arrangement", &jq::GgmlArrangement, "Byte places of eight blocks in the prepared layout.");
}
