// SPDX-License-Identifier: Apache-2.0
#pragma once
// Transport: how ranks of several hosts send bytes to each other. The implementations are MPI (src/mpi/) and TCP
// (src/tcp/). A message has a receiver, a tag and bytes. Messages with the same sender and tag arrive in order. The
// calls do not wait: they begin operations, and each call of the transport advances all of them.

#include <array>
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

namespace muster::multihost {

/// The maximum number of bytes of a message. The counts of MPI have type int.
inline constexpr std::size_t largest_piece = std::size_t{1} << 30;

/// As the sender of a receive: any rank.
inline constexpr int any_rank = -1;

/// The first tag for messages. The transport reserves lower tags for itself.
inline constexpr int first_tag = 3;

/// When a send completes: when its bytes can be reused (sent), or when the receiver has also begun to receive it
/// (taken).
enum class SendEnd : std::uint8_t { sent, taken };

/// An operation of the transport. Its memory is kept until the transport has released it.
class TransferOperation {
 public:
  virtual ~TransferOperation() = default;
  TransferOperation& operator=(TransferOperation&&) = delete;

  /// Returns whether the operation has completed, and advances the transport. Throws Error(io) if the other rank cannot
  /// be reached, and an error if the transport must rest.
  virtual bool test() = 0;
  /// Cancels a receive that no message has matched yet. Returns whether it was cancelled.
  virtual bool cancel() noexcept { return false; }
  /// Called when the last owner gives up an operation that has not completed.
  virtual void abandon() noexcept = 0;
  /// Returns whether the operation still uses memory of the caller.
  [[nodiscard]] virtual bool borrows() const noexcept = 0;
};

/// A send, a receive or a barrier in progress. It has one owner.
class PendingTransfer {
 public:
  PendingTransfer() noexcept = default;
  explicit PendingTransfer(std::shared_ptr<TransferOperation> operation) noexcept : operation_(std::move(operation)) {}
  PendingTransfer(PendingTransfer&& other) noexcept = default;
  PendingTransfer& operator=(PendingTransfer&& other) noexcept;
  /// Abandons an operation that has not completed.
  ~PendingTransfer();

  [[nodiscard]] bool is_open() const noexcept { return operation_ != nullptr; }
  [[nodiscard]] bool borrows() const noexcept { return operation_ && operation_->borrows(); }
  /// Returns whether the operation has completed, and advances the transport. Throws as GatherKind::test.
  bool test();
  /// Returns whether the operation has completed. Used as a last check after a failure: between live ranks the
  /// transport may have completed it.
  bool is_over() noexcept;
  /// Waits until the operation has completed. Throws Error(timeout) with the message `late`.
  void wait(std::chrono::milliseconds longest, const std::string& late);
  /// Cancels a receive that no message has matched yet.
  void cancel() noexcept;

 private:
  std::shared_ptr<TransferOperation> operation_;
};

/// A message that has arrived, and that no other receive can match any more. If it is destroyed without a receive, its
/// bytes are dropped; the sender does not wait for them.
class ArrivedMessage {
 public:
  virtual ~ArrivedMessage() = default;
  ArrivedMessage& operator=(ArrivedMessage&&) = delete;

  [[nodiscard]] virtual int from() const noexcept = 0;
  [[nodiscard]] virtual int tag() const noexcept = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  /// `place` has at least bytes() bytes.
  virtual PendingTransfer receive(std::span<std::byte> place, std::shared_ptr<const void> keeper) = 0;
};

class Transport {
 public:
  Transport(int rank, int size) noexcept : rank_(rank), size_(size) {}
  virtual ~Transport() = default;
  Transport& operator=(Transport&&) = delete;

  /// Returns the number of this process, which is less than size().
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  /// Returns the Group::kind() of groups over this transport: "mpi", "tcp".
  [[nodiscard]] virtual std::string_view kind() const noexcept = 0;
  /// Returns the name for messages: "MPI", "TCP".
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
  [[nodiscard]] virtual int most_tag() const = 0;
  /// The data with which other ranks find this one: its address. meet() distributes it.
  using Contact = std::array<std::byte, 24>;
  [[nodiscard]] virtual Contact contact() const { return {}; }
  /// Receives the contacts of all ranks. Called once, before any message except those of tell_all() and barrier().
  virtual void learn([[maybe_unused]] std::vector<Contact> contacts) {}
  /// Returns the number of open files that a rank needs to exchange messages with `ranks` other ranks; 0 if unknown.
  [[nodiscard]] virtual std::uint64_t open_files_for([[maybe_unused]] std::uint64_t ranks) const noexcept { return 0; }
  /// Returns whether it sends the bytes of a long message only after the receiver has answered.
  [[nodiscard]] virtual bool agrees_on_long_messages() const noexcept { return false; }

