// SPDX-License-Identifier: Apache-2.0
#include "src/group/region.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <exception>

#include "muster/error.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/base/message.hpp"
#include "src/os/pages.hpp"
#include "src/trace/span.hpp"

namespace muster::group {
namespace {

constexpr std::uint64_t most_bytes = std::uint64_t{1} << 60;

std::uint64_t whole_pages(std::uint64_t bytes) {
  return os::whole_pages(bytes, os::page_size());
}

}  // namespace

std::shared_ptr<Region> Region::own() {
  struct OwnRegion {
    ForkMutex mutex;
    std::shared_ptr<Region> region;
    os::Mapping ring;  // mapped until the process ends, because any thread may record
  };
  static constinit PerProcess<OwnRegion> own;
  OwnRegion& mine = *own;
  const std::lock_guard lock(mine.mutex);
  if (!mine.region) {
    mine.region = std::make_shared<Region>(os::default_backing());
    mine.ring = mine.region->hold_ring();
  }
  return mine.region;
}

void Region::show_own() noexcept {
  try {
    (void)own();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): others then see no phase of this process
  }
}

os::Mapping Region::hold_ring() noexcept {
  try {
    (void)take(trace::ring_bytes);
    if (backing_ == os::Backing::posix) os::reserve(*memory_, 0, trace::ring_bytes);
    os::Mapping ring(*memory_, os::Access::read_write, 0, trace::ring_bytes);
    trace::keep_ring_in(ring.data());
    return ring;
  } catch (const std::exception&) {
    return {};  // other processes then cannot see the phase of this one
  }
}

Region::Region(os::Backing backing)
    : backing_(backing),
      size_(std::min(most_bytes, os::largest_file())),
      next_(os::page_size()),  // place 0 is reserved: it means "no place"
      memory_(std::make_shared<const os::Fd>(os::create_shared_memory(size_, backing))) {}

Region::Region(os::Fd memory)
    : size_(os::shared_memory_size(memory)),
      is_shared_(true),
      memory_(std::make_shared<const os::Fd>(std::move(memory))) {}

std::shared_ptr<Region> Region::shared(os::Backing backing) {
  auto region = std::make_shared<Region>(backing);
  region->is_shared_ = true;
  region->check_room(os::page_size(), region->size_);
  if (backing == os::Backing::posix) os::reserve(*region->memory_, 0, os::page_size());
  region->head().must_reserve = backing == os::Backing::posix ? 1 : 0;
  region->head().next.store(os::page_size(), std::memory_order_relaxed);
  return region;
}

std::shared_ptr<const os::Fd> Region::memory() const {
  const std::lock_guard lock(mutex_);
  if (!memory_) throw Error(ErrorKind::peer_lost, "shared memory: mapping it: the rank that owns it has died");
  return memory_;
}

Region::RegionHead& Region::head() {
  const std::lock_guard lock(mutex_);
  if (!first_page_) first_page_ = os::Mapping(*memory_, os::Access::read_write, 0, os::page_size());
  return *reinterpret_cast<RegionHead*>(first_page_.data());
}

bool Region::must_reserve() {
  return head().must_reserve != 0;
}

void Region::let_go() noexcept {
  const std::lock_guard lock(mutex_);
  memory_ = nullptr;
}

std::uint64_t Region::room() {
  return size_ - std::min(size_, next().load(std::memory_order_relaxed));
}

void Region::check(std::uint64_t bytes) {
  check_room(bytes, room());
}

void Region::check_room(std::uint64_t bytes, std::uint64_t room) const {
  if (whole_pages(bytes) > room)
    throw Error(ErrorKind::out_of_space,
                fmt::format("shared memory: needed {}, but RLIMIT_FSIZE allows this process {} in its lifetime, of "
                            "which {} are left. Raise it before the job starts (ulimit -f)",
                            byte_text(bytes), byte_text(size_), byte_text(room)));
}

std::uint64_t Region::take(std::uint64_t bytes) {
  std::atomic<std::uint64_t>& next = this->next();
  std::uint64_t place = next.load(std::memory_order_relaxed);
  do check_room(bytes, size_ - std::min(size_, place));
  while (!next.compare_exchange_weak(place, place + whole_pages(bytes), std::memory_order_relaxed));
  return place;
}

}  // namespace muster::group
