// SPDX-License-Identifier: Apache-2.0
#pragma once
// Slots: segments of a rank for one purpose: data that it sends to one root, or data that the ranks of one list merge
// into it. A slot is written only after its last lease has ended.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "muster/tensor.hpp"
#include "src/group/group.hpp"
#include "src/shm/segment.hpp"

namespace muster::shm {

class Slot {
 public:
  explicit Slot(std::uint64_t capacity)
      : segment_(capacity),
        must_reserve_(group::Region::own()->backing() == os::Backing::posix),
        reserved_(must_reserve_) {}

  [[nodiscard]] OwnedSegment& segment() noexcept { return segment_; }
  [[nodiscard]] const OwnedSegment& segment() const noexcept { return segment_; }
  [[nodiscard]] bool is_free() const noexcept { return segment_.has_ended(lease_); }
  /// Returns how many data bytes have memory.
  [[nodiscard]] std::uint64_t backed() const noexcept { return backed_; }

  /// Offers a lease on the slot (OwnedSegment::offer). The slot is not free until the lease ends.
  LeaseId lend(std::shared_ptr<const group::PeerLiveness> holder) {
    return lease_ = segment_.offer(0, std::move(holder));
  }
  /// Ends the lease unless the other rank has taken it.
  void withdraw() noexcept { segment_.withdraw(lease_); }
  /// Called before several ranks write the first `bytes` bytes: their memory counts as taken. If a full mount could
  /// cause a failure, the memory is reserved. Throws Error(out_of_space).
  void take(std::uint64_t bytes);
  /// Returns whether `bytes` bytes can be written without a further agreement, because their memory is taken.
  [[nodiscard]] bool is_taken(std::uint64_t bytes) const noexcept {
    return reserved_ == must_reserve_ && backed_ >= bytes;
  }
  /// Returns whether the other ranks have mapped it, because an exchange or a merge with it has succeeded.
  [[nodiscard]] bool is_known() const noexcept { return is_known_; }
  void set_known() noexcept { is_known_ = true; }
  /// Returns the populated blocks of this process, for a slot that several ranks write.
  [[nodiscard]] PopulatedBlocks& populated() noexcept { return populated_; }
  /// Frees the memory of a free slot. The slot stays mapped, and takes memory again when it is written.
  void give_back() noexcept;

 private:
  friend class SlotWriter;
  OwnedSegment segment_;
  LeaseId lease_;
  bool is_known_ = false;
  std::uint64_t backed_ = 0;  // bytes written before, which therefore have memory
  std::uint64_t ready_ = 0;   // bytes in this process's page table
  PopulatedBlocks populated_;
  bool must_reserve_;  // touching the memory could fail on a full mount
  bool reserved_;
};

/// Writes the data of one use of a slot, in ascending order. Existing memory is written through the mapping with
/// streaming stores. Fresh memory is written with pwrite, which is twice as fast as faulting it in; small tensors are
/// joined to large writes.
class SlotWriter {
 public:
  /// `progress` is called every few MiB.
  SlotWriter(Slot& slot, std::function<void()> progress);
  /// Offsets must ascend. Throws Error(out_of_space | io).
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

/// The purpose of a slot: the rank that returns it, and the hash of the list that merges into it (0: its data is sent).
struct LaneId {
  LaneId(int first_rank, std::uint64_t list_hash = 0)  // NOLINT(google-explicit-constructor): senders have no list
      : first(first_rank), list(list_hash) {}
  int first;
  std::uint64_t list;
  friend bool operator==(const LaneId&, const LaneId&) = default;
};

/// The slot that a sender will use in an exchange.
struct SlotPlan {
  std::shared_ptr<Slot> slot;  ///< null: create one with `capacity`
  std::uint64_t capacity = 0;
  std::uint64_t fresh_bytes = 0;   ///< bytes of memory that must be taken
  std::uint32_t held = 0;          ///< slots that the root holds
  std::shared_ptr<Slot> replaces;  ///< a free slot that is too small, deleted before the new one is created
};

/// The slots of one rank, for all roots that it has sent to and all lists that merged on it. Used by the thread that
/// uses the group.
class SenderPool {
 public:
  struct SlotLimits {
    int pipeline_depth = 2;
    std::uint64_t memory_budget = 0;
    std::uint64_t pool_limit = 0;
    int root = 0;  ///< the global rank of the rank that returns the slot, for messages
  };

  /// Chooses a slot for `bytes` bytes to `id`. Allocates nothing yet. Throws Error(out_of_space) if the root holds so
  /// much memory that the budget does not allow another segment.
  SlotPlan plan(LaneId id, std::uint64_t bytes, const SlotLimits& limits);
  /// Returns how many slots are not free.
  [[nodiscard]] std::uint32_t held(LaneId id) const noexcept;
  /// Creates the plan's new slot, if it has one. Throws Error(out_of_space).
  std::shared_ptr<Slot> carry_out(LaneId id, SlotPlan plan);
  /// Returns how many data bytes have memory.
  [[nodiscard]] std::uint64_t bytes() const noexcept;
  /// Removes held slots from the pool; their memory is freed when their leases end. Free slots are kept if `keep_free`
  /// is set. Returns the bytes that remain.
  std::uint64_t settle(bool keep_free) noexcept;
  /// Called after a failed exchange: deletes a slot that was created for it, because some ranks may be unable to map
  /// it.
  void discard(LaneId id, const std::shared_ptr<Slot>& slot) noexcept;
  /// Frees all free memory; returns the bytes.
  std::uint64_t trim() noexcept;
  /// Called when the root is dead: deletes its slots.
  void drop(int first) noexcept;

 private:
  struct SlotLane {
    LaneId id;
    std::vector<std::shared_ptr<Slot>> slots;  // the most recently used last
  };
  SlotLane& lane(LaneId id);
  std::vector<SlotLane> lanes_;
};

}  // namespace muster::shm
