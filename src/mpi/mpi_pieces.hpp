// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the tensors of one rank travel by MPI: as pieces of the layout that shared memory would have, which both sides
// know from the descriptor. Small tensors share a piece and are packed into it; large ones are cut, and each piece is
// sent from where it is.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "muster/tensor.hpp"

namespace muster::mpi {

/// From here on a tensor travels by itself.
inline constexpr std::uint64_t large_tensor = 64 << 10;
/// Of small tensors together.
inline constexpr std::uint64_t packed_piece = 1 << 20;
/// Of a large tensor: progress is seen from piece to piece, and a strided one is copied so much at a time.
inline constexpr std::uint64_t cut_piece = 4 << 20;
/// Of one sender that MPI has at a time, on either side: enough to keep a link busy.
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

/// Copies what a piece has of its tensors (those that `places` has the places of) to `target`, as it lies in the
/// layout.
void pack(const Piece& piece, std::span<const Placed> places, std::span<const Tensor* const> tensors,
          std::byte* target);

}  // namespace muster::mpi
