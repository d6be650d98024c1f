// SPDX-License-Identifier: Apache-2.0
#pragma once
// Transport: how ranks of several hosts send each other bytes. MPI is one (src/mpi/), TCP another (src/tcp/). A message
// has a number of its receiver, a tag and bytes; those of one sender and one tag arrive in their order. Nothing waits
// in these calls: an operation is begun, and the transport goes on with all of them whenever it is called.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/error.hpp"

#include "src/os/clock.hpp"

namespace muster::hosts {

/// One message has at most so many bytes: MPI's counts are ints.
inline constexpr std::size_t largest_piece = std::size_t{1} << 30;

/// Of a receive: from whomever.
inline constexpr int any_rank = -1;

/// Messages have tags from here on; what is below is the transport's own.
inline constexpr int first_tag = 3;

/// When a send has finished: its bytes can be used again, or its receiver has begun to take them in, too.
enum class Finished : std::uint8_t { sent, taken };

/// What has been begun, as its transport knows it. Its memory is kept until the transport lets go of it.
class Operation {
 public:
  virtual ~Operation() = default;
  Operation& operator=(Operation&&) = delete;

  /// Whether it has finished; lets the transport go on. Throws Error(io) if the other rank cannot be reached, and where
  /// the transport has to rest.
  virtual bool test() = 0;
  /// Takes back a receive that nobody has answered yet. Returns whether that could be done.
  virtual bool cancel() noexcept = 0;
  /// Nobody asks any more, and it has not finished.
  virtual void abandon() noexcept = 0;
  /// What it still works on is the caller's.
  [[nodiscard]] virtual bool borrows() const noexcept = 0;
};

/// A send, a receive or a barrier that has not finished; has one owner.
class Pending {
 public:
  Pending() noexcept = default;
  explicit Pending(std::shared_ptr<Operation> operation) noexcept : operation_(std::move(operation)) {}
  Pending(Pending&& other) noexcept = default;
  Pending& operator=(Pending&& other) noexcept;
  /// An unfinished one is abandoned.
  ~Pending();

  [[nodiscard]] bool is_open() const noexcept { return operation_ != nullptr; }
  [[nodiscard]] bool borrows() const noexcept { return operation_ && operation_->borrows(); }
  /// Whether it has finished; lets the transport go on. Throws as Operation::test.
  bool test();
  /// Whether it has finished. A last look after a failure: between ranks that live the transport has gone on meanwhile.
  bool is_over() noexcept;
  /// Until it has finished. Throws Error(timeout) with `late`.
  void wait(std::chrono::milliseconds longest, const std::string& late);
  /// Takes back a receive that nobody has answered yet.
  void cancel() noexcept;

 private:
  std::shared_ptr<Operation> operation_;
};

/// A message that has come, and that no other receive finds any more. Without a receive its bytes are dropped: its
/// sender does not wait for them.
class Found {
 public:
  virtual ~Found() = default;
  Found& operator=(Found&&) = delete;

  [[nodiscard]] virtual int from() const noexcept = 0;
  [[nodiscard]] virtual int tag() const noexcept = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  /// `place` has room for all of it.
  virtual Pending receive(std::span<std::byte> place, std::shared_ptr<const void> keeper) = 0;
};

class Transport {
 public:
  Transport(int rank, int size) noexcept : rank_(rank), size_(size) {}
  virtual ~Transport() = default;
  Transport& operator=(Transport&&) = delete;

  /// This process's number, of `size()`.
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  /// SyncGroup::kind() of groups over it: "mpi", "tcp".
  [[nodiscard]] virtual std::string_view kind() const noexcept = 0;
  /// For messages: "MPI", "TCP".
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
  [[nodiscard]] virtual int most_tag() const = 0;

  /// `bytes` (at most largest_piece) must stay until it has finished: `keeper` keeps them; if it is null the caller
  /// does. Throws as Operation::test.
  virtual Pending send(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper,
                       Finished finished) = 0;
  /// Of bytes that are copied for it.
  Pending send_copy(int to, int tag, std::span<const std::byte> bytes, Finished finished);
  /// What was sent to that rank, and needs no more than it, is out of this process; true if the transport cannot tell.
  [[nodiscard]] virtual bool has_left([[maybe_unused]] int to) { return true; }
  /// From `from`, or any_rank. `bytes` has room for all that comes.
  virtual Pending receive(int from, int tag, std::span<std::byte> bytes, std::shared_ptr<const void> keeper) = 0;
  /// The oldest message from `from`, or from any rank (any_rank), that no receive waits for; null if there is none.
  /// Throws as Operation::test; of any_rank a lost rank is no error (next_lost).
  virtual std::unique_ptr<Found> find(int from, int tag) = 0;
  /// Of any rank and any tag from first_tag on.
  virtual std::unique_ptr<Found> find_any() = 0;
  /// Collective; of operations that are under way at the same time there is one.
  virtual Pending barrier() = 0;
  /// Collective, before there are groups: what every rank says (as many bytes on all of them), in rank order. Throws
  /// Error(timeout), Error(io).
  virtual std::vector<std::byte> tell_all(std::span<const std::byte> mine, std::chrono::milliseconds timeout) = 0;
  /// While the ranks meet: throws the cause, which all ranks throw, if one of them has ended. Never waits.
  virtual void watch() {}
  /// A rank that cannot be reached any more although it has not left, told once; any_rank: none. For transports that
  /// notice without an operation.
  virtual int next_lost() noexcept { return any_rank; }

  // Who may call it.
  /// It is there, and the calling thread may call it.
  [[nodiscard]] virtual bool may_call() const noexcept { return true; }
  /// Throws Error(unsupported) if the calling thread may not use a group, Error(argument) if the transport has ended.
  virtual void enter() {}
  /// The calling thread is the one that calls it from now on, if it is one at a time: the group's last user may be
  /// gone. Only in calls that the program has to keep apart from others (making, destroying, ending).
  virtual void take_over() noexcept {}
  /// Any thread may call it, several at once.
  [[nodiscard]] virtual bool is_for_all_threads() const noexcept { return true; }
  /// Nothing of it may be called any more, because it may still read memory that its owner may have freed.
  [[nodiscard]] virtual bool must_rest() const noexcept { return false; }
  /// Throws Error(unsupported) if so: also what another thread waits for ends then. Throws what keeps other ranks from
  /// reaching this one.
  virtual void throw_if_resting() const {}

  // The end.
  /// What calls of groups throw that have ended with it.
  [[nodiscard]] virtual Error ended() const = 0;
  /// All operations have finished, on all ranks. Called again until it returns true: it is closed.
  virtual bool close() noexcept = 0;
  /// Whether it can be destroyed before it is closed: it works on nobody's memory then.
  [[nodiscard]] virtual bool can_be_dropped() const noexcept = 0;
  /// How long a process must leave it alone between the end of groups on several hosts, whose last barrier took so
  /// long, and its own end.
  [[nodiscard]] virtual std::chrono::milliseconds rest(
      [[maybe_unused]] os::Clock::duration last_barrier) const noexcept {
    return std::chrono::milliseconds(0);
  }

 private:
  const int rank_;
  const int size_;
};

}  // namespace muster::hosts
