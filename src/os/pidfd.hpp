// SPDX-License-Identifier: Apache-2.0
#pragma once
// Process descriptors: a signal sent through one never hits a later process with the same number.

#include <sys/types.h>

#include <chrono>

#include "src/os/fd.hpp"

namespace muster::os {

/// A descriptor that stands for this very process: whoever it is passed to cannot mistake a later process with the same
/// number for it. Throws Error(unsupported) on kernels before 5.3 and in sandboxes that forbid it.
Fd own_pidfd();
/// Whether the process of a pidfd has ended (a zombie has).
bool has_exited(const Fd& pidfd) noexcept;
/// Empty where there is no such process (errno says why).
Fd open_pidfd(pid_t pid) noexcept;
/// False where it has ended.
bool send_signal(const Fd& process, int signal) noexcept;
/// Whether it ended within `longest`.
bool wait_for_exit(const Fd& process, std::chrono::milliseconds longest) noexcept;

}  // namespace muster::os
