// SPDX-License-Identifier: Apache-2.0
// Jobs in a workspace: `workspace_campaign [COUNT] [SEED] [DIRECTORY...]`. Four ranks that share only a directory form
// a group, gather, merge, stream, write states and read each other's, without a pause. In every second job one of them
// is killed at a random moment.
//
// Survivors must name it and return in time. All data read must be the data that was written. The next job must remove
// the leftovers of a killed one, and every remaining state must be complete. With several directories (mounts of one,
// as on several hosts) the ranks are distributed over them.

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/state_file.hpp"
#include "muster/workspace.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/survey.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;
constexpr int size = 4;

Config value_of(int rank, int round) {
  const std::int64_t bytes = 1 + (round * 7919 + rank * 104729) % 400000;
  return Config::object({{"rank", rank},
                         {"round", round},
                         {"w", pattern(DType::u8, {bytes}, static_cast<std::uint64_t>(100 * round + rank))}});
}

void work(Group& group, const std::string& directory, int rounds) {
  const int rank = group.rank();
  Workspace workspace(directory, group.shared_from_this(), {.durable = false});
  for (int round = 1; round <= rounds; ++round) {
    const std::vector<int> ranks = ranks_from(round % size, size);
    const Config mine = value_of(rank, round);
    const auto all = get_configs_parallel(&mine, ranks, group, {.workspace = {.path = directory}});
    for (const auto& [other, config] : all.present()) RANK_CHECK(config == value_of(other, round));
    const Tensor part = pattern(DType::f32, {3, 1000}, static_cast<std::uint64_t>(rank));
    const auto merged = merge_tensor_parallel(part, merge::concat(0), ranks, group, {.workspace = {.path = directory}});
    if (merged.tensor()) RANK_CHECK((merged.tensor()->shape() == Shape{3 * size, 1000}));
    int given = 0;
    gather_each([&] { return given < 3 ? std::optional<Config>(value_of(rank, ++given)) : std::nullopt; }, ranks, group,
                [&](LayerPart& layer) {
                  for (const auto& [other, config] : layer.present())
                    RANK_CHECK(config == value_of(other, static_cast<int>(layer.layer) + 1));
                },
                {.workspace = {.path = directory}});
    const std::uint64_t step = workspace.write_configs_and_weights(mine);
    group.barrier();
    const int other = (rank + round) % size;
    const auto read = workspace.read_configs_and_weights_from_rank(other, step);
    // The directory of another mount may show the state late: then there is none yet.
    if (read) RANK_CHECK(join(read->state) == value_of(other, static_cast<int>(read->step)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 10;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  const TemporaryDirectory temporary;
  std::vector<std::string> directories(argv + std::min(argc, 3), argv + argc);
  if (directories.empty()) directories.push_back(temporary / "w");
  std::mt19937 random(seed);
  int failures = 0;
  int kills = 0;
  double slowest = 0;
  for (int i = 0; i < count; ++i) {
    const bool kills_one = i % 2 == 1;
    const int victim = static_cast<int>(random() % size);
    const auto delay = std::chrono::microseconds(random() % 400'000);
    Ranks ranks(size, [&](int rank) {
      try {
        const std::string& directory = directories[static_cast<std::size_t>(rank) % directories.size()];
        const auto group = file_group({.directory = directory,
                                       .key = fmt::format("{} {}", seed, i),
                                       .rank = rank,
                                       .size = size,
                                       .timeout = 8s,
                                       .heartbeat = 200ms});
        work(*group, directory, kills_one ? 1000 : 3);
      } catch (const Error& error) {
        const bool is_named = error.kind() == ErrorKind::peer_lost && error.rank() == victim;
        // If a rank is killed during the rendezvous, rank 0 times out waiting for it, and the others time out waiting
        // for rank 0.
        if (!kills_one || !(is_named || error.kind() == ErrorKind::timeout)) throw;
      }
    });
    Clock::time_point since = Clock::now();
    if (kills_one) {
      std::this_thread::sleep_for(delay);
      ranks.signal(victim, SIGKILL);
      since = Clock::now();
      ++kills;
    }
    const std::vector<Ended> ended = ranks.wait(120s);
    if (kills_one) slowest = std::max(slowest, std::chrono::duration<double>(Clock::now() - since).count());
    for (int rank = 0; rank < size; ++rank) {
      const Ended& end = ended[static_cast<std::size_t>(rank)];
      if (end.ok() || (kills_one && rank == victim && end.signal == SIGKILL)) continue;
      ++failures;
      fmt::print("job {}: rank {}: status {}, signal {}: {}\n", i, rank, end.exit_status, end.signal, end.words);
    }
  }
  workspace::sweep_dead(directories[0]);
  const workspace::Survey survey = workspace::survey(directories[0]);
  std::size_t states = 0;
  for (const workspace::SurveyEntry& entry : survey.temporary) {
    ++failures;
    fmt::print("left: {}\n", entry.file);
  }
  for (const workspace::SurveyJob& job : survey.jobs) {
    for (const workspace::SurveyEntry& entry : job.passing) {
      ++failures;
      fmt::print("left: {}\n", entry.file);
    }
    for (const workspace::SurveyState& state : job.states) {
      ++states;
      if (state.complete && StateFile::open(directories[0] + "/" + state.entry.file).check().empty()) continue;
      ++failures;
      fmt::print("not whole: {}: {}\n", state.entry.file, state.problem);
    }
  }
  workspace::collect_garbage(directories[0], {.dry_run = false, .older_than = 0s});
  fmt::print("{} jobs, {} kills, {} states left and checked, slowest end after a kill {:.2f} s: {} failures\n", count,
             kills, states, slowest, failures);
  return failures == 0 ? 0 : 1;
}
