// SPDX-License-Identifier: Apache-2.0
// muster run: runs one command as N local ranks.

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "muster/launch.hpp"
#include "tools/commands.hpp"

namespace muster::tools {
namespace {

struct RunArguments {
  int ranks = 1;
  bool prefix = false;
  bool live = false;
  bool tee = false;
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
  return launch_local(arguments.command, options);
}

}  // namespace

void add_run_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("run", "Start N ranks of one command on this host, and as many on others");
  auto arguments = std::make_shared<RunArguments>();
  constexpr double longest = 1e9;  // seconds; larger values would eventually overflow the clock's milliseconds
  command->add_option("-n,--ranks", arguments->ranks, "Ranks to start")
      ->required()
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  command->add_flag("--prefix", arguments->prefix, "Put \"[rank] \" before each line of output");
  command->add_flag("--live", arguments->live, "On a terminal a line for each rank, with what it has said last");
  command->add_option("--logs", arguments->logs, "Write the output into DIR/rank-N.out and rank-N.err")
      ->type_name("DIR");
  command->add_flag("--tee", arguments->tee, "With --logs: to the terminal, too")->needs("--logs");
  CLI::Option* const nodes =
      command->add_option("--nodes", arguments->nodes.nodes, "Hosts of the job: muster run is called on each")
          ->check(CLI::Range(1, 4096))
          ->type_name("N");
  CLI::Option* const node_rank =
      command->add_option("--node-rank", arguments->nodes.node_rank, "Which of them this is, from 0 on")
          ->check(CLI::Range(0, 4095))
          ->type_name("K");
  CLI::Option* const rendezvous =
      command
          ->add_option("--rendezvous", arguments->nodes.rendezvous,
                       "Where they meet: an address of node 0's host and a free port there, or a file that all see")
          ->type_name("tcp://HOST:PORT|file:///PATH");
  nodes->needs(node_rank)->needs(rendezvous);
  node_rank->needs(nodes);
  rendezvous->needs(nodes);
  command
      ->add_option("--rendezvous-timeout", arguments->rendezvous_timeout,
                   "Seconds to wait for the other nodes (MUSTER_TIMEOUT, else 600)")
      ->needs(nodes)
      ->check(CLI::Range(0.001, longest))
      ->type_name("S");
  command
      ->add_option("--grace", arguments->grace,
                   "Seconds the other ranks have when one has failed, before SIGTERM and SIGKILL")
      ->capture_default_str()
      ->check(CLI::Range(0.0, longest))
      ->type_name("S");
  command
      ->add_option("--kill-after", arguments->kill_after,
                   "Seconds the ranks have after a SIGTERM or SIGHUP to muster run, before SIGKILL")
      ->capture_default_str()
      ->check(CLI::Range(0.0, longest))
      ->type_name("S");
  command->add_option("--timeout", arguments->timeout, "Seconds the job may take (status 124 after it)")
      ->check(CLI::Range(0.001, longest))
      ->type_name("S");
  command->add_option("command", arguments->command, "The command, after --")->required()->type_name("-- COMMAND...");
  command->footer(
      "Ranks find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and MUSTER_JOB in their\n"
      "environment. Signals are passed on to them; a second Ctrl-C kills them. The status is 0, or that of the rank\n"
      "that failed first (128 + N where signal N killed it). With --nodes that is so on all hosts, and 125 where the\n"
      "launcher of another one has died.\n\n"
      "Examples:\n  muster run -n 4 --prefix -- muster export shards/ --plan llama --out model/\n"
      "  muster run -n 4 --nodes 2 --node-rank 0 --rendezvous tcp://h1:29400 -- ./train");
  command->callback([arguments, &status] { status = run(*arguments); });
}

}  // namespace muster::tools
