// SPDX-License-Identifier: Apache-2.0
#pragma once
// The rendezvous, in which the processes of a job find each other. At first each process knows only a meeting place, a
// key and its own rank. One state machine serves local groups (Unix sockets), groups of several hosts (TCP) and groups
// over files.
//
//  1. Rank 0 opens the meeting place. Every other rank tries to connect until its deadline, and sends a Hello with its
//     job, version, rank, size and process. Rank 0 answers at once with Word::heard and its own Hello, or with
//     Word::other_job.
//  2. Each rank then prepares the data that the other ranks need, its part, and sends it. If this fails, the rank sends
//     the failure. A rank prepares its part after its hello, so that it can report a failure to do so.
//  3. When rank 0 has all parts, it sends all of them to every rank, or to each rank those that it needs (Terms).
//  4. Steps 2 and 3 form one round. The ranks may run further rounds while the session lasts.
//
// Rank 0 ends the rendezvous with one error, the cause, which all ranks throw. It does so in these cases:
//  - A rank has another version or size, or its rank belongs to another process.
//  - A rank sends a failure or malformed bytes, or it ends: its connection closes, or its process is dead.
//  - Rank 0 cannot prepare its own part, or runs out of descriptors or memory.
//  - The deadline of rank 0, or of a rank that has joined, passes. The cause names the missing ranks.
//  - A rank has not received its messages by the deadline.
//  - The program is interrupted.
// A connection that sends no valid hello belongs to a stranger. Rank 0 drops it after longest_silence, or earlier if
// there are many of them. The rendezvous continues.
//
// A rank that loses rank 0, or waits for it beyond the deadline, throws an error that names rank 0.
//
// Another rank of its host may pass the messages of a rank on (relay.hpp). A rank that loses this relay throws an error
// that names the relay. If it waits beyond its deadline, the error names rank 0 and the relay, because either may be
// stopped.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/os/clock.hpp"
#include "src/rendezvous/messages.hpp"

namespace muster::rendezvous {

using Clock = os::Clock;
using std::chrono::milliseconds;

/// One end of the connection between rank 0 and another process. No function waits.
class Line {
 public:
  virtual ~Line() = default;
  Line& operator=(Line&&) = delete;

  /// Begins to send a message. move() sends the bytes that the transport does not accept now.
  virtual void send(const OutgoingPointer& message) = 0;
  /// Sends as much of the pending messages as possible now. Throws Error(io | out_of_space) if this process fails.
  virtual void move() = 0;
  [[nodiscard]] virtual bool is_drained() const = 0;
  /// For use after Word::failure was sent: returns true once closing the line can no longer lose that message.
  [[nodiscard]] virtual bool is_over() const { return is_drained(); }
  /// Returns the next message that has arrived completely, or nullopt. Throws as move() does.
  virtual std::optional<Message> next(const MessageLimits& limits) = 0;
  struct End {
    bool is_garbage = false;  ///< the other side sent bytes that are not a message
    std::string words;        ///< "its connection was closed"
  };
  /// Returns why no more messages can arrive, or nullopt if they can.
  [[nodiscard]] virtual std::optional<End> end() const = 0;
  /// Returns the value for Member::address.
  [[nodiscard]] virtual std::array<std::uint8_t, 16> address() const { return {}; }
  /// Rank 0: returns the rank that passes the messages of this line on, or null if the line needs none.
  [[nodiscard]] virtual const Hello* relay() const { return nullptr; }
  /// Returns the other side for log messages about strangers: "10.0.0.7".
  [[nodiscard]] virtual std::string from() const { return "a process of this host"; }
};

/// Makes lines: rank 0 accepts them, and the other ranks open them.
class Connector {
 public:
  virtual ~Connector() = default;
  Connector& operator=(Connector&&) = delete;

