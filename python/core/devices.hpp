// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors on GPUs, through libmuster-cuda, which is loaded by the first gather and by the first tensor on a GPU.
//
// Exchanges read tensors after the work in the default stream of their GPU (docs/reference/gpu.md, rule 2), because
// Python names no stream. So an object that is imported first makes the default stream wait for its own stream.

#include "muster/tensor.hpp"
#include "python/core/bindings.hpp"
#include "src/cuda/functions.hpp"

namespace muster::python {

/// Loads libmuster-cuda if it is installed. All ranks of a gather need it, also a root that has no tensors on GPUs.
void load_devices_if_installed();
/// Returns the functions of libmuster-cuda. Throws Error(unsupported) with the remedy if it cannot be loaded.
const cuda::Functions& cuda_functions();

/// Returns the stream of a number of Python: None, 0 and 1 are the default stream (null).
CUstream_st* stream_of(nb::handle number);

/// Returns the tensor of obj.__cuda_array_interface__.
Tensor tensor_from_cuda_array_interface(nb::handle object);
/// Returns the dict of __cuda_array_interface__. Throws AttributeError if the tensor is on the host, or the interface
/// cannot express its dtype.
nb::object to_cuda_array_interface(const Tensor& tensor);

}  // namespace muster::python
