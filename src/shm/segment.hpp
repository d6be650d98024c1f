// SPDX-License-Identifier: Apache-2.0
#pragma once
// Segments: parts of a rank's region, as their owner and as the root use them. A segment is a header page followed by
// the data. Its memory is freed when its owner has dropped it and no lease on it is active. The holder of the last
// lease frees it, or the owner itself, which looks for dead holders whenever it creates a segment.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/group/group.hpp"
#include "src/group/region.hpp"
#include "src/os/shared_memory.hpp"

namespace muster::shm {

inline constexpr std::uint64_t header_bytes = 4096;
inline constexpr std::size_t lease_words = 256;
inline constexpr std::uint64_t segment_magic = 0x31474553'5453554dULL;  // "MUSTSEG1"

/// The header page. Processes other than the owner write only `users` and the lease words.
struct SegmentHeader {
  std::uint64_t magic;
  std::uint64_t capacity;
  std::atomic<std::uint32_t> users;                            // number of mappings
  std::atomic<std::uint32_t> retired;                          // not 0: the owner has dropped the segment
  std::atomic<std::uint32_t> sleepers;                         // number of threads that sleep on lease words
  std::array<std::atomic<std::uint32_t>, lease_words> leases;  // futexes; 0: no lease
};
static_assert(sizeof(SegmentHeader) <= header_bytes);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// The right of another rank to read a segment. The owner offers it. The other rank takes it, and returns it when it
/// has finished. Each of these steps is one atomic exchange of a word, so both sides agree about the state even if the
/// tensor exchange fails. A lease that has not been taken can be withdrawn. A lease that has been taken is held.
struct LeaseId {
  std::uint32_t word = 0;
  std::uint32_t stamp = 0;  // never 0; repeats in one word only after 2^30 leases
};

/// The parts of a segment that are in the page table of this process. A block is allocated and mapped just before it is
/// written, which costs a fraction of faulting it in page by page.
class PopulatedBlocks {
 public:
  /// Populates [begin, end) of the data in `mapping`; the data begins at `data_offset` of the mapping.
  void ensure(const os::Mapping& mapping, std::uint64_t data_offset, std::uint64_t begin, std::uint64_t end);
  /// Called when the memory has been freed: no block is present any more.
  void forget() noexcept { blocks_.clear(); }

 private:
  std::vector<bool> blocks_;
};

/// The part of a segment that remains after its owner has dropped it while it is lent: its place, mapped with its
/// header.
struct SegmentMemory {
  struct HeldLease {
    LeaseId lease;
    std::shared_ptr<const group::PeerLiveness> holder;  // null: this process
  };
  std::shared_ptr<const os::Fd> memory;
  std::uint64_t place = 0;
  os::Mapping mapping;
  std::int64_t owner_pid = 0;
  std::vector<HeldLease> lent;

  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(mapping.data()); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return mapping.size() - header_bytes; }
  [[nodiscard]] bool has_ended(LeaseId lease) const noexcept;
  /// Returns whether any lease is active. Leases of dead ranks are ended first.
  bool is_lent() noexcept;
  /// Frees the memory of the data, which then reads as zero.
  void punch() const noexcept;
  /// Frees the segment, which its owner no longer uses.
  void give_back() const noexcept;
};

/// A segment that this process created.
class OwnedSegment {
 public:
  /// Creates a segment for `capacity` bytes of data. Throws Error(out_of_space | unsupported).
  explicit OwnedSegment(std::uint64_t capacity);
  /// Frees the memory; if leases are active, it is freed when they have ended.
  ~OwnedSegment();
  OwnedSegment& operator=(OwnedSegment&&) = delete;

  [[nodiscard]] std::uint64_t place() const noexcept { return memory_.place; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return memory_.capacity(); }
  [[nodiscard]] SegmentHeader& header() const noexcept { return memory_.header(); }
  [[nodiscard]] std::byte* data() const noexcept { return memory_.mapping.data() + header_bytes; }
  [[nodiscard]] const os::Mapping& mapping() const noexcept { return memory_.mapping; }
  /// Returns whether this process created it. A forked child did not, and must not write into it.
  [[nodiscard]] bool is_owner_process() const noexcept;

  /// Reserves memory for all of the data, if a full mount could otherwise cause a failure later. Throws
  /// Error(out_of_space).
  void reserve();
  /// Writes into fresh memory. Throws Error(out_of_space | io).
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  void punch() noexcept { memory_.punch(); }

  /// Offers a lease with that word, whose previous lease must have ended. `holder`: the rank that may take it; null:
  /// this process keeps it.
  LeaseId offer(std::uint32_t word, std::shared_ptr<const group::PeerLiveness> holder);
  /// Ends a lease that has not been taken. A lease that has been taken stays.
  void withdraw(LeaseId lease) noexcept;
  /// Returns true if the lease has ended or never existed. Any thread.
  [[nodiscard]] bool has_ended(LeaseId lease) const noexcept { return memory_.has_ended(lease); }
  /// Sleeps until the lease has ended, at most `longest`. Any thread.
  void sleep(LeaseId lease, std::chrono::nanoseconds longest) noexcept;
  bool is_lent() noexcept { return memory_.is_lent(); }
  /// Returns whether all leases have ended, without checking whether their holders are dead.
  [[nodiscard]] bool is_given_back() const noexcept {
    return std::ranges::all_of(memory_.lent, [this](const auto& each) { return has_ended(each.lease); });
  }
  [[nodiscard]] const std::vector<SegmentMemory::HeldLease>& lent() const noexcept { return memory_.lent; }

