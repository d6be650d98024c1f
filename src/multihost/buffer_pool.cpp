// SPDX-License-Identifier: Apache-2.0
#include "src/multihost/buffer_pool.hpp"

#include <algorithm>
#include <utility>

#include "muster/error.hpp"

namespace muster::multihost {
namespace {

// A smaller remainder is not split off; it stays at the end of the buffer.
constexpr std::uint64_t least_rest = 64 << 10;
// The pool frees the oldest buffers beyond this count.
constexpr std::size_t most_free = 256;
constexpr std::chrono::milliseconds headroom_age{50};

}  // namespace

/// A lent buffer. It returns to the pool when its last owner releases it.
struct BufferPool::LentBuffer {
  os::PrivateMemory memory;
  std::uint64_t epoch = 0;
  std::weak_ptr<BufferPool> pool;

  explicit LentBuffer(std::weak_ptr<BufferPool> from) noexcept : pool(std::move(from)) {}
  LentBuffer& operator=(LentBuffer&&) = delete;
  ~LentBuffer() {
    if (const auto owner = pool.lock()) owner->give_back(std::move(memory), epoch);
  }
};

std::shared_ptr<std::byte> BufferPool::take(std::uint64_t bytes, std::uint64_t limit) {
  if (bytes == 0) return nullptr;
  auto lent = std::make_shared<LentBuffer>(weak_from_this());
  const std::lock_guard lock(mutex_);
  limit_ = limit;
  const std::uint64_t before = lent_ + free_bytes_;
  lent->memory = find(bytes);
  lent->epoch = epoch_;
  lent_ += lent->memory.size();
  trim_locked(std::min(limit_, std::max(before, lent_) - lent_));
  peak_ = std::max(peak_, lent_ + free_bytes_);
  std::byte* const data = lent->memory.data();
  return {std::move(lent), data};
}

/// Returns a free buffer: the smallest one that is large enough, otherwise the largest one, grown, otherwise a new one.
os::PrivateMemory BufferPool::find(std::uint64_t bytes) {
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    const auto is_better = [&] {
      return best->size() < bytes ? at->size() > best->size() : at->size() >= bytes && at->size() <= best->size();
    };
    if (best == free_.end() || is_better()) best = at;
  }
  if (best == free_.end()) return os::PrivateMemory(bytes);
  os::PrivateMemory memory = std::move(*best);
  free_.erase(best);
  free_bytes_ -= memory.size();
  try {
    memory.grow(bytes);
  } catch (const Error&) {
    free_bytes_ += memory.size();
    free_.push_back(std::move(memory));
    throw;
  }
  if (memory.size() >= os::whole_pages(bytes, os::page_size()) + least_rest) {
    os::PrivateMemory rest = memory.split(bytes);
    free_bytes_ += rest.size();
    free_.push_back(std::move(rest));
  }
  return memory;
}

std::uint64_t BufferPool::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_bytes_;
}

std::uint64_t BufferPool::bytes() const {
  const std::lock_guard lock(mutex_);
  return lent_ + free_bytes_;
}

std::uint64_t BufferPool::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

std::uint64_t BufferPool::trim(std::uint64_t most) {
  const std::lock_guard lock(mutex_);
  return trim_locked(most);
}

std::uint64_t BufferPool::trim_locked(std::uint64_t most) noexcept {
  std::uint64_t gone = 0;
  std::size_t count = 0;
  while (count < free_.size() && (free_bytes_ - gone > most || free_.size() - count > most_free))
    gone += free_[count++].size();
  free_.erase(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(count));
  free_bytes_ -= gone;
  return gone;
}

os::MemoryHeadroom BufferPool::headroom() {
  {
    const std::lock_guard lock(mutex_);
    if (std::chrono::steady_clock::now() - looked_ <= headroom_age) return headroom_;
  }
  // This call reads files of the kernel. Other threads need not wait for it.
  const os::MemoryHeadroom headroom = os::memory_headroom(os::Backing::anonymous);
  const std::lock_guard lock(mutex_);
  headroom_ = headroom;
  looked_ = std::chrono::steady_clock::now();
  return headroom;
}

std::uint64_t BufferPool::settle() {
  const std::lock_guard lock(mutex_);
  ++epoch_;
  lent_ = 0;
  peak_ = 0;
  return free_bytes_;
}

void BufferPool::give_back(os::PrivateMemory memory, std::uint64_t epoch) noexcept {
  if (os::process_id() != owner_) return;  // a forked child only unmaps its copy
  const std::lock_guard lock(mutex_);
  if (epoch != epoch_) return;
  lent_ -= memory.size();
  const std::uint64_t bytes = memory.size();
  try {
    free_.push_back(std::move(memory));
    free_bytes_ += bytes;
  } catch (const std::bad_alloc&) {
    return;  // the memory is freed
  }
  trim_locked(limit_);
}

std::shared_ptr<std::byte> with_credit(std::shared_ptr<std::byte> buffer, const Credits& credits) {
  std::byte* const data = buffer.get();
  return {data, [buffer = std::move(buffer), credits](std::byte*) mutable {
            buffer.reset();
            credits->fetch_add(1, std::memory_order_release);
          }};
}

std::shared_ptr<BufferPool> buffer_pool_of(Group& group) {
  return group::inside(group).extension<BufferPool>();
}

}  // namespace muster::multihost
