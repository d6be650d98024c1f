// SPDX-License-Identifier: Apache-2.0
#pragma once
// The descriptor: a config tree in compact binary form, with places instead of tensors. It is what a rank tells the
// first rank it has.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "muster/config.hpp"

namespace muster::core {

/// Where a tensor's bytes are: segment 0 is the exchange's own slot, others are arenas by number.
struct Place {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

inline constexpr std::uint64_t tensor_alignment = 64;

/// Offsets in the slot are not sent: both sides lay the tensors out in the order of the tree.
class SlotLayout {
 public:
  /// The offset of the next tensor. Throws Error(argument) if the sum does not fit 63 bits.
  std::uint64_t place(std::uint64_t nbytes);
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

 private:
  std::uint64_t size_ = 0;
};

/// `place_elsewhere(tensor)` gives the arena place of a tensor that need not move; none: it goes into the slot. Called
/// in the order of the tree. Throws Error(argument) on nesting beyond max_config_depth and on text that is not UTF-8.
std::vector<std::byte> encode_descriptor(const Config& config,
                                         const std::function<std::optional<Place>(const Tensor&)>& place_elsewhere);

/// The tree again; `make(dtype, shape, nbytes, place)` gives each tensor, and checks that the place is inside its
/// memory. Throws Error(corrupt) on any defect; allocates nothing that the bytes' own length does not justify.
Config decode_descriptor(std::span<const std::byte> bytes,
                         const std::function<Tensor(DType, const Shape&, std::uint64_t, Place)>& make);

}  // namespace muster::core
