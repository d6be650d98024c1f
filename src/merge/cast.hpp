// SPDX-License-Identifier: Apache-2.0
#pragma once
// Converts elements to another floating-point format. Rounding is to nearest, ties to even. Subnormal numbers are kept.
// A NaN becomes the quiet NaN of the format, with its sign.

#include <cstddef>
#include <optional>
#include <span>

#include "muster/dtype.hpp"

namespace muster::merge {

/// Returns true for conversions from f16, bf16, f32 or f64 to f16, bf16 or f32.
bool can_cast(DType from, DType to) noexcept;

/// Converts elements; source and target must have the same number of them. Values that are too large become infinity.
/// Returns the index of the first finite element that became infinite. The memory need not be aligned, but must not
/// overlap. can_cast() must be true.
std::optional<std::size_t> cast(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target);

}  // namespace muster::merge
