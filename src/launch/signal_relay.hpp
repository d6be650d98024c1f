// SPDX-License-Identifier: Apache-2.0
#pragma once
// The signals that a launcher passes on, read from a descriptor while they are blocked.

#include <signal.h>

#include <optional>

#include "src/os/fd.hpp"

namespace muster::launch {

/// Blocks the signals of the calling thread, and gives it its mask back at the end. What was ignored stays ignored: a
/// job under nohup hears no SIGHUP.
class SignalRelay {
 public:
  /// Throws Error(io) where there is no descriptor to be had.
  SignalRelay();
  ~SignalRelay();
  SignalRelay(const SignalRelay&) = delete;
  SignalRelay& operator=(const SignalRelay&) = delete;

  struct Received {
    int signal = 0;
    bool from_terminal = false;  ///< by a key: the kernel sent it to the whole foreground group
  };
  /// The next one that has come, none where none has.
  std::optional<Received> next();
  /// Readable when next() has one.
  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
  /// The thread's mask before: what the ranks start with.
  [[nodiscard]] const sigset_t& original_mask() const noexcept { return original_mask_; }
  /// Lets SIGTSTP have its effect on this process; returns after SIGCONT.
  void stop_here() const;

 private:
  sigset_t original_mask_{};
  struct sigaction original_child_action_ {};
  os::Fd descriptor_;
};

}  // namespace muster::launch
