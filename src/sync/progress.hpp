// SPDX-License-Identifier: Apache-2.0
#pragma once
// Progress: what a process moves while it waits. MPI's rule: whatever a rank waits for, its messages move, of all of
// its groups. So each wait of each kind of group makes a Progress and calls step() between its sleeps.
//
// The groups of the process are in one list. A step takes each group that no thread is in, or this one, as its user
// (Group::Hold) and lets its mail move. What fails there is the failure of that group, not of the wait.

#include <chrono>

#include "src/os/clock.hpp"

namespace muster::sync {

class Group;

class Progress {
 public:
  using Clock = os::Clock;

  /// The mail of all groups moves. Returns how long the caller may sleep, at most `longest`: not at all just after
  /// something has moved, and short where a message of this rank is under way.
  std::chrono::nanoseconds step(std::chrono::nanoseconds longest);

  /// A group begins and ends; `remove` waits for a step of another thread that is in it.
  static void add(Group& group);
  static void remove(Group& group) noexcept;
  /// Mail has moved. Whoever waits for this rank in any of its groups sees that it is not stuck.
  static void moved() noexcept;
  /// So many more mails have messages that this rank has to move.
  static void add_pending(int count) noexcept;

 private:
  Clock::time_point began_ = Clock::now();
  Clock::time_point moved_ = began_;
  Clock::time_point looked_{};
};

}  // namespace muster::sync
