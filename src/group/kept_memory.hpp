// SPDX-License-Identifier: Apache-2.0
#pragma once
// KeptMemory: private memory of this process that a group keeps from one export to the next.

#include <cstdint>
#include <mutex>
#include <span>

#include "src/base/fork_mutex.hpp"
#include "src/os/pages.hpp"

namespace muster::group {

/// One block, which one user has at a time. Thread-safe. An extension of a group (BaseGroup::extension).
class KeptMemory {
 public:
  /// Returns the size of the block.
  [[nodiscard]] std::uint64_t size() const {
    const std::lock_guard lock(mutex_);
    return memory_.size();
  }
  /// Returns `bytes` bytes of the block, which becomes larger if necessary. Its contents are undefined. The caller
  /// calls give_back() after use. Throws Error(out_of_space).
  std::span<std::byte> take(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (memory_.size() < bytes) {
      memory_ = os::PrivateMemory();
      memory_ = os::PrivateMemory(bytes);
    }
    is_taken_ = true;
    return {memory_.data(), bytes};
  }
  void give_back() noexcept {
    const std::lock_guard lock(mutex_);
    is_taken_ = false;
  }
  /// Frees the block unless it is in use. Returns the bytes that were freed.
  std::uint64_t trim() {
    const std::lock_guard lock(mutex_);
    if (is_taken_) return 0;
    const std::uint64_t bytes = memory_.size();
    memory_ = os::PrivateMemory();
    return bytes;
  }

 private:
  mutable ForkMutex mutex_;
  os::PrivateMemory memory_;
  bool is_taken_ = false;
};

}  // namespace muster::group
