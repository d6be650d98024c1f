// SPDX-License-Identifier: Apache-2.0
#pragma once
// Segments: places in a rank's region as their owner and as the first rank see them. A page with a few words, then the
// data. The memory of a segment goes when its owner has dropped it and nobody looks at it any more: who sees that last
// gives it back.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/os/shared_memory.hpp"
#include "src/sync/region.hpp"

namespace muster::shm {

inline constexpr std::uint64_t header_bytes = 4096;
inline constexpr std::size_t lease_words = 256;
inline constexpr std::uint64_t segment_magic = 0x31474553'5453554dULL;  // "MUSTSEG1"

/// The first page. The owner writes it once; the first rank writes only the words that say what it no longer holds.
struct SegmentHeader {
  std::uint64_t magic;
  std::uint64_t capacity;
  std::atomic<std::uint32_t> users;     // processes that have it mapped
  std::atomic<std::uint32_t> released;  // slot: the last use that the first rank has given back; futex
  std::atomic<std::uint32_t> retired;   // the owner has dropped the segment
  std::array<std::atomic<std::uint32_t>, lease_words>
      leases;  // arena: stamp of each lease that is out, 0: none; futexes
};
static_assert(sizeof(SegmentHeader) <= header_bytes);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

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

/// A segment that this process made, in its region: its own mapping covers header and data.
class OwnedSegment {
 public:
  /// Room for `capacity` bytes of data. Throws Error(no_space | unsupported).
  explicit OwnedSegment(std::uint64_t capacity);
  /// Retires the segment, and gives its memory back unless it is kept.
  ~OwnedSegment();
  OwnedSegment(const OwnedSegment&) = delete;
  OwnedSegment& operator=(const OwnedSegment&) = delete;

  [[nodiscard]] std::uint64_t place() const noexcept { return place_; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return mapping_.size() - header_bytes; }
  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(mapping_.data()); }
  [[nodiscard]] std::byte* data() const noexcept { return mapping_.data() + header_bytes; }
  [[nodiscard]] const os::Mapping& mapping() const noexcept { return mapping_; }
  /// This process made it (a forked child did not, and must not write into it).
  [[nodiscard]] bool is_owner_process() const noexcept;

  /// Memory for all of the data, where a full mount could refuse it later. Throws Error(no_space).
  void reserve();
  /// Writes into fresh memory. Throws Error(no_space | io).
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  /// Gives the data's memory back; it reads as zero after it.
  void punch() noexcept;
  /// From now on whoever ends a lease on it gives the data's memory back. Those that are out are asked for after this.
  void retire() noexcept;
  /// Somebody will.
  void keep_memory() noexcept { give_back_ = false; }
  /// Something that has to go before the memory is given back or unmapped: a lock on its pages. One of them; a later
  /// one takes its place.
  void attach(std::shared_ptr<void> attachment) noexcept { attachment_ = std::move(attachment); }
  [[nodiscard]] const std::shared_ptr<void>& attachment() const noexcept { return attachment_; }

 private:
  std::shared_ptr<const os::Fd> memory_;
  std::uint64_t place_;
  os::Mapping mapping_;
  std::int64_t owner_pid_;
  bool give_back_ = true;
  std::shared_ptr<void> attachment_;
};

/// Another rank's segment, mapped: data to read (or, where its owner lets others write into it, to write), the header's
/// words to write.
class RemoteSegment {
 public:
  /// At a place in its owner's region. Throws Error(corrupt) where no segment is there, Error(no_space) where it cannot
  /// be mapped, Error(peer_lost).
  RemoteSegment(const sync::Region& region, std::uint64_t place, os::Access access = os::Access::read_only);
  ~RemoteSegment();
  RemoteSegment(const RemoteSegment&) = delete;
  RemoteSegment& operator=(const RemoteSegment&) = delete;

  [[nodiscard]] std::uint64_t capacity() const noexcept { return data_.size(); }
  [[nodiscard]] const std::byte* data() const noexcept { return data_.data(); }
  /// The data's mapping; to write where the segment was mapped so.
  [[nodiscard]] const os::Mapping& mapping() const noexcept { return data_; }
  [[nodiscard]] PopulatedBlocks& populated() noexcept { return blocks_; }
  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(words_.data()); }
  [[nodiscard]] bool is_owner_process() const noexcept;
  /// Writes into fresh memory of one that is mapped to write. Throws Error(no_space | io).
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  /// A lease has ended: the memory goes with the last one if the owner has dropped the segment.
  void lease_ended() const noexcept;

  /// The first `bytes` of data have been written by an earlier use: puts them into the page table, once.
  void populate_known() noexcept;
  void note_written(std::uint64_t bytes) noexcept { written_ = std::max(written_, bytes); }

 private:
  std::shared_ptr<const os::Fd> memory_;
  std::uint64_t place_;
  os::Mapping words_;
  os::Mapping data_;
  std::uint64_t written_ = 0;
  std::uint64_t populated_ = 0;
  PopulatedBlocks blocks_;
  std::int64_t owner_pid_;
};

/// The first rank's right to look at one use of a slot. Its end gives the slot back: noexcept, any thread, nothing in a
/// forked child.
class SlotLease {
 public:
  SlotLease(std::shared_ptr<const RemoteSegment> segment, std::uint32_t use)
      : segment_(std::move(segment)), use_(use) {}
  ~SlotLease();
  SlotLease(const SlotLease&) = delete;
  SlotLease& operator=(const SlotLease&) = delete;
  /// From now on the end of the lease counts: before, the sender has not published this use.
  void arm() noexcept { armed_ = true; }
  [[nodiscard]] const RemoteSegment& segment() const noexcept { return *segment_; }

 private:
  std::shared_ptr<const RemoteSegment> segment_;
  std::uint32_t use_;
  bool armed_ = false;
};

}  // namespace muster::shm
