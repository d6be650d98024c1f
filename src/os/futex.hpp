// SPDX-License-Identifier: Apache-2.0
#pragma once
// Waiting on a word of shared memory. Not the private kind: the waiters are other processes.

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

/// Sleeps while `word` is `expected`, at most `longest`. Returns for any reason (woken, changed, signal, time), which
/// it does not tell: the caller looks again, and at the clock.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::chrono::nanoseconds longest) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  const timespec time{static_cast<time_t>(seconds.count()), static_cast<long>((longest - seconds).count())};
  futex(word, FUTEX_WAIT, expected, &time);
}

inline void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept {
  futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

/// One turn of a spinning loop.
inline void spin_pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Turns of a wait of one of so many processes that keep the core: if there is a core for each, what is waited for is
/// under way on another one. If not, it may need this one.
inline int turns_on_core(int processes) noexcept {
  return processes <= usable_cores() ? 150 : 15;
}

/// How waits in shared memory begin: asks `done` for some microseconds (2.5 ms if every offer of the core takes long),
/// and returns whether it has become true. A few turns (turns_on_core) keep the core, because what another core does
/// comes soonest so. Then each turn offers the core to others: the process that is waited for may need this very one.
/// Whoever gets it back late shares it with work that does not wait: then it is time to sleep, and to look at the
/// clock.
template <class Done>
bool comes_soon(const Done& done, int turns) {
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
