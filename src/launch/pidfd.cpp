// SPDX-License-Identifier: Apache-2.0
#include "src/launch/pidfd.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace muster::launch {

os::Fd open_pidfd(pid_t pid) noexcept {
  return os::Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0U)));
}

bool send_signal(const os::Fd& process, int signal) noexcept {
  return ::syscall(SYS_pidfd_send_signal, process.get(), signal, nullptr, 0U) == 0;
}

bool wait_for_exit(const os::Fd& process, std::chrono::milliseconds longest) noexcept {
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

}  // namespace muster::launch
