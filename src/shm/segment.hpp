// SPDX-License-Identifier: Apache-2.0
#pragma once
// Segments: places in a rank's region as their owner and as the first rank see them. A page with a few words, then the
// data. The memory of a segment goes when its owner has dropped it and no lease on it is out. The holder of the last
// one gives it back, or the owner itself, which looks for dead holders whenever it makes a segment.

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

#include "src/os/shared_memory.hpp"
#include "src/sync/group.hpp"
#include "src/sync/region.hpp"

namespace muster::shm {

inline constexpr std::uint64_t header_bytes = 4096;
inline constexpr std::size_t lease_words = 256;
inline constexpr std::uint64_t segment_magic = 0x31474553'5453554dULL;  // "MUSTSEG1"

/// The first page. Others than the owner write only `users` and the words of leases.
struct SegmentHeader {
  std::uint64_t magic;
  std::uint64_t capacity;
  std::atomic<std::uint32_t> users;                            // mappings of it
  std::atomic<std::uint32_t> retired;                          // the owner has dropped the segment
  std::atomic<std::uint32_t> sleepers;                         // on the words of leases
  std::array<std::atomic<std::uint32_t>, lease_words> leases;  // futexes; 0: none is out
};
static_assert(sizeof(SegmentHeader) <= header_bytes);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// The right of another rank to look at what is in a segment. The owner offers it; the other takes it, and gives it
/// back when it is through. Each of the three is one exchange of a word, so that both sides agree about it whatever
/// becomes of the exchange of tensors: what has not been taken can be withdrawn, what has been taken is held.
struct LeaseId {
  std::uint32_t word = 0;
  std::uint32_t stamp = 0;  // not 0; that of an earlier lease of this word only after 2^30 of them
};

/// Which parts of a segment this process has put into its page table: memory is taken and mapped a block at a time,
/// just before it is written, which costs a fraction of faulting it in page by page.
class PopulatedBlocks {
 public:
  /// Makes [begin, end) of the data of `mapping` present; `data_offset` is where the data begins there.
  void ensure(const os::Mapping& mapping, std::uint64_t data_offset, std::uint64_t begin, std::uint64_t end);
  /// The memory was given back: nothing is present any more.
  void forget() noexcept { blocks_.clear(); }

 private:
  std::vector<bool> blocks_;
};

/// What stays of one after its owner has dropped it, as long as it is lent: its place, mapped with its header.
struct SegmentMemory {
  struct Lent {
    LeaseId lease;
    std::shared_ptr<const sync::PeerLiveness> holder;  // null: this process
  };
  std::shared_ptr<const os::Fd> memory;
  std::uint64_t place = 0;
  os::Mapping mapping;
  std::int64_t owner_pid = 0;
  std::vector<Lent> lent;

  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(mapping.data()); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return mapping.size() - header_bytes; }
  [[nodiscard]] bool has_ended(LeaseId lease) const noexcept;
  /// Whether any lease is out. Those of dead ranks are not: they are taken back.
  bool is_lent() noexcept;
  /// Gives the data's memory back; it reads as zero after it.
  void punch() const noexcept;
  /// The owner has no use for it any more.
  void give_back() const noexcept;
};

/// A segment that this process made.
class OwnedSegment {
 public:
  /// Room for `capacity` bytes of data. Throws Error(no_space | unsupported).
  explicit OwnedSegment(std::uint64_t capacity);
  /// Gives the memory back; if some of it is lent, once that ends.
  ~OwnedSegment();
  OwnedSegment& operator=(OwnedSegment&&) = delete;

  [[nodiscard]] std::uint64_t place() const noexcept { return memory_.place; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return memory_.capacity(); }
  [[nodiscard]] SegmentHeader& header() const noexcept { return memory_.header(); }
  [[nodiscard]] std::byte* data() const noexcept { return memory_.mapping.data() + header_bytes; }
  [[nodiscard]] const os::Mapping& mapping() const noexcept { return memory_.mapping; }
  /// This process made it (a forked child did not, and must not write into it).
  [[nodiscard]] bool is_owner_process() const noexcept;

  /// Memory for all of the data, where a full mount could refuse it later. Throws Error(no_space).
  void reserve();
  /// Writes into fresh memory. Throws Error(no_space | io).
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  void punch() noexcept { memory_.punch(); }

