// SPDX-License-Identifier: Apache-2.0
#pragma once
// A Config as bytes for another rank: the length of its descriptor, the descriptor, then its tensors where SlotLayout
// puts them, from the next place that is aligned.

#include <cstdint>

#include "muster/config.hpp"

namespace muster::collectives {

/// Throws Error(argument) if it has tensors on devices.
Tensor packed(const Config& config);
/// Its tensors look at [offset, offset + bytes) of `all`, and keep it. Throws Error(corrupt).
Config unpacked(const Tensor& all, std::uint64_t offset, std::uint64_t bytes);

}  // namespace muster::collectives
