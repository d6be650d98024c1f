// SPDX-License-Identifier: Apache-2.0
#include "src/os/signal_action.hpp"

#include <sys/resource.h>

#include <cerrno>

namespace muster::os {
namespace {

sigset_t only(int signal) noexcept {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, signal);
  return set;
}

}  // namespace

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

void SignalAction::restore() const noexcept {
  ::sigaction(signal_, &action_, nullptr);
}

void SignalAction::restore_or_ignore() const noexcept {
  struct sigaction action = action_;
  if (is_default()) action.sa_handler = SIG_IGN;
  ::sigaction(signal_, &action, nullptr);
}

FileSizeAsError::FileSizeAsError() noexcept {
  rlimit limit{};
  is_limited_ = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  if (!is_limited_) return;
  const sigset_t exceeded = only(SIGXFSZ);
  ::pthread_sigmask(SIG_BLOCK, &exceeded, &before_);
}

FileSizeAsError::~FileSizeAsError() {
  if (!is_limited_) return;
  const int error = errno;
  const sigset_t exceeded = only(SIGXFSZ);
  const timespec at_once{};
  // The kernel sends it to the thread that made the call, so it is there now.
  while (::sigtimedwait(&exceeded, nullptr, &at_once) < 0 && errno == EINTR) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

}  // namespace muster::os