  /// A lease by that word, whose last one has ended. `holder`: the rank that may take it; null: this process keeps it.
  LeaseId offer(std::uint32_t word, std::shared_ptr<const sync::PeerLiveness> holder);
  /// Ends a lease that nobody has taken; one that is held stays.
  void withdraw(LeaseId lease) noexcept;
  /// Or it has never been. Any thread.
  [[nodiscard]] bool has_ended(LeaseId lease) const noexcept { return memory_.has_ended(lease); }
  /// Sleeps until the lease has ended, at most `longest`. Any thread.
  void sleep(LeaseId lease, std::chrono::nanoseconds longest) noexcept;
  bool is_lent() noexcept { return memory_.is_lent(); }
  /// Whether all leases have ended, without asking whether who holds one is dead.
  [[nodiscard]] bool is_given_back() const noexcept {
    return std::ranges::all_of(memory_.lent, [this](const auto& each) { return has_ended(each.lease); });
  }
  [[nodiscard]] const std::vector<SegmentMemory::Lent>& lent() const noexcept { return memory_.lent; }

  /// Something that has to go before the memory is given back or unmapped: a lock on its pages. One of them; a later
  /// one takes its place.
  void attach(std::shared_ptr<void> attachment) noexcept { attachment_ = std::move(attachment); }
  [[nodiscard]] const std::shared_ptr<void>& attachment() const noexcept { return attachment_; }

 private:
  SegmentMemory memory_;
  std::uint32_t stamp_ = 0;
  std::shared_ptr<void> attachment_;
};

/// Another rank's segment, mapped: data to read (or, where its owner lets others write into it, to write), the header's
/// words to write.
class RemoteSegment {
 public:
  /// At a place in its owner's region. Throws Error(corrupt) if no segment is there, Error(no_space) if it cannot
  /// be mapped, Error(peer_lost).
  RemoteSegment(const sync::Region& region, std::uint64_t place, os::Access access = os::Access::read_only);
  ~RemoteSegment();
  RemoteSegment& operator=(RemoteSegment&&) = delete;

  [[nodiscard]] std::uint64_t capacity() const noexcept { return data_.size(); }
  [[nodiscard]] const std::byte* data() const noexcept { return data_.data(); }
  /// The data's mapping; to write where the segment was mapped so.
  [[nodiscard]] const os::Mapping& mapping() const noexcept { return data_; }
  [[nodiscard]] os::Access access() const noexcept { return access_; }
  [[nodiscard]] PopulatedBlocks& populated() noexcept { return blocks_; }
  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(words_.data()); }
  [[nodiscard]] bool is_owner_process() const noexcept;
  /// Writes into fresh memory of one that is mapped to write. Throws Error(no_space | io).
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  /// A lease has ended: the memory goes with the last one if the owner has dropped the segment.
  void lease_ended() const noexcept;

  /// Puts so many bytes of data into the page table, once, as far as an earlier use has written them.
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

/// Other ranks' segments that this process has mapped.
class RemoteSegments {
 public:
  /// That of `owner` at a place in its region, mapped when it is first asked for, or asked for to write. Throws as
  /// RemoteSegment.
  std::shared_ptr<RemoteSegment> at(const sync::Group& group, int owner, std::uint64_t place,
                                    os::Access access = os::Access::read_only);
  /// Null if it is not mapped.
  [[nodiscard]] std::shared_ptr<RemoteSegment> known(int owner, std::uint64_t place) const;
  /// Unmaps what its owner has dropped and nobody holds: the mapping is the last that keeps it.
  void forget_retired();
  /// All of that rank.
  void forget(int owner) {
    std::erase_if(segments_, [&](const auto& each) { return each.first.first == owner; });
  }

 private:
  std::map<std::pair<int, std::uint64_t>, std::shared_ptr<RemoteSegment>> segments_;  // by owner and place
};

/// A lease that this process has taken. Its end gives it back: noexcept, any thread, nothing in a forked child.
class Lease {
 public:
  /// Throws Error(corrupt) if it is not offered (any more).
  Lease(std::shared_ptr<const RemoteSegment> segment, LeaseId id);
  ~Lease();
  Lease& operator=(Lease&&) = delete;
  [[nodiscard]] const RemoteSegment& segment() const noexcept { return *segment_; }

  /// Debug mode: the leased bytes must have this hash when the lease ends; else it is logged that `owner` wrote them.
  void watch(std::vector<std::span<const std::byte>> parts, std::uint64_t hash, std::string owner);

 private:
  std::shared_ptr<const RemoteSegment> segment_;
  LeaseId id_;
  std::vector<std::span<const std::byte>> parts_;
  std::uint64_t hash_ = 0;
  std::string owner_;
};

/// One hash over several pieces, in order.
std::uint64_t hash_parts(std::span<const std::span<const std::byte>> parts);

}  // namespace muster::shm
