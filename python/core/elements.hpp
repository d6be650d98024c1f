// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elements of tensors as Python objects, and basic indexing.

#include "muster/tensor.hpp"
#include "python/core/bindings.hpp"

namespace muster::python {

/// Returns the element of a tensor of one element: an int, a float, a bool or a complex. Throws Error(invalid_argument)
/// if there are more or none.
nb::object item_of(const Tensor& tensor);

/// Returns the elements as nested lists; the element itself for a scalar.
nb::object list_of_elements(const Tensor& tensor);

/// Returns a contiguous tensor of the same values: floats of at most 16 bits as F32, packed integers as I8 or U8.
/// Throws Error(invalid_argument) for other dtypes.
Tensor widened(const Tensor& tensor);

/// Returns the part of a tensor that an index selects, in the same memory. The index is an int, a slice, Ellipsis, or a
/// tuple of these. Throws IndexError and TypeError as lists do, and Error(invalid_argument) if elements of a packed
/// dtype would share bytes with others.
Tensor indexed(const Tensor& tensor, nb::handle index);

}  // namespace muster::python
