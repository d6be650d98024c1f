// SPDX-License-Identifier: Apache-2.0
#include "tools/interruption.hpp"

#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

std::atomic<int> received{0};
std::atomic<int> bell{-1};
std::atomic<std::int64_t> heard_at{0};

std::int64_t milliseconds_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

void ring(int descriptor) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(descriptor, &one, sizeof one);
}

void hear(int signal) {
  const int error = errno;
  const std::int64_t now = milliseconds_now();
  if (received.exchange(signal) == 0) {
    heard_at = now;
  } else if (now - heard_at > 200) {  // one Ctrl-C may arrive twice, from the terminal and from a wrapper program
    // After a second signal the user does not want to wait: the next run removes the leftovers.
    ::signal(signal, SIG_DFL);
    ::raise(signal);
  }
  ring(bell);
  errno = error;
}

}  // namespace

Interruption::Interruption() : bell_(::eventfd(0, EFD_CLOEXEC)) {
  if (!bell_) throw os::errno_error("preparing for signals: eventfd");
  bell = bell_.get();
  listener_ = os::Thread("signals", [this] {
    std::uint64_t rung = 0;
    while (::read(bell_.get(), &rung, sizeof rung) < 0 && errno == EINTR) continue;
    if (received != 0) stop_.request_stop();
  });
  for (const os::SignalAction* action : {&interrupt_, &terminate_, &hang_up_}) action->handle_where_default(&hear);
}

Interruption::~Interruption() {
  for (const os::SignalAction* action : {&interrupt_, &terminate_, &hang_up_}) action->restore();
  ring(bell_.get());
}

void Interruption::end_by_signal() const {
  if (received == 0) return;
  for (const os::SignalAction* action : {&interrupt_, &terminate_, &hang_up_}) action->restore();
  clear_progress_bar();
  ::raise(received);
}

}  // namespace muster::tools
