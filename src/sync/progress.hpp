// SPDX-License-Identifier: Apache-2.0
#pragma once
// Progress: the messages of all groups of a process make progress during every wait, whatever the wait is for. This is
// the progress rule of MPI. So each wait, in each kind of group, constructs a Progress and calls step() between its
// sleeps.
//
// All groups of the process are in one list. A step acquires each group (Group::Hold) unless another thread holds it,
// and runs one step of its mail. If this fails, that group has failed; the wait itself continues.

#include <chrono>

#include "src/os/clock.hpp"

namespace muster::sync {

class Group;

class Progress {
 public:
  using Clock = os::Clock;

  /// Runs one step of the mail of all groups. Returns how long the caller may sleep, at most `longest`: zero soon after
  /// a message has moved, and a short time while this process has messages in flight.
  std::chrono::nanoseconds step(std::chrono::nanoseconds longest);

  /// Adds and removes a group. remove() waits for another thread whose step is using the group.
  static void add(Group& group);
  static void remove(Group& group) noexcept;
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

}  // namespace muster::sync
