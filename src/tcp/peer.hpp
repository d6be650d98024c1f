// SPDX-License-Identifier: Apache-2.0
#pragma once
// Peer: the messages between this rank and another rank. It matches messages with receives, and keeps the messages that
// wait for a receive or for an answer. The step numbers are those of connection.hpp. The lock of the transport guards
// everything here.

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/error.hpp"
#include "src/multihost/transport.hpp"
#include "src/tcp/connection.hpp"

namespace muster::tcp {

/// The state of an operation. Until it is over, its memory belongs to the caller or is kept by `keeper`.
struct OperationState {
  std::shared_ptr<const void> keeper;
  bool is_over = false;
  std::optional<Error> failure;  ///< the reason if the operation has failed
};

/// An outgoing message.
struct OutgoingFrame final : MessageSource {
  OutgoingFrame(int to_tag, std::span<const std::byte> what, std::shared_ptr<const void> who, bool waits_for_taken)
      : tag(to_tag), bytes(what), needs_taken(waits_for_taken), is_borrowed(who == nullptr && !what.empty()) {
    progress.keeper = std::move(who);
  }
  [[nodiscard]] std::span<const std::byte> bytes_from(std::size_t offset) const noexcept override;

  const int tag;
  const std::span<const std::byte> bytes;
  const bool needs_taken;    ///< complete only when the receiver has begun to receive it
  const bool is_borrowed;    ///< the memory belongs to the caller
  bool is_offered = false;   ///< the bytes are sent when the receiver requests them
  bool is_given_up = false;  ///< only if borrowed: zeros are sent in place of the remaining bytes
  bool is_sent = false;
  bool is_taken = false;
  OperationState progress;
};

/// A receive operation.
struct ReceiveOperation {
  int tag = 0;
  std::span<std::byte> place;
  bool is_from_anybody = false;  ///< if the peer that answers it fails, it waits for the other peers again
  OperationState progress = {};
};

/// A message for which there is no receive. It has arrived or was offered.
struct UnmatchedMessage {
  int tag = 0;
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  bool is_offer = false;
  bool is_whole = false;
  std::unique_ptr<std::byte[]> memory = {};      ///< null for an offer
  std::shared_ptr<ReceiveOperation> taker = {};  ///< the receive of a message that is not complete yet
};

class Peer final : public Connection::Owner {
 public:
  /// The state that all peers share.
  struct PeersState {
    std::deque<std::shared_ptr<ReceiveOperation>> from_anybody;
    std::size_t arrivals = 0;  // of all peers
    /// Makes a receive from any rank wait again.
    std::function<void(const std::shared_ptr<ReceiveOperation>&)> receive_from_anybody;
    /// Keepers of operations that are over. They are destroyed without the lock, because their destructors may run code
    /// of the program.
    std::vector<std::shared_ptr<const void>> over;
    std::function<std::unique_ptr<Connection>(Peer&)> connect;
    std::function<void(Peer&)> lost;
  };

  Peer(PeersState& shared, int rank) : shared_(shared), rank_(rank) {}

  [[nodiscard]] int rank() const noexcept { return rank_; }
  /// Returns why this peer can no longer send or receive, or nullopt.
  [[nodiscard]] const std::optional<Error>& error() const noexcept { return failure_; }
  /// Must not be called after a failure.
  void send(const std::shared_ptr<OutgoingFrame>& message);
  /// Returns whether no other rank waits for data from this side.
  [[nodiscard]] bool has_nothing_to_send() const noexcept;
  void receive(const std::shared_ptr<ReceiveOperation>& receive);
  void take_back(const std::shared_ptr<ReceiveOperation>& receive);
  /// Removes and returns the oldest message, or null. Without a tag: of any tag from multihost::first_tag on.
  std::shared_ptr<UnmatchedMessage> find(std::optional<int> tag);
  void receive(const std::shared_ptr<UnmatchedMessage>& arrival, const std::shared_ptr<ReceiveOperation>& receive);
  void drop(const std::shared_ptr<UnmatchedMessage>& arrival);
  /// Accepts the connection from the peer to this rank. Returns false if one exists already.
  bool accept(std::unique_ptr<Connection> connection);
  void say_bye();
  /// Returns whether the peer has sent `bye` on all of its connections, or has no connections.
  [[nodiscard]] bool is_through() const noexcept;
  void close();
  void give_up_sockets() noexcept;

  std::span<std::byte> place_for(Connection& connection, const Frame& frame) override;
  void arrived(Connection& connection, const Frame& frame) override;
  void sent(Connection& connection, const Frame& frame, const std::shared_ptr<MessageSource>& source) override;
  void ended(Connection& connection, const std::optional<Error>& failure) override;

 private:
  std::shared_ptr<ReceiveOperation> match(int tag);
  void want(std::uint64_t number, std::uint64_t bytes, const std::shared_ptr<ReceiveOperation>& receive);
  /// Called when a message begins to be received: steps 1 and 3.
  void took(const UnmatchedMessage& arrival);
  void answered(const Frame& frame);
  [[nodiscard]] bool has_left(const Connection& connection) const noexcept;
  void finish(OperationState& progress, std::optional<Error> failure = {});
  /// Called when the message for this receive will not arrive completely.
  void give_up(const std::shared_ptr<ReceiveOperation>& receive, const Error& failure);
  void fail(const Error& why);

  PeersState& shared_;
  const int rank_;
  std::optional<Error> failure_;
  bool has_said_bye_ = false;
  std::vector<const Connection*> left_;  // connections on which the other side has sent `bye`

  // To the peer:
  std::unique_ptr<Connection> to_;
  std::uint64_t next_number_ = 1;
  std::uint64_t in_window_ = 0;
  std::size_t offers_ = 0;                                              // offers whose bytes have not been sent
  std::map<std::uint64_t, std::shared_ptr<OutgoingFrame>> unanswered_;  // offers, and messages that need `taken`

  // From the peer:
  std::unique_ptr<Connection> from_;
  std::deque<std::shared_ptr<UnmatchedMessage>> arrivals_;
  std::uint64_t waiting_ = 0;    // the cost of the arrivals in the window
  std::uint64_t to_return_ = 0;  // the part of the window that has not been returned yet
  std::deque<std::shared_ptr<ReceiveOperation>> posted_;
  std::map<std::uint64_t, std::shared_ptr<ReceiveOperation>> wanted_;  // by the number of the offer
  // One of these is the destination of the payload that is being read.
  std::shared_ptr<ReceiveOperation> into_;
  std::shared_ptr<UnmatchedMessage> into_arrival_;
};

}  // namespace muster::tcp
