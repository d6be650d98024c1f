// SPDX-License-Identifier: Apache-2.0
#include "src/base/fork_mutex.hpp"

namespace muster {

bool ForkMutex::acquire() noexcept {
  const pid_t self = ::getpid();
  for (pid_t holder = 0; !holder_.compare_exchange_weak(holder, self, std::memory_order_acquire); holder = 0) {
    if (holder != 0 && holder != self) return false;
    if (holder == self) holder_.wait(self, std::memory_order_relaxed);
  }
  return true;
}

void ForkMutex::unlock() noexcept {
  holder_.store(0, std::memory_order_release);
  holder_.notify_one();
}

}  // namespace muster
