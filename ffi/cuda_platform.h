// The handlers' Platform over the tables of cuda_kernels.h: for CUDA, and for the kernels emulated on the host, which
// differ in where XLA's stream comes from (Target).
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "ffi/affine/cuda_kernels.h"
#include "ffi/affine/dynamic/cuda_kernels.h"
#include "ffi/affine/dynamic/handlers.h"
#include "ffi/affine/handlers.h"

namespace jq {

template <typename Target>
struct CudaPlatform : Target {
  using typename Target::Context;

  static ffi::Error Map(Context context, Op op, const MapArguments& a, bool gradient) {
    const CudaKernels& kernels = KernelsOf(op);
    const CudaMap* entry = Find(gradient ? kernels.gradient_in_x : kernels.value, a.x_type, a.out_type);
    if (entry == nullptr && !gradient && IsFloat(a.x_type) && IsFloat(a.out_type)) {
      entry = a.wide ? &kernels.any_wide : &kernels.any_single;
    }
    if (entry == nullptr || entry->launch == nullptr) return UnknownTypes(op);
    return Result(op, entry->launch(a, nullptr, Target::Stream(context)));
  }

  static ffi::Error PackedMap(Context context, Op op, const MapArguments& a, const PackArguments& p) {
    const CudaKernels& kernels = KernelsOf(op);
    for (const CudaMap& entry : p.bits == 4 ? kernels.packed4 : kernels.packed2) {
      if (entry.x_type == a.x_type) return Result(op, entry.launch(a, &p, Target::Stream(context)));
    }
    return UnknownTypes(op);
  }

  static ffi::Error Gradient(Context context, Op op, const GradientArguments& a) {
    for (const CudaGradient& entry : KernelsOf(op).gradient) {
      if (entry.type == a.type) return Result(op, entry.launch(a, Target::Stream(context)));
    }
    return UnknownTypes(op);
  }

  static ffi::Error Pack(Context context, const PackArguments& p) {
    return Result("pack", PackOnCuda(p, Target::Stream(context)));
  }
  static ffi::Error Unpack(Context context, const PackArguments& p) {
    return Result("unpack", UnpackOnCuda(p, Target::Stream(context)));
  }

  static ffi::Error Histogram(Context context, const char* name, const HistogramArguments& a) {
    return Result(name, HistogramOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Range(Context context, const RangeArguments& a) {
    return Result("range", RangeOnCuda(a, Target::Stream(context)));
  }
  static ffi::Error Dynamic(Context context, Op op, const DynamicArguments& d) {
    bool complete = false;
    const bool fake = op == Op::kFakeQuantize;
    if (const char* error = DynamicOnCuda(d, fake, Target::Stream(context), &complete)) {
      return Result(DynamicNameOf(op), error);
    }
    if (complete || d.map.view->size == 0) return ffi::Error::Success();
    return d.packing != nullptr ? PackedMap(context, op, d.map, *d.packing) : Map(context, op, d.map, false);
  }

  // Brings the kernels of an operation to the device before anything is executed: XLA records executions into CUDA
  // graphs, and a kernel that is launched for the first time while a stream is captured may fail to load.
  static ffi::Error Load(const std::string& target) {
    for (const Op op : kOps) {
      const std::string name = NameOf(op);
      const CudaKernels& kernels = KernelsOf(op);
      const char* error = nullptr;
      if (target == name) {
        error = LoadAll(kernels.value);
        if (error == nullptr) error = LoadAll(kernels.packed4);
        if (error == nullptr) error = LoadAll(kernels.packed2);
        for (const CudaMap* any : {&kernels.any_single, &kernels.any_wide}) {
          if (error == nullptr && any->load != nullptr) error = any->load();
        }
      } else if (target == name + "_gradient") {
        error = LoadAll(kernels.gradient_in_x);
        if (error == nullptr) error = LoadAll(kernels.gradient);
      }
      if (error == nullptr && target == DynamicNameOf(op)) {
        error = LoadDynamicOnCuda();
        if (error != nullptr) return Result(target.c_str(), error);
        return Load(name);
      }
      if (error != nullptr) return Result(target.c_str(), error);
    }
    if (target == "histogram" || target == "digit_histogram") return Result(target.c_str(), LoadHistogramOnCuda());
    if (target == "range") return Result(target.c_str(), LoadDynamicOnCuda());
    return target == "pack" || target == "unpack" ? Result(target.c_str(), LoadPackingOnCuda()) : ffi::Error::Success();
  }

  // What a launch returned, as XLA wants it.
  static ffi::Error Result(const char* name, const char* error) {
    if (error == nullptr) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(name) + ": " + Target::kName + ": " + error + ".");
  }

 private:
  static const CudaKernels& KernelsOf(Op op) {
    switch (op) {
      case Op::kFakeQuantize: return fake_quantize_cuda;
      case Op::kQuantize: return quantize_cuda;
      case Op::kStochasticFakeQuantize: return stochastic_fake_quantize_cuda;
      case Op::kStochasticQuantize: return stochastic_quantize_cuda;
      default: return dequantize_cuda;
    }
  }
  static bool IsFloat(DType type) {
    return type == DType::kF32 || type == DType::kF64 || type == DType::kF16 || type == DType::kBF16;
  }
  static DType Signed(DType type) { return type == DType::kU8 ? DType::kI8 : type == DType::kU16 ? DType::kI16 : type; }
  static const CudaMap* Find(const CudaTable<CudaMap>& table, DType x, DType out) {
    for (const CudaMap& entry : table) {
      if (entry.x_type == Signed(x) && entry.out_type == Signed(out)) return &entry;
    }
    return nullptr;
  }
  template <typename Entry>
  static const char* LoadAll(const CudaTable<Entry>& table) {
    for (const Entry& entry : table) {
      if (const char* error = entry.load()) return error;
    }
    return nullptr;
  }

  static ffi::Error Result(Op op, const char* error) { return Result(NameOf(op), error); }
  static ffi::Error UnknownTypes(Op op) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      std::string(NameOf(op)) + ": no CUDA kernel for these element types.");
  }
};

}  // namespace jq
