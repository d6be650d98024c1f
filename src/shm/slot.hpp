// SPDX-License-Identifier: Apache-2.0
#pragma once
// Slots: a rank's segments for one purpose: what it sends to one first rank, or what is merged on it by the ranks of
// one list. A slot is written only when its last lease has ended.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "muster/tensor.hpp"
#include "src/shm/segment.hpp"
#include "src/sync/group.hpp"

namespace muster::shm {

class Slot {
 public:
  explicit Slot(std::uint64_t capacity)
      : segment_(capacity),
        must_reserve_(sync::Region::own()->backing() == os::Backing::posix),
        reserved_(must_reserve_) {}

  [[nodiscard]] OwnedSegment& segment() noexcept { return segment_; }
  [[nodiscard]] const OwnedSegment& segment() const noexcept { return segment_; }
  [[nodiscard]] bool is_free() const noexcept { return segment_.has_ended(lease_); }
  /// Data bytes that memory has been taken for.
  [[nodiscard]] std::uint64_t backed() const noexcept { return backed_; }

  /// A lease on it (OwnedSegment::offer). It is not free until that ends.
  LeaseId lend(std::shared_ptr<const sync::PeerLiveness> holder) {
    return lease_ = segment_.offer(0, std::move(holder));
  }
  /// Ends it unless the other rank has taken it.
  void withdraw() noexcept { segment_.withdraw(lease_); }
  /// Several ranks are about to write the first `bytes`: their memory counts as taken. Where a full mount could refuse
  /// it, it is reserved. Throws Error(no_space).
  void take(std::uint64_t bytes);
  /// Whether `bytes` can be written without another word: their memory is taken.
  [[nodiscard]] bool is_taken(std::uint64_t bytes) const noexcept {
    return reserved_ == must_reserve_ && backed_ >= bytes;
  }
  /// Whether the other ranks have it mapped: an exchange or a merge by it went well.
  [[nodiscard]] bool is_known() const noexcept { return is_known_; }
  void set_known() noexcept { is_known_ = true; }
  /// Of this process, where it writes beside others.
  [[nodiscard]] PopulatedBlocks& populated() noexcept { return populated_; }
  /// Gives the memory of a free slot back; it stays mapped and is taken anew when written.
  void give_back() noexcept;

 private:
  friend class SlotWriter;
  OwnedSegment segment_;
  LeaseId lease_;
  bool is_known_ = false;
  std::uint64_t backed_ = 0;  // written before, so memory is there
  std::uint64_t ready_ = 0;   // and in this process's page table
  PopulatedBlocks populated_;
  bool must_reserve_;  // memory that a full mount could refuse when it is touched
  bool reserved_;
};

/// Writes one use of a slot, front to back. Memory that is there already is written through the mapping with streaming
/// stores; fresh memory by pwrite, which is twice as fast as faulting it in, small tensors joined to large writes.
class SlotWriter {
 public:
  /// `progress` is called every few MiB.
  SlotWriter(Slot& slot, std::function<void()> progress);
  /// Offsets must grow. Throws Error(no_space | io).
  void write(std::uint64_t offset, const TensorView& tensor);
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  void finish();

 private:
  void write_fresh(std::uint64_t offset, std::span<const std::byte> bytes);
  void flush();

  Slot& slot_;
  std::function<void()> progress_;
  std::vector<std::byte> staged_;
  std::uint64_t staged_at_ = 0;
  std::uint64_t end_ = 0;
};

/// Whom slots are for: the rank that gives them back, and the hash of the list that merges into them (0: they are
/// sent).
struct LaneId {
  LaneId(int first_rank, std::uint64_t list_hash = 0)  // NOLINT(google-explicit-constructor): senders have no list
      : first(first_rank), list(list_hash) {}
  int first;
  std::uint64_t list;
  friend bool operator==(const LaneId&, const LaneId&) = default;
};

/// What a sender will use in an exchange.
struct SlotPlan {
  std::shared_ptr<Slot> slot;  ///< null: make one of `capacity`
  std::uint64_t capacity = 0;
  std::uint64_t fresh_bytes = 0;   ///< memory that has to be taken
  std::uint32_t held = 0;          ///< slots that the first rank holds
  std::shared_ptr<Slot> replaces;  ///< a free slot that is too small and goes when the new one is there
};

/// The slots of one rank, for all first ranks it has sent to and all lists that merged on it. Used by the thread that
/// uses the group.
class SenderPool {
 public:
  struct Limits {
    int pipeline_depth = 2;
    std::uint64_t memory_budget = 0;
    std::uint64_t pool_limit = 0;
  };

  /// Chooses a slot for `bytes` to `first`; nothing is allocated yet. Throws Error(no_space) if `first` holds so
  /// much that the budget does not allow another segment.
  SlotPlan plan(LaneId id, std::uint64_t bytes, const Limits& limits);
  /// Slots that are not free.
  [[nodiscard]] std::uint32_t held(LaneId id) const noexcept;
  /// Makes the plan's new slot, where it has one. Throws Error(no_space).
  std::shared_ptr<Slot> carry_out(LaneId id, SlotPlan plan);
  /// Data bytes of memory held.
  [[nodiscard]] std::uint64_t bytes() const noexcept;
  /// Slots that are held go with their holders' leases and no longer count; free ones stay or go. Returns the bytes
  /// that remain.
  std::uint64_t settle(bool keep_free) noexcept;
  /// The exchange failed: a slot that was made for it goes, because not all may be able to map it.
  void discard(LaneId id, const std::shared_ptr<Slot>& slot) noexcept;
  /// Gives all free memory back; returns the bytes.
  std::uint64_t trim() noexcept;
  /// The first rank is dead: its slots are free.
  void drop(int first) noexcept;

 private:
  struct Lane {
    LaneId id;
    std::vector<std::shared_ptr<Slot>> slots;  // the most recently used last
  };
  Lane& lane(LaneId id);
  std::vector<Lane> lanes_;
};

}  // namespace muster::shm
