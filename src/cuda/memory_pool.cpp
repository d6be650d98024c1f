// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/memory_pool.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "muster/error.hpp"
#include "src/base/message.hpp"
#include "src/cuda/driver.hpp"

namespace muster::cuda {
namespace {

constexpr std::uint64_t least = 64 << 10;

std::uint64_t rounded(std::uint64_t bytes) {
  return (std::max(bytes, least) + least - 1) / least * least;
}

void free_pinned(const MemoryPool::PoolBlock& block) noexcept {
  if (!block.is_locked) return std::free(block.data);
  on_device_if_there(block.device, [&](const DriverFunctions& functions) { functions.host_free(block.data); });
}

void free_on_device(const MemoryPool::PoolBlock& block) noexcept {
  on_device_if_there(block.device,
                     [&](const DriverFunctions& functions) { functions.free(device_pointer(block.data)); });
}

}  // namespace

MemoryPool::~MemoryPool() {
  trim();
}

MemoryPool::PoolBlock MemoryPool::fresh(std::uint64_t bytes) {
  try {
    return source_.allocate(rounded(bytes));
  } catch (const Error&) {
    if (trim() == 0) throw;
  }
  return source_.allocate(rounded(bytes));
}

MemoryPool::Buffer MemoryPool::take(std::uint64_t bytes, std::uint64_t budget) {
  PoolBlock chosen;
  {
    const std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at)
      if (at->bytes >= bytes && at->bytes <= 2 * rounded(bytes) && (best == free_.end() || at->bytes < best->bytes))
        best = at;
    if (best != free_.end()) {
      chosen = *best;
      free_.erase(best);
    }
  }
  const std::uint64_t own = chosen.data == nullptr ? rounded(bytes) : chosen.bytes;
  const auto is_too_much = [&] { return own > budget - std::min(budget, this->bytes()); };
  if (is_too_much()) trim();
  if (is_too_much()) {
    if (chosen.data != nullptr) source_.destroy(chosen);
    throw Error(
        ErrorKind::out_of_space,
        fmt::format("page-locked memory for device tensors: needed {} in addition to {} that earlier results hold, but "
                    "the memory budget is {}. Gather less at a time, release earlier results, or raise memory_budget",
                    byte_text(own), byte_text(this->bytes()), byte_text(budget)));
  }
  if (chosen.data == nullptr) chosen = fresh(bytes);
  {
    const std::lock_guard lock(mutex_);
    lent_ += chosen.bytes;
  }
  try {
    const auto give_back = [weak = weak_from_this(), chosen, destroy = source_.destroy](std::byte*) {
      if (const auto pool = weak.lock())
        pool->give_back(chosen);
      else
        destroy(chosen);
    };
    return {{chosen.data, give_back}, chosen.bytes, chosen.is_locked};
  } catch (const std::bad_alloc&) {
    // The deleter has run, so the pool has the block again.
    throw Error(ErrorKind::out_of_space, "out of memory");
  }
}

std::uint64_t MemoryPool::bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t sum = lent_;
  for (const PoolBlock& block : free_) sum += block.bytes;
  return sum;
}

std::uint64_t MemoryPool::trim() noexcept {
  if (os::process_id() != owner_) return 0;
  std::vector<PoolBlock> gone;
  {
    const std::lock_guard lock(mutex_);
    gone.swap(free_);
  }
  std::uint64_t sum = 0;
  for (const PoolBlock& block : gone) {
    sum += block.bytes;
    source_.destroy(block);
  }
  return sum;
}

void MemoryPool::give_back(const PoolBlock& block) noexcept {
  // A forked child cannot call the driver, and the memory belongs to its parent.
  if (os::process_id() != owner_) return;
  try {
    const std::lock_guard lock(mutex_);
    lent_ -= block.bytes;
    free_.push_back(block);
    return;
  } catch (const std::bad_alloc&) {
    // The block is then not kept.
  }
  source_.destroy(block);
}

std::shared_ptr<MemoryPool> make_pinned_pool() {
  const auto allocate = [](std::uint64_t bytes) {
    MemoryPool::PoolBlock block{nullptr, bytes, true, current_device().value_or(0)};
    void* memory = nullptr;
    if (driver().host_allocate(&memory, bytes, host_alloc_portable) != Status::success) {
      block.is_locked = false;
      memory = std::aligned_alloc(least, bytes);
      if (memory == nullptr)
        throw Error(ErrorKind::out_of_space,
                    fmt::format("host memory for device tensors: allocating {}: out of memory", byte_text(bytes)));
    }
    block.data = static_cast<std::byte*>(memory);
    return block;
  };
  return std::make_shared<MemoryPool>(MemoryPool::BlockSource{allocate, free_pinned});
}

const std::shared_ptr<MemoryPool>& pinned_pool_of_process() {
  // Never destroyed, because objects that are destroyed at exit may still return buffers.
  static const auto* const pool = new std::shared_ptr<MemoryPool>(make_pinned_pool());
  return *pool;
}

std::shared_ptr<MemoryPool> make_device_pool(int device) {
  const auto allocate = [device](std::uint64_t bytes) {
    const Current current(device);
    DevicePointer pointer = 0;
    const Status status = driver().allocate(&pointer, bytes);
    if (status == Status::out_of_memory) {
      std::size_t free = 0;
      std::size_t total = 0;
      driver().memory_info(&free, &total);
      throw Error(ErrorKind::out_of_space,
                  fmt::format("device memory: needed {} on cuda:{}, {} of {} are free. Receive less at a time, release "
                              "earlier results, or gather to the host",
                              byte_text(bytes), device, byte_text(free), byte_text(total)));
    }
    check(status, fmt::format("allocating {} bytes on cuda:{}", bytes, device));
    return MemoryPool::PoolBlock{address_of(pointer), bytes, true, device};
  };
  return std::make_shared<MemoryPool>(MemoryPool::BlockSource{allocate, free_on_device});
}

}  // namespace muster::cuda
