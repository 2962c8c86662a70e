// The CPU module: handlers over XLA's thread pool, and what was compiled in.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cstring>
#include <string>

#include "ffi/affine/cpu_kernels.h"
#include "ffi/affine/handlers.h"
#include "ffi/common/memory.h"
#include "ffi/common/parallel_for.h"
#include "ffi/ggml/cpu_platform.h"
#include "ffi/ggml/tables.h"

namespace nb = nanobind;

namespace jq {
namespace {

const AffineLoops& LoopsFor(Op op) {
  const CpuKernels& kernels = CpuKernelsHere();
  return *(op == Op::kFakeQuantize ? kernels.fake_quantize
           : op == Op::kQuantize   ? kernels.quantize
                                   : kernels.dequantize);
}

// Work below this many elements is not worth a second thread; above, chunks of it keep every thread busy to the end.
constexpr int64_t kGrain = 1 << 15;

ffi::Error UnknownTypes(Op op) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    std::string(NameOf(op)) + ": no CPU kernel for these element types.");
}

struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
  static auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

  static ffi::Error Map(Context pool, Op op, const MapArguments& a, bool gradient) {
    AdviseHugePages(a.out, a.view->size * SizeOf(a.out_type));
    std::atomic<bool> known{true};
    ParallelFor(pool, a.view->size, kGrain, [&](int64_t begin, int64_t end) {
      if (!CpuKernelsHere().map(LoopsFor(op), a, gradient, begin, end)) known = false;
    });
    return known ? ffi::Error::Success() : UnknownTypes(op);
  }

  static ffi::Error PackedMap(Context pool, Op op, const MapArguments& a, const PackArguments& p) {
    // Codes of a tile, then its bytes: the codes never leave the cache.
    constexpr int64_t kTile = 4096;
    const int64_t per_byte = 8 / p.bits, packed = (p.row_size + per_byte - 1) / per_byte;
    const int64_t tiles = (p.row_size + kTile - 1) / kTile;
    AdviseHugePages(p.out, p.rows * packed);
    std::atomic<bool> known{true};
    const int64_t grain = kGrain / (p.row_size < kTile ? p.row_size : kTile);
    ParallelFor(pool, p.rows * tiles, grain, [&](int64_t begin, int64_t end) {
      alignas(64) int8_t codes[kTile];
      MapArguments tile = a;
      tile.out = codes;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / tiles, column = i % tiles * kTile;
        const int64_t n = p.row_size - column < kTile ? p.row_size - column : kTile;
        tile.out_origin = row * p.row_size + column;
        if (!CpuKernelsHere().map(LoopsFor(op), tile, false, tile.out_origin, tile.out_origin + n)) {
          known = false;
          return;
        }
        CpuKernelsHere().packing->pack(reinterpret_cast<const uint8_t*>(codes),
                                       static_cast<uint8_t*>(p.out) + row * packed + column / per_byte, n, p.bits);
      }
    });
    return known ? ffi::Error::Success() : UnknownTypes(op);
  }

  static ffi::Error Gradient(Context pool, Op op, const GradientArguments& a) {
    if (a.dx != nullptr) AdviseHugePages(a.dx, a.view->size * SizeOf(a.type));
    std::atomic<bool> known{true};
    if (a.view->size == 0) {
      // Sums of nothing.
      const int64_t bytes = a.view->scale_size * (a.wide ? 8 : 4);
      if (a.dscale != nullptr) std::memset(a.dscale, 0, bytes);
      if (a.dzero_point != nullptr) std::memset(a.dzero_point, 0, bytes);
      return ffi::Error::Success();
    }
    const int64_t units = CpuKernelsHere().gradient_units(*a.view);
    const int64_t unit_size = a.view->size / units + 1;
    ParallelFor(pool, units, kGrain / unit_size, [&](int64_t begin, int64_t end) {
      if (!CpuKernelsHere().gradient(LoopsFor(op), a, begin, end)) known = false;
    });
    if (!known) return UnknownTypes(op);
    CpuKernelsHere().gradient_finish(a);
    return ffi::Error::Success();
  }

  static ffi::Error Pack(Context pool, const PackArguments& p) {
    return ForEachSegment(
        pool, p,
        [&](const uint8_t* codes, uint8_t* bytes, int64_t n) {
          CpuKernelsHere().packing->pack(codes, bytes, n, p.bits);
        },
        static_cast<const uint8_t*>(p.in), static_cast<uint8_t*>(p.out));
  }

  static ffi::Error Unpack(Context pool, const PackArguments& p) {
    return ForEachSegment(
        pool, p,
        [&](uint8_t* codes, const uint8_t* bytes, int64_t n) {
          CpuKernelsHere().packing->unpack(bytes, codes, n, p.bits, p.is_signed);
        },
        static_cast<uint8_t*>(p.out), static_cast<const uint8_t*>(p.in));
  }

 private:
  // f(codes, bytes, n) for parts of rows that begin on a whole byte.
  template <typename Codes, typename Bytes, typename F>
  static ffi::Error ForEachSegment(Context pool, const PackArguments& p, const F& f, Codes codes, Bytes bytes) {
    const int64_t per_byte = 8 / p.bits, packed = (p.row_size + per_byte - 1) / per_byte;
    const int64_t segments = (p.row_size + kGrain - 1) / kGrain;
    ParallelFor(pool, p.rows * segments, kGrain / p.row_size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / segments, column = i % segments * kGrain;
        const int64_t n = p.row_size - column < kGrain ? p.row_size - column : kGrain;
        f(codes + row * p.row_size + column, bytes + row * packed + column / per_byte, n);
      }
    });
    return ffi::Error::Success();
  }
};

nb::dict Registrations() {
  nb::dict targets;
  const auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  ForEachTarget<Cpu>(add);
  ggml::ForEachTarget<ggml::Cpu>(add);
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
  ggml::ToPrepared(type_id, low.data(), low_out.data(), ggml::kLanes, size.block, 0, ggml::kLanes);
  ggml::ToPrepared(type_id, high.data(), high_out.data(), ggml::kLanes, size.block, 0, ggml::kLanes);
  nb::list places;
  for (int64_t i = 0; i < bytes; ++i) places.append(low_out[i] | high_out[i] << 8);
  return places;
}

}  // namespace
}  // namespace jq

NB_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of jaxquant as XLA FFI targets.";
  m.def("registrations", &jq::Registrations, "Target name (without prefix) -> handler capsule.");
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("isa", [] { return jq::CpuKernelsHere().isa; }, "The instruction set in use.");
  m.def("compiled_isas", &jq::CompiledIsas);
  m.def("ggml_quantize", &jq::GgmlQuantize, nb::arg("type_id"), nb::arg("x"), nb::arg("k"), nb::arg("imatrix").none(),
        nb::arg("out"));
  m.def("ggml_formats", &jq::GgmlFormats, "Name -> (type id, values in a block, bytes of a block).");
  m.def("ggml_grids", &jq::GgmlGrids, "Name -> the points of an IQ lattice as words of codes.");
  m.def("ggml_arrangement", &jq::GgmlArrangement, "Byte places of eight blocks in the prepared layout.");
}
