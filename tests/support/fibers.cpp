// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fibers.hpp"

#include <cxxabi.h>
#include <fmt/core.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

namespace muster::test {
namespace {

// Only touched pages take memory.
constexpr std::size_t stack_bytes = 256 << 10;
constexpr std::uint64_t canary = 0x5eed'cafe'5eed'cafe;
constexpr std::uint64_t second = 1'000'000'000;
// As long as a short message between two cores. A wait that yields must let time pass.
constexpr std::uint64_t yield_ns = 1000;

thread_local Fibers* fibers_here = nullptr;

std::uint64_t real_ns() {
  timespec time{};
  ::syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * second + static_cast<std::uint64_t>(time.tv_nsec);
}

template <class... Values>
[[noreturn]] void end_process(const char* why, Values... values) {
  fmt::print(stderr, "fibers: {}\n", fmt::format(fmt::runtime(why), values...));
  std::_Exit(1);
}

/// The part of the C++ runtime's state of a thread that a fiber owns (Itanium C++ ABI, __cxa_eh_globals).
struct CaughtExceptions {
  void* caught;
  unsigned uncaught;
};

}  // namespace

Fibers::Fibers(int count) : fibers_(static_cast<std::size_t>(count)), now_(real_ns()) {
  // One mapping, because a process can have only about 65,000. A canary in each stack replaces the guard page.
  void* const memory = ::mmap(nullptr, fibers_.size() * stack_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mapping the stacks of fibers");
  stacks_ = static_cast<std::byte*>(memory);
}

Fibers::~Fibers() {
  ::munmap(stacks_, fibers_.size() * stack_bytes);
}

Fibers* Fibers::running() noexcept {
  return fibers_here != nullptr && fibers_here->current_ >= 0 ? fibers_here : nullptr;
}

void Fibers::enter_fiber() {
  Fibers& self = *fibers_here;
  const int fiber = self.current_;
  try {
    (*self.body_)(fiber);
  } catch (const std::exception& error) {
    end_process("fiber {} failed: {}", fiber, error.what());
  }
  --self.open_;
  Fiber& own = self.fibers_[static_cast<std::size_t>(fiber)];
  ::swapcontext(&own.context, &self.scheduler_);
}

void Fibers::start(int fiber) {
  Fiber& own = fibers_[static_cast<std::size_t>(fiber)];
  std::memcpy(stack_of(fiber), &canary, sizeof canary);
  ::getcontext(&own.context);
  own.context.uc_stack.ss_sp = stack_of(fiber) + sizeof canary;
  own.context.uc_stack.ss_size = stack_bytes - sizeof canary;
  own.context.uc_link = nullptr;
  ::makecontext(&own.context, &Fibers::enter_fiber, 0);
  own.caught = nullptr;
  own.uncaught = 0;
  own.is_asleep = false;
  ready_.push_back(fiber);
}

std::byte* Fibers::stack_of(int fiber) const noexcept {
  return stacks_ + static_cast<std::size_t>(fiber) * stack_bytes;
}

void Fibers::run(const std::function<void(int)>& body) {
  body_ = &body;
  open_ = static_cast<int>(fibers_.size());
  for (int fiber = 0; fiber < open_; ++fiber) start(fiber);
  Fibers* const outer = std::exchange(fibers_here, this);
  const std::uint64_t longest = now_ + 120 * second;
  while (open_ != 0) {
    if (ready_.empty()) advance_time();
    if (now_ > longest)
      end_process("{} of {} fibers still wait after two minutes of simulated time", open_, fibers_.size());
    const int next = ready_.front();
    ready_.pop_front();
    turn(next);
  }
  fibers_here = outer;
  ready_.clear();
  alarms_ = {};
}

void Fibers::turn(int fiber) {
  Fiber& next = fibers_[static_cast<std::size_t>(fiber)];
  auto* const globals = reinterpret_cast<CaughtExceptions*>(abi::__cxa_get_globals());
  const CaughtExceptions outer = std::exchange(*globals, CaughtExceptions{next.caught, next.uncaught});
  enters(fiber);
  current_ = fiber;
  ::swapcontext(&scheduler_, &next.context);
  current_ = -1;
  leaves(fiber);
  const CaughtExceptions own = std::exchange(*globals, outer);
  next.caught = own.caught;
  next.uncaught = own.uncaught;
  std::uint64_t seen = 0;
  std::memcpy(&seen, stack_of(fiber), sizeof seen);
  if (seen != canary) end_process("the stack of fiber {} has overflowed", fiber);
}

void Fibers::sleep(std::uint64_t nanoseconds) {
  Fiber& own = fibers_[static_cast<std::size_t>(current_)];
  own.is_asleep = true;
  alarms_.push({now_ + nanoseconds, current_, ++own.sleeps});
  ::swapcontext(&own.context, &scheduler_);
}

void Fibers::wake(int fiber) {
  Fiber& sleeper = fibers_[static_cast<std::size_t>(fiber)];
  if (std::exchange(sleeper.is_asleep, false)) ready_.push_back(fiber);
}

void Fibers::advance_time() {
  while (!alarms_.empty()) {
    const Alarm next = alarms_.top();
    // A message may have woken the fiber before.
    const Fiber& sleeper = fibers_[static_cast<std::size_t>(next.fiber)];
    const bool is_valid = sleeper.is_asleep && sleeper.sleeps == next.sleep;
    if (is_valid && next.time > now_) {
      if (!ready_.empty()) return;
      now_ = next.time;
    }
    alarms_.pop();
    if (is_valid) wake(next.fiber);
  }
  if (ready_.empty()) end_process("no fiber is ready or asleep");
}

}  // namespace muster::test

using muster::test::Fibers;

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const Fibers* const fibers = Fibers::running();
  if (fibers == nullptr || (clock != CLOCK_MONOTONIC && clock != CLOCK_MONOTONIC_COARSE))
    return static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  time->tv_sec = static_cast<time_t>(fibers->now_ns() / muster::test::second);
  time->tv_nsec = static_cast<long>(fibers->now_ns() % muster::test::second);
  return 0;
}

extern "C" int nanosleep(const timespec* wanted, timespec* left) {
  Fibers* const fibers = Fibers::running();
  if (fibers == nullptr) return static_cast<int>(::syscall(SYS_nanosleep, wanted, left));
  fibers->sleep(static_cast<std::uint64_t>(wanted->tv_sec) * muster::test::second +
                static_cast<std::uint64_t>(wanted->tv_nsec));
  return 0;
}

extern "C" int sched_yield() noexcept {
  Fibers* const fibers = Fibers::running();
  if (fibers == nullptr) return static_cast<int>(::syscall(SYS_sched_yield));
  fibers->sleep(muster::test::yield_ns);
  return 0;
}
