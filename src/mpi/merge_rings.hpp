// SPDX-License-Identifier: Apache-2.0
#pragma once
// Windows between the first rank of a merge and the senders of its own host: kept with the group, so that memory is
// taken and handed over once. What goes through them does not go by MPI, which on one host may end this process when a
// peer is killed.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "src/mpi/mpi_group.hpp"
#include "src/shm/window_ring.hpp"

namespace muster::mpi {

/// One ring as either side sees it.
struct MergeRing {
  std::uint64_t place = 0;  ///< in the first rank's region; 0: none
  std::shared_ptr<shm::WindowRing> windows;
  std::uint32_t turn = 0;  ///< the next
};

/// What a group keeps of them.
class MergeRings {
 public:
  static constexpr std::uint32_t depth = 2;

  /// First rank: the ring of `sender`, who knows the one at that place; a new one where that is another or too small.
  /// Throws Error(no_space).
  MergeRing& give(int sender, std::uint64_t known, std::uint64_t window_bytes);
  /// Sender: the ring of this first rank, perhaps none.
  MergeRing& of(int first) { return theirs_[first]; }
  /// Bytes of those that this rank owns.
  [[nodiscard]] std::uint64_t bytes() const noexcept;
  /// And of these senders alone: what a merge with them uses again, or replaces.
  [[nodiscard]] std::uint64_t bytes_of(std::span<const int> senders) const noexcept;
  /// Forgets all; returns the bytes of those that this rank owns.
  std::uint64_t trim() noexcept;

 private:
  std::map<int, MergeRing> own_;     // by sender
  std::map<int, MergeRing> theirs_;  // by first rank
};

std::shared_ptr<MergeRings> merge_rings_of(SyncGroup& group);

}  // namespace muster::mpi
