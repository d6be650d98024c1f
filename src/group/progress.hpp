// SPDX-License-Identifier: Apache-2.0
#pragma once
// Progress: the messages of all groups of a process make progress during every wait, whatever the wait is for. This is
// the progress rule of MPI. So each wait, in each kind of group, constructs a Progress and calls step() between its
// sleeps.
//
// All groups of the process are in one list. A step acquires each group (BaseGroup::Hold) unless another thread holds
// it, and runs one step of its mail. If this fails, that group has failed; the wait itself continues.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "muster/error.hpp"
#include "src/group/group.hpp"
#include "src/group/rank_table.hpp"
#include "src/group/region.hpp"
#include "src/os/clock.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"

namespace muster::group {

class BaseGroup;

class RankProgress {
 public:
  using Clock = os::Clock;

  /// Runs one step of the mail of all groups. Returns how long the caller may sleep, at most `longest`: zero soon after
  /// a message has moved, and a short time while this process has messages in flight.
  std::chrono::nanoseconds step(std::chrono::nanoseconds longest);

  /// Runs one step of the mail of all groups if this process has messages in flight. For long work between two waits.
  static void step_pending();

  /// Adds and removes a group. remove() waits for another thread whose step is using the group.
  static void add(BaseGroup& group);
  static void remove(BaseGroup& group) noexcept;
  /// Exchanges the list of groups. For simulated ranks that take turns in one thread: each of them has its own list.
  static void exchange_groups(std::vector<BaseGroup*>& groups) noexcept;
  /// Called when a message has moved: reports progress in all groups, so that ranks that wait for this one do not count
  /// it as stuck.
  static void moved() noexcept;
  /// Adds `count` (1 or -1) to the number of mails with messages in flight.
  static void add_pending(int count) noexcept;

 private:
  Clock::time_point began_ = Clock::now();
  Clock::time_point moved_ = began_;
  Clock::time_point looked_{};
};

// Pulse: the state that the ranks of a group publish besides rounds and messages, as one rank sees it. Peers: how a
// rank detects that another rank has ended. A watchdog reads both, for any kind of group.

/// The phase of a rank that is in no call of the group.
inline constexpr const char* between_calls = "its own work";

class Pulse {
 public:
  virtual ~Pulse() = default;
  /// Returns whether that rank has destroyed its group.
  [[nodiscard]] virtual bool has_left(int rank) const = 0;
  /// Returns a number that changes when the rank makes progress.
  [[nodiscard]] virtual std::uint64_t progress_of(int rank) const = 0;
  /// Returns 1 + the rank that this rank waits for in a companion group; 0: none.
  [[nodiscard]] virtual std::uint32_t awaited_by(int rank) const = 0;
  virtual void tell_awaited(int self, std::uint32_t awaited) noexcept = 0;
  /// Returns the operation that the rank is in.
  [[nodiscard]] virtual std::string phase(int rank) const = 0;

  /// Makes `cause` the group's failure unless it already has one. Wakes every waiting rank.
  virtual void abort(const Error& cause) noexcept = 0;
  [[nodiscard]] virtual std::optional<Error> error() const = 0;
  [[nodiscard]] virtual bool has_failure() const noexcept = 0;
};

/// While it lives, publishes this rank's phase for the error messages of other ranks. Calls tell(text).
template <class Tell>
class PhaseScope {
 public:
  PhaseScope(Tell tell, const char* phase) : tell_(std::move(tell)) { tell_(phase); }
  ~PhaseScope() { tell_(between_calls); }
  PhaseScope& operator=(PhaseScope&&) = delete;

 private:
  Tell tell_;
};

/// The identities of the ranks, and the means to see that one has ended. A group shares them with its duplicates.
struct Peers {
  std::shared_ptr<const RankTable> ranks;
  std::vector<std::shared_ptr<const os::Fd>> pidfds;  // one per rank; null if the rank has no pidfd here
  // For ranks that share memory: the region of each rank, and a region of rank 0 for the control blocks of groups. The
  // latter is separate because it exists as long as the groups do, even if ranks die.
  std::vector<std::shared_ptr<Region>> regions;
  std::shared_ptr<Region> structure;

  virtual ~Peers() = default;
  Peers& operator=(Peers&&) = delete;
  /// Returns how a rank has ended ("died"), or nullopt if it may be alive. Never waits.
  [[nodiscard]] virtual std::optional<std::string> end_of(int rank) const {
    return has_ended(rank) ? std::optional<std::string>("died") : std::nullopt;
  }
  /// Returns whether the process of a rank on this host has ended.
  [[nodiscard]] bool has_ended(int rank) const noexcept {
    const auto& pidfd = pidfds[static_cast<std::size_t>(rank)];
    return pidfd && *pidfd && os::has_exited(*pidfd);
  }
  /// Returns "alive", "dead" or "stopped" for messages.
  [[nodiscard]] virtual std::string state_of(int rank) const {
    if (end_of(rank)) return "dead";
    const bool is_stopped = os::process_state((*ranks)[rank].pid) == os::ProcessState::stopped;
    return is_stopped ? "stopped" : "alive";
  }
};

}  // namespace muster::group
