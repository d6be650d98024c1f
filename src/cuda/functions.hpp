// SPDX-License-Identifier: Apache-2.0
#pragma once
// The interface through which the Python package calls libmuster-cuda, to which it is not linked.

#include "muster/tensor.hpp"

struct CUstream_st;

namespace muster::cuda {

struct Functions {
  /// cuda_view() of muster/cuda.hpp.
  TensorView (*view)(DType dtype, Shape shape, const void* data, Strides strides);
  /// copy_to_host() of muster/cuda.hpp.
  Tensor (*copy_to_host)(const TensorView& tensor);
  /// Makes later work in the stream `after` of a device wait for the work that is in `before` now. The CPU does not
  /// wait. Null: the default stream of the device. Throws Error(invalid_argument | io).
  void (*order)(int device, CUstream_st* before, CUstream_st* after);
};

inline constexpr const char* functions_symbol = "muster_cuda_functions";
using GetFunctions = const Functions& (*)();

}  // namespace muster::cuda
