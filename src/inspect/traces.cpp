// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/traces.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/trace/rings.hpp"

namespace muster::inspect {
namespace {

using trace::Process;
using trace::SpanKind;
using trace::TraceEntry;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4;

bool is_of_group(const TraceEntry& entry) {
  return entry.operation != 0 && entry.kind != SpanKind::message && entry.kind != SpanKind::phase;
}

/// Whether the entry is not inside another operation of Muster.
bool is_outermost(const Process& process, const TraceEntry& entry) {
  if (entry.parent == 0) return true;
  const auto parent = std::ranges::lower_bound(process.entries, entry.parent, {}, &TraceEntry::number);
  return parent == process.entries.end() || parent->number != entry.parent || parent->kind == SpanKind::program;
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
  std::vector<std::vector<std::pair<std::size_t, const TraceEntry*>>> of_process_;
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

Config event_of(const TraceEntry& entry, int process, std::int64_t begin, std::int64_t end) {
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
  for (const TraceEntry& entry : process.entries) end = std::max({end, entry.begin, entry.end});
  return end;
}

/// Returns the latest time in the records, on the clock of the first process; the present time if a process still runs.
std::int64_t end_of(const Trace& trace) {
  std::int64_t end = 0;
  for (std::size_t i = 0; i < trace.processes.size(); ++i) {
    const bool is_alive = os::life_of(trace.processes[i].identity) == os::Life::alive;
    end = std::max(end, trace.aligned(i, is_alive ? os::now_ns() : end_of(trace.processes[i])));
  }
  return end;
}

void add_wait(TraceSummary& summary, const OperationPart& part, double wait, std::size_t awaited) {
  summary.waits.push_back({part, wait, awaited});
  RankSummary& rank = summary.ranks[part.process];
  rank.waiting_seconds += wait;
  if (wait <= rank.longest_wait) return;
  rank.longest_wait = wait;
  rank.longest_operation = fmt::format("{} {}", part.entry->name, part.entry->operation);
  rank.longest_for = static_cast<int>(awaited);
}

/// Returns whether it is the largest group of the process: the group's number is the beginning of the job's ID.
bool is_of_job(const Process& process, std::uint64_t group) {
  std::array<std::byte, sizeof group> bytes{};
  std::memcpy(bytes.data(), &group, sizeof group);
  return process.size != 0 && process.job.starts_with(os::hex_text(bytes));
}

/// Adds the operations that a member of their group has not begun. The members that have begun it wait for that one.
void add_missed(const Trace& trace, TraceSummary& summary) {
  std::map<std::uint64_t, std::set<std::size_t>> members;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<OperationPart>> begun;
  for (std::size_t i = 0; i < trace.processes.size(); ++i)
    for (const TraceEntry& entry : trace.processes[i].entries) {
      if (!is_of_group(entry) || !is_outermost(trace.processes[i], entry)) continue;
      members[entry.group].insert(i);
      begun[{entry.group, entry.operation}].push_back({i, &entry});
    }
  // A rank that has begun no operation of its largest group is a member, too.
  for (auto& [group, its] : members)
    for (std::size_t i = 0; i < trace.processes.size(); ++i)
      if (is_of_job(trace.processes[i], group)) its.insert(i);
  for (const auto& [key, parts] : begun) {
    const auto has_succeeded = [](const OperationPart& part) { return part.entry->end != 0 && !part.entry->failed; };
    if (std::ranges::any_of(parts, has_succeeded)) continue;
    MissedOperation missed{fmt::format("{} {}", parts.front().entry->name, key.second), {}, {}};
    for (const OperationPart& part : parts) missed.waiting.push_back(part.process);
    std::ranges::set_difference(members[key.first], missed.waiting, std::back_inserter(missed.missing));
    if (missed.missing.empty()) continue;
    for (const OperationPart& part : parts) {
      const std::int64_t end = part.entry->end == 0 ? trace.end : trace.aligned(part.process, part.entry->end);
      const double wait = seconds(std::max<std::int64_t>(end - trace.aligned(part.process, part.entry->begin), 0));
      add_wait(summary, part, wait, missed.missing.front());
      for (const std::size_t process : missed.missing) summary.ranks[process].caused_seconds += wait;
    }
    summary.missed.push_back(std::move(missed));
  }
}

std::vector<int> ranks_of(const Trace& trace, const std::vector<std::size_t>& processes) {
  std::vector<int> ranks;
  for (const std::size_t process : processes) ranks.push_back(trace.processes[process].rank);
  return ranks;
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
  trace.end = end_of(trace);
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
    for (const TraceEntry& entry : trace.processes[i].entries)
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
  summary.order.resize(trace.processes.size());
  std::iota(summary.order.begin(), summary.order.end(), std::size_t{0});
  for (std::size_t i = 0; i < trace.processes.size(); ++i) {
    RankSummary& rank = summary.ranks[i];
    for (const TraceEntry& entry : trace.processes[i].entries) {
      ++rank.spans;
      rank.open += entry.end == 0 ? 1 : 0;
      if (entry.end != 0 && entry.kind != SpanKind::program && entry.kind != SpanKind::phase &&
          is_outermost(trace.processes[i], entry))
        rank.seconds += seconds(static_cast<std::int64_t>(entry.end - entry.begin));
    }
  }
  std::map<std::pair<SpanKind, std::string>, RouteSummary> routes;
  const auto begin_of = [&](const OperationPart& part) { return trace.aligned(part.process, part.entry->begin); };
  for (const std::vector<OperationPart>& parts : operations_of(trace, true)) {
    const OperationPart& last = *std::ranges::max_element(parts, {}, begin_of);
    const std::int64_t last_begin = begin_of(last);
    OperationSummary operation{.entry = last.entry, .begin = last_begin, .end = last_begin, .awaited = last.process};
    for (const OperationPart& part : parts) {
      const double wait = seconds(last_begin - begin_of(part));
      add_wait(summary, part, wait, last.process);
      summary.ranks[last.process].caused_seconds += wait;
      operation.longest_wait = std::max(operation.longest_wait, wait);
      operation.begin = std::min(operation.begin, begin_of(part));
      operation.end = std::max(operation.end, trace.aligned(part.process, part.entry->end));
      operation.bytes += part.entry->bytes;
    }
    RouteSummary& route = routes[{last.entry->kind, last.entry->detail}];
    ++route.operations;
    route.bytes += operation.bytes;
    route.seconds += seconds(operation.end - operation.begin);
    summary.operations.push_back(operation);
  }
  add_missed(trace, summary);
  for (auto& [key, route] : routes) {
    route.kind = to_string(key.first);
    route.route = key.second;
    summary.routes.push_back(std::move(route));
  }
  return summary;
}

void sort(TraceSummary& summary, RankOrder order) {
  std::ranges::sort(summary.order);
  if (order == RankOrder::rank) return;
  const auto key = order == RankOrder::waiting ? &RankSummary::waiting_seconds : &RankSummary::caused_seconds;
  std::ranges::stable_sort(summary.order, std::greater(), [&](std::size_t at) { return summary.ranks[at].*key; });
}

std::int64_t begin_of(const Trace& trace) {
  std::optional<std::int64_t> begin;
  for (std::size_t i = 0; i < trace.processes.size(); ++i)
    for (const TraceEntry& entry : trace.processes[i].entries) {
      const std::int64_t time = trace.aligned(i, entry.begin);
      begin = begin ? std::min(*begin, time) : time;
    }
  return begin.value_or(0);
}

std::vector<RankTimes> step_times(const Trace& trace) {
  std::vector<RankTimes> ranks;
  for (const Process& process : trace.processes) {
    RankTimes& times = ranks.emplace_back();
    std::map<std::string, std::size_t> known;
    for (const TraceEntry& entry : process.entries) {
      const bool is_step =
          entry.kind == SpanKind::program || (entry.kind != SpanKind::phase && is_outermost(process, entry));
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
  const std::int64_t zero = begin_of(trace);
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
    for (const TraceEntry& entry : process.entries)
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
                      counted(summary.operations.size(), "operation"));
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
  for (const std::size_t i : summary.order) {
    const RankSummary& rank = summary.ranks[i];
    const Process& process = trace.processes[i];
    const auto number = [](double value) { return fmt::format("{:.6f}", value); };
    const bool waits = rank.longest_for >= 0;
    ranks.add({std::to_string(process.rank), printable(process.identity.host), std::to_string(process.identity.pid),
               number(rank.seconds), number(rank.waiting_seconds), number(rank.caused_seconds),
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
  const auto slowest = std::ranges::max_element(summary.ranks, {}, &RankSummary::caused_seconds);
  if (slowest != summary.ranks.end() && slowest->caused_seconds > 0)
    text += fmt::format("\nThe other ranks waited longest for rank {}: {:.6f} s in total.\n",
                        trace.processes[static_cast<std::size_t>(slowest - summary.ranks.begin())].rank,
                        slowest->caused_seconds);
  constexpr std::size_t most_missed = 10;
  for (std::size_t i = 0; i < std::min(summary.missed.size(), most_missed); ++i) {
    const MissedOperation& missed = summary.missed[i];
    text += fmt::format("{}: {} waited for {}, which did not begin it\n", printable(missed.operation),
                        ranks_text(ranks_of(trace, missed.waiting)), ranks_text(ranks_of(trace, missed.missing)));
  }
  if (summary.missed.size() > most_missed)
    text += fmt::format("{} more such operations; --json lists them all\n", summary.missed.size() - most_missed);
  for (const std::string& note : trace.notes) text += "note: " + printable(note) + "\n";
  return text;
}

Config trace_tree(const Trace& trace, const TraceSummary& summary) {
  Config tree = Config::object({{"operations", summary.operations.size()}});
  ConfigArray ranks;
  for (const std::size_t i : summary.order) {
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
         {"caused", rank.caused_seconds},
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
  tree["missed"] = list_of(summary.missed, [&](const MissedOperation& missed) {
    const auto ranks_tree = [&](const std::vector<std::size_t>& processes) {
      const std::vector<int> numbers = ranks_of(trace, processes);
      return ConfigArray(numbers.begin(), numbers.end());
    };
    return Config::object({{"operation", missed.operation},
                           {"waiting", ranks_tree(missed.waiting)},
                           {"missing", ranks_tree(missed.missing)}});
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
