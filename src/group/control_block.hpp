// SPDX-License-Identifier: Apache-2.0
#pragma once
// The control block: the shared memory in which the ranks of a local group meet. It consists of lock-free atomics and
// has no locks. A process that is killed while it writes here therefore leaves no lock behind, and other ranks detect
// its death while they wait.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "muster/error.hpp"
#include "src/base/fixed_string.hpp"
#include "src/group/group.hpp"
#include "src/group/progress.hpp"
#include "src/group/region.hpp"
#include "src/os/shared_memory.hpp"

namespace muster::group {

inline constexpr std::size_t phase_words = 6;

/// A futex on which a rank sleeps.
struct WakeWord {
  std::atomic<std::uint32_t> word;
  std::atomic<std::uint32_t> waiting;  // number of sleeping threads
  void ring() noexcept;
};

struct alignas(64) RankCell {
  std::atomic<std::uint32_t> left;     // not 0: this rank has destroyed its group
  std::atomic<std::uint32_t> arrived;  // the latest round that this rank has entered
  std::atomic<std::uint64_t> progress;
  std::atomic<std::uint32_t> waits_for;  // 1 + the rank that this one waits for in a companion group; 0: none
  std::array<std::atomic<std::uint64_t>, phase_words> phase;  // text: the operation that the rank is in
  std::array<std::atomic<std::uint32_t>, 2> record_length;    // lengths of the records of even and odd rounds
  std::atomic<std::uint32_t> pieces_taken;                    // the number of pieces of answers that this rank has read
  alignas(64) WakeWord bell;  // rings when a rank has sent to this one, or has read data that this one sent
};

/// The first failure. One rank claims the cell, writes the error, and then publishes it.
struct FailureCell {
  enum State : std::uint32_t { none = 0, being_written = 1, published = 2 };
  std::atomic<std::uint32_t> state;
  WrittenError<3072> error;
};

struct alignas(64) ControlHeader {
  std::uint32_t layout;  // group_layout of the rank that created the block; stays in front in all versions
  std::uint32_t size;
  std::uint32_t reserves_rings;                    // not 0: memory must be reserved before it is touched
  alignas(64) std::atomic<std::uint32_t> round;    // the latest complete round; futex
  alignas(64) std::atomic<std::uint32_t> counted;  // ranks that have entered the next round
  std::atomic<std::uint32_t> waiting;
  std::atomic<std::uint64_t> left;  // low half: ranks that have left; high half: ranks that died without leaving
  alignas(64) WakeWord pieces;      // the number of pieces of answers that have been written
  std::atomic<std::uint64_t> answer_bytes;  // the length of the answer that is being written
  alignas(64) FailureCell failure;
  alignas(64) FailureCell decision;
  std::atomic<std::uint32_t> is_passed_on;  // the other hosts have received the decision
};

/// The packets from one rank to another: a byte stream with one writer and one reader.
class Ring {
 public:
  /// Uses `bytes` bytes at offset `at` of `memory`, which must outlive the ring. `mapped` is the address if this part
  /// is already mapped, else null. With `reserves`, the writer reserves memory before it writes.
  Ring(const os::Fd& memory, std::uint64_t at, std::uint64_t bytes, std::byte* mapped, bool reserves);
  /// Called by the writer. Copies as many bytes as fit, and returns their number. Throws Error(out_of_space).
  std::uint64_t write(std::span<const std::byte> bytes);
  /// Called by the reader. Returns the number of unread bytes.
  [[nodiscard]] std::uint64_t filled() const noexcept;
  /// Called by the reader: peek() copies the first unread bytes, and take() marks bytes as read.
  void peek(std::span<std::byte> bytes) const noexcept;
  void take(std::uint64_t bytes) noexcept;
  [[nodiscard]] std::uint64_t room() const noexcept { return capacity() - filled(); }

 private:
  struct RingHead {
    alignas(64) std::atomic<std::uint64_t> written;
    std::atomic<std::uint64_t> origin;  // the stream position of the ring's first byte
    alignas(64) std::atomic<std::uint64_t> read;
  };
  [[nodiscard]] RingHead& head() const noexcept { return *reinterpret_cast<RingHead*>(begin_); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return bytes_ - sizeof(RingHead); }
  /// Calls copy(address in the ring, offset in `bytes`, length): once, or twice if the range wraps around the end of
  /// the ring.
  template <class Copy>
  void around(std::uint64_t position, std::uint64_t bytes, const Copy& copy) const;
  void reserve_until(std::uint64_t end);

  const os::Fd& memory_;
  std::uint64_t at_;
  std::uint64_t bytes_;
  os::Mapping mapping_;  // used unless the memory was mapped already
  std::byte* begin_;
  std::uint64_t reserved_;
};

/// The length of a piece of an answer (LocalGroup::give_answer).
inline constexpr std::size_t answer_piece = 16 << 10;

/// Maps a control block and gives access to its parts: the header, one cell and two records per rank, a table of the
/// rings in use, and two pieces of an answer. They are followed by one ring for each ordered pair of ranks. A ring
/// takes memory when it is first used. In a small group all rings are mapped at once, so that no message can fail for
/// lack of a mapping. In a large group each ring is mapped when it is first used.
class ControlBlock final : public Pulse {
 public:
  /// Creates a control block for `size` ranks in a region that all of them have. The caller sends its place to the
  /// other ranks. Throws Error(out_of_space).
  static std::shared_ptr<ControlBlock> create(Region& region, int size);
  /// Maps a control block that another rank created. Throws Error(version) if it has another layout, and
  /// Error(corrupt) if it is not a block for `size` ranks.
  static std::shared_ptr<ControlBlock> open(const Region& region, std::uint64_t place, int size);

  [[nodiscard]] std::uint64_t place() const noexcept { return place_; }
  /// Called when this rank leaves the group. The last rank frees the memory; so does a rank that sees that all others
  /// have left or died.
  void leave(int self, const Peers& peers) noexcept;
  /// Frees the memory. No rank may be using the block.
  void give_back() noexcept;
  [[nodiscard]] ControlHeader& header() const noexcept;
  [[nodiscard]] RankCell& cell(int rank) const noexcept;
  /// Returns the record of `rank` in this round. The distance between records follows from their length, so short
  /// records of all ranks fit into few pages. If the ranks disagree about the length they may overwrite each other's
  /// records; in that case all ranks throw.
  [[nodiscard]] std::byte* record(std::uint32_t round, int rank, std::size_t bytes) const noexcept;
  /// Called before the first answer is written. Throws Error(out_of_space).
  void reserve_pieces() const;
  /// Returns the memory of the piece with that number. Two consecutive pieces have separate memory.
  [[nodiscard]] std::byte* piece(std::uint32_t number) const noexcept;
  /// Called by the sender: creates the ring, and marks it so that the receiver finds it. Throws Error(out_of_space).
  [[nodiscard]] Ring make_ring(int from, int to) const;
  [[nodiscard]] bool has_ring(int from, int to) const noexcept;
  /// Called by the receiver if has_ring() is true. Throws Error(out_of_space).
  [[nodiscard]] Ring map_ring(int from, int to) const;

  void abort(const Error& cause) noexcept override;
  [[nodiscard]] std::optional<Error> error() const override;
  [[nodiscard]] bool has_failure() const noexcept override {
    return header().failure.state.load(std::memory_order_acquire) != 0;
  }

  /// For a group of several hosts that includes this group: sets the error that its ranks throw here. The first
  /// decision stays. The call wakes no rank.
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

}  // namespace muster::group
