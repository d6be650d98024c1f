// SPDX-License-Identifier: Apache-2.0
#include "src/os/clock.hpp"

#include <algorithm>
#include <atomic>

namespace muster::os {
namespace {

// The state of the clock is one atomic word, so that threads never see half of a change and a fork never copies a
// locked mutex. The upper half is the tick of the last call of now(). The lower half is the number of ticks that the
// clock has skipped. A tick is 2^24 ns (17 ms), and each half overflows after two years.
std::atomic<std::uint64_t> looks{0};

constexpr int tick_bits = 24;
constexpr auto most_ticks =
    static_cast<std::uint32_t>(std::chrono::nanoseconds(Clock::longest_step).count() >> tick_bits);

}  // namespace

Clock::time_point Clock::now() noexcept {
  std::uint64_t seen = looks.load(std::memory_order_acquire);
  for (;;) {
    const std::uint64_t time = now_ns();
    const auto tick = static_cast<std::uint32_t>(time >> tick_bits);
    const std::uint32_t gap = seen == 0 ? 0 : tick - static_cast<std::uint32_t>(seen >> 32);
    auto lost = static_cast<std::uint32_t>(seen);
    // If another thread has called now() since this one read the time, the gap is negative.
    const bool is_new = seen == 0 || static_cast<std::int32_t>(gap) > 0;
    if (is_new && gap > most_ticks) lost += gap - most_ticks;
    // The time is valid only if `looks` has not changed since this thread read it: the thread may have been suspended
    // in between.
    const bool is_valid = is_new ? looks.compare_exchange_weak(seen, static_cast<std::uint64_t>(tick) << 32 | lost,
                                                               std::memory_order_acq_rel, std::memory_order_acquire)
                                 : looks.load(std::memory_order_acquire) == seen;
    if (is_valid)
      return time_point(duration(static_cast<std::int64_t>(time) - (static_cast<std::int64_t>(lost) << tick_bits)));
    if (!is_new) seen = looks.load(std::memory_order_acquire);
  }
}

std::chrono::milliseconds Clock::next_sleep(time_point end) noexcept {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - now());
  return std::clamp(left, std::chrono::milliseconds(0), longest_sleep);
}

}  // namespace muster::os
