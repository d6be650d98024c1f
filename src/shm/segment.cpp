// SPDX-License-Identifier: Apache-2.0
#include "src/shm/segment.hpp"

#include <algorithm>

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

constexpr std::uint64_t block_bytes = 64 << 10;

}  // namespace

void PopulatedBlocks::ensure(const os::Mapping& mapping, std::uint64_t data_offset, std::uint64_t begin,
                             std::uint64_t end) {
  if (begin >= end) return;
  const std::uint64_t last = (end + block_bytes - 1) / block_bytes;
  if (blocks_.size() < last) blocks_.resize(last);
  for (std::uint64_t block = begin / block_bytes; block < last; ++block) {
    if (blocks_[block]) continue;
    // All that are missing in a row at once.
    const std::uint64_t first = block;
    while (block < last && !blocks_[block]) blocks_[block++] = true;
    const std::uint64_t at = data_offset + first * block_bytes;
    if (at < mapping.size())
      mapping.populate(os::Access::read_write, at, std::min((block - first) * block_bytes, mapping.size() - at));
  }
}

OwnedSegment::OwnedSegment(std::uint64_t capacity, os::Backing backing)
    : memory_(os::create_shared_memory(header_bytes + capacity, backing)),
      mapping_(memory_, os::Access::read_write, 0, header_bytes + capacity),
      owner_pid_(os::process_id()) {
  header().magic = segment_magic;
  header().id = fresh_id();
}

OwnedSegment::~OwnedSegment() {
  attachment_.reset();
  if (!is_owner_process()) return;
  header().retired.store(1, std::memory_order_release);
  if (give_back_) os::punch_hole(memory_, header_bytes, capacity());
}

bool OwnedSegment::is_owner_process() const noexcept {
  return os::process_id() == owner_pid_;
}

RemoteSegment::RemoteSegment(const os::Fd& memory, os::Access access) : owner_pid_(os::process_id()) {
  const std::uint64_t bytes = os::shared_memory_size(memory);
  if (bytes <= header_bytes)
    throw Error(ErrorKind::corrupt, "another rank's shared memory is too small to be a segment");
  words_ = os::Mapping(memory, os::Access::read_write, 0, header_bytes);
  data_ = os::Mapping(memory, access, header_bytes, bytes - header_bytes);
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
