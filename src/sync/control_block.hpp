// SPDX-License-Identifier: Apache-2.0
#pragma once
// The control block: the one piece of shared memory that the ranks of a local group meet in. Only lock-free words,
// never a lock: whoever is killed while writing here leaves nothing that another rank could wait for without noticing.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "muster/error.hpp"
#include "src/base/written.hpp"
#include "src/os/shared_memory.hpp"
#include "src/sync/group.hpp"
#include "src/sync/pulse.hpp"
#include "src/sync/region.hpp"

namespace muster::sync {

inline constexpr std::size_t phase_words = 6;

/// A word that a rank sleeps on: futex.
struct Bell {
  std::atomic<std::uint32_t> word;
  std::atomic<std::uint32_t> waiting;  // how many sleep
  void ring() noexcept;
};

struct alignas(64) RankCell {
  std::atomic<std::uint32_t> left;     // the group was destroyed there
  std::atomic<std::uint32_t> arrived;  // the last round this rank has come to
  std::atomic<std::uint64_t> progress;
  std::atomic<std::uint32_t> waits_for;  // the rank that this one waits for in a companion group, and 1; 0: for none
  std::array<std::atomic<std::uint64_t>, phase_words> phase;  // text: what the rank is in
  std::array<std::atomic<std::uint32_t>, 2> record_length;    // of the record of an odd and an even round
  alignas(64) Bell bell;  // rings when a rank has written to this one, or has read what this one wrote
};

/// The first failure: claimed once, written, then published.
struct FailureCell {
  enum State : std::uint32_t { none = 0, being_written = 1, published = 2 };
  std::atomic<std::uint32_t> state;
  WrittenError<3072> error;
};

struct alignas(64) ControlHeader {
  std::uint32_t size;
  std::uint32_t reserves_rings;                    // memory that has to be reserved before it is touched
  alignas(64) std::atomic<std::uint32_t> round;    // the last complete one; futex
  alignas(64) std::atomic<std::uint32_t> counted;  // ranks that have come to the next one
  std::atomic<std::uint32_t> waiting;
  std::atomic<std::uint64_t> left;  // ranks that have left, and above them those that died without leaving
  alignas(64) FailureCell failure;
  alignas(64) FailureCell decision;
  std::atomic<std::uint32_t> is_passed_on;  // the decision, to the other hosts
};

/// The packets from one rank to another: a byte stream with one writer and one reader.
class Ring {
 public:
  /// In that memory, which outlives it. `mapped`: where it is mapped already; else null. `reserves`: the writer
  /// reserves what it writes to.
  Ring(const os::Fd& memory, std::uint64_t at, std::uint64_t bytes, std::byte* mapped, bool reserves);
  /// The writer's: copies as much as there is room for, and returns how much that was. Throws Error(no_space).
  std::uint64_t write(std::span<const std::byte> bytes);
  /// The reader's: what is there to read,
  [[nodiscard]] std::uint64_t filled() const noexcept;
  /// the first bytes of it, and that they are read.
  void peek(std::span<std::byte> bytes) const noexcept;
  void take(std::uint64_t bytes) noexcept;
  [[nodiscard]] std::uint64_t room() const noexcept { return capacity() - filled(); }

 private:
  struct Head {
    alignas(64) std::atomic<std::uint64_t> written;
    std::atomic<std::uint64_t> origin;  // the position of the ring's first byte
    alignas(64) std::atomic<std::uint64_t> read;
  };
  [[nodiscard]] Head& head() const noexcept { return *reinterpret_cast<Head*>(begin_); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return bytes_ - sizeof(Head); }
  /// Calls copy(in the ring, in the bytes, length), twice where they go around the ring's end.
  template <class Copy>
  void around(std::uint64_t position, std::uint64_t bytes, const Copy& copy) const;
  void reserve_until(std::uint64_t end);

  const os::Fd& memory_;
  std::uint64_t at_;
  std::uint64_t bytes_;
  os::Mapping mapping_;  // of its own
  std::byte* begin_;
  std::uint64_t reserved_;
};

/// Maps a control block and finds the parts in it: header, cells, records (two a rank), which rings are in use. Behind
/// them is a ring for each pair of ranks and direction: memory is taken for those in use only, and if there are many of
/// them a mapping, too. Of few, all are mapped at once, so that no message fails for want of that.
class ControlBlock final : public Pulse {
 public:
  /// A new one for `size` ranks, in a region that all of them have; tell the others its place. Throws Error(no_space).
  static std::shared_ptr<ControlBlock> create(Region& region, int size);
  /// Maps what another rank made. Throws Error(corrupt) if it cannot be for `size` ranks.
  static std::shared_ptr<ControlBlock> open(const Region& region, std::uint64_t place, int size);

  [[nodiscard]] std::uint64_t place() const noexcept { return place_; }
  /// This rank has left the group. The last one gives the memory back, or one that sees all others left or dead.
  void leave(int self, const Peers& peers) noexcept;
  /// Nobody uses it.
  void give_back() noexcept;
  [[nodiscard]] ControlHeader& header() const noexcept;
  [[nodiscard]] RankCell& cell(int rank) const noexcept;
  /// Records of a round lie at a distance that their own length gives: those of all ranks are few pages, whatever the
  /// largest record is. If the ranks disagree about the length they may overwrite each other's, and all throw.
  [[nodiscard]] std::byte* record(std::uint32_t round, int rank, std::size_t bytes) const noexcept;
  /// The sender's: makes it, for the receiver to find. Throws Error(no_space).
  [[nodiscard]] Ring make_ring(int from, int to) const;
  [[nodiscard]] bool has_ring(int from, int to) const noexcept;
  /// The receiver's, where has_ring(). Throws Error(no_space).
  [[nodiscard]] Ring map_ring(int from, int to) const;

  void poison(const Error& cause) noexcept override;
  [[nodiscard]] std::optional<Error> failure() const override;
  [[nodiscard]] bool has_failure() const noexcept override {
    return header().failure.state.load(std::memory_order_acquire) != 0;
  }

  /// For a group of several hosts that this group is a part of: the cause that its ranks throw here. The first one
  /// stays, and wakes nobody.
  void decide(const Error& cause) noexcept;
  [[nodiscard]] std::optional<Error> decision() const;

  [[nodiscard]] bool has_left(int rank) const override { return cell(rank).left.load(std::memory_order_acquire) != 0; }
  [[nodiscard]] std::uint64_t progress_of(int rank) const override {
    return cell(rank).progress.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint32_t awaited_by(int rank) const override {
    return cell(rank).waits_for.load(std::memory_order_relaxed);
  }
  void tell_awaited(int self, std::uint32_t awaited) noexcept override {
    cell(self).waits_for.store(awaited, std::memory_order_relaxed);
  }
  void set_phase(int rank, std::string_view phase) noexcept;
  [[nodiscard]] std::string phase(int rank) const override;

 private:
  ControlBlock(std::shared_ptr<const os::Fd> memory, std::uint64_t place, int size);
  [[nodiscard]] std::atomic<std::uint8_t>& ring_in_use(int from, int to) const noexcept;
  [[nodiscard]] Ring ring(int from, int to, bool reserves) const;
  std::shared_ptr<const os::Fd> memory_;
  std::uint64_t place_;
  int size_;
  os::Mapping mapping_;
};

}  // namespace muster::sync
