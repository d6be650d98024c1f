// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that tensors of other hosts are received into and sent from: used again, because fresh memory costs page
// faults, more than the network does.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/os/pages.hpp"
#include "src/os/process.hpp"
#include "src/os/shared_memory.hpp"
#include "src/sync/group.hpp"

namespace muster::hosts {

/// Thread-safe. Buffers go back to it when nobody holds them, and outlive it.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  /// At the begin of a page, not initialised; null of no bytes. From free memory as far as there is some: the pool
  /// grows by no more than is missing. At most `limit` bytes stay free from now on. Throws Error(no_space).
  std::shared_ptr<std::byte> take(std::uint64_t bytes, std::uint64_t limit);
  /// Nobody holds them.
  [[nodiscard]] std::uint64_t free_bytes() const;
  /// Bytes in it and lent out.
  [[nodiscard]] std::uint64_t bytes() const;
  /// The most that it ever had, since it was settled.
  [[nodiscard]] std::uint64_t peak() const;
  /// Free bytes beyond `most` go back to the system, what was used longest ago first; returns how many went.
  std::uint64_t trim(std::uint64_t most);
  /// What is lent no longer counts, and goes when it is given back. Returns the bytes that stay.
  std::uint64_t settle();
  /// What the host still has, as of a moment ago: asked for in every exchange.
  os::MemoryHeadroom headroom();

 private:
  struct Lent;
  const std::int64_t owner_ = os::process_id();
  os::PrivateMemory find(std::uint64_t bytes);
  void give_back(os::PrivateMemory memory, std::uint64_t epoch) noexcept;
  std::uint64_t trim_locked(std::uint64_t most) noexcept;
  mutable ForkMutex mutex_;
  std::vector<os::PrivateMemory> free_;  // what was used last at the end
  std::uint64_t free_bytes_ = 0;
  std::uint64_t epoch_ = 0;  // what was lent in earlier ones does not come back
  std::uint64_t lent_ = 0;
  std::uint64_t peak_ = 0;
  std::uint64_t limit_ = UINT64_MAX;
  os::MemoryHeadroom headroom_;
  std::chrono::steady_clock::time_point looked_{};
};

/// Counts the parts of a stream that the first rank has let go of. Any thread.
using Credits = std::shared_ptr<std::atomic<std::uint64_t>>;
/// The buffer, whose last owner gives a credit: after the buffer itself, because who sees the credit may take it.
std::shared_ptr<std::byte> with_credit(std::shared_ptr<std::byte> buffer, const Credits& credits);

/// The one that the route keeps with a group: for its exchanges, or, of a stream's companion, for its parts.
std::shared_ptr<BufferPool> buffer_pool_of(SyncGroup& group);

}  // namespace muster::hosts
