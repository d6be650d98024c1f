// SPDX-License-Identifier: Apache-2.0
#pragma once
// HDF5's byte shuffle (filter 2): the first bytes of all elements, then the second ones, and so on. Signs and exponents
// of neighbours stand together then, which is what makes weights compressible.

#include <cstddef>
#include <span>

namespace muster::statefile {

/// `source` and `target` are of one size, a multiple of `item`, and apart.
void shuffle(std::span<const std::byte> source, std::size_t item, std::byte* target) noexcept;
/// The way back, of the first `elements` elements only.
void unshuffle(std::span<const std::byte> source, std::size_t item, std::size_t elements, std::byte* target) noexcept;

}  // namespace muster::statefile
