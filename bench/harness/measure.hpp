// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures one case. Every repetition runs every contender once, so that all of them have the same conditions.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bench/harness/meeting.hpp"

namespace bench {

/// One method to bring the bytes of every rank to the root. All members are collective; empty ones are skipped.
struct Contender {
  std::string name;
  std::function<void()> prepare;        ///< before the start; not timed
  std::function<void()> move;           ///< timed; returns on the root when it has access to the bytes
  std::function<std::uint64_t()> read;  ///< on the root; timed; returns sum_words over the bytes of every rank
  std::function<void()> finish;         ///< after the measurement; releases the result
};

/// The figures of one contender, on the root, with one entry per repetition.
struct Samples {
  std::string name;
  std::vector<double> access_seconds;  ///< from the start until the root has access
  std::vector<double> read_seconds;    ///< from the start until the root has read every byte
  std::vector<Usage> first_usage;      ///< usage of the root, until it has access
  std::vector<Usage> sender_usage;     ///< usage of all other ranks together
};

struct MeasureOptions {
  int warm_up = 2;  ///< repetitions that are not counted
  int repetitions = 21;
  double seconds_each = 6;  ///< a contender with three samples ends after this total time
};

/// Runs the contenders. Collective. `source` is the data of this rank. It is touched before each run, and its sum is
/// compared with the sum that the root reads. If they differ, throws std::runtime_error. The contenders take turns in
/// running first. Returns samples on the root only.
std::vector<Samples> measure(Meeting& meeting, std::span<std::byte> source, const std::vector<Contender>& contenders,
                             const MeasureOptions& options);

/// Returns a number of repetitions that is sufficient for a median and limits the time: fewer for more bytes.
int default_repetitions(std::uint64_t total_bytes);

double median(std::vector<double> values);

}  // namespace bench
