// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the program says of traces: a file for Perfetto and chrome://tracing, the summary, and what ranks are or were in
// (docs/tracing.md).

#include <cstdint>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/time_report.hpp"
#include "src/inspect/output.hpp"
#include "src/trace/reading.hpp"

namespace muster::inspect {

// The traces of all processes of a job as one: on one clock, and what follows from them together.

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

/// The Trace Event Format, a line an event.
void write_events(const Trace& trace, const Sink& sink);

std::string trace_text(const Trace& trace, const TraceSummary& summary, const OutputStyle& style);
Config trace_tree(const Trace& trace, const TraceSummary& summary);
/// The reports of muster/time_report.hpp.
std::string imbalance_text(const Trace& trace);
Config imbalance_tree(const Trace& trace);

/// What the ranks of a job are in, or were in at the end of what is known.
struct LastWords {
  std::string job = {};
  std::string source = {};  ///< a path; empty: processes that run
  std::string words = {};   ///< of a failure
  std::uint64_t time = 0;   ///< of it, on the clock of its processes
  std::int64_t wall_clock = 0;
  std::vector<trace::Process> processes = {};  ///< by rank
};
/// `wanted`: a process, the beginning of a job, or a directory of traces; empty: all jobs that run on this host, or
/// where there is none, the last one that failed. Throws Error(not_found | io).
std::vector<LastWords> last_words(const std::string& wanted);
std::string last_text(const std::vector<LastWords>& jobs, const OutputStyle& style);
Config last_tree(const std::vector<LastWords>& jobs);

}  // namespace muster::inspect
