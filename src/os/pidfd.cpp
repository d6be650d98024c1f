// SPDX-License-Identifier: Apache-2.0
#include "src/os/pidfd.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace muster::os {

Fd open_pidfd(pid_t pid) noexcept {
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0U)));
}

Fd own_pidfd() {
  Fd self = open_pidfd(::getpid());
  if (!self)
    throw errno_error(ErrorKind::unsupported,
                      "pidfd_open (Linux 5.3 or newer, and a sandbox that allows it, is needed)");
  return self;
}

bool send_signal(const Fd& process, int signal) noexcept {
  return ::syscall(SYS_pidfd_send_signal, process.get(), signal, nullptr, 0U) == 0;
}

bool wait_for_exit(const Fd& process, std::chrono::milliseconds longest) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + longest;
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd wanted{process.get(), POLLIN, 0};
    const int ready = ::poll(&wanted, 1, static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 60'000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (ready == 0 && std::chrono::steady_clock::now() >= deadline) return false;
  }
}

bool has_exited(const Fd& pidfd) noexcept {
  return wait_for_exit(pidfd, std::chrono::milliseconds(0));
}

}  // namespace muster::os
