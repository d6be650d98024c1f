// SPDX-License-Identifier: Apache-2.0
// launch_local(): a command as the ranks of this host.
#include "muster/launch.hpp"

#include <fmt/core.h>

#include <cstring>
#include <memory>
#include <utility>

#include "muster/error.hpp"
#include "src/launch/job.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace launch {

void check(const LaunchOptions& options) {
  using namespace std::chrono_literals;
  if (options.ranks < 1 || options.ranks > most_ranks)
    throw Error(ErrorKind::argument,
                fmt::format("starting a job: {} ranks asked for, 1 to {} can be started", options.ranks, most_ranks));
  if (options.grace < 0ms || options.kill_after < 0ms || (options.timeout && *options.timeout <= 0ms))
    throw Error(ErrorKind::argument, "starting a job: the times to wait must not be negative");
  if (options.tee && options.log_directory.empty())
    throw Error(ErrorKind::argument, "starting a job: tee is for a job with a log directory, and none is given");
  for (const auto& [name, value] : options.environment)
    if (name.empty() || name.find('=') != std::string::npos || (name + value).find('\0') != std::string::npos)
      throw Error(ErrorKind::argument, "starting a job: \"" + name + "\" cannot be an environment variable");
}

std::string exec_failure(const std::string& command, int failure) {
  return fmt::format("starting {} failed: {}{}", command, std::strerror(failure),
                     failure == ENOENT ? " (is it installed, and its name or path right?)" : "");
}

namespace {

int run_command(const std::vector<std::string>& command, const LaunchOptions& options, Place place, Nodes* nodes) {
  Job job(options, std::move(place), nodes, os::random_hex(16), true,
          [&](int, const ExecArguments::Variables& variables, const Inheritance& inheritance) {
            return spawn(ExecArguments(command, variables), inheritance);
          });
  const int status = job.run();
  if (job.failed_exec() != 0) job.say(exec_failure(command[0], job.failed_exec()));
  return status;
}

}  // namespace
}  // namespace launch

int launch_local(const std::vector<std::string>& command, const LaunchOptions& options) {
  if (command.empty()) throw Error(ErrorKind::argument, "starting a job: no command given");
  launch::check(options);
  LaunchOptions own = options;
  if (own.tee && own.output == RankOutput::inherit) own.output = RankOutput::lines;
  std::unique_ptr<launch::Nodes> nodes;
  launch::Place place;
  if (own.nodes) {
    nodes = std::make_unique<launch::Nodes>(*own.nodes, own.ranks);
    place = nodes->take_place();
  } else {
    place.world_size = own.ranks;
    place.job = os::random_hex(16);
    place.reserved = launch::reserve_port(0);
    // No port in this sandbox: the usual number, that nobody can listen on anyway.
    place.master_port = place.reserved ? place.reserved->number : launch::usual_port;
  }
  if (!own.job.empty()) place.job = own.job;
  try {
    return launch::run_command(command, own, std::move(place), nodes.get());
  } catch (const Error& error) {
    if (nodes) nodes->give_up(error);
    throw;
  }
}

}  // namespace muster
