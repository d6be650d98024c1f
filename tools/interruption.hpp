// SPDX-License-Identifier: Apache-2.0
#pragma once
// SIGINT, SIGTERM and SIGHUP while a command writes: the work is told to stop, which removes what it has begun, and
// then the program ends by that signal.

#include <stop_token>

#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/os/thread.hpp"

namespace muster::tools {

/// Signals that are ignored stay so. One at a time.
class Interruption {
 public:
  Interruption();
  ~Interruption();
  Interruption& operator=(Interruption&&) = delete;

  [[nodiscard]] std::stop_token token() const { return stop_.get_token(); }
  /// After the work has failed: ends the program by the signal that stopped it. Returns if there was none.
  void end_by_signal() const;

 private:
  std::stop_source stop_;
  os::Fd bell_;
  os::SignalAction interrupt_{SIGINT};
  os::SignalAction terminate_{SIGTERM};
  os::SignalAction hang_up_{SIGHUP};
  os::Thread listener_;
};

/// work(token), which ends the program by the signal if one stopped it.
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
