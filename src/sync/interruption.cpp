// SPDX-License-Identifier: Apache-2.0
#include "src/sync/interruption.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include "muster/error.hpp"
#include "muster/interrupt.hpp"

namespace muster {
namespace {

std::atomic<InterruptHook> interrupt_hook{nullptr};

}  // namespace

void set_interrupt_hook(InterruptHook hook) noexcept {
  interrupt_hook.store(hook, std::memory_order_release);
}

bool sync::is_interrupted() noexcept {
  const InterruptHook hook = interrupt_hook.load(std::memory_order_acquire);
  return hook != nullptr && hook();
}

void sync::check_interrupted(const char* phase) {
  if (is_interrupted()) throw Error(ErrorKind::cancelled, std::string(phase) + ": interrupted");
}

void sync::sleep_unless_interrupted(std::chrono::milliseconds time, const char* phase) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + time;
  do {
    check_interrupted(phase);
    std::this_thread::sleep_until(std::min(end, Clock::now() + between_questions));
  } while (Clock::now() < end);
}

}  // namespace muster
