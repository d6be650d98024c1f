// SPDX-License-Identifier: Apache-2.0
#pragma once
// The rendezvous: how processes that know a place, a key and their rank come to know each other. There is one state
// machine for local groups (Unix sockets), groups of several hosts (TCP) and groups over files.
//
//  1. Rank 0 opens the place. Every other rank tries to reach it until its deadline, and sends a hello: job, version,
//     rank, size, process. Rank 0 answers at once: "heard" with its own hello, or "another job".
//  2. Each rank then prepares its part, which the others need, and sends it. If that fails, it sends the failure. It
//     prepares after its hello, so that a rank that cannot join can report it.
//  3. When rank 0 has all parts, it sends all of them to every rank.
//  4. Steps 2 and 3 are a round. The ranks may make further rounds while the session lasts.
//
// Rank 0 ends the rendezvous with one cause, which all ranks throw, if
//  - a rank has another version, another size, or a rank that another process has;
//  - a rank sends a failure, garbage, or ends (its connection closes, or its process is seen to be dead);
//  - rank 0 itself cannot prepare, or runs out of descriptors or memory;
//  - its own deadline, or that of a rank that has joined, passes: the cause names the missing ranks;
//  - a rank does not take what is sent to it until the deadline, or the program is interrupted.
// A connection that sends no valid hello is a stranger's: it is dropped after longest_silence, earlier if there are
// many of them, and changes nothing.
//
// A rank that loses rank 0, or waits for it beyond its deadline, names rank 0.

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

/// One end of the conversation between rank 0 and another process. Nothing here waits.
class Line {
 public:
  virtual ~Line() = default;
  Line& operator=(Line&&) = delete;

  /// Sends a message; move() sends the rest of what the other side has not taken yet.
  virtual void send(const OutgoingPointer& message) = 0;
  /// Moves what can be moved now. Throws Error(io | no_space) on a failure of this process.
  virtual void move() = 0;
  [[nodiscard]] virtual bool is_drained() const = 0;
  /// After a failure has been sent: closing the line cannot lose it any more.
  [[nodiscard]] virtual bool is_over() const { return is_drained(); }
  /// The next message that has come. Throws as move().
  virtual std::optional<Message> next(const Limits& limits) = 0;
  struct End {
    bool is_garbage = false;  ///< it sent bytes that are not a message
    std::string words;        ///< "its connection was closed"
  };
  /// Why nothing more comes; empty as long as something may.
  [[nodiscard]] virtual std::optional<End> end() const = 0;
  /// For Member::address.
  [[nodiscard]] virtual std::array<std::uint8_t, 16> address() const { return {}; }
  /// "10.0.0.7", for messages about strangers.
  [[nodiscard]] virtual std::string from() const { return "a process of this host"; }
};

/// How lines come about.
class Transport {
 public:
  virtual ~Transport() = default;
  Transport& operator=(Transport&&) = delete;

  /// Rank 0: opens the place. Called once, before all others. Returns the token that hellos must have. Throws Error(io
  /// | argument).
  virtual Token open() = 0;
  /// Rank 0: the lines that have come since. Throws as Line::move().
  virtual std::vector<std::unique_ptr<Line>> arrivals() = 0;
  /// Rank 0: the rendezvous has failed. Frees what arrivals() may need to turn more ranks away.
  virtual void give_up() noexcept {}
  /// Rank 0: sends one message over all lines.
  virtual void tell_all(std::span<Line* const> lines, const OutgoingPointer& message) {
    for (Line* const line : lines) line->send(message);
  }
  /// Rank 0: traces of a rank that has not come, for messages.
  [[nodiscard]] virtual std::string trace_of(int /*rank*/) const { return {}; }
  /// Other ranks: tries to reach rank 0 and to send the hello, until then at the latest. Null if that failed, with the
  /// reason. Throws Error if no later try can succeed.
  /// The transport knows the token.
  virtual std::unique_ptr<Line> reach(Hello hello, Clock::time_point until, std::string& reason) = 0;
  /// Other ranks: the pause before the next try.
  [[nodiscard]] virtual milliseconds pause(int tries) const = 0;
  /// Waits until something may have come or gone, at most `longest`.
  virtual void wait(std::span<Line* const> lines, milliseconds longest) = 0;
};

struct Terms {
  std::string call;   ///< "local_group": begins the messages
  std::string place;  ///< "on this host", "at 10.0.0.1:29500"
  std::string hint;   ///< how to proceed if a rank is missing
  int rank = 0;
  int size = 1;
  Clock::time_point deadline = {};   ///< of step 1
  std::function<void()> watch = {};  ///< called while this rank waits; throws to end the rendezvous
  std::vector<int> numbers = {};     ///< by which messages call the ranks; empty: 0, 1, ...

  [[nodiscard]] int number(int of_rank) const {
    return numbers.empty() ? of_rank : numbers[static_cast<std::size_t>(of_rank)];
  }
};

/// The contribution of a rank to a round. The caller keeps the descriptors open until the round has ended.
struct Part {
  std::vector<std::byte> payload = {};
  std::vector<int> descriptors = {};
};

class Session {
 public:
  /// Step 1. Throws Error(timeout) if rank 0 cannot be reached, and as round().
  Session(Terms terms, std::unique_ptr<Transport> transport);
  ~Session();

  using Prepare = std::function<Part()>;
  /// Steps 2 and 3. Collective. Returns all ranks in their order, in the first round with host, process and address; on
  /// rank 0 its own part has no descriptors. Every rank
  /// throws the same cause if the round fails: Error(timeout | version | rank_mismatch | peer_lost | cancelled), or
  /// what `prepare` threw on one of them. The session is over then.
  std::vector<Member> round(const Prepare& prepare, Clock::time_point deadline);
  /// Between rounds, while the ranks do something together that can take long: throws the cause if a rank has ended or
  /// failed. Local, never waits.
  void watch();
  /// Sends a failure of this rank to the others, and returns the cause that all ranks throw. That is another one if
  /// this failure follows from it (a connection to a rank that has died).
  Error settle(const Error& own) noexcept;

  class Side;

 private:
  std::unique_ptr<Side> side_;
};

/// Turned-away strangers stay at most this long.
inline constexpr std::chrono::seconds longest_silence{10};
/// And at most so many beside the ranks of the job.
inline constexpr std::size_t most_strangers = 64;

}  // namespace muster::rendezvous
