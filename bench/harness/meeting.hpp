// SPDX-License-Identifier: Apache-2.0
#pragma once
// The benches' own meeting point: a futex barrier and a few words in memory that all ranks share. It knows nothing of
// the library, so that floor, library and peers start and end by the same clock.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace bench {

inline constexpr int max_ranks = 16;

/// What a rank spent between two moments: of the whole process, helper threads included.
struct Usage {
  double user_seconds = 0;
  double system_seconds = 0;
  std::int64_t page_faults = 0;
  std::int64_t switches = 0;

  Usage& operator+=(const Usage& other);
};

/// Since the start of this process.
Usage usage_now();
Usage operator-(const Usage& later, const Usage& earlier);

/// CLOCK_MONOTONIC, which all processes of a host share.
std::int64_t now_ns();

/// Lives in shared memory that began as zeros.
struct MeetingBlock {
  std::atomic<std::uint32_t> generation;
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::int64_t> released_ns;
  std::atomic<std::uint32_t> finished;  // contenders that have had their time, a bit each
  std::uint64_t expected_sum[max_ranks];
  Usage usage[max_ranks];
  std::int64_t number[max_ranks];  // a word for each rank, for whoever needs one
};

/// One rank's seat at the meeting.
class Meeting {
 public:
  Meeting(MeetingBlock& block, int rank, int size) : block_(&block), rank_(rank), size_(size) {}

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] bool is_first() const { return rank_ == 0; }
  [[nodiscard]] MeetingBlock& block() const { return *block_; }

  /// Returns when all ranks have come; gives the moment when the last one came, the same on all ranks. What is timed
  /// from that moment includes the wake-up of the others: floor, library and peers alike.
  std::int64_t wait();

 private:
  MeetingBlock* block_;
  int rank_;
  int size_;
};

}  // namespace bench
