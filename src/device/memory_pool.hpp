// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that costs much to get (page-locked, or of a device), used again. Thread-safe; buffers go back to their pool
// when nobody holds them, and outlive it.

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
  struct Block {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    bool is_locked = true;  ///< of host memory: false where no more could be locked
    int device = 0;         ///< whose it is, or by way of which it was locked
  };
  /// `allocate` throws Error(no_space); `destroy` never throws, and may be called at exit.
  struct Source {
    std::function<Block(std::uint64_t bytes)> allocate;
    void (*destroy)(const Block&) noexcept;
  };
  explicit MemoryPool(Source source) : source_(std::move(source)) {}
  ~MemoryPool();
  MemoryPool& operator=(MemoryPool&&) = delete;

  struct Buffer {
    std::shared_ptr<std::byte> data;  ///< 256-byte aligned, not initialised
    std::uint64_t bytes = 0;
    bool is_locked = true;
  };
  /// At least that much: the smallest free block that is not twice too large, else fresh memory. Where there is none,
  /// or the pool would have more than `budget`, free blocks are given back before. Throws Error(no_space).
  Buffer take(std::uint64_t bytes, std::uint64_t budget = UINT64_MAX);
  /// Bytes in it and lent out.
  [[nodiscard]] std::uint64_t bytes() const;
  /// Gives free blocks back to the system; returns the bytes.
  std::uint64_t trim() noexcept;

 private:
  void give_back(const Block& block) noexcept;
  [[nodiscard]] Block fresh(std::uint64_t bytes);

  Source source_;
  const std::int64_t owner_ = os::process_id();
  mutable ForkMutex mutex_;
  std::vector<Block> free_;
  std::uint64_t lent_ = 0;
};

/// Page-locked memory of the host, for all devices; ordinary memory where no more can be locked. Where it is taken, a
/// device must be current.
std::shared_ptr<MemoryPool> make_pinned_pool();
/// One of them for calls that no group is part of; a group's trim() empties it, too.
const std::shared_ptr<MemoryPool>& pinned_pool_of_process();
/// Memory of a device.
std::shared_ptr<MemoryPool> make_device_pool(int device);

}  // namespace muster::cuda
