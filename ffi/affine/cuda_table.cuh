// Entries of an operation's tables.
#pragma once

#include "ffi/affine/cuda_gradient.cuh"
#include "ffi/affine/cuda_kernels.h"
#include "ffi/affine/cuda_map.cuh"

namespace jq {

template <typename T>
constexpr DType kTypeOf = DType::kF32;
template <>
constexpr DType kTypeOf<double> = DType::kF64;
template <>
constexpr DType kTypeOf<Float16> = DType::kF16;
template <>
constexpr DType kTypeOf<BFloat16> = DType::kBF16;
template <>
constexpr DType kTypeOf<Code8> = DType::kI8;
template <>
constexpr DType kTypeOf<Code16> = DType::kI16;

template <typename F, typename Real, typename X, typename Out>
const char* LoadMap() {
  const char* error = LoadKernel(&VectorMap<F, Real, X, Out>);
  return error != nullptr ? error : LoadKernel(&ColumnMap<F, Real, X, Out>);
}
template <typename F, typename Real, typename X, typename Out>
constexpr CudaMap MapEntry() {
  return {kTypeOf<X>, kTypeOf<Out>, LaunchMap<F, Real, X, Out>, LoadMap<F, Real, X, Out>};
}

template <typename F, typename Real>
const char* LoadAnyMap() {
  return LoadKernel(&AnyMap<F, Real>);
}
template <typename F, typename Real>
constexpr CudaMap AnyMapEntry() {
  return {kRealType<Real>, kRealType<Real>, LaunchAnyMap<F, Real>, LoadAnyMap<F, Real>};
}

template <typename Math, typename Real, typename X>
const char* LoadGradient() {
  const char* error = LoadKernel(&RowGradient<Math, Real, X>);
  if (error == nullptr) error = LoadKernel(&ColumnGradient<Math, Real, X>);
  return error != nullptr ? error : LoadKernel(&SumChunks<Real>);
}
template <typename Math, typename Real, typename X>
constexpr CudaGradient GradientEntry() {
  return {kTypeOf<X>, LaunchGradient<Math, Real, X>, LoadGradient<Math, Real, X>};
}

// The gradients of one operation, for every type of x.
template <typename Math>
struct Gradients {
  static constexpr CudaMap kInX[] = {
      MapEntry<GradientOf<Math>, float, float, float>(),
      MapEntry<GradientOf<Math>, float, Float16, Float16>(),
      MapEntry<GradientOf<Math>, float, BFloat16, BFloat16>(),
      MapEntry<GradientOf<Math>, double, double, double>(),
  };
  static constexpr CudaGradient kAll[] = {
      GradientEntry<Math, float, float>(),
      GradientEntry<Math, float, Float16>(),
      GradientEntry<Math, float, BFloat16>(),
      GradientEntry<Math, double, double>(),
  };
};

}  // namespace jq
