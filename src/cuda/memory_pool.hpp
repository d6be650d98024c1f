// SPDX-License-Identifier: Apache-2.0
#pragma once
// MemoryPool: reuses memory that is expensive to allocate (page-locked memory, or memory of a device). Thread-safe. A
// buffer returns to its pool when its last owner releases it, and may outlive the pool.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/os/process.hpp"

namespace muster::cuda {

class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  struct PoolBlock {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    bool is_locked = true;  ///< for host memory: false if no more memory could be locked
    int device = 0;         ///< the device that owns the memory, or through which it was locked
  };
  /// `allocate` throws Error(out_of_space). `destroy` never throws, and may be called at exit.
  struct BlockSource {
    std::function<PoolBlock(std::uint64_t bytes)> allocate;
    void (*destroy)(const PoolBlock&) noexcept;
  };
  explicit MemoryPool(BlockSource source) : source_(std::move(source)) {}
  ~MemoryPool();
  MemoryPool& operator=(MemoryPool&&) = delete;

  struct Buffer {
    std::shared_ptr<std::byte> data;  ///< 256-byte aligned, not initialised
    std::uint64_t bytes = 0;
    bool is_locked = true;
  };
  /// Returns a buffer of at least `bytes`: the smallest free block that is at most twice as large, otherwise new
  /// memory. If there is none, or if the pool would exceed `budget`, frees unused blocks first. Throws
  /// Error(out_of_space).
  Buffer take(std::uint64_t bytes, std::uint64_t budget = UINT64_MAX);
  /// Returns the free bytes and the lent bytes together.
  [[nodiscard]] std::uint64_t bytes() const;
  /// Frees all unused blocks. Returns their size in bytes.
  std::uint64_t trim() noexcept;

 private:
  void give_back(const PoolBlock& block) noexcept;
  [[nodiscard]] PoolBlock fresh(std::uint64_t bytes);

  BlockSource source_;
  const std::int64_t owner_ = os::process_id();
  mutable ForkMutex mutex_;
  std::vector<PoolBlock> free_;
  std::uint64_t lent_ = 0;
};

/// Makes a pool of page-locked host memory for all devices. If no more memory can be locked, buffers are pageable
/// memory. A device must be current in take().
std::shared_ptr<MemoryPool> make_pinned_pool();
/// Returns a pool of page-locked memory for calls without a group. The trim() of a group empties it too.
const std::shared_ptr<MemoryPool>& pinned_pool_of_process();
/// Makes a pool of memory of a device.
std::shared_ptr<MemoryPool> make_device_pool(int device);

}  // namespace muster::cuda
