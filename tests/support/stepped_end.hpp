// SPDX-License-Identifier: Apache-2.0
#pragma once
// A process that ends at a chosen instruction of its work: so each step of it is the last one once.

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace muster::test {

/// Nanoseconds of the clock that all processes share.
inline std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

/// In the process that ends. Steps of its work are instructions of one thread, counted by the processor's trap after
/// each. Other processors have no such trap for a process itself: there it ends behind all work.
class SteppedEnd {
 public:
  /// At step `last`, or behind the last one of the work, the process gets `signal`, and `when` the time; 0: at none.
  SteppedEnd(std::uint64_t last, int signal, std::atomic<std::uint64_t>& when) {
    last_ = last;
    signal_ = signal;
    when_ = &when;
    struct sigaction action {};
    action.sa_handler = [](int) { count(); };
    ::sigaction(SIGTRAP, &action, nullptr);
  }
  template <class Work>
  void run(const Work& work) {
    set_trap(true);
    work();
    set_trap(false);
    if (last_ != 0) end();
  }
  [[nodiscard]] static std::uint64_t steps() noexcept { return steps_; }

 private:
  static void count() noexcept {
    const std::uint64_t step = steps_ + 1;
    steps_ = step;
    if (step == last_) end();
  }
  static void end() noexcept {
    when_->store(now_ns());
    ::kill(::getpid(), signal_);
  }
#if defined(__x86_64__)
  [[gnu::noinline]] static void set_trap(bool on) noexcept {
    constexpr std::uint64_t trap = 0x100;
    const std::uint64_t flags = __builtin_ia32_readeflags_u64();
    __builtin_ia32_writeeflags_u64(on ? flags | trap : flags & ~trap);
  }
#else
  static void set_trap(bool) noexcept {}
#endif
  static inline volatile std::uint64_t steps_ = 0;
  static inline volatile std::uint64_t last_ = 0;
  static inline volatile int signal_ = 0;
  static inline std::atomic<std::uint64_t>* when_ = nullptr;
};

}  // namespace muster::test
