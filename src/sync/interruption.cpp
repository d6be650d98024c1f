// SPDX-License-Identifier: Apache-2.0
#include "src/sync/interruption.hpp"

#include <atomic>
#include <string>

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

}  // namespace muster
