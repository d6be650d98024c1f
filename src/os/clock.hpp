// SPDX-License-Identifier: Apache-2.0
#pragma once
// The clock that all processes of a host share and nobody sets.

#include <time.h>

#include <cstdint>

namespace muster::os {

inline std::uint64_t clock_ns(clockid_t clock) noexcept {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}
/// Nanoseconds, as std::chrono::steady_clock counts them.
inline std::uint64_t now_ns() noexcept {
  return clock_ns(CLOCK_MONOTONIC);
}
/// Likewise as of the kernel's last tick, some milliseconds ago: for a third of the cost.
inline std::uint64_t tick_ns() noexcept {
  return clock_ns(CLOCK_MONOTONIC_COARSE);
}

}  // namespace muster::os
