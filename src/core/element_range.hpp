// SPDX-License-Identifier: Apache-2.0
#pragma once
// A part of a tensor as it would lie in memory without gaps: what copies that go through a bounded buffer take at a
// time.

#include <cstddef>
#include <cstdint>

#include "muster/tensor.hpp"

namespace muster::core {

/// Writes elements [begin, end) of `source`, counted row-major, to `target`, which has room for them. The range lies
/// inside, and a packed one begins and ends at a byte. Local, any thread; throws nothing but std::bad_alloc.
void copy_elements(const TensorView& source, std::int64_t begin, std::int64_t end, std::byte* target);

}  // namespace muster::core
