// SPDX-License-Identifier: Apache-2.0
#include "src/shm/segment.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/os/futex.hpp"
#include "src/os/pages.hpp"
#include "src/os/process.hpp"

namespace muster::shm {
namespace {

constexpr std::uint64_t block_bytes = 64 << 10;

// The states of a lease word other than 0. The upper bits hold the stamp.
constexpr std::uint32_t offered = 1;
constexpr std::uint32_t held = 2;
constexpr std::uint32_t word_of(LeaseId lease, std::uint32_t state) noexcept {
  return lease.stamp << 2 | state;
}

/// `data`: the mapping of the memory at `place`.
void write_fresh(const os::Fd& memory, std::uint64_t place, std::byte* data, std::uint64_t offset,
                 std::span<const std::byte> bytes) {
  // The place may have been created by a process without the file-size limit of this one.
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
    // All consecutive missing blocks are populated by one call.
    const std::uint64_t first = block;
    while (block < last && !blocks_[block]) blocks_[block++] = true;
    const std::uint64_t at = data_offset + first * block_bytes;
    if (at < mapping.size())
      mapping.populate(os::Access::read_write, at, std::min((block - first) * block_bytes, mapping.size() - at));
  }
}

namespace {

/// Segments that this process has dropped while they were lent.
struct Retired {
  ForkMutex mutex;
  std::vector<SegmentMemory> segments;
};

Retired& retired() {
  static constinit PerProcess<Retired> all;
  return *all;
}

void give_back_retired() {
  const std::lock_guard lock(retired().mutex);
  std::erase_if(retired().segments, [](SegmentMemory& segment) {
    if (segment.is_lent()) return false;
    segment.give_back();
    return true;
  });
}

}  // namespace

bool SegmentMemory::has_ended(LeaseId lease) const noexcept {
  return lease.stamp == 0 || header().leases[lease.word].load(std::memory_order_seq_cst) >> 2 != lease.stamp;
}

bool SegmentMemory::is_lent() noexcept {
  std::erase_if(lent, [&](const HeldLease& each) {
    if (has_ended(each.lease)) return true;
    if (!each.holder || !each.holder->is_dead()) return false;
    header().leases[each.lease.word].store(0, std::memory_order_seq_cst);
    return true;
  });
  return !lent.empty();
}

void SegmentMemory::punch() const noexcept {
  os::punch_hole(*memory, place + header_bytes, capacity());
}

void SegmentMemory::give_back() const noexcept {
  punch();
  if (header().users.fetch_sub(1, std::memory_order_acq_rel) == 1) os::punch_hole(*memory, place, mapping.size());
}

OwnedSegment::OwnedSegment(std::uint64_t capacity) {
  give_back_retired();
  const std::shared_ptr<group::Region> region = group::Region::own();
  memory_.owner_pid = os::process_id();
  memory_.memory = region->memory();
  memory_.place = region->take(header_bytes + capacity);
  memory_.mapping = os::Mapping(*memory_.memory, os::Access::read_write, memory_.place, header_bytes + capacity);
  if (region->backing() == os::Backing::posix) os::reserve(*memory_.memory, memory_.place, header_bytes + capacity);
  header().magic = segment_magic;
  header().capacity = capacity;
  header().users.store(1, std::memory_order_relaxed);
}

OwnedSegment::~OwnedSegment() {
  attachment_.reset();
  if (!is_owner_process()) return;
  // From now on, any process that ends a lease on the segment checks whether it was the last one.
  header().retired.store(1, std::memory_order_seq_cst);
  if (!is_lent()) {
    memory_.give_back();
    return;
  }
  try {
    const std::lock_guard lock(retired().mutex);
    retired().segments.push_back(std::move(memory_));
  } catch (const std::bad_alloc&) {
    // The holder of the lease frees the memory, unless it is killed.
  }
}

bool OwnedSegment::is_owner_process() const noexcept {
  return os::process_id() == memory_.owner_pid;
}

void OwnedSegment::reserve() {
  os::reserve(*memory_.memory, memory_.place + header_bytes, capacity());
}

void OwnedSegment::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  write_fresh(*memory_.memory, memory_.place + header_bytes, data(), offset, bytes);
}

LeaseId OwnedSegment::offer(std::uint32_t word, std::shared_ptr<const group::PeerLiveness> holder) {
  stamp_ = stamp_ % ((1U << 30) - 1) + 1;
  const LeaseId lease{word, stamp_};
  std::erase_if(memory_.lent, [word](const SegmentMemory::HeldLease& each) { return each.lease.word == word; });
  memory_.lent.push_back({lease, std::move(holder)});
  header().leases[word].store(word_of(lease, offered), std::memory_order_release);
  return lease;
}

