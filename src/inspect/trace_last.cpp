// SPDX-License-Identifier: Apache-2.0
// The current or last step of each rank: from running processes, from files of failures, or from traces.

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <tuple>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/traces.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/trace/rings.hpp"

namespace muster::inspect {
namespace {

using trace::Process;
using trace::TraceEntry;

constexpr std::uint64_t largest_failure = 1 << 30;

/// Returns the ID of the process's job; empty if the process is in no group.
std::string job_of(const Process& process) {
  return process.size == 0 ? "" : process.job;
}

std::string rank_text(const Process& process) {
  return process.rank < 0 ? "" : std::to_string(process.rank);
}

bool is_wanted(const std::vector<Process>& processes, const std::string& wanted) {
  return wanted.empty() || std::ranges::any_of(processes, [&](const Process& process) {
           return job_of(process).starts_with(wanted) || std::to_string(process.identity.pid) == wanted;
         });
}

/// Whether the process with the ID `wanted` has started one of these, as the launcher of a job has.
bool has_started(const std::string& wanted, const std::vector<Process>& processes) {
  std::int64_t pid = 0;
  const auto [end, error] = std::from_chars(wanted.data(), wanted.data() + wanted.size(), pid);
  if (error != std::errc() || end != wanted.data() + wanted.size()) return false;
  return std::ranges::any_of(processes, [&](const Process& process) {
    return os::life_of(process.identity) == os::Life::alive && os::descends_from(process.identity.pid, pid);
  });
}

void sort_by_rank(std::vector<Process>& processes) {
  std::ranges::sort(processes, {}, [](const Process& process) {
    return std::tuple(process.rank, process.identity.host, process.identity.pid);
  });
}

/// Groups processes from any source by job.
std::vector<LastWords> jobs_of(std::vector<Process> processes) {
  std::map<std::string, LastWords> jobs;
  for (Process& process : processes) jobs[job_of(process)].processes.push_back(std::move(process));
  std::vector<LastWords> list;
  for (auto& [name, job] : jobs) {
    job.job = name;
    sort_by_rank(job.processes);
    list.push_back(std::move(job));
  }
  return list;
}

std::vector<LastWords> running(const std::string& wanted) {
  std::vector<Process> processes;
  for (const trace::Ring& ring : trace::all_rings()) {
    try {
      processes.push_back(trace::parse(ring, "a ring"));
    } catch (const Error&) {
      // The memory belongs to another program, or to another version.
    }
  }
  std::vector<LastWords> jobs = jobs_of(std::move(processes));
  std::erase_if(jobs, [&](LastWords& job) {
    job.time = os::now_ns();
    job.wall_clock = static_cast<std::int64_t>(os::clock_ns(CLOCK_REALTIME) - job.time);
    return !is_wanted(job.processes, wanted) && !has_started(wanted, job.processes);
  });
  return jobs;
}

std::optional<LastWords> failed(const std::string& directory, const std::string& wanted) {
  for (const std::string& path : trace::failures_in(directory)) {
    try {
      trace::Failure failure = trace::parse_failure(os::read_small_file(path, largest_failure), path);
      if (failure.processes.empty() || !is_wanted(failure.processes, wanted)) continue;
      sort_by_rank(failure.processes);
      return LastWords{.job = failure.processes.front().job,
                       .source = path,
                       .words = std::move(failure.words),
                       .time = failure.time,
                       .wall_clock = failure.wall_clock,
                       .processes = std::move(failure.processes)};
    } catch (const Error&) {
      // The file is damaged or missing; an older one may be usable.
    }
  }
  return std::nullopt;
}

std::vector<LastWords> traced(const std::string& directory) {
  Trace trace = read_trace(directory);
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < trace.processes.size(); ++i)
    for (TraceEntry& entry : trace.processes[i].entries) {
      const auto align = [&](std::uint64_t& time) {
        if (time != 0) time = static_cast<std::uint64_t>(trace.aligned(i, time));
        end = std::max(end, time);
      };
      align(entry.begin);
      align(entry.end);
    }
  std::vector<LastWords> jobs = jobs_of(std::move(trace.processes));
  for (LastWords& job : jobs) {
    job.source = directory;
    job.time = end;
    job.wall_clock = job.processes.front().wall_clock;
    if (const auto failure = failed(directory, job.job)) job.words = failure->words;
  }
  return jobs;
}

std::string state_of(const LastWords& job, const Process& process) {
  if (!job.source.empty()) return "";
  switch (os::life_of(process.identity)) {
    case os::Life::dead:
      return "dead";
    case os::Life::unknown:
      return "unknown";
    default:
      return os::process_state(process.identity.pid) == os::ProcessState::stopped ? "stopped" : "running";
  }
}

double seconds_before(const LastWords& job, std::uint64_t time) {
  return time > job.time ? 0 : static_cast<double>(job.time - time) * 1e-9;
}

/// Returns the entries that have not ended, in the order of their beginning.
std::vector<const TraceEntry*> open_of(const Process& process) {
  std::vector<const TraceEntry*> open;
  for (const TraceEntry& entry : process.entries)
    if (entry.end == 0) open.push_back(&entry);
  return open;
}

const TraceEntry* last_ended(const Process& process) {
  // An operation with parts ends with the last of them, or within the same tick.
  const auto order = [](const TraceEntry& entry) { return std::tuple(entry.end, -entry.depth, entry.number); };
  const auto last = std::ranges::max_element(process.entries, {}, order);
  return last == process.entries.end() || last->end == 0 ? nullptr : &*last;
}

std::string progress_of(const TraceEntry& entry) {
  std::string text;
  if (entry.done != 0) text = human_bytes(entry.done) + " moved";
  if (entry.bytes != 0) text = human_bytes(entry.bytes);
  if (!entry.detail.empty()) text += fmt::format("{}after {}", text.empty() ? "" : ", ", printable(entry.detail));
  if (entry.peer >= 0) text += fmt::format("{}rank {}", text.empty() ? "" : ", ", entry.peer);
  return text;
}

}  // namespace

