// SPDX-License-Identifier: Apache-2.0
#pragma once
// The output of the bench programs: one JSON object per line, which bench/run merges into tables and drawings.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/harness/measure.hpp"
#include "muster/gather.hpp"

namespace bench {

/// The measured case, which is part of every line.
struct Case {
  std::string scenario;  ///< "gather", "first", "small"
  int ranks = 0;
  std::uint64_t bytes = 0;  ///< per rank
  /// The owner of the memory that was allocated first, if known: the choice of physical pages changes the time of a
  /// copy by a tenth.
  std::string placement = {};
};

/// Prints one line per contender: all samples of access and read in seconds, and the medians of the usage of the ranks.
void print_samples(const Case& what, const std::vector<Samples>& all);

/// Prints the times of a small operation, in seconds.
void print_times(const Case& what, std::string_view series, const std::vector<double>& seconds);

/// Prints why a case was not measured, so that a missing row is explained.
void print_skipped(const Case& what, std::string_view series, std::string_view reason);

/// The phases of exchanges as the library reports them.
class PhaseLog {
 public:
  void add(const muster::ExchangeReport& report);
  /// Prints the medians over the added exchanges.
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
