// SPDX-License-Identifier: Apache-2.0
#pragma once
// Fibers: many ranks that take turns in one thread, with a simulated clock. A fiber runs until it sleeps or yields
// through the C library, so the library under test needs no change. Time passes only while all fibers sleep. So counts
// do not depend on the speed of the machine.
//
// A program that links fibers.cpp replaces clock_gettime, nanosleep and sched_yield. Outside of run() they work as
// usual.

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <vector>

#include "tests/support/uncounted.hpp"

namespace muster::test {

class Fibers {
 public:
  explicit Fibers(int count);
  ~Fibers();
  Fibers& operator=(Fibers&&) = delete;

  /// Runs body(fiber) in all fibers until they have returned. Ends the process with a message if an error leaves a
  /// body, or if a fiber does not return within two minutes of simulated time: the stacks of the others cannot be
  /// unwound.
  void run(const std::function<void(int fiber)>& body);
  /// Ends the current sleep of a fiber.
  void wake(int fiber);
  /// Called before a fiber continues, and after it has stopped.
  std::function<void(int fiber)> enters = [](int) {};
  std::function<void(int fiber)> leaves = [](int) {};

  /// Called by the replaced functions. Returns the fibers that run in this thread, or null.
  static Fibers* running() noexcept;
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return now_; }
  void sleep(std::uint64_t nanoseconds);

 private:
  struct Fiber {
    ucontext_t context{};
    // The exceptions that this fiber has caught. The C++ runtime keeps them by thread.
    void* caught = nullptr;
    unsigned uncaught = 0;
    std::uint64_t sleeps = 0;  // the number of its last sleep
    bool is_asleep = false;
  };
  struct Alarm {
    std::uint64_t time;
    int fiber;
    std::uint64_t sleep;
    friend bool operator>(const Alarm& a, const Alarm& b) { return a.time > b.time; }
  };
  static void enter_fiber();
  void start(int fiber);
  [[nodiscard]] std::byte* stack_of(int fiber) const noexcept;
  void turn(int fiber);
  void advance_time();

  std::vector<Fiber> fibers_;
  std::byte* stacks_ = nullptr;
  ucontext_t scheduler_{};
  std::deque<int, Uncounted<int>> ready_;
  std::priority_queue<Alarm, std::vector<Alarm, Uncounted<Alarm>>, std::greater<>> alarms_;
  std::uint64_t now_ = 0;
  int current_ = -1;
  int open_ = 0;
  const std::function<void(int)>* body_ = nullptr;
};

}  // namespace muster::test
