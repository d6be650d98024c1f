// SPDX-License-Identifier: Apache-2.0
#pragma once
// Regions: shared memory that is handed to the other ranks of the host when they meet. A region is one sparse file.
// What ranks share later on is a place in it, told as a number: no operation needs another file descriptor.
//
// Places are never used twice, so that whoever looks late at one finds zeros, and nobody takes one thing for another.
// There is room for that: memory is taken for what is touched alone.

#include <atomic>
#include <cstdint>
#include <memory>

#include "src/base/fork_mutex.hpp"
#include "src/os/shared_memory.hpp"

namespace muster::sync {

class Region {
 public:
  /// This process's, which its slots, arenas and windows lie in, and its ring of last operations at its begin. Made
  /// when it is first asked for; a forked child makes its own. Throws Error(no_space | unsupported).
  static std::shared_ptr<Region> own();
  /// Makes it, as far as that can be: what this process is in is seen by it, whether its ranks share memory or not.
  static void show_own() noexcept;
  /// A new one. Throws as own().
  explicit Region(os::Backing backing);
  /// A new one that everybody takes places of who has it: how far they go stands in its first page. Throws as own().
  static std::shared_ptr<Region> shared(os::Backing backing);
  /// One that another process has made. Throws Error(io).
  explicit Region(os::Fd memory);

  /// Throws Error(peer_lost) after let_go().
  [[nodiscard]] std::shared_ptr<const os::Fd> memory() const;
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// Of one that this process has made.
  [[nodiscard]] os::Backing backing() const noexcept { return backing_; }
  /// Whether places have to be reserved before they are touched. Throws as take().
  [[nodiscard]] bool must_reserve();

  /// The maker's, and everybody's of a shared one: a place for so many bytes. No memory is taken yet. Throws
  /// Error(no_space) if a limit of the size of files (RLIMIT_FSIZE) leaves no room.
  std::uint64_t take(std::uint64_t bytes);
  /// Throws where take() would.
  void check(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t room();

  /// The process that has made it is dead: its memory goes with the last part of it that is still mapped somewhere.
  void let_go() noexcept;

 private:
  /// What stands in the first page of a shared one.
  struct Head {
    std::atomic<std::uint64_t> next;
    std::uint32_t must_reserve;
  };
  Head& head();
  /// This process's own one begins with what it is in (src/trace/), for the others to see.
  os::Mapping hold_ring() noexcept;
  void check_room(std::uint64_t bytes, std::uint64_t room) const;
  /// The first place that has not been taken.
  std::atomic<std::uint64_t>& next() { return is_shared_ ? head().next : next_; }

  os::Backing backing_ = os::Backing::anonymous;
  std::uint64_t size_ = 0;
  std::atomic<std::uint64_t> next_{0};
  bool is_shared_ = false;
  mutable ForkMutex mutex_;
  std::shared_ptr<const os::Fd> memory_;
  os::Mapping first_page_;  // mapped when it is first needed
};

}  // namespace muster::sync
