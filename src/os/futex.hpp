// SPDX-License-Identifier: Apache-2.0
#pragma once
// Futexes in shared memory. They are not private, because the waiters are other processes.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>

#include "src/os/process.hpp"

namespace muster::os {

inline long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
                  const timespec* time) noexcept {
  static_assert(sizeof(word) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);
  return ::syscall(SYS_futex, &word, operation, value, time, nullptr, 0);
}

/// Sleeps while `word` equals `expected`, at most `longest`. It may return for any reason (woken, changed, signal,
/// time) and does not report which; the caller must check its condition and the clock again.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::chrono::nanoseconds longest) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  const timespec time{static_cast<time_t>(seconds.count()), static_cast<long>((longest - seconds).count())};
  futex(word, FUTEX_WAIT, expected, &time);
}

inline void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept {
  futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

/// Pauses for one iteration of a spin loop.
inline void spin_pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Returns how many iterations a waiting process spins before it yields its core. `processes`: how many processes wait
/// for each other. If each has its own core, the awaited process is running on another core. If not, it may need this
/// core.
inline int spin_iterations(int processes) noexcept {
  return processes <= usable_cores() ? 150 : 15;
}

/// The first phase of a wait in shared memory: checks `done` for some microseconds (up to 2.5 ms if every yield takes
/// long), and returns its result. It first spins for `turns` iterations, which reacts fastest to another core. Then it
/// yields the core in each iteration, because the awaited process may need this core. If a yield returns late, the core
/// is contended: it stops, and the caller sleeps and checks the clock.
template <class Done>
bool spin_then_yield(const Done& done, int turns) {
  constexpr int yields = 50;
  constexpr std::chrono::microseconds late{50};
  for (int turn = 0; turn < turns; ++turn) {
    if (done()) return true;
    spin_pause();
  }
  auto before = std::chrono::steady_clock::now();
  for (int turn = 0; turn < yields; ++turn) {
    if (done()) return true;
    std::this_thread::yield();
    const auto now = std::chrono::steady_clock::now();
    if (now - before > late) break;
    before = now;
  }
  return done();
}

}  // namespace muster::os
