// SPDX-License-Identifier: Apache-2.0
#pragma once
// Watchdog: the checks that a waiting rank makes between sleeps. Only the watchdog decides whether a wait continues.
// The decision depends on elapsed time, not on how often or why a sleep is interrupted (signals, bells for other
// waits).

#include <chrono>
#include <functional>
#include <optional>
#include <vector>
#include "muster/group.hpp"
#include "src/group/group.hpp"
#include "src/group/progress.hpp"
#include "src/os/clock.hpp"

namespace muster::group {

/// One wait of one rank. The wait begins with the construction.
/// Checking a rank costs a system call. In a large group each slice therefore checks only some ranks, in turns,
/// beginning with this rank's neighbour. If all ranks but one wait, each rank is checked by some other rank in every
/// slice. A single waiter has checked all ranks after `turns` slices.
/// In companion groups ranks wait for each other in chains. A waiting rank counts as making progress if the rank that
/// it waits for does. Each rank therefore publishes the rank it waits for, and the watchdog sums the progress of the
/// whole chain. Ranks that wait in a circle make no progress.
class Watchdog {
 public:
  ~Watchdog();
  /// The longest sleep between two looks.
  static constexpr std::chrono::milliseconds slice{60};
  static constexpr int turns = 16;
  static constexpr int least_at_once = 16;

  /// `parent`: the parent of a companion group, else null (BaseGroup::companion).
  Watchdog(Pulse& group, Pulse* parent, const Peers& peers, int self, const WaitOptions& options,
           std::chrono::milliseconds timeout)
      : group_(group), parent_(parent), peers_(peers), self_(self), options_(options), timeout_(timeout) {}

  /// Called before each sleep. If the wait cannot succeed, poisons the group and throws. It checks every time whether
  /// the group has failed or the caller has cancelled. Once per slice it also checks:
  /// - whether the program was interrupted,
  /// - whether a rank selected by `needed` is dead or has left,
  /// - whether a rank selected by `awaited` made no progress for the whole timeout.
  /// It calls `done` again before it blames a rank, because that rank may have done its part and left.
  void check(const std::function<bool()>& done, const std::function<bool(int)>& needed,
             const std::function<bool(int)>& awaited);

 private:
  /// Checks for cancellation and failure: the cheap half, which does not look at other ranks. Returns true if the wait
  /// has succeeded meanwhile.
  [[nodiscard]] bool check_failure(const std::function<bool()>& done);
  [[noreturn]] void cancel(const char* how);
  void look(os::Clock::time_point now, const std::function<bool()>& done, const std::function<bool(int)>& needed,
            const std::function<bool(int)>& awaited);
  struct Seen {
    std::uint64_t progress = 0;  // sum over the chain
    os::Clock::time_point since;
  };
  [[noreturn]] void fail(const Error& cause);
  /// As fail(), for a failure that this rank detected. Also records the operations of the ranks on its host.
  [[noreturn]] void fail_with_ranks(const Error& cause);
  /// Returns the number that messages use for a rank.
  [[nodiscard]] int number(int rank) const { return (*peers_.ranks)[rank].global_rank; }
  [[nodiscard]] std::string describe(int rank, const char* link) const;
  /// Returns a text about the rank's phase, or an empty text if the phase is unknown.
  [[nodiscard]] std::string last_seen(int rank, const char* before) const;
  void tell(int awaited);
  /// Returns how many ranks one slice looks at.
  [[nodiscard]] int at_once() const noexcept;
  /// Calls look(rank) for the next ranks that `wants` selects, from `at` on. If look() returns false, the turn ends.
  template <class Wants, class Look>
  void take_turn(int& at, const Wants& wants, const Look& look) const;
  /// Fails if the rank is dead or has left. Returns true if so but `done` shows that the wait has succeeded.
  bool is_over(int rank, const std::function<bool()>& done);
  /// Returns whether the rank made no progress until the deadline.
  bool is_late(int rank, os::Clock::time_point now);
  struct Chain {
    std::uint64_t progress = 0;
    int end = 0;  // the rank that the whole chain waits for; in a circle, the rank it began with
  };
  [[nodiscard]] Chain chain_of(int rank) const;
  [[noreturn]] void time_out(std::vector<int> missing);
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
  int next_alive_ = self_;  // the next rank to be checked for life
  int next_late_ = self_;   // the next rank to be checked for progress
  bool any_moves_ = false;
  bool has_told_ = false;
};

// Timeouts of groups, and whether the program wants to cancel the waits of this thread (muster/interrupt.hpp).

/// Returns MUSTER_TIMEOUT in seconds (a fraction is allowed), or 10 minutes if it is unset. Throws
/// Error(invalid_argument) if it does not parse.
std::chrono::milliseconds default_timeout();

/// About 30 years. Deadlines that far away do not overflow the clock; a longer timeout means no timeout.
constexpr std::chrono::seconds longest_timeout{1'000'000'000};

constexpr std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return timeout < longest_timeout ? timeout : longest_timeout;
}
/// Returns the requested timeout, or `otherwise` if none was requested. All waits get their timeouts here.
constexpr std::chrono::milliseconds timeout_of(const std::optional<std::chrono::milliseconds>& asked,
                                               std::chrono::milliseconds otherwise) {
  return bounded(asked.value_or(otherwise));
}
inline std::chrono::milliseconds timeout_of(const WaitOptions& options, const Group& group) {
  return timeout_of(options.timeout, group.timeout());
}

/// A wait sleeps at most this long between two checks for an interrupt.
inline constexpr std::chrono::milliseconds between_questions{40};

/// Returns whether the program wants to cancel the waits of this thread.
bool is_interrupted() noexcept;

/// Throws Error(cancelled) if is_interrupted(). `phase` names the operation in the message.
void check_interrupted(const char* phase);

/// Sleeps, and checks for an interrupt meanwhile. Throws as check_interrupted().
void sleep_unless_interrupted(std::chrono::milliseconds time, const char* phase);

}  // namespace muster::group
