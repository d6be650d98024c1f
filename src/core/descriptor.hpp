// SPDX-License-Identifier: Apache-2.0
#pragma once
// The descriptor: a config tree in a compact binary form, with places instead of tensors. A sender describes its value
// to the root (the first rank of the list) with it.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "muster/config.hpp"

namespace muster::core {

/// The location of a tensor's bytes. Segment 0 is the slot of the exchange; other numbers are arenas.
struct TensorLocation {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

inline constexpr std::uint64_t tensor_alignment = 64;

/// Computes offsets in the slot. They are not sent: both sides lay out the tensors in the order of the tree.
class SlotLayout {
 public:
  /// Returns the offset of the next tensor. Throws Error(invalid_argument) if the sum does not fit into 63 bits.
  std::uint64_t place(std::uint64_t nbytes);
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

 private:
  std::uint64_t size_ = 0;
};

/// Encodes a tree. `place_elsewhere(tensor)` returns the place of a tensor in an arena, which need not move; nullopt
/// puts the tensor into the slot. It is called in the order of the tree. Throws Error(invalid_argument) on nesting
/// beyond max_config_depth and on text that is not UTF-8.
std::vector<std::byte> encode_descriptor(
    const Config& config, const std::function<std::optional<TensorLocation>(const Tensor&)>& place_elsewhere);

/// Decodes a tree. `make(dtype, shape, nbytes, place)` returns each tensor, and must check that the place is inside its
/// memory. Throws Error(corrupt) on any defect. Allocates no more than the length of the input justifies.
Config decode_descriptor(std::span<const std::byte> bytes,
                         const std::function<Tensor(DType, const Shape&, std::uint64_t, TensorLocation)>& make);

}  // namespace muster::core
