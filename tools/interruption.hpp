// SPDX-License-Identifier: Apache-2.0
#pragma once
// Handles SIGINT, SIGTERM and SIGHUP while a command writes: it requests the work to stop, the work removes its
// unfinished output, and then the program ends by that signal.

#include <stop_token>

#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/os/thread.hpp"

namespace muster::tools {

/// Signals that are ignored remain ignored. Only one object may exist at a time.
class Interruption {
 public:
  Interruption();
  ~Interruption();
  Interruption& operator=(Interruption&&) = delete;

  [[nodiscard]] std::stop_token token() const { return stop_.get_token(); }
  /// Ends the program by the signal that stopped it. Call it after the work has failed; it returns if there was no
  /// signal.
  void end_by_signal() const;

 private:
  std::stop_source stop_;
  os::Fd bell_;
  os::SignalAction interrupt_{SIGINT};
  os::SignalAction terminate_{SIGTERM};
  os::SignalAction hang_up_{SIGHUP};
  os::Thread listener_;
};

/// Runs work(token), and ends the program by the signal if one stopped it.
template <class Work>
auto interruptible(Work&& work) {
  const Interruption interruption;
  try {
    return work(interruption.token());
  } catch (...) {
    interruption.end_by_signal();
    throw;
  }
}

}  // namespace muster::tools
