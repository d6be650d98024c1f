// SPDX-License-Identifier: Apache-2.0
#pragma once
// The form in which a transport sends a tree: its descriptor, and the bytes of its tensors. Both sides compute from the
// descriptor the layout that the tensors would have in shared memory. The bytes are sent as pieces of that layout.
// Small tensors are packed together into a piece. Large tensors are cut, and each piece is sent without a copy.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/config.hpp"
#include "src/gather/record.hpp"

namespace muster::multihost {

/// A tensor of at least this size has pieces of its own.
inline constexpr std::uint64_t large_tensor = 64 << 10;
/// The size of a piece of small tensors.
inline constexpr std::uint64_t packed_piece = 1 << 20;
/// The size of a piece of a large tensor. Progress is visible after each piece, and a strided tensor is copied piece by
/// piece.
inline constexpr std::uint64_t cut_piece = 4 << 20;
/// The maximum number of pieces per sender that the transport has at a time, on either side. They suffice to keep a
/// link busy.
inline constexpr std::size_t pieces_under_way = 8;
/// If a sender has at most this many bytes in total, they are sent with the descriptor.
inline constexpr std::uint64_t rides_along = 32 << 10;

/// The position of a tensor in the layout.
struct Placed {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// One message.
struct MessagePiece {
  std::uint64_t offset = 0;  ///< in the layout
  std::uint64_t bytes = 0;
  std::size_t first = 0;  ///< the first tensor in the piece
  std::size_t count = 0;  ///< the number of tensors; 1 if a large tensor is cut
  friend bool operator==(const MessagePiece&, const MessagePiece&) = default;
};

/// Cuts `tensors`, which are in the order of their offsets. Both sides get the same result. Empty tensors have no
/// piece.
std::vector<MessagePiece> cut(const std::vector<Placed>& tensors);

/// Cuts one tensor into pieces of the given size, however small it is.
std::vector<MessagePiece> cut_evenly(const Placed& tensor, std::uint64_t piece_bytes);

/// The sender's side. The tree must stay unchanged while this object is used.
class OutgoingTree {
 public:
  OutgoingTree() = default;
  /// Describes the tree in `record`. Throws as core::encode_descriptor.
  OutgoingTree(const Config& value, gather::ExchangeRecord& record);

  [[nodiscard]] std::span<const std::byte> descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] std::uint64_t hash() const noexcept { return hash_; }
  /// Returns the size of the layout.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const std::vector<Placed>& places() const noexcept { return places_; }

  /// Returns a message: `front`, the descriptor, and the bytes of the layout if `with_bytes` is set.
  [[nodiscard]] std::vector<std::byte> message(std::span<const std::byte> front, bool with_bytes) const;
  /// Returns whether a piece must be packed before it is sent.
  [[nodiscard]] bool is_packed(const MessagePiece& piece) const;
  /// Returns the bytes of a piece that need not be packed. owner_of returns their owner (null: the caller).
  [[nodiscard]] std::span<const std::byte> bytes_of(const MessagePiece& piece) const;
  [[nodiscard]] const std::shared_ptr<const void>& owner_of(const MessagePiece& piece) const;
  /// Writes any piece to `target`, in the form that it has in the layout.
  void pack(const MessagePiece& piece, std::byte* target) const;

 private:
  std::vector<std::byte> descriptor_;
  std::uint64_t hash_ = 0;
  std::uint64_t bytes_ = 0;
  std::vector<Placed> places_;
  std::vector<const Tensor*> tensors_;
};

/// The receiver's side.
struct IncomingTree {
  std::optional<Config> config;
  std::vector<MessagePiece> pieces;  ///< the pieces that must still be received
};

/// Returns the tree of `sender`, and checks the hash of its descriptor. Its tensors are in `buffer` and keep it alive;
/// it has `bytes` bytes and is null for 0. `riding` contains the bytes of the layout if they arrived with the
/// descriptor. Throws Error(corrupt | version).
IncomingTree take_tree(int sender, std::span<const std::byte> descriptor, std::uint64_t hash, std::uint64_t bytes,
                       const std::shared_ptr<std::byte>& buffer, std::span<const std::byte> riding);

}  // namespace muster::multihost
