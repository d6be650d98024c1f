// SPDX-License-Identifier: Apache-2.0
#pragma once
// A Config as bytes: a descriptor, and its tensors at the positions that SlotLayout gives them.

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
  Tensor tensors;  // the bytes of all tensors; a single contiguous tensor is not copied
};
/// Throws Error(unsupported) for a tensor on a device.
PackedConfig packed(const Config& config);

/// Restores a Config. Its tensors refer to `tensors` and keep it alive. Throws Error(corrupt).
Config unpacked(std::span<const std::byte> descriptor, const Tensor& tensors);

/// Returns the type and shape of the tensor if the descriptor describes a single tensor, otherwise nullopt.
std::optional<TensorSpec> tensor_of(std::span<const std::byte> descriptor);

/// A Config before it is packed: its descriptor, its tensors, and their positions.
struct ConfigPlan {
  std::vector<std::byte> descriptor;
  std::vector<Tensor> tensors;
  std::vector<std::uint64_t> places;
  std::uint64_t bytes = 0;  // the size of all tensors

  /// Throws Error(unsupported) for a tensor on a device.
  explicit ConfigPlan(const Config& config);
  void copy_tensors_to(std::byte* target) const;
  // The next two functions pack the descriptor and the tensors into one piece.
  [[nodiscard]] std::uint64_t whole_bytes() const;
  /// `target` must have the alignment that the tensors need.
  void copy_whole_to(std::byte* target) const;
};
/// Packs the descriptor and the tensors into one piece.
Tensor packed_whole(const ConfigPlan& plan);
inline Tensor packed_whole(const Config& config) {
  return packed_whole(ConfigPlan(config));
}
/// Restores a Config from these bytes of `all`, which its tensors keep alive. The tensors are writable if `all` is.
Config unpacked_whole(const Tensor& all, std::uint64_t offset, std::uint64_t bytes);

}  // namespace muster::collectives
