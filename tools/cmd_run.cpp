// SPDX-License-Identifier: Apache-2.0
// muster run: runs one command as N local ranks.

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "muster/launch.hpp"
#include "src/inspect/output.hpp"
#include "src/launch/job.hpp"
#include "src/os/process.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

struct RunArguments {
  int ranks = 1;
  bool prefix = false;
  bool live = false;
  bool tee = false;
  bool json = false;
  std::string logs;
  LaunchNodes nodes{.nodes = 1, .node_rank = -1, .rendezvous = {}};
  double rendezvous_timeout = 0;
  double grace = 5;
  double kill_after = 30;
  double timeout = 0;
  std::vector<std::string> command;
};

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

/// {"status", "message", "host", "seconds", "ranks": [{"rank", "pid", "status", "signal", "seconds"}]}.
Config report_tree(const launch::JobReport& report) {
  return Config::object({{"status", report.status},
                         {"message", inspect::or_null(report.message)},
                         {"host", os::host_name()},
                         {"seconds", report.seconds},
                         {"ranks", inspect::list_of(report.ranks, [](const launch::JobReport::Rank& rank) {
                            return Config::object({{"rank", rank.rank},
                                                   {"pid", rank.pid},
                                                   {"status", rank.status},
                                                   {"signal", rank.signal == 0 ? Config() : Config(rank.signal)},
                                                   {"seconds", rank.seconds}});
                          })}});
}

int run(const RunArguments& arguments) {
  LaunchOptions options{.ranks = arguments.ranks,
                        .output = arguments.live     ? RankOutput::live
                                  : arguments.prefix ? RankOutput::prefixed
                                                     : RankOutput::inherit,
                        .log_directory = arguments.logs,
                        .tee = arguments.tee,
                        .grace = milliseconds_of(arguments.grace),
                        .kill_after = milliseconds_of(arguments.kill_after)};
  if (arguments.timeout > 0) options.timeout = milliseconds_of(arguments.timeout);
  if (arguments.nodes.nodes > 1) {
    options.nodes = arguments.nodes;
    if (arguments.rendezvous_timeout > 0) options.nodes->timeout = milliseconds_of(arguments.rendezvous_timeout);
  }
  const launch::JobReport report = launch::run_command(arguments.command, options);
  if (arguments.json) (report.status == 0 ? print_done : print)(inspect::json_report(report_tree(report)));
  return report.status;
}

}  // namespace

void add_run_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("run", "Start N ranks of a command, on one host or on several");
  auto arguments = std::make_shared<RunArguments>();
  constexpr double longest = 1e9;  // seconds; larger values would eventually overflow the clock's milliseconds
  constexpr double shortest = 0.001;
  constexpr double most = 4096;
  command->add_option("-n,--ranks", arguments->ranks, "Ranks to start on this host")
      ->required()
      ->check(number_from(1, most))
      ->type_name("N");
  command->add_flag("--prefix", arguments->prefix, "Prefix each line of output with \"[rank] \"");
  command->add_flag("--live", arguments->live, "On a terminal: show one line per rank, with its last output");
  command->add_option("--logs", arguments->logs, "Write the output to DIR/rank-N.out and DIR/rank-N.err")
      ->type_name("DIR");
  CLI::Option* const tee =
      command->add_flag("--tee", arguments->tee, "With --logs: also print the output")->needs("--logs");
  add_json_flag(*command, arguments->json)
      ->description("With --logs: at the end, print JSON with the status and duration of each rank of this host")
      ->needs("--logs")
      ->excludes(tee);
  CLI::Option* const nodes =
      command->add_option("--nodes", arguments->nodes.nodes, "Hosts of the job; call muster run on each of them")
          ->check(number_from(1, most))
          ->type_name("N");
  CLI::Option* const node_rank =
      command->add_option("--node-rank", arguments->nodes.node_rank, "Number of this host, from 0")
          ->check(number_from(0, most - 1))
          ->type_name("N");
  CLI::Option* const rendezvous =
      command
          ->add_option("--rendezvous", arguments->nodes.rendezvous,
                       "Address of the host of node 0 with a free port, or a file that all hosts see")
          ->type_name("tcp://HOST:PORT|file:///PATH");
  nodes->needs(node_rank)->needs(rendezvous);
  node_rank->needs(nodes);
  rendezvous->needs(nodes);
  command
      ->add_option("--rendezvous-timeout", arguments->rendezvous_timeout,
                   "Time to wait for the other hosts [MUSTER_TIMEOUT, or 600]")
      ->needs(nodes)
      ->check(number_from(shortest, longest))
      ->type_name("SECONDS");
  command
      ->add_option("--grace", arguments->grace,
                   "Time for the other ranks to exit after one has failed, before SIGTERM and SIGKILL")
      ->capture_default_str()
      ->check(number_from(0, longest))
      ->type_name("SECONDS");
  command
      ->add_option("--kill-after", arguments->kill_after,
                   "Time for the ranks to exit after SIGTERM or SIGHUP to muster run, before SIGKILL")
      ->capture_default_str()
      ->check(number_from(0, longest))
      ->type_name("SECONDS");
  command->add_option("--timeout", arguments->timeout, "Time limit of the job (exit status 124)")
      ->check(number_from(shortest, longest))
      ->type_name("SECONDS");
  command->add_option("command", arguments->command, "The command and its arguments")
      ->required()
      ->type_name("-- COMMAND");
  command->footer(
      "Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and MUSTER_JOB for the ranks.\n"
      "Signals are forwarded to the ranks; a second Ctrl-C kills them. The exit status is 0, or that of the rank that\n"
      "failed first (128 + N if signal N killed it). With --nodes all hosts return it, or 125 if the launcher of "
      "another\n"
      "host died.\n\n"
      "Examples:\n  muster run -n 4 --prefix -- muster export shards/ --plan llama --out model/\n"
      "  muster run -n 4 --nodes 2 --node-rank 0 --rendezvous tcp://h1:29400 -- ./train");
  command->callback([arguments, &status] { status = run(*arguments); });
}

}  // namespace muster::tools
