// SPDX-License-Identifier: Apache-2.0
#include "src/launch/signal_relay.hpp"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>

namespace muster::launch {

SignalRelay::SignalRelay() {
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) sigaddset(&wanted, signal);
  }
  descriptor_ = os::Fd(::signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!descriptor_) throw os::errno_error("starting a job: signalfd");
  ::pthread_sigmask(SIG_BLOCK, &wanted, &original_mask_);
  // Ignored, SIGCHLD would take the ranks' statuses away.
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &usual, &original_child_action_);
}

SignalRelay::~SignalRelay() {
  ::sigaction(SIGCHLD, &original_child_action_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &original_mask_, nullptr);
}

std::optional<SignalRelay::Received> SignalRelay::next() {
  signalfd_siginfo info{};
  ssize_t got = 0;
  do got = ::read(descriptor_.get(), &info, sizeof info);
  while (got < 0 && errno == EINTR);
  if (got != sizeof info) return std::nullopt;
  const int signal = static_cast<int>(info.ssi_signo);
  // That the terminal was closed, the kernel tells the session's leader alone.
  return Received{signal, info.ssi_code == SI_KERNEL && signal != SIGHUP};
}

void SignalRelay::stop_here() const {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTSTP);
  ::pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
  ::raise(SIGTSTP);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
}

}  // namespace muster::launch
