// SPDX-License-Identifier: Apache-2.0
// muster trace joins the traces of all ranks. muster status prints the current or last operation of each rank.

#include <memory>
#include <string>
#include <vector>

#include "src/inspect/traces.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct TraceArguments {
  std::string directory;
  std::string out;
  std::string order;
  bool imbalance = false;
  bool json = false;
};

struct StatusArguments {
  std::string what;
  std::string order;
  bool json = false;
};

void show_status(const StatusArguments& arguments) {
  std::vector<inspect::LastWords> jobs = inspect::last_words(arguments.what);
  if (arguments.order == "time") inspect::sort_by_time(jobs);
  print(arguments.json ? inspect::json_report(inspect::last_tree(jobs)) : inspect::last_text(jobs, output_style()));
}

void merge(const TraceArguments& arguments) {
  const inspect::Trace trace = inspect::read_trace(arguments.directory);
  if (!arguments.out.empty())
    write_output_file(arguments.out, [&](const inspect::Sink& sink) { inspect::write_events(trace, sink); });
  using inspect::RankOrder;
  inspect::TraceSummary summary = inspect::summarize(trace);
  inspect::sort(summary, arguments.order == "waiting"  ? RankOrder::waiting
                         : arguments.order == "caused" ? RankOrder::caused
                                                       : RankOrder::rank);
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
  CLI::App* command = app.add_subcommand("trace", "Merge the traces of all ranks of a job");
  auto arguments = std::make_shared<TraceArguments>();
  command->add_option("directory", arguments->directory, "Directory that MUSTER_TRACE named")
      ->required()
      ->type_name("DIR");
  command->add_option("-o,--out", arguments->out, "Write a file for Perfetto and chrome://tracing")->type_name("FILE");
  command->add_flag("--imbalance", arguments->imbalance, "Print the time of each step by rank, and the imbalance");
  add_sort_option(*command, arguments->order, {"rank", "waiting", "caused"},
                  "Order of the ranks; waiting, caused: the longest time first");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Prints how long each rank waited, for which rank, and the rate of each route.\n\n"
      "Examples:\n  MUSTER_TRACE=trace muster run -n 4 -- ./train\n  muster trace trace --out trace.json\n"
      "  muster trace trace --imbalance");
  command->callback([arguments] { merge(*arguments); });
}

void add_status_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("status", "Show the current or last operation of each rank");
  auto arguments = std::make_shared<StatusArguments>();
  command
      ->add_option("job", arguments->what,
                   "The first digits of a job ID, the process ID of a rank or launcher, or a directory with traces")
      ->type_name("JOB|PID|DIR");
  add_sort_option(*command, arguments->order, {"rank", "time"},
                  "Order of the ranks; time: since the operation began or ended, the longest first");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Without an argument it shows all jobs of this user that run on this host. If no job runs, it shows the job\n"
      "that failed last.\n\n"
      "Examples:\n  muster status\n  muster status 3f2a\n  muster status trace/");
  command->callback([arguments] { show_status(*arguments); });
}

}  // namespace muster::tools
