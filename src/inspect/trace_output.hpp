// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the program says of traces: a file for Perfetto and chrome://tracing, the summary, and what ranks are or were in
// (docs/tracing.md).

#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/trace_merge.hpp"

namespace muster::inspect {

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