  /// Rank 0: opens the meeting place. Called once, before all other functions. Returns the token that a Hello must
  /// have. Throws Error(io | argument).
  virtual Token open() = 0;
  /// Rank 0: returns the lines that have arrived since the previous call. Throws as Line::move() does.
  virtual std::vector<std::unique_ptr<Line>> arrivals() = 0;
  /// Rank 0: called when the rendezvous has failed. Frees the resources that arrivals() may need to accept, and turn
  /// away, more ranks.
  virtual void give_up() noexcept {}
  /// Rank 0: sends one message over all lines.
  virtual void tell_all(std::span<Line* const> lines, const OutgoingPointer& message) {
    for (Line* const line : lines) line->send(message);
  }
  /// Rank 0: describes, for messages, the traces that a missing rank has left.
  [[nodiscard]] virtual std::string trace_of(int /*rank*/) const { return {}; }
  /// Other ranks: tries until `until` to connect to rank 0 and to send the Hello, whose token the transport sets.
  /// Returns null, and sets `reason`, if this fails. Throws Error if no later attempt can succeed.
  virtual std::unique_ptr<Line> reach(Hello hello, Clock::time_point until, std::string& reason) = 0;
  /// Other ranks: returns the pause before the next attempt.
  [[nodiscard]] virtual milliseconds pause(int tries) const = 0;
  /// Waits at most `longest`, until a line may have arrived, received, sent or closed.
  virtual void wait(std::span<Line* const> lines, milliseconds longest) = 0;
};

struct Terms {
  std::string call;   ///< "local_group": the first word of error messages
  std::string place;  ///< "on this host", "at 10.0.0.1:29500"
  std::string hint;   ///< the remedy if a rank is missing, for error messages
  int rank = 0;
  int size = 1;
  Clock::time_point deadline = {};   ///< deadline of step 1
  std::function<void()> watch = {};  ///< called repeatedly while this rank waits; may throw to end the rendezvous
  std::vector<int> numbers = {};     ///< numbers of the ranks in messages; empty: 0, 1, 2 and so on
  /// Returns the ranks, in ascending order, whose parts a rank receives in the first round; the same on all ranks. In
  /// later rounds, each rank then receives only that of rank 0. Empty: it receives those of all ranks. Not for parts
  /// with descriptors.
  std::function<std::vector<int>(int rank)> needed = {};

  [[nodiscard]] int number(int of_rank) const {
    return numbers.empty() ? of_rank : numbers[static_cast<std::size_t>(of_rank)];
  }
};

/// The data that a rank contributes to a round. The caller keeps the descriptors open until the round has ended.
struct RoundPart {
  std::vector<std::byte> payload = {};
  std::vector<int> descriptors = {};
};

class Session {
 public:
  /// Runs step 1. Throws Error(timeout) if rank 0 cannot be reached, and all errors of round().
  Session(Terms terms, std::unique_ptr<Connector> transport);
  ~Session();

  using Prepare = std::function<RoundPart()>;
  /// Runs steps 2 and 3. Collective. Returns the ranks that this rank needs, in order (on rank 0, all ranks). The first
  /// round also fills in host, pid and address.
  /// On rank 0 the Member of rank 0 has no descriptors. If the round fails, every rank throws the same cause:
  /// Error(timeout | version | rank_mismatch | peer_lost | cancelled), or the error that `prepare` threw on one of the
  /// ranks. The session has then ended.
  std::vector<Member> round(const Prepare& prepare, Clock::time_point deadline);
  /// Throws the cause if a rank has ended or failed. Called between rounds, during long operations of all ranks. Local;
  /// never waits.
  void watch();
  /// Sends a failure of this rank to the others, and returns the cause that all ranks throw. The cause is a different
  /// error if this failure is its consequence, such as a lost connection to a rank that has died.
  Error settle(const Error& own) noexcept;

  class Side;

 private:
  std::unique_ptr<Side> side_;
};

/// Rank 0 drops a connection that has sent no Hello for this long.
inline constexpr std::chrono::seconds longest_silence{10};
/// Rank 0 keeps at most this many connections without a Hello, in addition to one per rank.
inline constexpr std::size_t most_strangers = 64;

}  // namespace muster::rendezvous
