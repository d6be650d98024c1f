// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the programs of the bench print: one JSON object a line, which bench/run merges into tables and drawings.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/harness/measure.hpp"
#include "muster/gather.hpp"

namespace bench {

/// What was measured; goes into every line.
struct Case {
  std::string scenario;  ///< "gather", "first", "small"
  int ranks = 0;
  std::uint64_t bytes = 0;  ///< of one rank
  /// Whose memory was taken first, where that is set: which physical pages one gets is worth a tenth of a copy's time.
  std::string placement = {};
};

/// One line for each contender: all samples of access and read in seconds, medians of what ranks spent.
void print_samples(const Case& what, const std::vector<Samples>& all);

/// Times of something small, in seconds each.
void print_times(const Case& what, std::string_view series, const std::vector<double>& seconds);

/// Why something was not measured, so that no table lacks a row in silence.
void print_skipped(const Case& what, std::string_view series, std::string_view reason);

/// The phases of exchanges as the library itself tells them.
class PhaseLog {
 public:
  void add(const muster::ExchangeReport& report);
  /// Medians over the exchanges added.
  void print(const Case& what, std::string_view series, int rank) const;

 private:
  struct Phase {
    std::string name;
    std::vector<double> seconds;
    std::vector<double> faults;
    muster::PhaseReport last;
  };
  std::vector<Phase> phases_;
  muster::ExchangeReport last_;
};

}  // namespace bench
