// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which tensors a device can copy in one go: those whose elements are rows of bytes at one distance.

#include <cstdint>
#include <optional>

#include "muster/tensor.hpp"

namespace muster::cuda {

/// `rows` runs of `width` bytes, `pitch` bytes from one to the next.
struct Pitched {
  std::uint64_t width = 0;
  std::uint64_t rows = 1;
  std::uint64_t pitch = 0;  ///< at least the width
  friend bool operator==(const Pitched&, const Pitched&) = default;
};

/// None where the strides are not so: elements with gaps between them in more than one dimension, in another order
/// than row-major, or more than once. Pure.
std::optional<Pitched> pitched(const TensorView& view);

/// The same, with Error(argument) that says what to do instead.
Pitched require_pitched(const TensorView& view);

}  // namespace muster::cuda
