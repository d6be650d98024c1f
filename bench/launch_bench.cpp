// SPDX-License-Identifier: Apache-2.0
// Measures the start and end of ranks that do nothing, in turns with plain fork and exec of the same program. Prints
// medians.
//
//   launch_bench [--ranks 64] [--rounds 9]
#include <fmt/core.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "muster/compat/multiprocess.hpp"

namespace {

using namespace muster;

void nothing(std::span<const std::string>) {}
const RegisteredFunction registered("nothing", nothing);

void fork_and_exec(int ranks) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::execl("/proc/self/exe", "launch_bench", "--nothing", nullptr);
      ::_exit(127);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) ::waitpid(child, nullptr, 0);
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> all) {
  std::ranges::sort(all);
  return all[all.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  run_launched_function();
  int ranks = 64, rounds = 9;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--nothing") == 0) return 0;
    if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) ranks = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) rounds = std::atoi(argv[++i]);
  }
  MultiprocessConfig forked{.world_size = ranks};
  MultiprocessConfig spawned = forked;
  spawned.launch_method = LaunchMethod::spawn;
  struct Way {
    const char* name;
    std::function<void()> work;
    std::vector<double> seconds;
  };
  std::vector<Way> ways = {
      {"fork and exec", [&] { fork_and_exec(ranks); }, {}},
      {"launch_local",
       [&] {
         launch_local({"/proc/self/exe", "--nothing"}, {.ranks = ranks});
       },
       {}},
      {"a command, output kept",
       [&] {
         launch_subprocesses(std::vector<std::string>{"/proc/self/exe", "--nothing"}, forked);
       },
       {}},
      {"a function with groups, forkserver", [&] { launch_subprocesses("nothing", forked); }, {}},
      {"a function with groups, spawn", [&] { launch_subprocesses("nothing", spawned); }, {}},
  };
  for (int round = 0; round < rounds; ++round)
    for (Way& way : ways) way.seconds.push_back(seconds_of(way.work));
  const double floor = median(ways[0].seconds);
  fmt::print("{} ranks, started and ended, median of {} rounds\n", ranks, rounds);
  for (const Way& way : ways)
    fmt::print("{:<36} {:8.1f} ms {:6.2f} x\n", way.name, median(way.seconds) * 1e3, median(way.seconds) / floor);
}
