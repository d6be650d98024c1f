// SPDX-License-Identifier: Apache-2.0
// Waits under a profiler's timer, which ends every sleep after 5 ms, and under bells that ring for others: what a wait
// looks at between its sleeps does not depend on what ends them.

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <list>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int size = 4;
// Beside rank 0 on its host, where there are two.
constexpr int victim = 1;
const std::vector<int> all_ranks = {0, 1, 2, 3};

/// What ends the victim's part in a wait: it is killed, or does nothing more.
using End = std::function<void()>;

struct Wait {
  std::string name;
  /// On every rank; the victim calls `end` in it.
  std::function<void(SyncGroup&, const WaitOptions&, const End&)> run;
};

const Wait waits[] = {
    {"barrier",
     [](SyncGroup& group, const WaitOptions& options, const End& end) {
       if (group.rank() == victim) end();
       group.barrier(options);
     }},
    {"all-gather",
     [](SyncGroup& group, const WaitOptions& options, const End& end) {
       if (group.rank() == victim) end();
       const std::array<std::byte, 8> mine{};
       std::array<std::byte, 8 * size> all{};
       group.all_gather(mine, all, options);
     }},
    {"receive",
     [](SyncGroup& group, const WaitOptions& options, const End& end) {
       if (group.rank() == victim) end();
       (void)group.receive(victim, 100, options);
     }},
    {"send",
     [](SyncGroup& group, const WaitOptions& options, const End& end) {
       if (group.rank() == victim) end();
       // Files are not bounded: there the victim's word is missing.
       group.send(victim, std::vector<std::byte>(8 << 20), options);
       (void)group.receive(victim, 100, options);
     }},
    {"wait_until",
     [](SyncGroup& group, const WaitOptions& options, const End& end) {
       if (group.rank() == victim) end();
       const int on[] = {victim};
       group.wait_until([] { return false; }, [](auto longest) { ::usleep(static_cast<unsigned>(longest / 1us)); }, on,
                        options);
     }},
    {"gather",
     [](SyncGroup& group, const WaitOptions& options, const End& end) {
       if (group.rank() == victim) end();
       const Tensor mine = pattern(DType::u8, {1000}, 1);
       (void)get_tensors_parallel(mine, all_ranks, group, {.timeout = options.timeout});
     }},
    {"stream",
     [](SyncGroup& group, const WaitOptions& options, const End& end) {
       int layers = 0;
       const LayerSource source = [&]() -> std::optional<Config> {
         if (group.rank() == victim && layers == 2) end();
         if (++layers == 50) return std::nullopt;
         return Config::object({{"w", pattern(DType::u8, {100'000}, 1)}});
       };
       gather_each(source, all_ranks, group, [](LayerPart&) {}, {.timeout = options.timeout});
     }},
};

/// Runs all waits at the same time, each in a job of its own; `expect` looks at the survivors' errors, and how long
/// they came after both the wait's beginning and the victim's end.
void run_all(const End& end, std::chrono::milliseconds timeout,
             const std::function<void(const Error&, SyncGroup&, Clock::time_point since)>& expect) {
  SharedWords ends;
  std::list<GroupOf> groups;
  std::list<Ranks> jobs;
  for (const Wait& wait : waits) {
    const GroupOf& group = groups.emplace_back(size);
    std::atomic<std::uint64_t>& ended = ends[static_cast<int>(jobs.size())];
    jobs.emplace_back(size, [&group, &wait, &end, &expect, &ended, timeout](int rank) {
      start_timer(rank == 3 ? Timer::interrupt : Timer::restart);
      const auto mine = group.join(rank);
      const Clock::time_point since = Clock::now();
      try {
        // The others may hear of the victim's end in here.
        mine->barrier();
        wait.run(*mine, {.timeout = timeout, .stop = {}, .phase = wait.name.c_str()}, [&] {
          ended = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
          end();
        });
      } catch (const Error& error) {
        const Clock::time_point end_of_victim(Clock::duration(static_cast<Clock::rep>(ended.load())));
        expect(error, *mine, std::max(since, end_of_victim));
        return;
      }
      throw RankFailure("nothing was thrown");
    });
  }
  auto job = jobs.begin();
  for (const Wait& wait : waits) {
    CAPTURE(wait.name);
    const auto ended = (job++)->wait(20s);
    for (int rank = 0; rank < size; ++rank) {
      CAPTURE(rank);
      const Ended& one = ended[static_cast<std::size_t>(rank)];
      if (rank == victim)
        CHECK(one.signal == SIGKILL);
      else
        CHECK_MESSAGE(one.ok(), one.words);
    }
  }
}

}  // namespace

TEST_CASE("a timer's signals do not switch the watchdog off: a killed rank is named within a second") {
  run_all([] { ::raise(SIGKILL); }, 20s,
          [](const Error& error, SyncGroup& group, Clock::time_point since) {
            check_named(error, since, victim, static_cast<pid_t>(group.info(victim).pid), 1s);
          });
}

TEST_CASE("a timer's signals do not switch the watchdog off: a deadline of 3 s comes within 3.5 s") {
  run_all(
      [] {
        // SIGPROF does not end this sleep.
        std::this_thread::sleep_for(4500ms);
        ::raise(SIGKILL);
      },
      3s,
      [](const Error& error, SyncGroup&, Clock::time_point since) {
        const auto waited = Clock::now() - since;
        if (error.kind() != ErrorKind::timeout || error.rank() != victim) throw RankFailure(error.what());
        if (waited < 3s || waited > 3500ms)
          throw RankFailure("after " + std::to_string(waited / 1ms) + " ms: " + error.what());
      });
}

TEST_CASE("wake-ups by others do not switch the watchdog off: a killed rank is named within a second") {
  const auto ended = try_ranks(3, [](SyncGroup& group) {
    const pid_t victim_pid = static_cast<pid_t>(group.info(victim).pid);
    group.barrier();
    if (group.rank() == victim) ::raise(SIGKILL);
    const Clock::time_point since = Clock::now();
    try {
      if (group.rank() == 0) (void)group.receive(victim, 100);
      // Rings for rank 0 more often than it looks.
      for (;;) {
        group.send(0, std::vector<std::byte>(1));
        std::this_thread::sleep_for(1ms);
      }
    } catch (const Error& error) {
      check_named(error, since, victim, victim_pid, 1s);
    }
  });
  for (const int rank : {0, 2})
    CHECK_MESSAGE(ended[static_cast<std::size_t>(rank)].ok(), ended[static_cast<std::size_t>(rank)].words);
}
