// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory beyond the ranks' blocks that collectives of one host use: results that all ranks have mapped, and inputs that
// lie in their ranks' arenas and are read there.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "src/collectives/backend.hpp"
#include "src/collectives/lent_memory.hpp"
#include "src/shm/segment.hpp"
#include "src/sync/group.hpp"

namespace muster::collectives {

/// Results in memory of rank 0, which all ranks hold.
class SharedResults {
 public:
  explicit SharedResults(sync::Group& group) : group_(group), memory_(group, 0, os::Access::read_write) {}
  SharedResults(const SharedResults&) = delete;
  SharedResults& operator=(const SharedResults&) = delete;
  ~SharedResults() { last_.withdraw(); }

  /// Rank 0's: room for so many bytes, offered to all ranks. What nobody has taken of the last offer, because the call
  /// has failed before, is withdrawn. Throws Error(no_space).
  ResultOffer offer(std::uint64_t bytes) {
    last_.withdraw();
    last_ = memory_.lend(bytes, group_.all());
    return last_.offer;
  }
  /// That room on this rank. Throws Error(corrupt | no_space).
  HeldResult take(const ResultOffer& offer, std::uint64_t bytes) {
    return memory_.take(offer, static_cast<std::size_t>(group_.rank()), bytes);
  }

 private:
  sync::Group& group_;
  LentMemory memory_;
  Loan last_;
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
