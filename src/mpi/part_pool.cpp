// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/part_pool.hpp"

#include <algorithm>
#include <new>

namespace muster::mpi {

/// Owns a buffer that somebody has, and gives it back.
struct PartPool::Lent {
  os::PrivateMemory memory;
  std::uint64_t epoch = 0;
  std::weak_ptr<PartPool> pool;
  Credits credits;

  ~Lent() {
    if (const auto alive = pool.lock()) alive->give_back(std::move(memory), epoch);
    // After the buffer: who sees the credit may take it.
    if (credits) credits->fetch_add(1, std::memory_order_release);
  }
};

void PartPool::set_size(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes == size_) return;
  size_ = bytes;
  ++epoch_;
  lent_ = 0;
  peak_ = 0;
  free_.clear();
}

std::shared_ptr<std::byte> PartPool::take(const Credits& credits) {
  auto lent = std::make_shared<Lent>();
  {
    const std::lock_guard lock(mutex_);
    lent->epoch = epoch_;
    if (!free_.empty()) {
      lent->memory = std::move(free_.back());
      free_.pop_back();
    } else {
      lent->memory = os::PrivateMemory(size_);
    }
    lent_ += size_;
    peak_ = std::max(peak_, lent_ + free_.size() * size_);
    lent->pool = weak_from_this();
  }
  lent->credits = credits;
  std::byte* data = lent->memory.data();
  return {std::move(lent), data};
}

std::uint64_t PartPool::bytes() const {
  const std::lock_guard lock(mutex_);
  return lent_ + free_.size() * size_;
}

std::uint64_t PartPool::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

std::uint64_t PartPool::trim() {
  const std::lock_guard lock(mutex_);
  const std::uint64_t bytes = free_.size() * size_;
  free_.clear();
  return bytes;
}

std::uint64_t PartPool::settle() {
  const std::lock_guard lock(mutex_);
  if (lent_ != 0) {
    ++epoch_;
    lent_ = 0;
  }
  peak_ = 0;
  return free_.size() * size_;
}

void PartPool::give_back(os::PrivateMemory memory, std::uint64_t epoch) noexcept {
  const std::lock_guard lock(mutex_);
  if (epoch != epoch_) return;
  lent_ -= size_;
  try {
    free_.push_back(std::move(memory));
  } catch (const std::bad_alloc&) {
    // It goes back to the system.
  }
}

}  // namespace muster::mpi
