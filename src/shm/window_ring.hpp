// SPDX-License-Identifier: Apache-2.0
#pragma once
// WindowRing: windows of shared memory that several processes fill together and one takes. Window `turn % depth` is
// used for turn after turn:
//
//  1. A contributor waits until the owner is through with turn - depth (released), and writes its part.
//  2. It counts itself as arrived.
//  3. The owner waits until all contributors of the turn have arrived, and uses what they wrote.
//  4. It sets the count back and releases the turn. Turns are released in their order.
// There is no lock: whoever is killed leaves counts that the others can wait for in vain until they see that it is
// dead.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/sync/group.hpp"
#include "src/sync/region.hpp"

namespace muster::shm {

class WindowRing {
 public:
  static constexpr std::uint32_t most_depth = 16;

  /// The owner's, in its region. `depth` windows of `window_bytes` each (none: a ring that only counts progress), for
  /// `others` processes. Takes the memory now. Throws Error(no_space | unsupported).
  WindowRing(std::uint32_t depth, std::uint64_t window_bytes, std::size_t others);
  /// At a place in another process's. Throws Error(corrupt) if it is no ring.
  WindowRing(const sync::Region& region, std::uint64_t place);
  /// The windows' memory goes with the owner, and the rest with the last of all that have it.
  ~WindowRing();
  WindowRing& operator=(WindowRing&&) = delete;

  [[nodiscard]] std::uint64_t place() const noexcept { return place_; }
  [[nodiscard]] std::uint64_t window_bytes() const noexcept { return window_bytes_; }
  [[nodiscard]] std::span<std::byte> window(std::uint32_t turn) const;

  /// Step 1, without the writing. `owner`: its rank in the group. Throws as SyncGroup::wait_until.
  void claim(std::uint32_t turn, int owner, SyncGroup& group, const WaitOptions& options) const;
  /// Step 2. Orders what was written before it, streaming stores too.
  void arrive(std::uint32_t turn) const noexcept;
  /// Step 3. `others`: ranks that it waits for.
  void wait_full(std::uint32_t turn, std::uint32_t contributors, std::span<const int> others, SyncGroup& group,
                 const WaitOptions& options) const;
  /// Step 4.
  void release(std::uint32_t turn) const noexcept;

  /// Bytes that the owner has finished with: for who shows progress.
  void add_progress(std::uint64_t bytes) const noexcept;
  [[nodiscard]] std::uint64_t progress() const noexcept;
  /// A number that the owner raises, for others to wait for.
  void set_stage(std::uint32_t stage) const noexcept;
  [[nodiscard]] std::uint32_t stage() const noexcept;
  /// `on`: the owner's rank, where it is another one.
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

/// The other ranks of a group that share memory with this one.
std::vector<int> near_ranks(const SyncGroup& group);
/// Collective. The rings of `near`, by rank; `own`: what this rank has for them. Throws as SyncGroup::all_gather, and
/// as WindowRing.
std::vector<std::unique_ptr<WindowRing>> find_rings(sync::Group& group, std::span<const int> near,
                                                    const WindowRing& own, const WaitOptions& options);

}  // namespace muster::shm
