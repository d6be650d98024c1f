// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tree as a transport carries it: its descriptor, and the bytes of its tensors by their places in the layout that
// shared memory would have, which both sides know from the descriptor. They travel as pieces of that layout. Small
// tensors share a piece and are packed into it; large ones are cut, and each piece is sent from where it is.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/config.hpp"
#include "src/gather/record.hpp"

namespace muster::hosts {

/// From here on a tensor travels by itself.
inline constexpr std::uint64_t large_tensor = 64 << 10;
/// Of small tensors together.
inline constexpr std::uint64_t packed_piece = 1 << 20;
/// Of a large tensor: progress is seen from piece to piece, and a strided one is copied so much at a time.
inline constexpr std::uint64_t cut_piece = 4 << 20;
/// Of one sender that the transport has at a time, on either side: enough to keep a link busy.
inline constexpr std::size_t pieces_under_way = 8;
/// What a sender has in all, where it is no more than this, goes with the descriptor.
inline constexpr std::uint64_t rides_along = 32 << 10;

/// A tensor's place in the layout.
struct Placed {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// One message.
struct Piece {
  std::uint64_t offset = 0;  ///< in the layout
  std::uint64_t bytes = 0;
  std::size_t first = 0;  ///< of the tensors that it has something of
  std::size_t count = 0;  ///< one, of a large tensor
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// `tensors` in the order of their offsets. The same on both sides. Empty tensors have no piece.
std::vector<Piece> cut(const std::vector<Placed>& tensors);

/// One tensor, in pieces of that size whatever its own.
std::vector<Piece> cut_evenly(const Placed& tensor, std::uint64_t piece_bytes);

/// A sender's side. The tree stays where it is as long as this is used.
class OutgoingTree {
 public:
  OutgoingTree() = default;
  /// Writes what the tree has into `record`. Throws as core::encode_descriptor.
  OutgoingTree(const Config& value, gather::Record& record);

  [[nodiscard]] std::span<const std::byte> descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] std::uint64_t hash() const noexcept { return hash_; }
  /// Of the layout.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const std::vector<Placed>& places() const noexcept { return places_; }

  /// A message: `front`, the descriptor, and where it is wanted the layout's bytes.
  [[nodiscard]] std::vector<std::byte> message(std::span<const std::byte> front, bool with_bytes) const;
  /// Whether a piece cannot be sent from where it is.
  [[nodiscard]] bool is_packed(const Piece& piece) const;
  /// A piece that can: its bytes, and who keeps them (null: the caller).
  [[nodiscard]] std::span<const std::byte> bytes_of(const Piece& piece) const;
  [[nodiscard]] const std::shared_ptr<const void>& owner_of(const Piece& piece) const;
  /// Any piece, as it lies in the layout.
  void pack(const Piece& piece, std::byte* target) const;

 private:
  std::vector<std::byte> descriptor_;
  std::uint64_t hash_ = 0;
  std::uint64_t bytes_ = 0;
  std::vector<Placed> places_;
  std::vector<const Tensor*> tensors_;
};

/// A receiver's.
struct IncomingTree {
  std::optional<Config> config;
  std::vector<Piece> pieces;  ///< that are still to come
};

/// The tree of `sender`, with the hash of its descriptor, whose tensors lie in `buffer` (of `bytes`, null where that is
/// 0) and keep it. `riding`: the layout's bytes where they came with the descriptor. Throws Error(corrupt | version).
IncomingTree take_tree(int sender, std::span<const std::byte> descriptor, std::uint64_t hash, std::uint64_t bytes,
                       const std::shared_ptr<std::byte>& buffer, std::span<const std::byte> riding);

}  // namespace muster::hosts
