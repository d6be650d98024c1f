// SPDX-License-Identifier: Apache-2.0
#pragma once
// A child that a rank forks has all of its connections, too. While it keeps them open nobody sees the rank's end: so
// the child gives them up at once.

namespace muster::tcp {

/// What has sockets. The three are called around each fork of the process, in the thread that forks.
class Forkable {
 public:
  Forkable() = default;
  Forkable(const Forkable&) = delete;
  Forkable& operator=(const Forkable&) = delete;

  /// No other thread may change its sockets until one of the next two.
  virtual void before_fork() = 0;
  virtual void after_fork() = 0;
  /// In the child, which has one thread: only what is safe in a signal handler, but for the lock.
  virtual void in_child() noexcept = 0;

 protected:
  ~Forkable() = default;
  /// From here on forks count,
  void begin_forkable();
  /// and no more.
  void end_forkable() noexcept;
};

/// In a child: the descriptor stays one, but of nothing.
void give_up(int descriptor) noexcept;

}  // namespace muster::tcp
