// SPDX-License-Identifier: Apache-2.0
#include "src/sync/waits.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <string>
#include <thread>

#include "muster/error.hpp"
#include "muster/interrupt.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

std::atomic<InterruptHook> interrupt_hook{nullptr};

}  // namespace

void set_interrupt_hook(InterruptHook hook) noexcept {
  interrupt_hook.store(hook, std::memory_order_release);
}

std::chrono::milliseconds sync::default_timeout() {
  const auto text = os::environment("MUSTER_TIMEOUT");
  if (!text) return std::chrono::minutes(10);
  double seconds = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), seconds);
  if (error != std::errc{} || end != text->data() + text->size() || !std::isfinite(seconds) || seconds <= 0 ||
      seconds > std::chrono::duration<double>(longest_timeout).count())
    throw Error(ErrorKind::argument, fmt::format("MUSTER_TIMEOUT is '{}': it must be a number of seconds", *text));
  return std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1000)));
}

bool sync::is_interrupted() noexcept {
  const InterruptHook hook = interrupt_hook.load(std::memory_order_acquire);
  return hook != nullptr && hook();
}

void sync::check_interrupted(const char* phase) {
  if (is_interrupted()) throw Error(ErrorKind::cancelled, std::string(phase) + ": interrupted");
}

void sync::sleep_unless_interrupted(std::chrono::milliseconds time, const char* phase) {
  using Clock = os::Clock;
  const Clock::time_point end = Clock::now() + time;
  do {
    check_interrupted(phase);
    std::this_thread::sleep_for(std::min<Clock::duration>(end - Clock::now(), between_questions));
  } while (Clock::now() < end);
}

}  // namespace muster
