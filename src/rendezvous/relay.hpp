// SPDX-License-Identifier: Apache-2.0
#pragma once
// Relays: each host has one connection to rank 0, which carries the messages of all its ranks.
//
//  1. The ranks of one host and user find each other at an abstract Unix socket. Its name is a hash of the job's token
//     and address. The first rank that claims the name is the relay. It connects to rank 0. The connection is a trunk.
//     Rank 0 claims the name too if it is free, and then needs no trunk to the ranks of its host.
//  2. Every other rank connects to the relay, over its line, and sends a hello: its rank, process and job. The relay
//     answers with a card, which names the relay. Until rank 0 has accepted that rank, the relay sends it the card
//     again every second, and after each failed attempt to reach rank 0. A rank that receives no card for five seconds
//     leaves the relay, and from then on connects to rank 0 itself. If the relay ends before rank 0 has accepted it,
//     the next rank claims the name. A relay that lacks descriptors for more ranks gives the name up.
//  3. When rank 0 has accepted the relay, the relay numbers its lines and passes the hellos on. From then on it passes
//     all messages on. It adds the number of the line to a message of a rank. A message of rank 0 names its lines. Rank
//     0 sends a message for several ranks once per trunk.
//  4. The relay passes its own failure, or the one that rank 0 sends to it, to all ranks behind it. Before its
//     rendezvous ends, it waits until they have received everything, or no longer receive anything.
// If the connection of a rank behind it ends, the relay reports this to rank 0, which names that rank. If a trunk ends,
// rank 0 names the relay, and so do the ranks behind it.

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/rendezvous/sockets.hpp"

namespace muster::rendezvous {

/// Returns the name of step 1. `address` is that of the rendezvous.
std::string relay_name(const Token& token, const std::string& address);

/// A line that has a socket of its own, but gives its messages another meaning.
class FilteredLine : public LineOnSocket {
 public:
  explicit FilteredLine(std::unique_ptr<SocketLine> socket) : socket_(std::move(socket)) {}
  [[nodiscard]] SocketLine& carrier() noexcept override { return *socket_; }
  void send(const OutgoingPointer& message) override { socket_->send(message); }
  void move() override { socket_->move(); }
  [[nodiscard]] bool is_drained() const override { return socket_->is_drained(); }
  [[nodiscard]] bool is_over() const override { return socket_->is_over(); }
  std::optional<Message> next(const MessageLimits& limits) override { return socket_->next(limits); }
  [[nodiscard]] std::optional<End> end() const override { return socket_->end(); }
  [[nodiscard]] std::string from() const override { return socket_->from(); }

 private:
  std::unique_ptr<SocketLine> socket_;
};

/// The relay's side.
class Relay {
 public:
  /// `listener` holds the name. `own` is the Hello of this rank, with its token.
  Relay(os::Fd listener, const Hello& own) : listener_(std::move(listener)), own_(own) {}
  /// Step 4.
  ~Relay();
  Relay& operator=(Relay&&) = delete;

  [[nodiscard]] const Token& token() const noexcept { return own_.token; }
  /// Called before each attempt to reach rank 0. `reason` is that of the previous failure.
  void tell_reason(const std::string& reason);
  /// Returns this rank's line to rank 0, over the connected socket. `root` is the address of rank 0.
  std::unique_ptr<Line> make_trunk(std::unique_ptr<SocketLine> socket, const std::array<std::uint8_t, 16>& root);
  /// Accepts ranks, and passes the messages of the ranks on. Never waits. Throws as Line::move() does.
  void move();
  /// Adds the sockets for which wait_for_sockets() should wait.
  void add_to(std::vector<SocketLine*>& sockets, std::vector<const os::Fd*>& listeners) const;

 private:
  class TrunkEnd;
  struct Branch {
    std::uint32_t number = 0;
    std::unique_ptr<SocketLine> line;
    Clock::time_point since = Clock::now();
    OutgoingPointer hello = {};  // null until it has arrived
    bool is_open = false;        // rank 0 has received the hello
    bool is_heard = false;       // rank 0 has accepted it
    bool is_told = false;        // a failure was sent to it
    bool is_over = false;
  };

  void accept();
  void hear(Branch& branch);
  void take(Branch& branch, const Message& message);
  void open(Branch& branch);
  void leave(Branch& branch, const Line::End& end);
  void send_card(Branch& branch);
  void send_cards();
  void tell_failure();
  void carry(const Branch& branch, const OutgoingPointer& message);
  /// Passes a message of rank 0 on. Sets `own` if it is for this rank. Returns false if it is malformed.
  bool take_from_root(Message message, std::optional<Message>& own);
  void take_own(const Message& message);

