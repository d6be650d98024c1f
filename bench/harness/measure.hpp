// SPDX-License-Identifier: Apache-2.0
#pragma once
// Takes the figures of one case: every repetition runs every way to move the bytes once, so that all meet the same
// weather.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bench/harness/meeting.hpp"

namespace bench {

/// One way to bring every rank's bytes to the first rank. All members are collective; empty ones are skipped.
struct Contender {
  std::string name;
  std::function<void()> prepare;        ///< before the start, not timed
  std::function<void()> move;           ///< timed: it has returned on the first rank when that one has access
  std::function<std::uint64_t()> read;  ///< on the first rank, timed: sum_words over every rank's bytes
  std::function<void()> finish;         ///< after the clock has stopped: releases the result
};

/// Figures of one contender, on the first rank: one entry a repetition.
struct Samples {
  std::string name;
  std::vector<double> access_seconds;  ///< start until the first rank has access
  std::vector<double> read_seconds;    ///< start until it has read every byte
  std::vector<Usage> first_usage;      ///< the first rank's, until it has access
  std::vector<Usage> sender_usage;     ///< all other ranks' together
};

struct MeasureOptions {
  int warm_up = 2;  ///< repetitions before those that count
  int repetitions = 21;
  double seconds_each = 6;  ///< a contender that took longer in all, and has three samples, is done
};

/// Collective. `source` is this rank's payload: touched before each run, and its sum compared with what the first rank
/// reads (std::runtime_error where they differ: a bench that moves the wrong bytes measures nothing). Contenders take
/// turns in beginning. Samples are filled on the first rank only.
std::vector<Samples> measure(Meeting& meeting, std::span<std::byte> source, const std::vector<Contender>& contenders,
                             const MeasureOptions& options);

/// Enough repetitions for a median, few enough to end: fewer the more bytes move.
int default_repetitions(std::uint64_t total_bytes);

double median(std::vector<double> values);

}  // namespace bench
