// SPDX-License-Identifier: Apache-2.0
#pragma once
// Spans of a program in the trace of its job. With MUSTER_TRACE=DIR each process records its activity in a file in DIR,
// in addition to the spans of library calls. `muster trace DIR` combines the files (docs/howto/find-a-hang.md).

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

/// Records that this thread executes `name` (first 31 bytes) from construction to destruction. Spans nest in spans that
/// the thread has begun before. Without MUSTER_TRACE only the latest spans of each rank are kept, for `muster
/// status`, at a cost of about 35 ns. A span must end on the thread on which it began. Spans of one thread may end in
/// any order; running spans keep their position in the trace. In a forked child a span records nothing. Local, never
/// throws.
class TraceSpan {
 public:
  /// Begins a span.
  explicit TraceSpan(std::string_view name) noexcept;
  ~TraceSpan();
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  /// Adds to the number of bytes that the span processes, from which its throughput is computed.
  void add_bytes(std::uint64_t bytes) noexcept;

 private:
  alignas(8) std::array<std::byte, 104> span_;
};

/// Returns whether this process writes a trace. Local; the first call may create the file.
bool is_tracing() noexcept;

// Reports how long the ranks took for the steps of a loop, and how evenly the work was divided. Semantics:
// report_load_imbalance and report_time_info of torchgfn. In addition, steps that rank 0 does not have are reported,
// and ranks may differ in the number of iterations.

/// A step of the loop of a rank, with the duration of each iteration.
struct StepTimes {
  /// The name of the step.
  std::string step;
  /// The duration of each iteration.
  std::vector<double> seconds;
};
/// The steps of one rank, in order.
using RankTimes = std::vector<StepTimes>;

/// The load imbalance of one step.
struct StepImbalance {
  /// The name of the step.
  std::string step;
  std::size_t iterations = 0;  ///< number of iterations that all ranks have
  double useful_seconds = 0;   ///< mean over the ranks, summed over the iterations
  double waiting_seconds = 0;  ///< time of the slowest rank beyond the mean, summed over the iterations
};
/// The load imbalance of all steps.
struct ImbalanceReport {
  std::vector<StepImbalance> steps;   ///< steps that all ranks have, in the order of rank 0
  std::vector<std::string> warnings;  ///< steps that some ranks do not have, and ignored iterations
  double useful_seconds = 0;          ///< of all steps
  /// The time of the slowest rank beyond the mean, for all steps.
  double waiting_seconds = 0;
};
/// Reports the load imbalance. `ranks` has one entry per rank. A step that a rank does not have is ignored, with a
/// warning. If ranks differ in their number of iterations, only the iterations that all have are used, with a warning.
/// Local. Throws Error(invalid_argument) if a rank has a step twice, or a time is negative or not a number.
ImbalanceReport report_load_imbalance(std::span<const RankTimes> ranks);
/// Returns the report as text: one line per step, one for all steps, and the warnings.
std::string to_string(const ImbalanceReport& report);

/// The times of one step on all ranks, in seconds.
struct StepTimeInfo {
  /// The name of the step.
  std::string step;
  /// One entry per rank, which is 0 without the step.
  std::vector<double> mean_seconds;
  /// The sum over the iterations of each rank.
  std::vector<double> total_seconds;
  /// The number of iterations of each rank.
  std::vector<std::size_t> iterations;
  /// Over the totals of the ranks that have the step.
  double largest_total = 0;
  /// The mean of these totals.
  double mean_total = 0;
};
/// The times of all steps.
struct TimeReport {
  /// Steps that any rank has: those of rank 0, then the additional ones of the next ranks.
  std::vector<StepTimeInfo> steps;
};
/// Reports the times of each step. Local. Throws as report_load_imbalance().
TimeReport report_time_info(std::span<const RankTimes> ranks);
/// Returns the report as text: one line per step and rank, and one line per step.
std::string to_string(const TimeReport& report);

}  // namespace muster
