// SPDX-License-Identifier: Apache-2.0
#pragma once
// The traces of all processes of a job as one: on one clock, and what follows from them together.

#include <cstdint>
#include <string>
#include <vector>

#include "muster/time_report.hpp"
#include "src/trace/reading.hpp"

namespace muster::inspect {

/// What the processes of a directory have recorded.
struct Trace {
  std::vector<trace::Process> processes = {};  ///< by job and rank
  std::vector<std::int64_t> offsets = {};      ///< what each one's clock is ahead of the first one's, in nanoseconds
  std::vector<std::string> notes = {};         ///< what could not be had of it

  /// On the first one's clock.
  [[nodiscard]] std::int64_t aligned(std::size_t process, std::uint64_t time) const {
    return static_cast<std::int64_t>(time) - offsets[process];
  }
};

/// Reads all trace files of a directory, and aligns them. Files that are damaged are left out, with a note. Throws
/// Error(not_found) if there is none, Error(io).
Trace read_trace(const std::string& directory);

/// Finds the offsets. In an operation that all ranks of a group are in together none ends before the last one has
/// begun: that bounds what each clock can be ahead of the others. A clock has the offset 0 if all bounds allow it, else
/// that of an earlier process of its host if they allow that, else the middle.
void align(Trace& trace);

/// A part of an operation of a group: what one rank has recorded of it.
struct OperationPart {
  std::size_t process = 0;
  const trace::Entry* entry = nullptr;
};
/// Operations that have ended well on each rank that has recorded them, by their order in each group. `outermost`: but
/// for those inside of another operation.
std::vector<std::vector<OperationPart>> operations_of(const Trace& trace, bool outermost);

struct RankSummary {
  std::uint64_t spans = 0;
  std::uint64_t open = 0;      ///< that have not ended
  double seconds = 0;          ///< in operations of the library
  double waiting_seconds = 0;  ///< from its own begin of operations until the last rank has begun them
  double awaited_seconds = 0;  ///< that all others together waited for this rank
  double longest_wait = 0;
  std::string longest_operation;  ///< "all_reduce 17"
  int longest_for = -1;           ///< the process that it waited for
};
struct RouteSummary {
  std::string kind;
  std::string route;
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;  ///< that all ranks gave
  double seconds = 0;       ///< from the first begin to the last end
};
struct TraceSummary {
  std::vector<RankSummary> ranks;  ///< of each process
  std::vector<RouteSummary> routes;
  std::uint64_t operations = 0;  ///< of several ranks
};
TraceSummary summarize(const Trace& trace);

/// What each process took for the spans of the program, by their names, and for the library's operations.
std::vector<RankTimes> step_times(const Trace& trace);

}  // namespace muster::inspect
