// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ranks took for the steps of a loop, and how evenly. Semantics: torchgfn's report_load_imbalance and
// report_time_info; but steps that rank 0 does not have are reported, too, and ranks may differ in how many iterations
// they have.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace muster {

/// One step of a rank's loop: what each iteration of it took.
struct StepTimes {
  std::string step;
  std::vector<double> seconds;
};
/// Of one rank, in the order in which its steps come.
using RankTimes = std::vector<StepTimes>;

struct StepImbalance {
  std::string step;
  std::size_t iterations = 0;  ///< that all ranks have
  double useful_seconds = 0;   ///< the mean over the ranks, summed up over the iterations
  double waiting_seconds = 0;  ///< what the slowest rank took beyond the mean, likewise
};
struct ImbalanceReport {
  std::vector<StepImbalance> steps;   ///< that all ranks have, in rank 0's order
  std::vector<std::string> warnings;  ///< steps that some ranks do not have, iterations that were left out
  double useful_seconds = 0;          ///< of all steps
  double waiting_seconds = 0;
};
/// `ranks`: one for each rank. A step that a rank does not have is left out, with a warning; of ranks that differ in
/// their iterations, so many count as all have, with a warning. Local. Throws Error(argument) if a rank has a step
/// twice or a time is no number from 0 on.
ImbalanceReport report_load_imbalance(std::span<const RankTimes> ranks);
/// A line for each step, one for all, and the warnings.
std::string to_string(const ImbalanceReport& report);

struct StepTimeInfo {
  std::string step;
  /// By rank; 0 where it has none.
  std::vector<double> mean_seconds;
  std::vector<double> total_seconds;
  std::vector<std::size_t> iterations;
  /// Of the totals of the ranks that have the step.
  double largest_total = 0;
  double mean_total = 0;
};
struct TimeReport {
  std::vector<StepTimeInfo> steps;  ///< that any rank has: rank 0's, then those that the next ranks have beside
};
/// Local. Throws as report_load_imbalance.
TimeReport report_time_info(std::span<const RankTimes> ranks);
/// A line for each step and rank, and one for the step.
std::string to_string(const TimeReport& report);

}  // namespace muster
