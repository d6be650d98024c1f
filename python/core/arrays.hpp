// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors as Python's buffers, both ways, and as NumPy's __array_interface__.

#include "python/core/bindings.hpp"

namespace muster::python {

/// The memory that an object exports by the buffer protocol. Throws Error(argument) on formats without a dtype,
/// nb::python_error if the object refuses.
Tensor tensor_from_buffer(nb::handle object);

/// What __array_interface__ tells of. Throws Error(argument).
Tensor tensor_from_array_interface(nb::handle object);

/// Slots of the class Tensor: dtypes that buffers have no format for are bytes ("B") or words ("H") there; packed ones
/// are one dimension of bytes.
extern const PyType_Slot buffer_slots[3];

}  // namespace muster::python
