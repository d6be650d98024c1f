// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of f16 with the processor's conversions between f16 and f32.

#include <cstddef>
#include <span>

namespace muster::merge {

/// Adds the f16 elements of all sources as f32, in the order of the sources, and rounds each sum once. Returns the
/// number of bytes written, which are whole vectors: at most 63 bytes are left. The bits are those of reduce().
using AddHalves = std::size_t (*)(std::span<std::byte> target, std::span<const std::byte* const> sources);

/// Returns the variants that this processor supports, widest first. Empty if it cannot convert f16.
std::span<const AddHalves> half_sum_variants() noexcept;

}  // namespace muster::merge
