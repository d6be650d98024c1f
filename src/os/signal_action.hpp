// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this process does on a signal, kept while a library that was called changes it.

#include <signal.h>

namespace muster::os {

class SignalAction {
 public:
  /// What is done now.
  explicit SignalAction(int signal) noexcept;
  /// Where that is to end the process, `handler` is called instead.
  void handle_where_default(void (*handler)(int)) const noexcept;
  /// From now on the same again; where that was to end the process, the signal is ignored.
  void restore_or_ignore() const noexcept;

 private:
  [[nodiscard]] bool is_default() const noexcept;

  int signal_;
  struct sigaction action_ {};
};

}  // namespace muster::os