std::vector<LastWords> last_words(const std::string& wanted) {
  if (const auto status = wanted.empty() ? std::nullopt : os::file_status(wanted, os::Links::followed);
      status && status->is_directory)
    return traced(wanted);
  std::vector<LastWords> jobs = running(wanted);
  const std::string own = trace::failure_directory();
  for (const std::string& directory : {os::environment("MUSTER_TRACE").value_or(own), own})
    if (jobs.empty())
      if (auto job = failed(directory, wanted)) jobs.push_back(std::move(*job));
  if (jobs.empty())
    throw Error(
        ErrorKind::not_found,
        wanted.empty()
            ? fmt::format("no job of this user runs on this host, and {} has no record of a failed job", in_quotes(own))
            : fmt::format("{}: not a directory, a process or a job that runs on this host, or a job with a "
                          "record in {}",
                          in_quotes(wanted), in_quotes(own)));
  return jobs;
}

void sort_by_time(std::vector<LastWords>& jobs) {
  for (LastWords& job : jobs)
    std::ranges::stable_sort(job.processes, std::greater(), [&](const Process& process) {
      const std::vector<const TraceEntry*> open = open_of(process);
      const TraceEntry* const last = last_ended(process);
      return !open.empty()     ? seconds_before(job, open.front()->begin)
             : last != nullptr ? seconds_before(job, last->end)
                               : 0;
    });
}

std::string last_text(const std::vector<LastWords>& jobs, const OutputStyle& style) {
  std::string text;
  for (const LastWords& job : jobs) {
    const std::size_t count = job.processes.size();
    text += text.empty() ? "" : "\n";
    text += job.job.empty() ? fmt::format("{} process{} in no group", count, count == 1 ? "" : "es")
                            : fmt::format("job {}, {} of {} ranks", job.job, count,
                                          std::max(job.processes.front().size, static_cast<int>(count)));
    text += job.source.empty() ? "\n" : fmt::format(", from {}\n", printable(job.source));
    if (!job.words.empty()) text += printable(job.words) + "\n";
    TextTable table({{"rank", Align::right},
                     {"host"},
                     {"pid", Align::right},
                     {"state"},
                     {"in"},
                     {"number", Align::right},
                     {"group"},
                     {"for", Align::right},
                     {"progress"}},
                    {1, 8});
    for (const Process& process : job.processes) {
      const auto row = [&](const std::string& what, const TraceEntry* entry, double time, const std::string& how_far) {
        const bool has_number = entry != nullptr && entry->operation != 0;
        table.add({rank_text(process), printable(process.identity.host), std::to_string(process.identity.pid),
                   state_of(job, process), what, has_number ? std::to_string(entry->operation) : "",
                   entry != nullptr && entry->group != 0 ? fmt::format("{:016x}", entry->group).substr(0, 6) : "",
                   entry != nullptr ? fmt::format("{:.1f} s", time) : "", how_far});
      };
      const std::vector<const TraceEntry*> open = open_of(process);
      for (const TraceEntry* entry : open)
        row(printable(entry->name), entry, seconds_before(job, entry->begin), progress_of(*entry));
      if (!open.empty()) continue;
      const TraceEntry* const last = last_ended(process);
      row("no operation", last, last == nullptr ? 0 : seconds_before(job, last->end),
          last == nullptr ? "" : fmt::format("after {}", printable(last->name)));
    }
    table.append_to(text, style);
  }
  return text;
}

Config last_tree(const std::vector<LastWords>& jobs) {
  const auto entry_tree = [](const LastWords& job, const TraceEntry& entry) {
    return Config::object({{"name", entry.name},
                           {"kind", to_string(entry.kind)},
                           {"group", entry.group == 0 ? Config() : Config(fmt::format("{:016x}", entry.group))},
                           {"operation", entry.operation == 0 ? Config() : Config(entry.operation)},
                           {"peer", entry.peer < 0 ? Config() : Config(entry.peer)},
                           {"began", seconds_before(job, entry.begin)},
                           {"ended", entry.end == 0 ? Config() : Config(seconds_before(job, entry.end))},
                           {"failed", entry.failed},
                           {"bytes", entry.bytes},
                           {"moved", entry.done},
                           {entry.end == 0 ? "after" : "route", or_null(entry.detail)}});
  };
  return Config::object(
      {{"jobs", list_of(jobs, [&](const LastWords& job) {
          return Config::object(
              {{"job", or_null(job.job)},
               {"source", or_null(job.source)},
               {"message", or_null(job.words)},
               {"time", (static_cast<double>(job.wall_clock) + static_cast<double>(job.time)) * 1e-9},
               {"ranks", list_of(job.processes, [&](const Process& process) {
                  const TraceEntry* const last = last_ended(process);
                  return Config::object(
                      {{"rank", process.rank < 0 ? Config() : Config(process.rank)},
                       {"size", process.size},
                       {"host", process.identity.host},
                       {"pid", process.identity.pid},
                       {"state", or_null(state_of(job, process))},
                       {"open",
                        list_of(open_of(process), [&](const TraceEntry* entry) { return entry_tree(job, *entry); })},
                       {"last", last == nullptr ? Config() : entry_tree(job, *last)}});
                })}});
        })}});
}

}  // namespace muster::inspect
