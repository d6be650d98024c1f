// SPDX-License-Identifier: Apache-2.0
#pragma once
// Watchdog: what a waiting rank looks at between sleeps. It alone decides that a wait goes on, by the clock: how often
// and by what a sleep is ended (signals, bells that ring for others) makes no difference.

#include <chrono>
#include <functional>
#include <vector>

#include "src/os/clock.hpp"
#include "src/sync/group.hpp"
#include "src/sync/pulse.hpp"

namespace muster::sync {

/// One wait of one rank. It begins when it is made.
/// A look at a rank costs a system call. Of a large group a slice takes some ranks, by turns, beginning with the own
/// neighbour: where all ranks but one wait, each is seen by somebody in every slice, and a single waiter has seen all
/// of them after `turns` slices. In companion groups ranks wait for each other in chains: a rank that waits moves as
/// long as the one it waits for does, so each tells whom it waits for, and progress is that of the whole chain. Ranks
/// that wait in a circle stand.
class Watchdog {
 public:
  ~Watchdog();
  /// The longest sleep between two looks.
  static constexpr std::chrono::milliseconds slice{60};
  static constexpr int turns = 16;
  static constexpr int least_at_once = 16;

  /// `parent`: of a companion group, else null (Group::companion).
  Watchdog(Pulse& group, Pulse* parent, const Peers& peers, int self, const WaitOptions& options,
           std::chrono::milliseconds timeout)
      : group_(group), parent_(parent), peers_(peers), self_(self), options_(options), timeout_(timeout) {}

  /// Called before each sleep. Throws (and poisons the group) where the wait cannot succeed: the group has failed, the
  /// caller cancelled; and, looked at once a slice, the program was interrupted, a rank that `needed` names is dead or
  /// has left, or none of those that `awaited` names made progress until the deadline. `done` is asked again before a
  /// rank is blamed: it may have done its part and gone.
  void check(const std::function<bool()>& done, const std::function<bool(int)>& needed,
             const std::function<bool(int)>& awaited);

 private:
  /// Cancelled or failed: the cheap half, without a look at the other ranks. True if the wait is over after all.
  [[nodiscard]] bool check_failure(const std::function<bool()>& done);
  [[noreturn]] void cancel(const char* how);
  void look(os::Clock::time_point now, const std::function<bool()>& done, const std::function<bool(int)>& needed,
            const std::function<bool(int)>& awaited);
  struct Seen {
    std::uint64_t progress = 0;  // of the chain
    os::Clock::time_point since;
  };
  [[noreturn]] void fail(const Error& cause);
  /// Likewise of what this rank has found out, and keeps what the ranks of its host are in.
  [[noreturn]] void fail_with_ranks(const Error& cause);
  /// What messages call a rank.
  [[nodiscard]] int number(int rank) const { return peers_.ranks[static_cast<std::size_t>(rank)].rank; }
  [[nodiscard]] std::string describe(int rank) const;
  /// What to say of the rank's phase; nothing if it is not known.
  [[nodiscard]] std::string last_seen(int rank, const char* before) const;
  void tell(int awaited);
  /// Ranks that one slice looks at.
  [[nodiscard]] int at_once() const noexcept;
  /// Calls look(rank) for the next ones that `wants` names, from `at` on; false from it ends the turn.
  template <class Wants, class Look>
  void take_turn(int& at, const Wants& wants, const Look& look) const;
  /// Fails if the rank is dead or has left; true if it is, and `done` says that it does not matter any more.
  bool is_over(int rank, const std::function<bool()>& done);
  /// No progress until the deadline.
  bool is_late(int rank, os::Clock::time_point now);
  struct Chain {
    std::uint64_t progress = 0;
    int end = 0;  // whom all of it waits for; where it is a circle, the rank it began with
  };
  [[nodiscard]] Chain chain_of(int rank) const;
  [[noreturn]] void time_out(const std::vector<int>& missing);
  void log_waiting(os::Clock::time_point now, const std::function<bool(int)>& awaited) const;

  Pulse& group_;
  Pulse* parent_;
  const Peers& peers_;
  int self_;
  const WaitOptions& options_;
  std::chrono::milliseconds timeout_;
  os::Clock::time_point begin_ = os::Clock::now();
  os::Clock::time_point looked_ = begin_;
  os::Clock::time_point logged_ = begin_;
  std::vector<Seen> seen_;
  int next_alive_ = self_;  // whose turn it is: to be looked at,
  int next_late_ = self_;   // and to be asked how it gets on
  bool any_moves_ = false;
  bool has_told_ = false;
};

}  // namespace muster::sync
