// SPDX-License-Identifier: Apache-2.0
#pragma once
// Two clocks: the monotonic clock, which all processes of a host share, and the clock of deadlines.

#include <time.h>

#include <chrono>
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
/// Returns now_ns() as of the kernel's last tick, a few milliseconds ago, at a third of the cost.
inline std::uint64_t tick_ns() noexcept {
  return clock_ns(CLOCK_MONOTONIC_COARSE);
}

/// The clock of all deadlines. It is steady, but it pauses while the process does not run: during SIGSTOP, in a frozen
/// cgroup (docker pause, scontrol suspend), or if no core is free. To detect this, it advances by at most
/// `longest_step` between two calls of now() in any threads of the process. So a wait must call now() at least that
/// often, and sleeps for at most `longest_sleep` at a time. Measurements use std::chrono::steady_clock instead.
struct Clock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;
  static constexpr std::chrono::milliseconds longest_step{250};
  static constexpr std::chrono::milliseconds longest_sleep{100};

  static time_point now() noexcept;
  /// Returns how long a wait that ends at `end` may sleep before its next call of now(); 0 if `end` has passed.
  static std::chrono::milliseconds next_sleep(time_point end) noexcept;
};

}  // namespace muster::os
