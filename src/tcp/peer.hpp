// SPDX-License-Identifier: Apache-2.0
#pragma once
// Peer: another rank as this one sends to it and receives from it: which message belongs to which receive, what waits
// for a receive and what for an answer. The numbers are those of frames.hpp. All of it under the transport's lock.

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/error.hpp"
#include "src/hosts/transport.hpp"
#include "src/tcp/connection.hpp"

namespace muster::tcp {

/// How far a message is on this side. What it works on is the caller's, or kept by `keeper`, as long as it is not over.
struct Progress {
  std::shared_ptr<const void> keeper;
  bool is_over = false;
  std::optional<Error> failure;  ///< why it is over
};

/// A message that goes.
struct Outgoing final : Source {
  Outgoing(int to_tag, std::span<const std::byte> what, std::shared_ptr<const void> who, bool waits_for_taken)
      : tag(to_tag), bytes(what), needs_taken(waits_for_taken), is_borrowed(who == nullptr && !what.empty()) {
    progress.keeper = std::move(who);
  }
  [[nodiscard]] std::span<const std::byte> bytes_from(std::size_t offset) const noexcept override;

  const int tag;
  const std::span<const std::byte> bytes;
  const bool needs_taken;    ///< finished when its receiver has begun to take it in
  const bool is_borrowed;    ///< nobody here keeps its bytes
  bool is_offered = false;   ///< its bytes go when they are wanted
  bool is_given_up = false;  ///< of a borrowed one: zeros go in place of what has not gone
  bool is_sent = false;
  bool is_taken = false;
  Progress progress;
};

/// A receive.
struct Incoming {
  int tag = 0;
  std::span<std::byte> place;
  bool is_from_anybody = false;  ///< if the peer that answers it fails, it waits for the others again
  Progress progress = {};
};

/// A message that no receive waits for: it has come, or can be had.
struct Arrival {
  int tag = 0;
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  bool is_offer = false;
  bool is_whole = false;
  std::unique_ptr<std::byte[]> memory = {};  ///< not of an offer
  std::shared_ptr<Incoming> taker = {};      ///< of one that is not whole yet
};

class Peer final : public Connection::Owner {
 public:
  /// What peers have in common.
  struct Shared {
    std::deque<std::shared_ptr<Incoming>> from_anybody;
    std::size_t arrivals = 0;  // of all peers
    /// Makes a receive from anybody wait again.
    std::function<void(const std::shared_ptr<Incoming>&)> receive_from_anybody;
    /// Who kept what is over: destroyed when the lock is not held, because it may be anybody's.
    std::vector<std::shared_ptr<const void>> over;
    std::function<std::unique_ptr<Connection>(Peer&)> connect;
    std::function<void(Peer&)> lost;
  };

  Peer(Shared& shared, int rank) : shared_(shared), rank_(rank) {}

  [[nodiscard]] int rank() const noexcept { return rank_; }
  /// Nothing comes from it any more, and nothing goes to it: why.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  /// Not of one with a failure.
  void send(const std::shared_ptr<Outgoing>& message);
  /// Nothing waits for this side to go on.
  [[nodiscard]] bool has_nothing_to_send() const noexcept;
  void receive(const std::shared_ptr<Incoming>& receive);
  void take_back(const std::shared_ptr<Incoming>& receive);
  /// Takes the oldest message out; null if there is none. Without a tag: of any from hosts::first_tag on.
  std::shared_ptr<Arrival> find(std::optional<int> tag);
  void receive(const std::shared_ptr<Arrival>& arrival, const std::shared_ptr<Incoming>& receive);
  void drop(const std::shared_ptr<Arrival>& arrival);
  /// Its connection to this rank. False if it has one.
  bool accept(std::unique_ptr<Connection> connection);
  void say_bye();
  /// It has said bye on all of its connections, or there are none.
  [[nodiscard]] bool is_through() const noexcept;
  void close();
  void give_up_sockets() noexcept;

  std::span<std::byte> place_for(Connection& connection, const Frame& frame) override;
  void arrived(Connection& connection, const Frame& frame) override;
  void sent(Connection& connection, const Frame& frame, const std::shared_ptr<Source>& source) override;
  void ended(Connection& connection, const std::optional<Error>& failure) override;

 private:
  std::shared_ptr<Incoming> match(int tag);
  void want(std::uint64_t number, std::uint64_t bytes, const std::shared_ptr<Incoming>& receive);
  /// A message is being taken in: steps 1 and 3.
  void took(const Arrival& arrival);
  void answered(const Frame& frame);
  [[nodiscard]] bool has_left(const Connection& connection) const noexcept;
  void finish(Progress& progress, std::optional<Error> failure = {});
  /// The message that answers the receive does not come, or not whole.
  void give_up(const std::shared_ptr<Incoming>& receive, const Error& failure);
  void fail(const Error& why);

  Shared& shared_;
  const int rank_;
  std::optional<Error> failure_;
  bool has_said_bye_ = false;
  std::vector<const Connection*> left_;  // those that the other side has said bye on

  // To it.
  std::unique_ptr<Connection> to_;
  std::uint64_t next_number_ = 1;
  std::uint64_t in_window_ = 0;
  std::size_t offers_ = 0;                                         // whose bytes have not gone
  std::map<std::uint64_t, std::shared_ptr<Outgoing>> unanswered_;  // offers, and messages that have to be taken

  // From it.
  std::unique_ptr<Connection> from_;
  std::deque<std::shared_ptr<Arrival>> arrivals_;
  std::uint64_t waiting_ = 0;    // what arrivals take up of the window
  std::uint64_t to_return_ = 0;  // of the window
  std::deque<std::shared_ptr<Incoming>> posted_;
  std::map<std::uint64_t, std::shared_ptr<Incoming>> wanted_;  // by the offer's number
  // What is being read belongs to one of these.
  std::shared_ptr<Incoming> into_;
  std::shared_ptr<Arrival> into_arrival_;
};

}  // namespace muster::tcp
