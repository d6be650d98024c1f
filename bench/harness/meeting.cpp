// SPDX-License-Identifier: Apache-2.0
#include "bench/harness/meeting.hpp"

#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace bench {

namespace {

// Sufficient for a rank on another core to arrive. Too short to matter to a rank that needs this core.
constexpr int spins = 200;

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

}  // namespace

Usage& Usage::operator+=(const Usage& other) {
  user_seconds += other.user_seconds;
  system_seconds += other.system_seconds;
  page_faults += other.page_faults;
  switches += other.switches;
  return *this;
}

Usage usage_now() {
  rusage raw{};
  getrusage(RUSAGE_SELF, &raw);
  return {seconds(raw.ru_utime), seconds(raw.ru_stime), raw.ru_minflt + raw.ru_majflt, raw.ru_nvcsw + raw.ru_nivcsw};
}

Usage operator-(const Usage& later, const Usage& earlier) {
  return {later.user_seconds - earlier.user_seconds, later.system_seconds - earlier.system_seconds,
          later.page_faults - earlier.page_faults, later.switches - earlier.switches};
}

std::int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

std::int64_t Meeting::wait() {
  const std::uint32_t step = block_->step.load();
  if (block_->arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(size_)) {
    block_->arrived.store(0);
    const std::int64_t moment = now_ns();
    block_->released_ns.store(moment);
    block_->step.fetch_add(1);
    futex_wake_all(block_->step);
    return moment;
  }
  for (int i = 0; i < spins && block_->step.load() == step; ++i) {
    pause_briefly();
  }
  while (block_->step.load() == step) {
    futex_wait(block_->step, step);
  }
  // This value cannot be overwritten before this rank enters the next barrier.
  return block_->released_ns.load();
}

}  // namespace bench
