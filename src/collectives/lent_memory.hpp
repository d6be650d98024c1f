// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that one rank of a host lends to others. It is used again when none of them holds anything in it any more.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/shm/segment.hpp"
#include "src/sync/group.hpp"

namespace muster::collectives {

/// What the owner has offered.
struct Loan {
  ResultOffer offer;
  std::shared_ptr<shm::OwnedSegment> segment;  // the owner may write into it until the others know of the offer
  std::vector<shm::LeaseId> leases;

  /// From those who have not taken it.
  void withdraw() noexcept;
};

class LentMemory {
 public:
  /// `access`: of those who take it.
  LentMemory(sync::Group& group, int owner, os::Access access);

  /// The owner's: room for so many bytes, offered to those ranks. Throws Error(no_space).
  Loan lend(std::uint64_t bytes, std::span<const int> ranks);
  /// That room on this rank, which is the `at`th of those ranks. Throws Error(corrupt | no_space | peer_lost).
  HeldResult take(const ResultOffer& offer, std::size_t at, std::uint64_t bytes);

 private:
  /// With room for so many bytes; null if there is none.
  template <class IsUnused>
  [[nodiscard]] std::shared_ptr<shm::OwnedSegment> smallest_unused(std::uint64_t bytes,
                                                                   const IsUnused& is_unused) const;

  sync::Group& group_;
  int owner_;
  os::Access access_;
  std::vector<std::shared_ptr<const sync::PeerLiveness>> holders_;  // by rank; null: this one
  std::vector<std::shared_ptr<shm::OwnedSegment>> own_;
  shm::RemoteSegments mapped_;
};

}  // namespace muster::collectives