  os::Fd listener_;
  const Hello own_;
  std::array<std::uint8_t, 16> root_{};
  std::string reason_;
  Clock::time_point told_ = Clock::now();  // when the cards were sent
  std::uint32_t last_number_ = 0;
  std::deque<Branch> branches_;
  SocketLine* trunk_ = nullptr;  // null while this rank has no connection to rank 0
  bool is_heard_ = false;        // rank 0 has accepted this rank
  OutgoingPointer failure_;      // the failure that rank 0 has sent to this rank
  OutgoingPointer own_failure_;  // the failure that this rank has sent to rank 0
};

/// The facts that a line to a relay leaves to the next attempt of its rank.
struct RelayNews {
  bool was_silent = false;                 ///< the rank has left a silent relay, and tries no other one
  std::array<std::uint8_t, 16> root = {};  ///< RelayCard::root
};

/// The line of a rank to its relay.
class LineToRelay final : public FilteredLine {
 public:
  LineToRelay(std::unique_ptr<SocketLine> socket, RelayNews& news) : FilteredLine(std::move(socket)), news_(news) {}
  ~LineToRelay() override;
  LineToRelay& operator=(LineToRelay&&) = delete;
  std::optional<Message> next(const MessageLimits& limits) override;

 private:
  RelayNews& news_;
  bool is_heard_ = false;
};

/// Rank 0's side: a connection that may carry the messages of several ranks.
class Trunk {
 public:
  /// A line of a rank behind the relay.
  struct Branch {
    std::uint32_t number = 0;
    std::deque<Message> incoming = {};
    std::optional<Line::End> end = {};
  };

  explicit Trunk(std::unique_ptr<SocketLine> socket) : socket_(std::move(socket)) {}
  [[nodiscard]] SocketLine& socket() noexcept { return *socket_; }
  [[nodiscard]] const SocketLine& socket() const noexcept { return *socket_; }
  /// Returns the Hello of the relay, or null before it has arrived.
  [[nodiscard]] const Hello* relay() const noexcept { return hello_ ? &*hello_ : nullptr; }
  /// Reads messages up to the next one of the relay itself, which it returns. Returns nullopt if none has arrived, or
  /// after many messages of other ranks.
  std::optional<Message> next(MessageLimits limits);
  [[nodiscard]] std::optional<Line::End> end() const { return garbage_ ? garbage_ : socket_->end(); }
  /// Sends one message to these lines.
  void send(std::span<const std::uint32_t> lines, const OutgoingPointer& message);
  [[nodiscard]] bool has_fresh() const noexcept { return !fresh_.empty(); }
  /// Returns the lines that have been opened since the previous call.
  std::vector<std::shared_ptr<Branch>> take_fresh() { return std::exchange(fresh_, {}); }

 private:
  bool take(const Message& message, int size);

  std::unique_ptr<SocketLine> socket_;
  std::optional<Hello> hello_;
  std::optional<Line::End> garbage_;
  std::map<std::uint32_t, std::shared_ptr<Branch>> branches_;
  std::vector<std::shared_ptr<Branch>> fresh_;
};

/// Rank 0's line to the rank at the other end of a trunk (`branch` is null), or to a rank behind that one.
class TrunkLine final : public LineOnSocket {
 public:
  explicit TrunkLine(std::shared_ptr<Trunk> trunk, std::shared_ptr<Trunk::Branch> branch = nullptr)
      : trunk_(std::move(trunk)), branch_(std::move(branch)) {}
  [[nodiscard]] SocketLine& carrier() noexcept override { return trunk_->socket(); }
  void send(const OutgoingPointer& message) override;
  void move() override { trunk_->socket().move(); }
  [[nodiscard]] bool is_drained() const override { return trunk_->socket().is_drained(); }
  [[nodiscard]] bool is_over() const override { return trunk_->end() || (branch_ && branch_->end); }
  std::optional<Message> next(const MessageLimits& limits) override;
  /// The end of the trunk is the end of the relay's line only, so that rank 0 names the relay.
  [[nodiscard]] std::optional<End> end() const override { return branch_ ? branch_->end : trunk_->end(); }
  [[nodiscard]] std::array<std::uint8_t, 16> address() const override { return trunk_->socket().address(); }
  [[nodiscard]] const Hello* relay() const override { return branch_ ? trunk_->relay() : nullptr; }
  [[nodiscard]] std::string from() const override { return trunk_->socket().from(); }

  [[nodiscard]] Trunk& trunk() noexcept { return *trunk_; }
  [[nodiscard]] std::uint32_t number() const noexcept { return branch_ ? branch_->number : 0; }

 private:
  std::shared_ptr<Trunk> trunk_;
  std::shared_ptr<Trunk::Branch> branch_;
};

}  // namespace muster::rendezvous
