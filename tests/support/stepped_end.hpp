// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ends a process at a chosen instruction of its work. So a test can make every step the last one.

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace muster::test {

/// Returns nanoseconds of the clock that all processes share.
inline std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

/// Used in the process that ends. A step is an instruction of one thread, after which the processor raises a trap. On
/// processors without such a trap the process ends after all of its work.
class SteppedEnd {
 public:
  /// At step `last`, or after the last step of the work, the process gets `signal`, and `when` is set to the time. 0
  /// means no step.
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
