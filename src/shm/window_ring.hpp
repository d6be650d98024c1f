// SPDX-License-Identifier: Apache-2.0
#pragma once
// WindowRing: windows of shared memory that several processes fill together and one process reads. Window `turn %
// depth` is used for each turn in sequence:
//
//  1. A contributor waits until the owner has released turn - depth, and writes its part.
//  2. The contributor increments the count of arrivals.
//  3. The owner waits until all contributors of the turn have arrived, and reads the window.
//  4. The owner resets the count and releases the turn. Turns are released in order.
// There is no lock. If a process is killed, the others wait for its count until they detect that it is dead.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/group/group.hpp"
#include "src/group/region.hpp"

namespace muster::shm {

class WindowRing {
 public:
  static constexpr std::uint32_t most_depth = 16;

  /// Creates a ring in the owner's region: `depth` windows of `window_bytes` each, for `others` other processes. With 0
  /// windows the ring only counts progress. Takes the memory now. Throws Error(no_space | unsupported).
  WindowRing(std::uint32_t depth, std::uint64_t window_bytes, std::size_t others);
  /// Maps the ring at a place in another process's region. Throws Error(corrupt) if it is not a ring.
  WindowRing(const group::Region& region, std::uint64_t place);
  /// The owner frees the memory of the windows. The last process that has the ring frees the rest.
  ~WindowRing();
  WindowRing& operator=(WindowRing&&) = delete;

  [[nodiscard]] std::uint64_t place() const noexcept { return place_; }
  [[nodiscard]] std::uint64_t window_bytes() const noexcept { return window_bytes_; }
  [[nodiscard]] std::span<std::byte> window(std::uint32_t turn) const;

  /// Step 1, without the write. `owner`: the owner's rank in the group. Throws as SyncGroup::wait_until.
  void claim(std::uint32_t turn, int owner, SyncGroup& group, const WaitOptions& options) const;
  /// Step 2. Orders earlier writes before the arrival, including streaming stores.
  void arrive(std::uint32_t turn) const noexcept;
  /// Step 3. `others`: the ranks that it waits for.
  void wait_full(std::uint32_t turn, std::uint32_t contributors, std::span<const int> others, SyncGroup& group,
                 const WaitOptions& options) const;
  /// Step 4.
  void release(std::uint32_t turn) const noexcept;

  /// Adds bytes that the owner has processed, for processes that display progress.
  void add_progress(std::uint64_t bytes) const noexcept;
  [[nodiscard]] std::uint64_t progress() const noexcept;
  /// Sets a number that the owner raises and other processes wait for.
  void set_stage(std::uint32_t stage) const noexcept;
  [[nodiscard]] std::uint32_t stage() const noexcept;
  /// Waits until the stage is at least `least`. `on`: the owner's rank, unless the caller is the owner.
  void wait_stage(std::uint32_t least, std::span<const int> on, SyncGroup& group, const WaitOptions& options) const;

 private:
  struct Header;
  [[nodiscard]] Header& header() const noexcept;
  std::shared_ptr<const os::Fd> memory_;
  std::uint64_t place_;
  bool is_own_;
  std::int64_t pid_;
  os::Mapping mapping_;
  std::uint32_t depth_ = 0;
  std::uint64_t window_bytes_ = 0;
};

/// Returns the other ranks of a group that share memory with this one.
std::vector<int> near_ranks(const SyncGroup& group);
/// Collective. Returns the rings of the ranks `near`, by rank. `own`: the ring that this rank shares with them. Throws
/// as SyncGroup::all_gather and WindowRing.
std::vector<std::unique_ptr<WindowRing>> find_rings(group::Group& group, std::span<const int> near,
                                                    const WindowRing& own, const WaitOptions& options);

}  // namespace muster::shm
