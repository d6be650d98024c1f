// SPDX-License-Identifier: Apache-2.0
#pragma once
// A range of a tensor's elements in contiguous row-major order. Copies through a bounded buffer process one range at a
// time.

#include <cstddef>
#include <cstdint>

#include "muster/tensor.hpp"

namespace muster::core {

/// Writes elements [begin, end) of `source`, in row-major order, to `target`, which must have room for them. The range
/// must be inside the tensor. For a packed type it must begin and end at a byte boundary. Local, any thread; throws
/// only std::bad_alloc.
void copy_elements(const TensorView& source, std::int64_t begin, std::int64_t end, std::byte* target);

}  // namespace muster::core
