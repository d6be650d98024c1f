// SPDX-License-Identifier: Apache-2.0
// muster trace: joins the traces of all ranks, and prints the current or last step of each rank.

#include <memory>
#include <string>

#include "src/inspect/traces.hpp"
#include "src/os/publish.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct TraceArguments {
  std::string what;
  std::string out;
  bool last = false;
  bool imbalance = false;
  bool json = false;
};

void write_file(const inspect::Trace& trace, const std::string& path) {
  constexpr std::size_t piece = 1 << 20;
  os::remove_dead_partials(path);
  os::OutputFile file(path);
  std::string text;
  std::uint64_t at = 0;
  const auto write = [&] {
    file.write_at(at, std::as_bytes(std::span(text)));
    at += text.size();
    text.clear();
  };
  inspect::write_events(trace, [&](std::string_view more) {
    text += more;
    if (text.size() >= piece) write();
  });
  write();
  file.commit(os::Durability::unsynced);
}

void show_last(const TraceArguments& arguments) {
  const auto jobs = inspect::last_words(arguments.what);
  print(arguments.json ? inspect::json_report(inspect::last_tree(jobs)) : inspect::last_text(jobs, output_style()));
}

void merge(const TraceArguments& arguments) {
  const inspect::Trace trace = inspect::read_trace(arguments.what);
  if (!arguments.out.empty()) write_file(trace, arguments.out);
  const inspect::TraceSummary summary = inspect::summarize(trace);
  if (arguments.json) {
    Config tree = inspect::trace_tree(trace, summary);
    if (arguments.imbalance) tree["imbalance"] = inspect::imbalance_tree(trace);
    return print(inspect::json_report(tree));
  }
  print(inspect::trace_text(trace, summary, output_style()));
  if (arguments.imbalance) print("\n" + inspect::imbalance_text(trace));
}

}  // namespace

void add_trace_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("trace", "Traces of a job's ranks as one, and what its ranks are or were in");
  auto arguments = std::make_shared<TraceArguments>();
  command->add_option("path", arguments->what, "The directory that MUSTER_TRACE named; with --last also a job or a pid")
      ->type_name("DIR|JOB|PID");
  command->add_option("-o,--out", arguments->out, "A file for Perfetto and chrome://tracing to make")
      ->type_name("FILE");
  command->add_flag("--imbalance", arguments->imbalance, "What ranks took for each step, and how evenly");
  auto* last = command->add_flag("--last", arguments->last,
                                 "What each rank is in, or was in when it ended, of jobs that run or have failed");
  last->excludes("--out")->excludes("--imbalance");
  command->add_flag("--json", arguments->json, "JSON for programs");
  command->footer(
      "Without --last: who waited for whom, and how fast each route was. With --last and nothing else: all jobs of "
      "this\n"
      "user that run on this host; if there is none, the last one that failed.\n\n"
      "Examples:\n  MUSTER_TRACE=trace muster run -n 4 -- ./train\n  muster trace trace --out trace.json\n"
      "  muster trace trace --imbalance\n  muster trace --last");
  command->callback([arguments] {
    if (arguments->last) return show_last(*arguments);
    if (arguments->what.empty()) throw CLI::RequiredError("DIR");
    merge(*arguments);
  });
}

}  // namespace muster::tools
