// SPDX-License-Identifier: Apache-2.0
#pragma once
// Regions: shared memory that ranks of one host hand to each other at the rendezvous. A region is one sparse file.
// Memory that ranks share later is a place in it, sent as a number, so no operation needs another file descriptor.
//
// No place is used twice. A rank that reads a place late finds zeros and cannot mistake one object for another. The
// file is large enough for that, because only touched pages take memory.

#include <atomic>
#include <cstdint>
#include <memory>

#include "src/base/fork_mutex.hpp"
#include "src/os/shared_memory.hpp"

namespace muster::group {

class Region {
 public:
  /// Returns the region of this process. It holds the slots, arenas and windows of the process, and its ring of latest
  /// operations at the beginning. The first call creates it; a forked child creates its own. Throws Error(out_of_space
  /// | unsupported).
  static std::shared_ptr<Region> own();
  /// Creates own() if possible, so that other processes can see which operation this process is in. Called even if the
  /// ranks share no memory.
  static void show_own() noexcept;
  /// Creates a region. Throws as own().
  explicit Region(os::Backing backing);
  /// Creates a region in which every process that has it may take places; its first page holds the next free place.
  /// Throws as own().
  static std::shared_ptr<Region> shared(os::Backing backing);
  /// Opens a region that another process created. Throws Error(io).
  explicit Region(os::Fd memory);

  /// Throws Error(peer_lost) after let_go().
  [[nodiscard]] std::shared_ptr<const os::Fd> memory() const;
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// Returns the backing of a region that this process created.
  [[nodiscard]] os::Backing backing() const noexcept { return backing_; }
  /// Returns whether places must be reserved before they are touched. Throws as take().
  [[nodiscard]] bool must_reserve();

  /// Takes a place of that many bytes. Only the creator may call it, or any process if the region is shared. The call
  /// does not allocate memory. Throws Error(out_of_space) if a limit on file sizes (RLIMIT_FSIZE) leaves no room.
  std::uint64_t take(std::uint64_t bytes);
  /// Throws if take() would throw.
  void check(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t room();

  /// Called when the process that created the region is dead. Its memory is freed when the last mapped part is
  /// unmapped.
  void let_go() noexcept;

 private:
  /// The contents of the first page of a shared region.
  struct RegionHead {
    std::atomic<std::uint64_t> next;
    std::uint32_t must_reserve;
  };
  RegionHead& head();
  /// Maps the ring of latest operations (src/trace/) at the beginning of this process's own region, where other
  /// processes can read it.
  os::Mapping hold_ring() noexcept;
  void check_room(std::uint64_t bytes, std::uint64_t room) const;
  /// Returns the first place that has not been taken.
  std::atomic<std::uint64_t>& next() { return is_shared_ ? head().next : next_; }

  os::Backing backing_ = os::Backing::anonymous;
  std::uint64_t size_ = 0;
  std::atomic<std::uint64_t> next_{0};
  bool is_shared_ = false;
  mutable ForkMutex mutex_;
  std::shared_ptr<const os::Fd> memory_;
  os::Mapping first_page_;  // mapped at first use
};

}  // namespace muster::group
