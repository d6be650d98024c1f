// SPDX-License-Identifier: Apache-2.0
#pragma once
// The barrier of the benches: a futex and a few variables in memory that all ranks share. It does not use the library,
// so that floor, library and peers are measured with the same clock.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace bench {

inline constexpr int max_ranks = 16;

/// The resources that a rank has used in an interval, for the whole process including helper threads.
struct Usage {
  double user_seconds = 0;
  double system_seconds = 0;
  std::int64_t page_faults = 0;
  std::int64_t switches = 0;

  Usage& operator+=(const Usage& other);
};

/// Returns the usage since the start of this process.
Usage usage_now();
Usage operator-(const Usage& later, const Usage& earlier);

/// Returns CLOCK_MONOTONIC in nanoseconds. All processes of a host share this clock.
std::int64_t now_ns();

/// Placed in shared memory that initially contains zeros.
struct MeetingBlock {
  std::atomic<std::uint32_t> step;
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::int64_t> released_ns;
  std::atomic<std::uint32_t> finished;  // one bit per contender that has used up its time
  std::uint64_t expected_sum[max_ranks];
  Usage usage[max_ranks];
  std::int64_t number[max_ranks];  // one free word per rank
};

/// One rank's access to the barrier.
class Meeting {
 public:
  Meeting(MeetingBlock& block, int rank, int size) : block_(&block), rank_(rank), size_(size) {}

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] bool is_first() const { return rank_ == 0; }
  [[nodiscard]] MeetingBlock& block() const { return *block_; }

  /// Waits until all ranks have arrived. Returns the time at which the last rank arrived, which is the same on all
  /// ranks. Times from that moment include the wake-up of the other ranks, equally for floor, library and peers.
  std::int64_t wait();

 private:
  MeetingBlock* block_;
  int rank_;
  int size_;
};

}  // namespace bench
