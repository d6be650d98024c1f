// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tree as MPI carries it: its descriptor, and the bytes of its tensors by their places in a layout that both sides
// know from it (mpi_pieces.hpp).

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "muster/config.hpp"
#include "src/gather/record.hpp"
#include "src/mpi/mpi_pieces.hpp"

namespace muster::mpi {

/// A sender's side. The tree stays where it is as long as this is used.
class OutgoingTree {
 public:
  OutgoingTree() = default;
  /// Writes what the tree has into `record`. Throws as core::encode_descriptor.
  OutgoingTree(const Config& value, gather::Record& record);

  [[nodiscard]] std::span<const std::byte> descriptor() const noexcept { return descriptor_; }
  /// Of the layout.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const std::vector<Placed>& places() const noexcept { return places_; }

  /// Copies all tensors to `target`, which has bytes().
  void copy(std::byte* target) const;
  /// Whether a piece cannot be sent from where it is.
  [[nodiscard]] bool is_packed(const Piece& piece) const;
  /// A piece that can: its bytes, and who keeps them (null: the caller).
  [[nodiscard]] std::span<const std::byte> bytes_of(const Piece& piece) const;
  [[nodiscard]] const std::shared_ptr<const void>& owner_of(const Piece& piece) const;
  /// Any piece, as it lies in the layout.
  void pack(const Piece& piece, std::byte* target) const;

 private:
  std::vector<std::byte> descriptor_;
  std::uint64_t bytes_ = 0;
  std::vector<Placed> places_;
  std::vector<const Tensor*> tensors_;
};

/// The receiver's: the tree, whose tensors lie in `buffer` (of `bytes`, null where that is 0) and keep it. Appends
/// where they are. Throws Error(corrupt | version).
Config take_tree(std::span<const std::byte> descriptor, std::uint64_t bytes, const std::shared_ptr<std::byte>& buffer,
                 std::vector<Placed>& places);

}  // namespace muster::mpi
