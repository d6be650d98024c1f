// SPDX-License-Identifier: Apache-2.0
#pragma once
// Process descriptors: a signal sent through one never hits a later process with the same number.

#include <sys/types.h>

#include <chrono>

#include "src/os/fd.hpp"

namespace muster::launch {

/// Empty where there is no such process (errno says why).
os::Fd open_pidfd(pid_t pid) noexcept;
/// False where it has ended.
bool send_signal(const os::Fd& process, int signal) noexcept;
/// Whether it ended within `longest`.
bool wait_for_exit(const os::Fd& process, std::chrono::milliseconds longest) noexcept;

}  // namespace muster::launch
