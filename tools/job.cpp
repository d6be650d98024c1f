// SPDX-License-Identifier: Apache-2.0
#include "tools/job.hpp"

#include <fmt/core.h>

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <stop_token>

#include "muster/error.hpp"
#include "muster/launch.hpp"
#include "src/os/thread.hpp"
#include "src/rendezvous/world.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

std::shared_ptr<Group> group_of_job(const group::Start& start, const std::string& command) {
  const os::Thread reminder("a reminder", [&](const std::stop_token& come) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any never;
    never.wait_for(lock, come, std::chrono::seconds(5), [] { return false; });
    if (!come.stop_requested())
      remark(
          fmt::format("this process is a rank of a job ({}), and has waited 5 s for its other ranks to call muster "
                      "{}. If they do not, stop it and pass --standalone, or set MUSTER_STANDALONE=1.",
                      start.said, command));
  });
  return world();
}

}  // namespace

void add_job_options(CLI::App& command, JobArguments& job, const std::string& verb, const std::string& otherwise) {
  command.add_option("-j,--processes", job.processes, "Processes to start [" + otherwise + "]")
      ->check(number_from(1, 4096))
      ->type_name("N");
  command.add_flag(
      "--standalone", job.standalone,
      fmt::format("Inside a job: {} in this process without the other ranks (as MUSTER_STANDALONE=1)", verb));
}

int as_called(const CLI::App& command, const JobArguments& job, const std::function<int()>& alone,
              const std::function<int(Group&)>& in_job) {
  const group::Start start = job.standalone ? group::Start() : group::find_start(group::own_surroundings());
  if (start.by == group::StartedBy::alone) return alone();
  if (job.processes != 0)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("--processes starts local ranks, but this process is a rank of a job ({}) whose ranks "
                            "{} together. Leave --processes out, or pass --standalone",
                            start.said, command.get_name()));
  return in_job(*group_of_job(start, command.get_name()));
}

int with_local_ranks(const CLI::App& command, int ranks, const std::vector<std::string>& arguments,
                     const std::function<int(Group&)>& in_job) {
  if (ranks == 1) return in_job(*single_group());
  std::vector<std::string> line = {std::filesystem::read_symlink("/proc/self/exe").string(), command.get_name()};
  for (const CLI::Option* option : command.get_options([](const CLI::Option* each) { return each->count() != 0; }))
    if (const std::string name = option->get_name();
        name.starts_with("-") && name != "--processes" && name != "--standalone")
      for (const std::string& value : option->results()) line.push_back(name + "=" + value);
  line.emplace_back("--");
  line.insert(line.end(), arguments.begin(), arguments.end());
  const LaunchOptions options{
      .ranks = ranks, .explained = {cannot, done_unsaid}, .name = "muster " + command.get_name()};
  return launch_local(line, options);
}

int reported_once(const Group& group, const std::function<int()>& work) {
  try {
    return work();
  } catch (const Error& error) {
    const bool alone = error.kind() == ErrorKind::timeout || error.kind() == ErrorKind::peer_lost;
    if (group.rank() == 0 || alone) throw;
    return cannot;
  }
}

}  // namespace muster::tools
