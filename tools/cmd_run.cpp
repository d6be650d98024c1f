// SPDX-License-Identifier: Apache-2.0
// muster run: one command as N local ranks.

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
                        .output = arguments.prefix ? RankOutput::prefixed : RankOutput::inherit,
                        .grace = milliseconds_of(arguments.grace),
                        .kill_after = milliseconds_of(arguments.kill_after)};
  if (arguments.timeout > 0) options.timeout = milliseconds_of(arguments.timeout);
  return launch_local(arguments.command, options);
}

}  // namespace

void add_run_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("run", "Start N local ranks of one command");
  auto arguments = std::make_shared<RunArguments>();
  constexpr double longest = 1e9;  // seconds; more would overflow the clock's milliseconds one day
  command->add_option("-n,--ranks", arguments->ranks, "Ranks to start")
      ->required()
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  command->add_flag("--prefix", arguments->prefix, "Put \"[rank] \" before each line of output");
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
      "that failed first (128 + N where signal N killed it).\n\n"
      "Example:\n  muster run -n 4 --prefix -- muster export shards/ --plan llama --out model/");
  command->callback([arguments, &status] { status = run(*arguments); });
}

}  // namespace muster::tools
