// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared memory that the ranks of one host lend to each other: LentMemory for single results, SharedBlocks for blocks
// that all ranks read and write during the lifetime of the object.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/group/group.hpp"
#include "src/os/futex.hpp"
#include "src/shm/segment.hpp"

namespace muster::collectives {

/// An offer of the owner.
struct Loan {
  ResultOffer offer;
  std::shared_ptr<shm::OwnedSegment> segment;  // the owner may write into it until the other ranks know of the offer
  std::vector<shm::LeaseId> leases;

  /// Withdraws the offer from ranks that have not taken it.
  void withdraw() noexcept;
};

/// Memory that one rank lends to others. It is reused when none of them holds a lease of it any more.
class LentMemory {
 public:
  /// `access` is the access of the ranks that take it.
  LentMemory(group::BaseGroup& group, int owner, os::Access access);

  /// Called by the owner: returns memory for `bytes` bytes, offered to `ranks`. Throws Error(out_of_space).
  Loan lend(std::uint64_t bytes, std::span<const int> ranks);
  /// Returns the offered memory on this rank, which is ranks[at] of the offer. Throws Error(corrupt | out_of_space |
  /// peer_lost).
  HeldResult take(const ResultOffer& offer, std::size_t at, std::uint64_t bytes);

 private:
  /// Returns the smallest unused segment of at least `bytes`, or null.
  template <class IsUnused>
  [[nodiscard]] std::shared_ptr<shm::OwnedSegment> smallest_unused(std::uint64_t bytes,
                                                                   const IsUnused& is_unused) const;

  group::BaseGroup& group_;
  int owner_;
  os::Access access_;
  std::vector<std::shared_ptr<const group::PeerLiveness>> holders_;  // by rank; null for this rank
  std::vector<std::shared_ptr<shm::OwnedSegment>> own_;
  shm::RemoteSegments mapped_;
};

inline constexpr std::size_t line = 64;

/// A counter with one writer, for which other ranks wait.
struct Count {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;

  void publish(std::uint32_t reached) noexcept {
    value.store(reached, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) os::futex_wake_all(value);
  }
  /// Counters may wrap around.
  [[nodiscard]] bool has_reached(std::uint32_t count) const noexcept {
    return static_cast<std::int32_t>(value.load(std::memory_order_acquire) - count) >= 0;
  }
  /// Sleeps until the counter is published again, at most `longest`. Returns at once if it has changed since it was
  /// `seen`.
  void sleep(std::uint32_t seen, std::chrono::nanoseconds longest) noexcept {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    os::futex_wait(value, seen, longest);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};
struct alignas(line) Word : Count {};

/// Waits until done() is true. done() depends on `count`, which `ranks` publish. `turns` is the value of
/// os::spin_iterations. Throws as Group::wait_until.
template <class Done>
void wait_on(group::BaseGroup& group, Count& count, std::span<const int> ranks, int turns, const WaitOptions& options,
             const Done& done) {
  if (os::spin_then_yield(done, turns)) return;
  std::uint32_t seen = 0;
  const auto is_done = [&] {
    seen = count.value.load(std::memory_order_seq_cst);
    return done();
  };
  group.wait_until(
      is_done, [&](std::chrono::nanoseconds longest) { count.sleep(seen, longest); }, ranks, options);
}

/// Blocks of memory that all ranks of a host have mapped for reading and writing. Some ranks provide one block each. A
/// block exists until all ranks have released it or are dead.
class SharedBlocks {
 public:
  /// Returns whether the ranks of a group can share blocks. All ranks get the same result. Local.
  static bool can_be(const group::BaseGroup& group);
  /// Collective. `bytes` is the size of this rank's block, which initially contains zeros; 0 for no block. Throws as
  /// Group::all_gather, and Error(out_of_space) on all ranks.
  SharedBlocks(group::BaseGroup& group, std::uint64_t bytes, const WaitOptions& options);
  ~SharedBlocks();
  SharedBlocks& operator=(SharedBlocks&&) = delete;

  /// Returns null if that rank provides no block.
  [[nodiscard]] std::byte* of(std::size_t rank) const noexcept { return blocks_[rank]; }

 private:
  std::unique_ptr<shm::OwnedSegment> own_;
  std::vector<shm::LeaseId> offered_;
  std::vector<std::unique_ptr<shm::Lease>> leases_;  // leases of the blocks of other ranks
  std::vector<std::byte*> blocks_;
};

}  // namespace muster::collectives
