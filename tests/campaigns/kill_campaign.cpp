// SPDX-License-Identifier: Apache-2.0
// Kills at random moments: `kill_campaign [COUNT] [SEED]`. Four ranks exchange tensors, configs and arena tensors
// without a pause, and one of them (sometimes two) is killed. Every survivor must return within two seconds with an
// error that names a killed rank. Nothing may remain in /dev/shm, and no process may be left.

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string_view>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/shared_arena.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

// The report of a rank if another one was killed before the rendezvous.
constexpr const char* unmet = "waited for a rank until the rendezvous ended";

void exchange_without_end(Group& group) {
  const std::vector<int> all = {0, 1, 2, 3};
  SharedArena arena(4 << 20);
  std::vector<GatheredTensors> kept;
  for (int round = 0;; ++round) {
    std::vector<int> ranks = all;
    std::rotate(ranks.begin(), ranks.begin() + round % 4, ranks.end());
    const Tensor mine = pattern(DType::u8, {1 + (round * 7919) % 400000}, static_cast<std::uint64_t>(group.rank()));
    GatheredTensors result = get_tensors_parallel(mine, ranks, group, {.root_tensors = RootTensors::copy});
    for (const auto& [rank, tensor] : result.present())
      RANK_CHECK(is_pattern(tensor, DType::u8, mine.shape(), static_cast<std::uint64_t>(rank)));
    if (round % 3 == 0) kept.push_back(std::move(result));
    if (kept.size() > 3) kept.erase(kept.begin());
    Config config = Config::object({{"round", round}});
    Tensor shared = arena.allocate(DType::i32, {1000});
    fill(shared.mutable_data(), shared.nbytes(), 1);
    config["shared"] = std::move(shared);
    const GatheredConfigs configs = get_configs_parallel(&config, ranks, group);
    for (const auto& [rank, other] : configs.present()) RANK_CHECK(other == config);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 25;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  std::mt19937 random(seed);
  // MPI_Init waits for all ranks without a deadline, so there the kills begin when all have joined.
  const char* kind = std::getenv("MUSTER_TEST_GROUP");
  const bool over_mpi = kind != nullptr && std::string_view(kind).starts_with("mpi");
  int failures = 0;
  double slowest = 0;
  for (int i = 0; i < count; ++i) {
    const GroupOf job(4);
    const int victim = static_cast<int>(random() % 4);
    int second = random() % 5 == 0 ? static_cast<int>(random() % 4) : victim;
    // If a whole host is killed, the others detect it only at the deadline; mpi_kill_test covers that.
    if (over_mpi && second / 2 == victim / 2) second = victim;
    SharedWords joined;
    Ranks ranks(4, [&](int rank) {
      bool has_met = false;
      try {
        const auto group = job.join(rank, 2s);
        has_met = true;
        ++joined[0];
        exchange_without_end(*group);
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::timeout && !has_met) return say(unmet);
        if (error.kind() != ErrorKind::peer_lost) throw;
        say(fmt::format("lost {}: {}", error.rank().value_or(-1), error.what()));
      }
    });
    while (over_mpi && joined[0].load() < 4) std::this_thread::sleep_for(1ms);
    // Every fourth kill falls into the rendezvous; the others range up to several dozen exchanges.
    std::this_thread::sleep_for(std::chrono::microseconds(random() % (i % 4 == 0 ? 5000 : 40000)));
    const Clock::time_point killed = Clock::now();
    ranks.signal(victim, SIGKILL);
    ranks.signal(second, SIGKILL);
    const std::vector<Ended> ended = ranks.wait(15s);
    const double seconds = std::chrono::duration<double>(Clock::now() - killed).count();
    bool early = false;
    for (int rank = 0; rank < 4; ++rank) {
      const Ended& one = ended[static_cast<std::size_t>(rank)];
      if (rank == victim || rank == second) continue;
      const bool named = one.words.starts_with(fmt::format("lost {}:", victim)) ||
                         one.words.starts_with(fmt::format("lost {}:", second));
      // The rank was killed before the rendezvous: no rank knows its pid, and the rendezvous ends at its deadline.
      early = early || one.words == unmet;
      if (one.ok() && (named || one.words == unmet)) continue;
      ++failures;
      fmt::print("kill {} (rank {} and {}): rank {} status {} signal {}: {}\n", i, victim, second, rank,
                 one.exit_status, one.signal, one.words);
    }
    if (!early) {
      slowest = std::max(slowest, seconds);
      if (seconds > 2) {
        ++failures;
        fmt::print("kill {}: the survivors took {:.2f} s\n", i, seconds);
      }
    }
    for (const std::string& name : shared_memory_names()) {
      ++failures;
      fmt::print("kill {}: left in /dev/shm: {}\n", i, name);
    }
  }
  fmt::print("{} kills (seed {}): {} failures, the slowest survivors left after {:.3f} s\n", count, seed, failures,
             slowest);
  return failures == 0 ? 0 : 1;
}
