// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory beyond the ranks' blocks that collectives of one host use: results that all ranks have mapped, and inputs that
// lie in their ranks' arenas and are read there.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/shm/segment.hpp"
#include "src/sync/group.hpp"

namespace muster::collectives {

/// Segments of rank 0 for results: one is used again when no rank holds a result in it any more.
class SharedResults {
 public:
  explicit SharedResults(sync::Group& group);
  SharedResults(const SharedResults&) = delete;
  SharedResults& operator=(const SharedResults&) = delete;
  ~SharedResults();

  /// Rank 0's: room for so many bytes, offered to all ranks. Throws Error(no_space).
  ResultOffer offer(std::uint64_t bytes);
  /// That room on this rank. Throws Error(corrupt | no_space).
  HeldResult take(const ResultOffer& offer, std::uint64_t bytes);

 private:
  /// Of those with room for so many bytes; null if there is none.
  template <class IsUnused>
  std::shared_ptr<shm::OwnedSegment> smallest_unused(std::uint64_t bytes, const IsUnused& is_unused);

  sync::Group& group_;
  std::vector<std::shared_ptr<const sync::PeerLiveness>> holders_;  // by rank; null: this one
  std::vector<std::shared_ptr<shm::OwnedSegment>> own_;
  std::vector<std::pair<shm::OwnedSegment*, shm::LeaseId>> offered_;     // the last ones
  std::map<std::uint64_t, std::shared_ptr<shm::RemoteSegment>> mapped_;  // by place
};

/// Arenas of all ranks, as this rank sees them.
class SharedInputs {
 public:
  explicit SharedInputs(sync::Group& group) : group_(group) {}
  /// Where all of `in` lies in an arena of this process; nothing else if it does not.
  static InputPlace place_of(Bytes in);
  /// What lies there, of another rank. Throws Error(corrupt | no_space).
  const std::byte* map(std::size_t rank, const InputPlace& place, std::uint64_t bytes);

 private:
  sync::Group& group_;
  std::map<std::pair<std::size_t, std::uint64_t>, std::unique_ptr<shm::RemoteSegment>> mapped_;  // by rank and place
};

}  // namespace muster::collectives
