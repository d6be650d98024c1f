// SPDX-License-Identifier: Apache-2.0
#include "src/shm/segment.hpp"

#include "muster/error.hpp"
#include "src/os/futex.hpp"
#include "src/os/process.hpp"

namespace muster::shm {
namespace {

std::uint64_t fresh_id() {
  // Unique for the owner as long as it lives, which is as long as anybody asks.
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

OwnedSegment::OwnedSegment(std::uint64_t capacity, os::Backing backing)
    : memory_(os::create_shared_memory(header_bytes + capacity, backing)),
      mapping_(memory_, os::Access::read_write, 0, header_bytes + capacity),
      owner_pid_(os::process_id()) {
  header().magic = segment_magic;
  header().id = fresh_id();
}

OwnedSegment::~OwnedSegment() {
  if (!is_owner_process()) return;
  header().retired.store(1, std::memory_order_release);
  if (give_back_) os::punch_hole(memory_, header_bytes, capacity());
}

bool OwnedSegment::is_owner_process() const noexcept {
  return os::process_id() == owner_pid_;
}

RemoteSegment::RemoteSegment(const os::Fd& memory) : owner_pid_(os::process_id()) {
  const std::uint64_t bytes = os::shared_memory_size(memory);
  if (bytes <= header_bytes)
    throw Error(ErrorKind::corrupt, "another rank's shared memory is too small to be a segment");
  words_ = os::Mapping(memory, os::Access::read_write, 0, header_bytes);
  data_ = os::Mapping(memory, os::Access::read_only, header_bytes, bytes - header_bytes);
  id_ = header().id;
  if (header().magic != segment_magic) throw Error(ErrorKind::corrupt, "another rank's shared memory is no segment");
}

bool RemoteSegment::is_owner_process() const noexcept {
  return os::process_id() == owner_pid_;
}

void RemoteSegment::populate_known() noexcept {
  if (populated_ >= written_) return;
  data_.populate(os::Access::read_only, populated_, written_ - populated_);
  populated_ = written_;
}

SlotLease::~SlotLease() {
  if (!armed_ || !segment_->is_owner_process()) return;
  std::atomic<std::uint32_t>& released = segment_->header().released;
  released.store(use_, std::memory_order_release);
  os::futex_wake_all(released);
}

}  // namespace muster::shm
