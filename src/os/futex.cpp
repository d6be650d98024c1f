// SPDX-License-Identifier: Apache-2.0
#include "src/os/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace muster::os {
namespace {

long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* time) noexcept {
  static_assert(sizeof(word) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);
  return ::syscall(SYS_futex, &word, operation, value, time, nullptr, 0);
}

}  // namespace

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds longest) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  const timespec time{static_cast<time_t>(seconds.count()), static_cast<long>((longest - seconds).count())};
  futex(word, FUTEX_WAIT, expected, &time);
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept {
  futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace muster::os
