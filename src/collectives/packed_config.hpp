// SPDX-License-Identifier: Apache-2.0
#pragma once
// A Config as bytes: a descriptor, and its tensors, where SlotLayout puts them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "muster/config.hpp"
#include "muster/tensor.hpp"

namespace muster::collectives {

struct PackedConfig {
  std::vector<std::byte> descriptor;
  Tensor tensors;  // their bytes; of one contiguous tensor itself
};
/// Throws Error(unsupported) on a tensor on a device.
PackedConfig packed(const Config& config);

/// Back; its tensors look at `tensors`, and keep it. Throws Error(corrupt).
Config unpacked(std::span<const std::byte> descriptor, const Tensor& tensors);

/// Of a descriptor of one tensor; none if it is of something else.
std::optional<TensorSpec> tensor_of(std::span<const std::byte> descriptor);

/// A Config before it is bytes: its descriptor, its tensors, and where they go.
struct ConfigPlan {
  std::vector<std::byte> descriptor;
  std::vector<Tensor> tensors;
  std::vector<std::uint64_t> places;
  std::uint64_t bytes = 0;  // of the tensors

  /// Throws Error(unsupported) on a tensor on a device.
  explicit ConfigPlan(const Config& config);
  void copy_tensors_to(std::byte* target) const;
  // Both in one piece.
  [[nodiscard]] std::uint64_t whole_bytes() const;
  /// `target` is aligned as the tensors shall be.
  void copy_whole_to(std::byte* target) const;
};
/// Both in one piece.
Tensor packed_whole(const ConfigPlan& plan);
inline Tensor packed_whole(const Config& config) {
  return packed_whole(ConfigPlan(config));
}
/// Of these bytes of `all`, which its tensors keep; they are writable if it is.
Config unpacked_whole(const Tensor& all, std::uint64_t offset, std::uint64_t bytes);

}  // namespace muster::collectives
