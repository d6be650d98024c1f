// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/trace_output.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "muster/state.hpp"

namespace muster::inspect {
namespace {

using trace::Entry;
using trace::Process;

/// Ranks as the numbers of processes, where each is there once; else they are counted.
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

/// The latest time that a process tells of.
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
                   {"awaited", Align::right},
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
    TextTable routes({{"what"},
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
    text += fmt::format("\nThe others waited longest for rank {}: {:.6f} s together.\n",
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
