// SPDX-License-Identifier: Apache-2.0
#pragma once
// BufferPool: memory into which tensors of other hosts are received, and from which tensors are sent. Buffers are
// reused, because page faults on fresh memory cost more time than the network.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/group/group.hpp"
#include "src/os/pages.hpp"
#include "src/os/process.hpp"
#include "src/os/shared_memory.hpp"

namespace muster::multihost {

/// Thread-safe. A buffer returns to the pool when its last owner releases it. A buffer may outlive the pool.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  /// Returns a page-aligned, uninitialised buffer, or null for 0 bytes. Uses free memory first: the pool grows only by
  /// the bytes that are missing. From now on the pool keeps at most `limit` free bytes. Throws Error(out_of_space).
  std::shared_ptr<std::byte> take(std::uint64_t bytes, std::uint64_t limit);
  /// Returns the bytes that have no owner.
  [[nodiscard]] std::uint64_t free_bytes() const;
  /// Returns the free bytes and the lent bytes together.
  [[nodiscard]] std::uint64_t bytes() const;
  /// Returns the maximum of bytes() since the last settle().
  [[nodiscard]] std::uint64_t peak() const;
  /// Returns free bytes beyond `most` to the system, those that have been unused longest first. Returns the number of
  /// bytes.
  std::uint64_t trim(std::uint64_t most);
  /// Stops counting the lent buffers; they are freed when their owners release them. Returns the bytes that remain in
  /// the pool.
  std::uint64_t settle();
  /// Returns the memory that the host still has. The value may be 50 ms old, because every exchange queries it.
  os::MemoryHeadroom headroom();

 private:
  struct LentBuffer;
  const std::int64_t owner_ = os::process_id();
  os::PrivateMemory find(std::uint64_t bytes);
  void give_back(os::PrivateMemory memory, std::uint64_t epoch) noexcept;
  std::uint64_t trim_locked(std::uint64_t most) noexcept;
  mutable ForkMutex mutex_;
  std::vector<os::PrivateMemory> free_;  // in the order of their last use
  std::uint64_t free_bytes_ = 0;
  std::uint64_t epoch_ = 0;  // buffers that were lent in an earlier epoch do not return
  std::uint64_t lent_ = 0;
  std::uint64_t peak_ = 0;
  std::uint64_t limit_ = UINT64_MAX;
  os::MemoryHeadroom headroom_;
  std::chrono::steady_clock::time_point looked_{};
};

/// Counts the parts of a stream that the root has released. Thread-safe.
using Credits = std::shared_ptr<std::atomic<std::uint64_t>>;
/// Returns a pointer to the buffer that adds a credit when its last owner releases it. The buffer is released before
/// the credit is added, because the sender may use the credit at once.
std::shared_ptr<std::byte> with_credit(std::shared_ptr<std::byte> buffer, const Credits& credits);

/// Returns the pool of the group, which the route keeps. Exchanges use it; parts of a stream use the pool of the
/// stream's companion group.
std::shared_ptr<BufferPool> buffer_pool_of(Group& group);

}  // namespace muster::multihost
