// SPDX-License-Identifier: Apache-2.0
#include "src/os/signal_action.hpp"

namespace muster::os {

SignalAction::SignalAction(int signal) noexcept : signal_(signal) {
  ::sigaction(signal_, nullptr, &action_);
}

bool SignalAction::is_default() const noexcept {
  return (action_.sa_flags & SA_SIGINFO) == 0 && action_.sa_handler == SIG_DFL;
}

void SignalAction::handle_where_default(void (*handler)(int)) const noexcept {
  if (!is_default()) return;
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal_, &action, nullptr);
}

void SignalAction::restore_or_ignore() const noexcept {
  struct sigaction action = action_;
  if (is_default()) action.sa_handler = SIG_IGN;
  ::sigaction(signal_, &action, nullptr);
}

}  // namespace muster::os
