// SPDX-License-Identifier: Apache-2.0
#pragma once
// Waiting on a word of shared memory. Not the private kind: the waiters are other processes.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace muster::os {

/// Sleeps while `word` is `expected`, at most `longest`. Returns for any reason (woken, changed, signal, time), which
/// it does not tell: the caller looks again, and at the clock.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds longest) noexcept;

void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept;

/// One turn of a spinning loop.
inline void spin_pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace muster::os
