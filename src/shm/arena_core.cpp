// SPDX-License-Identifier: Apache-2.0
#include "src/shm/arena_core.hpp"

#include "src/base/fork_mutex.hpp"
#include "src/base/message.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <new>
#include <shared_mutex>

#include "muster/shared_arena.hpp"
#include "src/os/pages.hpp"

namespace muster {
namespace detail {
namespace {

// Memory for the allocator's own data: its header, and a block header before each tensor.
constexpr std::uint64_t bookkeeping_bytes = 64 << 10;
constexpr std::uint64_t alignment = 64;

/// All arenas of this process, by address.
struct Registry {
  std::shared_mutex mutex;
  std::map<const std::byte*, std::weak_ptr<ArenaCore>> by_begin;
  std::atomic<std::size_t> count{0};  // read before the mutex is acquired
};

Registry& registry() {
  static constinit PerProcess<Registry> all;
  return *all;
}

}  // namespace

ArenaCore::ArenaCore(std::uint64_t capacity)
    : capacity_(capacity),
      segment_(os::whole_pages(capacity + capacity / 64 + bookkeeping_bytes, os::page_size())),
      buffer_(boost::interprocess::create_only, segment_.data(), segment_.capacity()) {}

std::shared_ptr<ArenaCore> ArenaCore::create(std::uint64_t capacity) {
  const os::MemoryHeadroom room = os::memory_headroom(group::Region::own()->backing());
  if (capacity > room.bytes)
    throw Error(ErrorKind::out_of_space, fmt::format("SharedArena: needed {}, available {} ({})", byte_text(capacity),
                                                     byte_text(room.bytes), os::to_string(room.limit)));
  std::shared_ptr<ArenaCore> core(new ArenaCore(capacity));
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  all.by_begin.emplace(core->segment_.data(), core);
  all.count.store(all.by_begin.size(), std::memory_order_release);
  return core;
}

ArenaCore::~ArenaCore() {
  if (!segment_.is_owner_process()) return;
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  all.by_begin.erase(segment_.data());
  all.count.store(all.by_begin.size(), std::memory_order_release);
}

std::optional<ArenaCore::ArenaRange> ArenaCore::find(const std::byte* data, std::uint64_t bytes) {
  Registry& all = registry();
  if (all.count.load(std::memory_order_acquire) == 0) return std::nullopt;
  // Declared before the lock, so that it is destroyed after the unlock. It may be the last owner, and the destructor of
  // an arena acquires the mutex.
  std::shared_ptr<ArenaCore> core;
  const std::shared_lock lock(all.mutex);
  auto after = all.by_begin.upper_bound(data);
  if (after == all.by_begin.begin()) return std::nullopt;
  core = std::prev(after)->second.lock();
  if (!core || !core->segment_.is_owner_process()) return std::nullopt;
  const auto offset = static_cast<std::uint64_t>(data - core->segment_.data());
  if (offset > core->segment_.capacity() || bytes > core->segment_.capacity() - offset) return std::nullopt;
  return ArenaRange{std::move(core), offset};
}

Tensor ArenaCore::allocate(DType dtype, Shape shape) {
  const std::uint64_t bytes = byte_size(dtype, shape);
  std::byte* data = nullptr;
  std::uint64_t free = 0;
  std::uint64_t waiting = 0;
  {
    const std::lock_guard lock(mutex_);
    reclaim();
    data =
        static_cast<std::byte*>(buffer_.allocate_aligned(std::max<std::uint64_t>(bytes, 1), alignment, std::nothrow));
    free = buffer_.get_free_memory();
    for (const Freed& block : freed_) waiting += block.bytes;
  }
  if (data == nullptr)
    throw Error(ErrorKind::out_of_space,
                fmt::format("SharedArena: needed {} in one piece: {} of {} are free, and a root still leases {} that "
                            "are freed. Release its results, or use a larger arena",
                            byte_text(bytes), byte_text(free), byte_text(capacity_), byte_text(waiting)));
  std::shared_ptr<const void> owner(static_cast<const void*>(data), [core = shared_from_this(), data, bytes](
                                                                        const void*) { core->release(data, bytes); });
  return {TensorView(dtype, std::move(shape), data), std::move(owner), data};
}

void ArenaCore::release(std::byte* data, std::uint64_t bytes) noexcept {
  // In a forked child the allocator's data still belongs to the parent.
  if (!segment_.is_owner_process()) return;
  const std::lock_guard lock(mutex_);
  if (!segment_.is_lent()) return buffer_.deallocate(data);
  try {
    std::vector<shm::LeaseId> leases;
    for (const auto& lent : segment_.lent()) leases.push_back(lent.lease);
    freed_.push_back({data, bytes, std::move(leases)});
  } catch (const std::bad_alloc&) {
    // The block stays allocated, because there is no memory to track its leases.
  }
}

void ArenaCore::reclaim() noexcept {
  (void)segment_.is_lent();  // ends leases of dead ranks
  std::erase_if(freed_, [&](Freed& block) {
    std::erase_if(block.leases, [&](shm::LeaseId lease) { return segment_.has_ended(lease); });
    if (!block.leases.empty()) return false;
    buffer_.deallocate(block.data);
    return true;
  });
}

std::uint64_t ArenaCore::available() {
  const std::lock_guard lock(mutex_);
  reclaim();
  return buffer_.get_free_memory();
}

std::uint64_t ArenaCore::waiting_for_leases() {
  const std::lock_guard lock(mutex_);
  reclaim();
  std::uint64_t waiting = 0;
  for (const Freed& block : freed_) waiting += block.bytes;
  return waiting;
}

shm::LeaseId ArenaCore::lend(std::shared_ptr<const group::PeerLiveness> holder) {
  const std::lock_guard lock(mutex_);
  (void)segment_.is_lent();
  for (std::uint32_t word = 0; word < shm::lease_words; ++word) {
    if (std::ranges::none_of(segment_.lent(), [&](const auto& lent) { return lent.lease.word == word; }))
      return segment_.offer(word, std::move(holder));
  }
  throw Error(
      ErrorKind::out_of_space,
      fmt::format(
          "SharedArena: roots hold {} results of this rank's arena tensors, which is the largest number. Release some",
          shm::lease_words));
}

}  // namespace detail

SharedArena::SharedArena(std::uint64_t capacity) : core_(detail::ArenaCore::create(capacity)) {}
SharedArena::SharedArena(SharedArena&&) noexcept = default;
SharedArena& SharedArena::operator=(SharedArena&&) noexcept = default;
SharedArena::~SharedArena() = default;

Tensor SharedArena::allocate(DType dtype, Shape shape) {
  return core_->allocate(dtype, std::move(shape));
}
std::uint64_t SharedArena::capacity() const noexcept {
  return core_->capacity();
}
std::uint64_t SharedArena::available() const {
  return core_->available();
}
std::uint64_t SharedArena::waiting_for_leases() const {
  return core_->waiting_for_leases();
}

}  // namespace muster
