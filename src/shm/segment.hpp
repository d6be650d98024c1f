// SPDX-License-Identifier: Apache-2.0
#pragma once
// Segments: pieces of shared memory as their owner and as the first rank see them. A page with a few words, then the
// data.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "src/os/shared_memory.hpp"

namespace muster::shm {

inline constexpr std::uint64_t header_bytes = 4096;
inline constexpr std::size_t lease_words = 256;
inline constexpr std::uint64_t segment_magic = 0x31474553'5453554dULL;  // "MUSTSEG1"

/// The first page. The owner writes it once; the first rank writes only the words that say what it no longer holds.
struct SegmentHeader {
  std::uint64_t magic;
  std::uint64_t id;                     // unique for its owner
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

/// A segment that this process made: its own mapping covers header and data.
class OwnedSegment {
 public:
  /// Room for `capacity` bytes of data. Throws Error(no_space | unsupported).
  OwnedSegment(std::uint64_t capacity, os::Backing backing);
  /// Marks the segment as retired and gives its memory back, whoever still maps it.
  ~OwnedSegment();
  OwnedSegment(const OwnedSegment&) = delete;
  OwnedSegment& operator=(const OwnedSegment&) = delete;

  [[nodiscard]] std::uint64_t id() const noexcept { return header().id; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return mapping_.size() - header_bytes; }
  [[nodiscard]] const os::Fd& memory() const noexcept { return memory_; }
  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(mapping_.data()); }
  [[nodiscard]] std::byte* data() const noexcept { return mapping_.data() + header_bytes; }
  [[nodiscard]] const os::Mapping& mapping() const noexcept { return mapping_; }
  /// This process made it (a forked child did not, and must not write into it).
  [[nodiscard]] bool is_owner_process() const noexcept;
  /// Keeps the memory where others still read it, when this object goes.
  void keep_memory() noexcept { give_back_ = false; }
  /// Something that has to go before the memory is given back or unmapped: a lock on its pages. One of them; a later
  /// one takes its place.
  void attach(std::shared_ptr<void> attachment) noexcept { attachment_ = std::move(attachment); }
  [[nodiscard]] const std::shared_ptr<void>& attachment() const noexcept { return attachment_; }

 private:
  os::Fd memory_;
  os::Mapping mapping_;
  std::int64_t owner_pid_;
  bool give_back_ = true;
  std::shared_ptr<void> attachment_;
};

/// Another rank's segment, mapped: data to read (or, where its owner lets others write into it, to write), the header's
/// words to write.
class RemoteSegment {
 public:
  /// Throws Error(corrupt) where it is no segment, Error(no_space) where it cannot be mapped.
  explicit RemoteSegment(const os::Fd& memory, os::Access access = os::Access::read_only);

  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return data_.size(); }
  [[nodiscard]] const std::byte* data() const noexcept { return data_.data(); }
  /// The data's mapping; to write where the segment was mapped so.
  [[nodiscard]] const os::Mapping& mapping() const noexcept { return data_; }
  [[nodiscard]] PopulatedBlocks& populated() noexcept { return blocks_; }
  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(words_.data()); }
  [[nodiscard]] bool is_owner_process() const noexcept;

  /// The first `bytes` of data have been written by an earlier use: puts them into the page table, once.
  void populate_known() noexcept;
  void note_written(std::uint64_t bytes) noexcept { written_ = std::max(written_, bytes); }

 private:
  os::Mapping words_;
  os::Mapping data_;
  std::uint64_t id_ = 0;
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
