// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/traces.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/trace/rings.hpp"

namespace muster::inspect {
namespace {

using trace::Entry;
using trace::Kind;
using trace::Process;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4;

bool is_of_group(const Entry& entry) {
  return entry.operation != 0 && entry.kind != Kind::message && entry.kind != Kind::phase;
}

/// Whether the entry is not inside another operation of Muster.
bool is_outermost(const Process& process, const Entry& entry) {
  if (entry.parent == 0) return true;
  const auto parent = std::ranges::lower_bound(process.entries, entry.parent, {}, &Entry::number);
  return parent == process.entries.end() || parent->number != entry.parent || parent->kind == Kind::program;
}

double seconds(std::int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

/// The bounds on a clock's offset, derived from the processes that are already aligned.
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
  std::vector<std::int64_t> latest_begins_;  // of the aligned processes; by operation
  std::vector<std::int64_t> earliest_ends_;
};

std::string name_of(const Process& process) {
  return fmt::format("rank {} (host {}, pid {})", process.rank, process.identity.host, process.identity.pid);
}

/// Returns the number of each process: its rank if every rank occurs once, otherwise its index.
std::vector<int> numbers_of(const Trace& trace) {
  std::set<int> ranks;
  std::vector<int> numbers;
  for (const Process& process : trace.processes) {
    ranks.insert(process.rank);
    numbers.push_back(process.rank);
  }
  if (ranks.size() != numbers.size() || ranks.contains(-1))
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(i);
  return numbers;
}

std::string group_text(std::uint64_t group) {
  return fmt::format("{:016x}", group);
}

double microseconds(std::int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / 1e3;
}

Config event_of(const Entry& entry, int process, std::int64_t begin, std::int64_t end) {
  Config arguments = Config::object({{"bytes", entry.bytes}, {"depth", entry.depth}});
  if (entry.operation != 0) arguments["operation"] = entry.operation;
  if (entry.group != 0) arguments["group"] = group_text(entry.group);
  if (entry.peer >= 0) arguments["peer"] = entry.peer;
  if (entry.copies != 0) arguments["copies"] = entry.copies;
  if (entry.page_faults != 0) arguments["page_faults"] = entry.page_faults;
  if (!entry.detail.empty()) arguments[entry.end == 0 ? "after" : "route"] = printable(entry.detail);
  if (entry.failed) arguments["failed"] = true;
  if (entry.end == 0) arguments["open"] = true;
  return Config::object({{"name", printable(entry.name)},
                         {"cat", to_string(entry.kind)},
                         {"ph", "X"},
                         {"pid", process},
                         {"tid", entry.thread},
                         {"ts", microseconds(begin)},
                         {"dur", microseconds(end - begin)},
                         {"args", std::move(arguments)}});
}

/// Returns the latest time in a process's records.
std::uint64_t end_of(const Process& process) {
  std::uint64_t end = 0;
  for (const Entry& entry : process.entries) end = std::max({end, entry.begin, entry.end});
  return end;
}

std::string rate_text(const RouteSummary& route) {
  return route.seconds <= 0
             ? ""
             : human_bytes(static_cast<std::uint64_t>(static_cast<double>(route.bytes) / route.seconds)) + "/s";
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
      // A process that is still writing only appends to the file.
      trace.processes.push_back(trace::parse(os::MappedFile::open(path)->bytes(), path));
    } catch (const Error& error) {
      trace.notes.emplace_back(error.what());
    }
  }
  if (!any)
    throw Error(ErrorKind::not_found,
                fmt::format("{}: contains no trace. Run the job with MUSTER_TRACE={}", in_quotes(directory), directory),
                {.path = directory});
  std::ranges::sort(trace.processes, {}, [](const Process& process) {
    return std::tuple(process.job, process.rank, process.identity.host, process.identity.pid);
  });
  for (const Process& process : trace.processes)
    if (process.damaged != 0)
      trace.notes.push_back(fmt::format("{}: {} damaged records are left out", name_of(process), process.damaged));
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
      // It shares no operation with the processes before it: it is the first one of another job, or has completed no
      // operation.
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
        trace.notes.push_back(fmt::format("{}: its clock drifts from the other clocks by {:.6f} s during the trace",
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

void write_events(const Trace& trace, const Sink& sink) {
  const std::vector<int> numbers = numbers_of(trace);
  std::int64_t zero = 0;
  bool any = false;
  for (std::size_t i = 0; i < trace.processes.size(); ++i)
    for (const Entry& entry : trace.processes[i].entries) {
      zero = any ? std::min(zero, trace.aligned(i, entry.begin)) : trace.aligned(i, entry.begin);
      any = true;
    }
  sink("{\"displayTimeUnit\": \"ns\", \"traceEvents\": [");
  const char* before = "\n";
  const auto put = [&](const Config& event) {
    sink(before + to_json(event));
    before = ",\n";
  };
  for (std::size_t i = 0; i < trace.processes.size(); ++i) {
    const Process& process = trace.processes[i];
    const auto meta = [&](const char* name, Config arguments) {
      put(Config::object({{"name", name}, {"ph", "M"}, {"pid", numbers[i]}, {"args", std::move(arguments)}}));
    };
    meta("process_name", Config::object({{"name", fmt::format("rank {} ({}, {})", process.rank, process.identity.host,
                                                              process.identity.pid)}}));
    meta("process_sort_index", Config::object({{"sort_index", numbers[i]}}));
    const std::uint64_t end = end_of(process);
    for (const Entry& entry : process.entries)
      put(event_of(entry, numbers[i], trace.aligned(i, entry.begin) - zero,
                   trace.aligned(i, entry.end == 0 ? end : entry.end) - zero));
  }
  sink("\n]}\n");
}

std::string trace_text(const Trace& trace, const TraceSummary& summary, const OutputStyle& style) {
  std::string text;
  std::uint64_t spans = 0;
  for (const RankSummary& rank : summary.ranks) spans += rank.spans;
  text += fmt::format("{} of {}, {} of several ranks\n\n", counted(spans, "span"),
                      trace.processes.size() == 1 ? "1 process" : fmt::format("{} processes", trace.processes.size()),
                      counted(summary.operations, "operation"));
  TextTable ranks({{"rank", Align::right},
                   {"host"},
                   {"pid", Align::right},
                   {"in calls", Align::right},
                   {"waiting", Align::right},
                   {"caused", Align::right},
                   {"longest", Align::right},
                   {"in"},
                   {"for rank", Align::right}},
                  {1, 7});
  for (std::size_t i = 0; i < summary.ranks.size(); ++i) {
    const RankSummary& rank = summary.ranks[i];
    const Process& process = trace.processes[i];
    const auto number = [](double value) { return fmt::format("{:.6f}", value); };
    const bool waits = rank.longest_for >= 0;
    ranks.add({std::to_string(process.rank), printable(process.identity.host), std::to_string(process.identity.pid),
               number(rank.seconds), number(rank.waiting_seconds), number(rank.awaited_seconds),
               waits ? number(rank.longest_wait) : "", printable(rank.longest_operation),
               waits ? std::to_string(trace.processes[static_cast<std::size_t>(rank.longest_for)].rank) : ""});
  }
  ranks.append_to(text, style);
  if (!summary.routes.empty()) {
    text += "\n";
    TextTable routes({{"kind"},
                      {"route"},
                      {"count", Align::right},
                      {"bytes", Align::right},
                      {"seconds", Align::right},
                      {"rate", Align::right}},
                     {1});
    for (const RouteSummary& route : summary.routes)
      routes.add({route.kind, printable(route.route), std::to_string(route.operations), human_bytes(route.bytes),
                  fmt::format("{:.6f}", route.seconds), rate_text(route)});
    routes.append_to(text, style);
  }
  const auto slowest = std::ranges::max_element(summary.ranks, {}, &RankSummary::awaited_seconds);
  if (slowest != summary.ranks.end() && slowest->awaited_seconds > 0)
    text += fmt::format("\nThe other ranks waited longest for rank {}: {:.6f} s in total.\n",
                        trace.processes[static_cast<std::size_t>(slowest - summary.ranks.begin())].rank,
                        slowest->awaited_seconds);
  for (const std::string& note : trace.notes) text += "note: " + printable(note) + "\n";
  return text;
}

Config trace_tree(const Trace& trace, const TraceSummary& summary) {
  Config tree = Config::object({{"operations", summary.operations}});
  ConfigArray ranks;
  for (std::size_t i = 0; i < summary.ranks.size(); ++i) {
    const RankSummary& rank = summary.ranks[i];
    const Process& process = trace.processes[i];
    ranks.push_back(Config::object(
        {{"rank", process.rank},
         {"host", process.identity.host},
         {"pid", process.identity.pid},
         {"job", process.job},
         {"clock_offset", static_cast<double>(trace.offsets[i]) * 1e-9},
         {"spans", rank.spans},
         {"open", rank.open},
         {"seconds", rank.seconds},
         {"waiting", rank.waiting_seconds},
         {"awaited", rank.awaited_seconds},
         {"longest_wait", rank.longest_wait},
         {"longest_operation", or_null(rank.longest_operation)},
         {"longest_for", rank.longest_for < 0
                             ? Config()
                             : Config(trace.processes[static_cast<std::size_t>(rank.longest_for)].rank)}}));
  }
  tree["ranks"] = std::move(ranks);
  tree["routes"] = list_of(summary.routes, [](const RouteSummary& route) {
    return Config::object({{"kind", route.kind},
                           {"route", or_null(route.route)},
                           {"operations", route.operations},
                           {"bytes", route.bytes},
                           {"seconds", route.seconds}});
  });
  tree["notes"] = ConfigArray(trace.notes.begin(), trace.notes.end());
  return tree;
}

std::string imbalance_text(const Trace& trace) {
  const std::vector<RankTimes> times = step_times(trace);
  return to_string(report_load_imbalance(times)) + "\n" + to_string(report_time_info(times));
}

Config imbalance_tree(const Trace& trace) {
  const std::vector<RankTimes> times = step_times(trace);
  const ImbalanceReport imbalance = report_load_imbalance(times);
  const auto numbers = [](const auto& values) { return ConfigArray(values.begin(), values.end()); };
  return Config::object({{"useful", imbalance.useful_seconds},
                         {"waiting", imbalance.waiting_seconds},
                         {"steps", list_of(imbalance.steps,
                                           [](const StepImbalance& step) {
                                             return Config::object({{"step", step.step},
                                                                    {"iterations", step.iterations},
                                                                    {"useful", step.useful_seconds},
                                                                    {"waiting", step.waiting_seconds}});
                                           })},
                         {"warnings", numbers(imbalance.warnings)},
                         {"times", list_of(report_time_info(times).steps, [&](const StepTimeInfo& step) {
                            return Config::object({{"step", step.step},
                                                   {"iterations", numbers(step.iterations)},
                                                   {"mean", numbers(step.mean_seconds)},
                                                   {"total", numbers(step.total_seconds)},
                                                   {"largest_total", step.largest_total},
                                                   {"mean_total", step.mean_total}});
                          })}});
}

}  // namespace muster::inspect
