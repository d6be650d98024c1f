// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/trace_merge.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "muster/error.hpp"
#include "src/inspect/output.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/trace/trace_file.hpp"

namespace muster::inspect {
namespace {

using trace::Entry;
using trace::Kind;
using trace::Process;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4;

bool is_of_group(const Entry& entry) {
  return entry.operation != 0 && entry.kind != Kind::message && entry.kind != Kind::phase;
}

/// Not inside of another operation of the library.
bool is_outermost(const Process& process, const Entry& entry) {
  if (entry.parent == 0) return true;
  const auto parent = std::ranges::lower_bound(process.entries, entry.parent, {}, &Entry::number);
  return parent == process.entries.end() || parent->number != entry.parent || parent->kind == Kind::program;
}

double seconds(std::int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

/// What clocks can be, as far as the processes tell that are aligned already.
class Bounds {
 public:
  explicit Bounds(const Trace& trace) : trace_(trace), of_process_(trace.processes.size()) {
    const auto operations = operations_of(trace, false);
    latest_begins_.assign(operations.size(), -most);
    earliest_ends_.assign(operations.size(), most);
    for (std::size_t i = 0; i < operations.size(); ++i)
      for (const OperationPart& part : operations[i]) of_process_[part.process].emplace_back(i, part.entry);
  }

  struct Range {
    std::int64_t least = -most;
    std::int64_t largest = most;
    [[nodiscard]] bool is_known() const { return least != -most && largest != most; }
    [[nodiscard]] bool allows(std::int64_t offset) const { return least <= offset && offset <= largest; }
  };
  [[nodiscard]] Range of(std::size_t process) const {
    Range range;
    for (const auto& [at, entry] : of_process_[process]) {
      if (latest_begins_[at] == -most) continue;
      range.least = std::max(range.least, static_cast<std::int64_t>(entry->begin) - earliest_ends_[at]);
      range.largest = std::min(range.largest, static_cast<std::int64_t>(entry->end) - latest_begins_[at]);
    }
    return range;
  }
  void settle(std::size_t process) {
    for (const auto& [at, entry] : of_process_[process]) {
      latest_begins_[at] = std::max(latest_begins_[at], trace_.aligned(process, entry->begin));
      earliest_ends_[at] = std::min(earliest_ends_[at], trace_.aligned(process, entry->end));
    }
  }

 private:
  const Trace& trace_;
  std::vector<std::vector<std::pair<std::size_t, const Entry*>>> of_process_;
  std::vector<std::int64_t> latest_begins_;  // of those that are aligned; by operation
  std::vector<std::int64_t> earliest_ends_;
};

std::string name_of(const Process& process) {
  return fmt::format("rank {} (host {}, pid {})", process.rank, process.identity.host, process.identity.pid);
}

}  // namespace

Trace read_trace(const std::string& directory) {
  Trace trace;
  bool any = false;
  for (const os::DirectoryEntry& entry : os::list_directory(directory)) {
    if (!entry.name.ends_with(trace::file_suffix)) continue;
    any = true;
    const std::string path = directory + "/" + entry.name;
    try {
      // A process that still writes only adds to it.
      trace.processes.push_back(trace::parse(os::MappedFile::open(path)->bytes(), path));
    } catch (const Error& error) {
      trace.notes.emplace_back(error.what());
    }
  }
  if (!any)
    throw Error(ErrorKind::not_found,
                fmt::format("there is no trace in {}: run the job with MUSTER_TRACE={}", directory, directory),
                {.path = directory});
  std::ranges::sort(trace.processes, {}, [](const Process& process) {
    return std::tuple(process.job, process.rank, process.identity.host, process.identity.pid);
  });
  for (const Process& process : trace.processes)
    if (process.damaged != 0)
      trace.notes.push_back(
          fmt::format("{}: {} records cannot be, and are left out", name_of(process), process.damaged));
  align(trace);
  return trace;
}

void align(Trace& trace) {
  trace.offsets.assign(trace.processes.size(), 0);
  Bounds bounds(trace);
  std::vector<std::size_t> done;
  std::vector<std::size_t> left(trace.processes.size());
  for (std::size_t i = 0; i < left.size(); ++i) left[i] = i;
  const auto settle = [&](std::size_t process) {
    bounds.settle(process);
    done.push_back(process);
    std::erase(left, process);
  };
  while (!left.empty()) {
    const auto next = std::ranges::find_if(left, [&](std::size_t process) { return bounds.of(process).is_known(); });
    if (next == left.end()) {
      // Nothing joins it with those before: the first of another job, or it has ended no operation.
      settle(left.front());
      continue;
    }
    const std::size_t process = *next;
    const Bounds::Range range = bounds.of(process);
    std::int64_t& offset = trace.offsets[process];
    if (!range.allows(0)) {
      const auto mate = std::ranges::find_if(done, [&](std::size_t other) {
        return trace.processes[other].identity.host == trace.processes[process].identity.host &&
               range.allows(trace.offsets[other]);
      });
      offset = mate != done.end() ? trace.offsets[*mate] : range.least + (range.largest - range.least) / 2;
      if (range.least > range.largest)
        trace.notes.push_back(fmt::format("{}: its clock runs apart from the others' by {:.6f} s during the trace",
                                          name_of(trace.processes[process]), seconds(range.least - range.largest)));
    }
    settle(process);
  }
}

std::vector<std::vector<OperationPart>> operations_of(const Trace& trace, bool outermost) {
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<OperationPart>> found;
  for (std::size_t i = 0; i < trace.processes.size(); ++i)
    for (const Entry& entry : trace.processes[i].entries)
      if (is_of_group(entry) && entry.end != 0 && !entry.failed &&
          (!outermost || is_outermost(trace.processes[i], entry)))
        found[{entry.group, entry.operation}].push_back({i, &entry});
  std::vector<std::vector<OperationPart>> operations;
  for (auto& [key, parts] : found)
    if (parts.size() > 1) operations.push_back(std::move(parts));
  return operations;
}

TraceSummary summarize(const Trace& trace) {
  TraceSummary summary;
  summary.ranks.resize(trace.processes.size());
  for (std::size_t i = 0; i < trace.processes.size(); ++i) {
    RankSummary& rank = summary.ranks[i];
    for (const Entry& entry : trace.processes[i].entries) {
      ++rank.spans;
      rank.open += entry.end == 0 ? 1 : 0;
      if (entry.end != 0 && entry.kind != Kind::program && entry.kind != Kind::phase &&
          is_outermost(trace.processes[i], entry))
        rank.seconds += seconds(static_cast<std::int64_t>(entry.end - entry.begin));
    }
  }
  std::map<std::pair<Kind, std::string>, RouteSummary> routes;
  const auto begin_of = [&](const OperationPart& part) { return trace.aligned(part.process, part.entry->begin); };
  for (const std::vector<OperationPart>& parts : operations_of(trace, true)) {
    ++summary.operations;
    const OperationPart& last = *std::ranges::max_element(parts, {}, begin_of);
    const std::int64_t last_begin = begin_of(last);
    std::int64_t first_begin = last_begin;
    std::int64_t last_end = last_begin;
    std::uint64_t bytes = 0;
    for (const OperationPart& part : parts) {
      RankSummary& rank = summary.ranks[part.process];
      const double wait = seconds(last_begin - begin_of(part));
      rank.waiting_seconds += wait;
      summary.ranks[last.process].awaited_seconds += wait;
      if (wait > rank.longest_wait) {
        rank.longest_wait = wait;
        rank.longest_operation = fmt::format("{} {}", part.entry->name, part.entry->operation);
        rank.longest_for = static_cast<int>(last.process);
      }
      first_begin = std::min(first_begin, begin_of(part));
      last_end = std::max(last_end, trace.aligned(part.process, part.entry->end));
      bytes += part.entry->bytes;
    }
    RouteSummary& route = routes[{last.entry->kind, last.entry->detail}];
    ++route.operations;
    route.bytes += bytes;
    route.seconds += seconds(last_end - first_begin);
  }
  for (auto& [key, route] : routes) {
    route.kind = to_string(key.first);
    route.route = key.second;
    summary.routes.push_back(std::move(route));
  }
  return summary;
}

std::vector<RankTimes> step_times(const Trace& trace) {
  std::vector<RankTimes> ranks;
  for (const Process& process : trace.processes) {
    RankTimes& times = ranks.emplace_back();
    std::map<std::string, std::size_t> known;
    for (const Entry& entry : process.entries) {
      const bool is_step = entry.kind == Kind::program || (entry.kind != Kind::phase && is_outermost(process, entry));
      if (!is_step || entry.end == 0) continue;
      const auto [at, is_new] = known.try_emplace(entry.name, times.size());
      if (is_new) times.push_back({printable(entry.name), {}});
      times[at->second].seconds.push_back(seconds(static_cast<std::int64_t>(entry.end - entry.begin)));
    }
  }
  return ranks;
}

}  // namespace muster::inspect
