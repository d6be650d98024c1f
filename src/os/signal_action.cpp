// SPDX-License-Identifier: Apache-2.0
#include "src/os/signal_action.hpp"

namespace muster::os {

SignalAction::SignalAction(int signal) noexcept : signal_(signal) {
  ::sigaction(signal_, nullptr, &action_);
}

void SignalAction::restore_or_ignore() const noexcept {
  struct sigaction action = action_;
  if ((action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL) action.sa_handler = SIG_IGN;
  ::sigaction(signal_, &action, nullptr);
}

}  // namespace muster::os