  /// Attaches an object that is destroyed before the memory is freed or unmapped, for example a lock on its pages. A
  /// segment has one attachment; a later one replaces it.
  void attach(std::shared_ptr<void> attachment) noexcept { attachment_ = std::move(attachment); }
  [[nodiscard]] const std::shared_ptr<void>& attachment() const noexcept { return attachment_; }

 private:
  SegmentMemory memory_;
  std::uint32_t stamp_ = 0;
  std::shared_ptr<void> attachment_;
};

/// Another rank's segment, mapped here. The data is mapped for reading, or for writing if the owner lets other ranks
/// write into it. The header is mapped for writing.
class RemoteSegment {
 public:
  /// Maps the segment at a place in its owner's region. Throws Error(corrupt) if no segment exists there,
  /// Error(out_of_space) if it cannot be mapped, and Error(peer_lost).
  RemoteSegment(const group::Region& region, std::uint64_t place, os::Access access = os::Access::read_only);
  ~RemoteSegment();
  RemoteSegment& operator=(RemoteSegment&&) = delete;

  [[nodiscard]] std::uint64_t capacity() const noexcept { return data_.size(); }
  [[nodiscard]] const std::byte* data() const noexcept { return data_.data(); }
  /// Returns the mapping of the data. It is writable if the segment was mapped with write access.
  [[nodiscard]] const os::Mapping& mapping() const noexcept { return data_; }
  [[nodiscard]] os::Access access() const noexcept { return access_; }
  [[nodiscard]] PopulatedBlocks& populated() noexcept { return blocks_; }
  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(words_.data()); }
  [[nodiscard]] bool is_owner_process() const noexcept;
  /// Writes into fresh memory of a segment that is mapped with write access. Throws Error(out_of_space | io).
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  /// Called when a lease has ended: frees the memory if it was the last lease and the owner has dropped the segment.
  void lease_ended() const noexcept;

  /// Adds the first `bytes` bytes of the data to the page table, once, and only the part that an earlier use has
  /// written.
  void populate_known(std::uint64_t bytes) noexcept;
  void note_written(std::uint64_t bytes) noexcept { written_ = std::max(written_, bytes); }

 private:
  std::shared_ptr<const os::Fd> memory_;
  std::uint64_t place_;
  os::Access access_;
  os::Mapping words_;
  os::Mapping data_;
  std::uint64_t written_ = 0;
  std::uint64_t populated_ = 0;
  PopulatedBlocks blocks_;
  std::int64_t owner_pid_;
};

/// The segments of other ranks that this process has mapped.
class RemoteSegments {
 public:
  /// Returns the segment of `owner` at a place in its region. Maps it at the first call, and again if write access is
  /// requested later. Throws as RemoteSegment.
  std::shared_ptr<RemoteSegment> at(const group::BaseGroup& group, int owner, std::uint64_t place,
                                    os::Access access = os::Access::read_only);
  /// Returns null if it is not mapped.
  [[nodiscard]] std::shared_ptr<RemoteSegment> known(int owner, std::uint64_t place) const;
  /// Unmaps the segments that their owners have dropped and no lease holds, because only the mapping keeps their
  /// memory.
  void forget_retired();
  /// Unmaps all segments of that rank.
  void forget(int owner) {
    std::erase_if(segments_, [&](const auto& each) { return each.first.first == owner; });
  }

 private:
  std::map<std::pair<int, std::uint64_t>, std::shared_ptr<RemoteSegment>> segments_;  // by owner and place
};

/// A lease that this process has taken. The destructor returns it: noexcept, on any thread, without effect in a forked
/// child.
class Lease {
 public:
  /// Throws Error(corrupt) if the lease is not offered, or no longer offered.
  Lease(std::shared_ptr<const RemoteSegment> segment, LeaseId id);
  ~Lease();
  Lease& operator=(Lease&&) = delete;
  [[nodiscard]] const RemoteSegment& segment() const noexcept { return *segment_; }

  /// Debug mode: the leased bytes must have this hash when the lease ends. Otherwise a log message reports that `owner`
  /// wrote them.
  void watch(std::vector<std::span<const std::byte>> parts, std::uint64_t hash, std::string owner);

 private:
  std::shared_ptr<const RemoteSegment> segment_;
  LeaseId id_;
  std::vector<std::span<const std::byte>> parts_;
  std::uint64_t hash_ = 0;
  std::string owner_;
};

/// Returns one hash over several pieces, in order.
std::uint64_t hash_parts(std::span<const std::span<const std::byte>> parts);

}  // namespace muster::shm
