// SPDX-License-Identifier: Apache-2.0
#pragma once
// Watchdog: what a waiting rank looks at between slices of sleep. It ends a wait that cannot succeed.

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "muster/sync_group.hpp"
#include "src/sync/pulse.hpp"

namespace muster::sync {

/// One wait of one rank. It begins when it is made.
/// In companion groups ranks wait for each other in chains: a rank that waits moves as long as the one it waits for
/// does, so each tells whom it waits for, and progress is that of the whole chain. Ranks that wait in a circle stand.
class Watchdog {
 public:
  ~Watchdog();
  /// The longest sleep between two looks.
  static constexpr std::chrono::milliseconds slice{20};

  /// `parent`: of a companion group, else null (SyncGroup::companion).
  Watchdog(Pulse& group, Pulse* parent, const Peers& peers, int self, const WaitOptions& options,
           std::chrono::milliseconds timeout)
      : group_(group), parent_(parent), peers_(peers), self_(self), options_(options), timeout_(timeout) {}

  /// Throws (and poisons the group) where the wait cannot succeed: the group has failed, the caller cancelled, a rank
  /// that `needed` names is dead or has left, or none of those that `awaited` names made progress until the deadline.
  /// `done` is asked again before a rank is blamed: it may have done its part and gone.
  void check(const std::function<bool()>& done, const std::function<bool(int)>& needed,
             const std::function<bool(int)>& awaited);
  /// Cancelled or failed: the cheap half, without a look at the other ranks.
  void check_failure();

 private:
  struct Seen {
    std::uint64_t progress = 0;  // of the chain
    std::chrono::steady_clock::time_point since;
  };
  [[noreturn]] void fail(const Error& cause);
  [[nodiscard]] std::string describe(int rank) const;
  void tell(int awaited);
  struct Chain {
    std::uint64_t progress = 0;
    int end = 0;  // whom all of it waits for; where it is a circle, the rank it began with
  };
  [[nodiscard]] Chain chain_of(int rank) const;
  [[noreturn]] void time_out(const std::vector<int>& missing);

  Pulse& group_;
  Pulse* parent_;
  const Peers& peers_;
  int self_;
  const WaitOptions& options_;
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point logged_ = begin_;
  std::vector<Seen> seen_;
  bool has_told_ = false;
};

}  // namespace muster::sync
