// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elements in another floating point format. Rounding is to the nearest, ties to even; subnormal numbers stay; a NaN is
// the format's quiet one, with its sign.

#include <cstddef>
#include <optional>
#include <span>

#include "muster/dtype.hpp"

namespace muster::merge {

/// From f16, bf16, f32 or f64 to f16, bf16 or f32.
bool can_cast(DType from, DType to) noexcept;

/// As many elements as there are in both. What is too large becomes infinity. Nothing need be aligned; they do not
/// overlap. Returns the place of the first finite element that became so. can_cast() is true.
std::optional<std::size_t> cast(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target);

}  // namespace muster::merge
