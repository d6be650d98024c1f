// SPDX-License-Identifier: Apache-2.0
#include "src/shm/segment.hpp"

#include <algorithm>
#include <cstring>

#include "muster/error.hpp"
#include "src/os/futex.hpp"
#include "src/os/pages.hpp"
#include "src/os/process.hpp"

namespace muster::shm {
namespace {

constexpr std::uint64_t block_bytes = 64 << 10;

/// `data`: the mapping of what begins at `place`.
void write_fresh(const os::Fd& memory, std::uint64_t place, std::byte* data, std::uint64_t offset,
                 std::span<const std::byte> bytes) {
  // The place is another process's, which may have had no limit.
  if (place + offset + bytes.size() > os::largest_file())
    std::memcpy(data + offset, bytes.data(), bytes.size());
  else
    os::write_at(memory, place + offset, bytes);
}

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

OwnedSegment::OwnedSegment(std::uint64_t capacity) : owner_pid_(os::process_id()) {
  const std::shared_ptr<sync::Region> region = sync::Region::own();
  memory_ = region->memory();
  place_ = region->take(header_bytes + capacity);
  if (region->backing() == os::Backing::posix) os::reserve(*memory_, place_, header_bytes + capacity);
  mapping_ = os::Mapping(*memory_, os::Access::read_write, place_, header_bytes + capacity);
  header().magic = segment_magic;
  header().capacity = capacity;
  header().users.store(1, std::memory_order_relaxed);
}

OwnedSegment::~OwnedSegment() {
  attachment_.reset();
  if (!is_owner_process()) return;
  retire();
  if (give_back_) punch();
  if (header().users.fetch_sub(1, std::memory_order_acq_rel) == 1) os::punch_hole(*memory_, place_, mapping_.size());
}

bool OwnedSegment::is_owner_process() const noexcept {
  return os::process_id() == owner_pid_;
}

void OwnedSegment::reserve() {
  os::reserve(*memory_, place_ + header_bytes, capacity());
}

void OwnedSegment::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  write_fresh(*memory_, place_ + header_bytes, data(), offset, bytes);
}

void OwnedSegment::punch() noexcept {
  os::punch_hole(*memory_, place_ + header_bytes, capacity());
}

void OwnedSegment::retire() noexcept {
  if (is_owner_process()) header().retired.store(1, std::memory_order_seq_cst);
}

RemoteSegment::RemoteSegment(const sync::Region& region, std::uint64_t place, os::Access access)
    : memory_(region.memory()), place_(place), owner_pid_(os::process_id()) {
  const auto is_inside = [&](std::uint64_t bytes) { return bytes < region.size() && place <= region.size() - bytes; };
  if (place == 0 || place % os::page_size() != 0 || !is_inside(header_bytes))
    throw Error(ErrorKind::corrupt, "another rank names a place outside its shared memory");
  words_ = os::Mapping(*memory_, os::Access::read_write, place, header_bytes);
  const std::uint64_t capacity = header().capacity;
  if (header().magic != segment_magic || capacity == 0 || capacity > region.size() - header_bytes ||
      !is_inside(header_bytes + capacity))
    throw Error(ErrorKind::corrupt, "another rank's shared memory has no segment where it names one");
  data_ = os::Mapping(*memory_, access, place + header_bytes, capacity);
  header().users.fetch_add(1, std::memory_order_relaxed);
}

RemoteSegment::~RemoteSegment() {
  if (is_owner_process() && header().users.fetch_sub(1, std::memory_order_acq_rel) == 1)
    os::punch_hole(*memory_, place_, header_bytes + capacity());
}

void RemoteSegment::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  write_fresh(*memory_, place_ + header_bytes, data_.data(), offset, bytes);
}

void RemoteSegment::lease_ended() const noexcept {
  if (header().retired.load(std::memory_order_seq_cst) == 0) return;
  const bool is_lent = std::ranges::any_of(
      header().leases, [](const auto& lease) { return lease.load(std::memory_order_seq_cst) != 0; });
  if (!is_lent) os::punch_hole(*memory_, place_ + header_bytes, capacity());
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
  released.store(use_, std::memory_order_seq_cst);
  os::futex_wake_all(released);
  segment_->lease_ended();
}

}  // namespace muster::shm