  /// Sends `bytes`, at most largest_piece. They must stay valid until the send has completed: `keeper` keeps them
  /// alive, or the caller if it is null. Throws as GatherKind::test.
  virtual PendingTransfer send(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper,
                               SendEnd finished) = 0;
  /// Sends a copy of `bytes`.
  PendingTransfer send_copy(int to, int tag, std::span<const std::byte> bytes, SendEnd finished);
  /// Returns whether all messages to `to` that depend only on that rank have left this process. Returns true if the
  /// transport does not know.
  [[nodiscard]] virtual bool has_left([[maybe_unused]] int to) { return true; }
  /// Receives from `from`, which may be any_rank. `bytes` must be large enough for the message.
  virtual PendingTransfer receive(int from, int tag, std::span<std::byte> bytes,
                                  std::shared_ptr<const void> keeper) = 0;
  /// Returns the oldest message from `from`, which may be any_rank, that no receive waits for. Returns null if none
  /// exists. Throws as GatherKind::test; for any_rank a lost rank is not an error (next_lost).
  virtual std::unique_ptr<ArrivedMessage> find(int from, int tag) = 0;
  /// Like find, for any rank and any tag from first_tag on.
  virtual std::unique_ptr<ArrivedMessage> find_any() = 0;
  /// Collective. At most one barrier may be in progress at a time.
  virtual PendingTransfer barrier() = 0;
  /// Gathers the same number of bytes from every rank, in rank order. Collective; used before groups exist. Throws
  /// Error(timeout), Error(io).
  virtual std::vector<std::byte> tell_all(std::span<const std::byte> mine, std::chrono::milliseconds timeout) = 0;
  /// Used during the rendezvous. If a rank has ended, throws the cause, which all ranks throw. Never waits.
  virtual void watch() {}
  /// Returns a rank that can no longer be reached although it has not left, or any_rank. Each rank is returned once.
  /// For transports that detect this without an operation.
  virtual int next_lost() noexcept { return any_rank; }

  // The threads that may call the transport.
  /// Returns whether the transport has not ended and the calling thread may call it.
  [[nodiscard]] virtual bool may_call() const noexcept { return true; }
  /// Throws Error(unsupported) if the calling thread may not use a group, Error(invalid_argument) if the transport has
  /// ended.
  virtual void enter() {}
  /// Makes the calling thread the one that calls the transport from now on, if only one may do so at a time. The
  /// previous user of the group may have ended. Used only in calls that the program must serialise with others (making,
  /// destroying, ending).
  virtual void take_over() noexcept {}
  /// Returns whether several threads may call the transport at the same time.
  [[nodiscard]] virtual bool is_for_all_threads() const noexcept { return true; }
  /// Returns whether the transport must not be called any more, because it may still read memory that its owner may
  /// have freed.
  [[nodiscard]] virtual bool must_rest() const noexcept { return false; }
  /// Throws Error(unsupported) if must_rest(). Waits of other threads end with this error too. Also throws any error
  /// that prevents other ranks from reaching this one.
  virtual void throw_if_resting() const {}

  // The end of the transport.
  /// Returns the error that calls throw in groups that ended with the transport.
  [[nodiscard]] virtual Error ended() const = 0;
  /// Closes the transport after all operations have completed on all ranks. Called again until it returns true.
  virtual bool close() noexcept = 0;
  /// Returns whether the transport can be destroyed before it is closed, because it accesses no memory of its users by
  /// then.
  [[nodiscard]] virtual bool can_be_dropped() const noexcept = 0;
  /// Returns how long a process must not use the transport between the end of its groups on several hosts and its own
  /// end. `last_barrier` is the duration of the last barrier of those groups.
  [[nodiscard]] virtual std::chrono::milliseconds rest(
      [[maybe_unused]] os::Clock::duration last_barrier) const noexcept {
    return std::chrono::milliseconds(0);
  }

 private:
  const int rank_;
  const int size_;
};

}  // namespace muster::multihost
