// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that ranks of one host lend each other: LentMemory for single results, SharedBlocks for what all of them read
// and write as long as they live.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/os/futex.hpp"
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

/// Memory that one rank lends to others. It is used again when none of them holds anything in it any more.
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

inline constexpr std::size_t line = 64;

/// A count with one writer, which others wait for.
struct Count {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;

  void publish(std::uint32_t reached) noexcept {
    value.store(reached, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) os::futex_wake_all(value);
  }
  /// Counts may run over.
  [[nodiscard]] bool has_reached(std::uint32_t count) const noexcept {
    return static_cast<std::int32_t>(value.load(std::memory_order_acquire) - count) >= 0;
  }
  /// Sleeps until it is published again, at most `longest`, unless it has been since it was `seen`.
  void sleep(std::uint32_t seen, std::chrono::nanoseconds longest) noexcept {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    os::futex_wait(value, seen, longest);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};
struct alignas(line) Word : Count {};

/// Waits until done(), which looks at `count` and becomes true by what is published there; `ranks`: who publishes.
/// `turns`: os::turns_on_core. Throws as SyncGroup::wait_until.
template <class Done>
void wait_on(sync::Group& group, Count& count, std::span<const int> ranks, int turns, const WaitOptions& options,
             const Done& done) {
  if (os::comes_soon(done, turns)) return;
  std::uint32_t seen = 0;
  const auto is_done = [&] {
    seen = count.value.load(std::memory_order_seq_cst);
    return done();
  };
  group.wait_until(
      is_done, [&](std::chrono::nanoseconds longest) { count.sleep(seen, longest); }, ranks, options);
}

/// Blocks of memory that all ranks of a host have mapped, to read and write: some ranks give one each. A block stays
/// until all ranks have let go of it, or are dead.
class SharedBlocks {
 public:
  /// Whether the ranks of a group can have some. The same on all. Local.
  static bool can_be(const sync::Group& group);
  /// Collective. `bytes`: of this rank's, zeros at first; 0: it gives none. Throws as SyncGroup::all_gather, and
  /// Error(no_space) on all ranks.
  SharedBlocks(sync::Group& group, std::uint64_t bytes, const WaitOptions& options);
  ~SharedBlocks();
  SharedBlocks& operator=(SharedBlocks&&) = delete;

  /// Null if that rank gives none.
  [[nodiscard]] std::byte* of(std::size_t rank) const noexcept { return blocks_[rank]; }

 private:
  std::unique_ptr<shm::OwnedSegment> own_;
  std::vector<shm::LeaseId> offered_;
  std::vector<std::unique_ptr<shm::Lease>> leases_;  // of the others' blocks
  std::vector<std::byte*> blocks_;
};

}  // namespace muster::collectives
