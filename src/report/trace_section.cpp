// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "src/inspect/output.hpp"
#include "src/inspect/traces.hpp"
#include "src/report/sections.hpp"

namespace muster::report {
namespace {

using trace::TraceEntry;

constexpr std::size_t most_spans = 20'000;
constexpr std::size_t most_slowest = 50;

double in_seconds(std::int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

struct Span {
  std::size_t process = 0;
  const TraceEntry* entry = nullptr;
  std::int64_t begin = 0;  ///< since the beginning of the trace, in nanoseconds
  std::int64_t end = 0;
};

/// Returns the longest spans, at most `most_spans`, sorted by process and begin.
std::vector<Span> longest_spans(const inspect::Trace& trace, std::size_t& left_out) {
  const std::int64_t zero = begin_of(trace);
  std::vector<Span> spans;
  for (std::size_t i = 0; i < trace.processes.size(); ++i)
    for (const TraceEntry& entry : trace.processes[i].entries)
      spans.push_back({i, &entry, trace.aligned(i, entry.begin) - zero,
                       (entry.end == 0 ? trace.end : trace.aligned(i, entry.end)) - zero});
  left_out = spans.size() - std::min(spans.size(), most_spans);
  if (left_out != 0) {
    const auto length = [](const Span& span) { return span.end - span.begin; };
    std::ranges::nth_element(spans, spans.begin() + most_spans, std::greater(), length);
    spans.resize(most_spans);
    std::ranges::sort(spans, {}, [](const Span& span) { return std::pair(span.process, span.begin); });
  }
  return spans;
}

/// Numbers texts in the order of their first use.
class NameList {
 public:
  std::size_t number(const std::string& name) {
    const auto [found, is_new] = known_.try_emplace(name, names_.size());
    if (is_new) names_.emplace_back(name);
    return found->second;
  }
  [[nodiscard]] const ConfigArray& names() const { return names_; }

 private:
  std::unordered_map<std::string, std::size_t> known_;
  ConfigArray names_;
};

void add_spans(Config& section, const inspect::Trace& trace, const inspect::TraceSummary& summary) {
  std::unordered_map<const TraceEntry*, const inspect::OperationWait*> waits;
  for (const inspect::OperationWait& wait : summary.waits) waits.emplace(wait.part.entry, &wait);
  std::size_t left_out = 0;
  NameList names;
  ConfigArray process, thread, depth, name, kind, begin, end, wait, awaited, operation, bytes, route, state;
  for (const Span& span : longest_spans(trace, left_out)) {
    const TraceEntry& entry = *span.entry;
    const auto waited = waits.find(span.entry);
    const bool is_waiting = waited != waits.end();
    process.emplace_back(span.process);
    thread.emplace_back(entry.thread);
    depth.emplace_back(entry.depth);
    name.emplace_back(names.number(entry.name));
    kind.emplace_back(to_string(entry.kind));
    begin.emplace_back(in_seconds(span.begin));
    end.emplace_back(in_seconds(span.end));
    wait.push_back(is_waiting ? Config(waited->second->seconds) : Config());
    awaited.push_back(is_waiting ? Config(waited->second->awaited) : Config());
    operation.push_back(entry.operation != 0 ? Config(entry.operation) : Config());
    bytes.emplace_back(entry.bytes);
    route.push_back(inspect::or_null(entry.end == 0 ? "" : entry.detail));
    state.emplace_back(entry.failed ? "failed" : entry.end == 0 ? "open" : "done");
  }
  section["names"] = names.names();
  section["spans"] = Config::object({{"process", std::move(process)},
                                     {"thread", std::move(thread)},
                                     {"depth", std::move(depth)},
                                     {"name", std::move(name)},
                                     {"kind", std::move(kind)},
                                     {"begin", std::move(begin)},
                                     {"end", std::move(end)},
                                     {"wait", std::move(wait)},
                                     {"awaited", std::move(awaited)},
                                     {"operation", std::move(operation)},
                                     {"bytes", std::move(bytes)},
                                     {"route", std::move(route)},
                                     {"state", std::move(state)}});
  section["spans_left_out"] = left_out;
}

ConfigArray slowest_tree(const inspect::Trace& trace, const inspect::TraceSummary& summary) {
  std::vector<inspect::OperationSummary> slowest = summary.operations;
  std::ranges::stable_sort(slowest, std::greater(),
                           [](const inspect::OperationSummary& one) { return one.end - one.begin; });
  slowest.resize(std::min(slowest.size(), most_slowest));
  const std::int64_t zero = begin_of(trace);
  return inspect::list_of(slowest, [&](const inspect::OperationSummary& one) {
    return Config::object({{"operation", one.entry->name + " " + std::to_string(one.entry->operation)},
                           {"kind", to_string(one.entry->kind)},
                           {"route", inspect::or_null(one.entry->detail)},
                           {"begin", in_seconds(one.begin - zero)},
                           {"seconds", in_seconds(one.end - one.begin)},
                           {"bytes", one.bytes},
                           {"wait", one.longest_wait},
                           {"awaited", one.awaited}});
  });
}

}  // namespace

Config trace_section(const std::string& directory) {
  const inspect::Trace trace = inspect::read_trace(directory);
  const inspect::TraceSummary summary = inspect::summarize(trace);
  Config section =
      Config::object({{"section", "trace"}, {"path", directory}, {"seconds", in_seconds(trace.end - begin_of(trace))}});
  const Config tree = inspect::trace_tree(trace, summary);
  for (const auto& [key, value] : tree.as_object()) section[key] = value;
  section["imbalance"] = inspect::imbalance_tree(trace);
  for (const char* list : {"steps", "times", "warnings"}) limit_list(section["imbalance"], list);
  for (const char* list : {"missed", "notes", "routes"}) limit_list(section, list);
  add_spans(section, trace, summary);
  section["slowest"] = slowest_tree(trace, summary);
  return section;
}

}  // namespace muster::report
