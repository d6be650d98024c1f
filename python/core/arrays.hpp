// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversions between tensors and Python buffers, and from __array_interface__ of NumPy.

#include "python/core/bindings.hpp"

namespace muster::python {

/// Returns a tensor of the memory that an object exports by the buffer protocol. Throws Error(invalid_argument) if the
/// format has no dtype, nb::python_error if the object refuses.
Tensor tensor_from_buffer(nb::handle object);

/// The elements that __array_interface__ or __cuda_array_interface__ describes.
struct ArrayInterface {
  DType dtype = DType::u8;
  Shape shape;
  Strides strides;
  void* address = nullptr;
  bool is_read_only = false;
};
/// Returns the attribute `name` of an object. Throws Error(invalid_argument).
ArrayInterface array_interface_of(nb::handle object, const char* name);
/// Returns the type string of a dtype in these interfaces; empty if they have none.
std::string typestr_of(DType dtype);

/// Returns a tensor of the memory that __array_interface__ describes. Throws Error(invalid_argument).
Tensor tensor_from_array_interface(nb::handle object);

/// Type slots of the class Tensor. Dtypes without a buffer format are exported as "B" or "H"; packed ones as one
/// dimension of bytes.
extern const PyType_Slot buffer_slots[3];

}  // namespace muster::python