void OwnedSegment::withdraw(LeaseId lease) noexcept {
  std::uint32_t word = word_of(lease, offered);
  if (is_owner_process()) header().leases[lease.word].compare_exchange_strong(word, 0, std::memory_order_seq_cst);
}

void OwnedSegment::sleep(LeaseId lease, std::chrono::nanoseconds longest) noexcept {
  const std::atomic<std::uint32_t>& word = header().leases[lease.word];
  header().sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = word.load(std::memory_order_seq_cst);
  if (!has_ended(lease)) os::futex_wait(word, seen, longest);
  header().sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

RemoteSegment::RemoteSegment(const group::Region& region, std::uint64_t place, os::Access access)
    : memory_(region.memory()), place_(place), access_(access), owner_pid_(os::process_id()) {
  const auto is_inside = [&](std::uint64_t bytes) { return bytes < region.size() && place <= region.size() - bytes; };
  if (place == 0 || place % os::page_size() != 0 || !is_inside(header_bytes))
    throw Error(ErrorKind::corrupt, "malformed message: it names an address outside the shared memory of its sender");
  words_ = os::Mapping(*memory_, os::Access::read_write, place, header_bytes);
  const std::uint64_t capacity = header().capacity;
  if (header().magic != segment_magic || capacity == 0 || capacity > region.size() - header_bytes ||
      !is_inside(header_bytes + capacity))
    throw Error(ErrorKind::corrupt, "malformed message: it names a segment that its sender does not have");
  data_ = os::Mapping(*memory_, access, place + header_bytes, capacity);
  header().users.fetch_add(1, std::memory_order_relaxed);
}

RemoteSegment::~RemoteSegment() {
  if (is_owner_process() && header().users.fetch_sub(1, std::memory_order_acq_rel) == 1)
    os::punch_hole(*memory_, place_, header_bytes + capacity());
}

std::shared_ptr<RemoteSegment> RemoteSegments::at(const group::BaseGroup& group, int owner, std::uint64_t place,
                                                  os::Access access) {
  if (auto segment = known(owner, place); segment && segment->access() >= access) return segment;
  forget_retired();
  const auto region = owner == group.rank() ? group::Region::own() : group.region_of(owner);
  auto segment = std::make_shared<RemoteSegment>(*region, place, access);
  segments_.insert_or_assign({owner, place}, segment);
  return segment;
}

std::shared_ptr<RemoteSegment> RemoteSegments::known(int owner, std::uint64_t place) const {
  const auto found = segments_.find({owner, place});
  return found == segments_.end() ? nullptr : found->second;
}

void RemoteSegments::forget_retired() {
  std::erase_if(segments_, [](const auto& each) {
    return each.second.use_count() == 1 && each.second->header().retired.load(std::memory_order_acquire) != 0;
  });
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

void RemoteSegment::populate_known(std::uint64_t bytes) noexcept {
  const std::uint64_t end = std::min(bytes, written_);
  if (populated_ >= end) return;
  data_.populate(os::Access::read_only, populated_, end - populated_);
  populated_ = end;
}

Lease::Lease(std::shared_ptr<const RemoteSegment> segment, LeaseId id) : segment_(std::move(segment)), id_(id) {
  std::uint32_t word = word_of(id, offered);
  if (id.word >= lease_words || id.stamp == 0 ||
      !segment_->header().leases[id.word].compare_exchange_strong(word, word_of(id, held), std::memory_order_seq_cst))
    throw Error(ErrorKind::corrupt, "malformed message: the tensor is not offered for a lease");
}

void Lease::watch(std::vector<std::span<const std::byte>> parts, std::uint64_t hash, std::string owner) {
  parts_ = std::move(parts);
  hash_ = hash;
  owner_ = std::move(owner);
}

Lease::~Lease() {
  if (!segment_->is_owner_process()) return;
  if (!parts_.empty() && hash_parts(parts_) != hash_)
    log(LogLevel::error,
        owner_ + " wrote to arena tensors during a lease: the tensors that the root read may be inconsistent");
  std::atomic<std::uint32_t>& word = segment_->header().leases[id_.word];
  std::uint32_t mine = word_of(id_, held);
  if (word.compare_exchange_strong(mine, 0, std::memory_order_seq_cst) &&
      segment_->header().sleepers.load(std::memory_order_seq_cst) != 0)
    os::futex_wake_all(word);
  segment_->lease_ended();
}

std::uint64_t hash_parts(std::span<const std::span<const std::byte>> parts) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (const auto& part : parts) XXH3_64bits_update(&state, part.data(), part.size());
  return XXH3_64bits_digest(&state);
}

}  // namespace muster::shm
