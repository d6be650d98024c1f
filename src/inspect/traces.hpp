// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reports of traces: a file for Perfetto and chrome://tracing, the summary, and the current or last step of each rank
// (docs/howto/find-a-hang.md).

#include <cstdint>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/trace.hpp"
#include "src/inspect/output.hpp"
#include "src/trace/reading.hpp"

namespace muster::inspect {

// Joins the traces of all processes of a job on one clock, and derives results from them.

/// The records of all processes of a directory.
struct Trace {
  std::vector<trace::Process> processes = {};  ///< by job and rank
  /// the difference of each clock to the first one, in nanoseconds; positive: it is ahead
  std::vector<std::int64_t> offsets = {};
  std::vector<std::string> notes = {};  ///< problems of reading or aligning
  /// the latest time of the records, on the clock of the first process; the time of reading, if a process still runs
  std::int64_t end = 0;

  /// Converts a time to the clock of the first process.
  [[nodiscard]] std::int64_t aligned(std::size_t process, std::uint64_t time) const {
    return static_cast<std::int64_t>(time) - offsets[process];
  }
};

/// Reads all trace files of a directory, and aligns them. Damaged files are left out, with a note. Throws
/// Error(not_found) if there is no trace file, Error(io).
Trace read_trace(const std::string& directory);

/// Determines the offsets. An operation in which all ranks of a group wait for each other ends on no rank before the
/// last one has begun. That bounds the difference of each pair of clocks. A clock has the offset 0 if all bounds allow
/// it. Otherwise it has the offset of an earlier process of its host if they allow that, and otherwise the middle of
/// the bounds.
void align(Trace& trace);

/// A part of an operation of a group: the record of one rank.
struct OperationPart {
  std::size_t process = 0;
  const trace::TraceEntry* entry = nullptr;
};
/// Returns the operations that succeeded on every rank that recorded them, in their order in each group. `outermost`
/// excludes operations inside another operation.
std::vector<std::vector<OperationPart>> operations_of(const Trace& trace, bool outermost);

struct RankSummary {
  std::uint64_t spans = 0;
  std::uint64_t open = 0;  ///< operations that have not ended
  double seconds = 0;      ///< in operations of Muster
  /// From this rank's begin of each operation until the last rank has begun it. If a rank has not begun it: until this
  /// rank failed, or the end of the trace.
  double waiting_seconds = 0;
  double caused_seconds = 0;  ///< the sum of the times that all other ranks waited for this rank
  double longest_wait = 0;
  std::string longest_operation;  ///< "all_reduce 17"
  int longest_for = -1;           ///< the process for which it waited
};
struct RouteSummary {
  std::string kind;
  std::string route;
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;  ///< contributed by all ranks
  double seconds = 0;       ///< from the first begin to the last end
};
/// An operation that some ranks of its group have begun, and others have not. Members are indices of processes.
struct MissedOperation {
  std::string operation;  ///< "barrier 17"
  std::vector<std::size_t> waiting;
  std::vector<std::size_t> missing;
};
/// The time from the begin of an operation on one rank until the last rank has begun it.
struct OperationWait {
  OperationPart part;
  double seconds = 0;
  std::size_t awaited = 0;  ///< the process that began it last, or has not begun it
};
/// An operation of several ranks. Times are on the clock of the first process.
struct OperationSummary {
  const trace::TraceEntry* entry = nullptr;  ///< the record of the rank that began it last
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::uint64_t bytes = 0;  ///< contributed by all ranks
  double longest_wait = 0;
  std::size_t awaited = 0;  ///< the process that began it last
};
/// Its pointers are valid as long as the trace.
struct TraceSummary {
  std::vector<RankSummary> ranks;  ///< of each process
  std::vector<RouteSummary> routes;
  std::vector<OperationSummary> operations;  ///< operations that succeeded on several ranks
  std::vector<OperationWait> waits;          ///< of each rank in these operations, and in missed ones
  std::vector<MissedOperation> missed;
  std::vector<std::size_t> order;  ///< of the processes in reports
};
TraceSummary summarize(const Trace& trace);

enum class RankOrder : std::uint8_t {
  rank,
  waiting,  ///< the longest time first, here and below
  caused,
};
/// Sets the order of the processes in reports.
void sort(TraceSummary& summary, RankOrder order);

/// Returns the earliest time of the records, on the clock of the first process; 0 if there are none.
std::int64_t begin_of(const Trace& trace);

/// Returns the time that each process spent in the spans of the program, by their names, and in Muster's operations.
std::vector<RankTimes> step_times(const Trace& trace);

/// Writes the Trace Event Format, one line per event.
void write_events(const Trace& trace, const Sink& sink);

std::string trace_text(const Trace& trace, const TraceSummary& summary, const OutputStyle& style);
Config trace_tree(const Trace& trace, const TraceSummary& summary);
/// The reports of muster/trace.hpp.
std::string imbalance_text(const Trace& trace);
Config imbalance_tree(const Trace& trace);

/// The steps that the ranks of a job are in, or were in at the end of their records.
struct LastWords {
  std::string job = {};     ///< empty: processes in no group
  std::string source = {};  ///< a path; empty: running processes
  std::string words = {};   ///< of a failure
  std::uint64_t time = 0;   ///< of the failure, on the clock of its processes
  std::int64_t wall_clock = 0;
  std::vector<trace::Process> processes = {};  ///< by rank
};
/// Returns the last steps of the ranks. `wanted` is a process of a job or its launcher, a prefix of a job, or a
/// directory of traces. If it is
/// empty, returns all jobs that run on this host, or the last one that failed if none runs. Throws Error(not_found |
/// io).
std::vector<LastWords> last_words(const std::string& wanted);
/// Sorts the ranks of each job by the time since their last step began or ended, the longest first.
void sort_by_time(std::vector<LastWords>& jobs);
std::string last_text(const std::vector<LastWords>& jobs, const OutputStyle& style);
Config last_tree(const std::vector<LastWords>& jobs);

}  // namespace muster::inspect
