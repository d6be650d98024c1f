// SPDX-License-Identifier: Apache-2.0
// Ranks of several hosts fail their group at the same moment, each with its own message. All must throw the same
// message, then and in later calls. Runs over two and three hosts (MUSTER_TEST_GROUP).

#include <random>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "src/group/group.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

/// Runs four ranks. `fails` makes some of them throw, and the others wait. All must throw the same message.
void expect_one_cause(const std::function<void(SyncGroup&, Clock::time_point)>& fails) {
  SharedWords words;
  const auto ended = try_ranks(
      4,
      [&](SyncGroup& group) {
        // Connections are made first, because making them would delay the messages.
        for (int first = 0; first < group.size(); ++first)
          (void)get_tensors_parallel(Tensor::allocate(DType::u8, {100000}), ranks_from(first, group.size()), group);
        if (group.rank() == 0) words[0] = static_cast<std::uint64_t>((Clock::now() + 20ms).time_since_epoch().count());
        Clock::time_point moment;
        const Error error = error_of([&] {
          // A slow rank may receive the error here.
          group.barrier();
          moment = Clock::time_point(Clock::duration(static_cast<Clock::rep>(words[0].load())));
          fails(group, moment);
        });
        RANK_CHECK(Clock::now() - moment < 3s || moment == Clock::time_point());
        const std::string said = error.what();
        say(said);
        for (int again = 0; again < 2; ++again) RANK_CHECK(error_of([&] { group.barrier(); }).what() == said);
      },
      20s);
  check_ended(ended);
  for (const Ended& one : ended) CHECK(one.words == ended.front().words);
}

}  // namespace

TEST_CASE("ranks of two hosts fail their group at the same moment: one cause") {
  std::mt19937 random(2026);
  for (int turn = 0; turn < 10; ++turn) {
    CAPTURE(turn);
    const auto spread = std::chrono::microseconds(random() % (turn % 3 != 2 ? 20 : 30000));
    expect_one_cause([spread](SyncGroup& group, Clock::time_point moment) {
      if (group.rank() == 1 || group.rank() == 2) {
        const Clock::time_point mine = moment + (group.rank() == 1 ? spread : 0us);
        std::this_thread::sleep_until(mine - 2ms);
        // Exact to the microsecond.
        while (Clock::now() < mine) continue;
        group.poison(Error(ErrorKind::io, "the disk of rank " + std::to_string(group.rank())));
      }
      group.barrier();
    });
  }
}

TEST_CASE("deadlines of two hosts pass at the same moment: one cause") {
  // Rank 3 is late, and receives the error when it arrives.
  expect_one_cause([](SyncGroup& group, Clock::time_point moment) {
    if (group.rank() == 3) std::this_thread::sleep_until(moment + 1200ms);
    group.barrier({.timeout = 400ms, .stop = {}, .phase = "waiting"});
  });
}

TEST_CASE("one rank of each host is cancelled at the same moment: one cause") {
  expect_one_cause([](SyncGroup& group, Clock::time_point moment) {
    std::stop_source source;
    std::jthread stopping;
    if (group.rank() == 0 || group.rank() == 2)
      stopping = std::jthread([&] {
        std::this_thread::sleep_until(moment);
        source.request_stop();
      });
    for (;;) group.barrier({.timeout = {}, .stop = source.get_token(), .phase = "rounds"});
  });
}

TEST_CASE("a failure that began on another host ends an auxiliary group's wait for ranks of this host") {
  expect_one_cause([](SyncGroup& group, Clock::time_point) {
    const auto companion = group::inside(group).companion();
    if (group.rank() == 3) group.poison(Error(ErrorKind::io, "the disk of rank 3"));
    // No rank of this host has reported it to the others yet.
    while (!companion->failure()) std::this_thread::sleep_for(1ms);
    companion->wait_until([] { return false; }, [](std::chrono::nanoseconds) { std::this_thread::sleep_for(1ms); }, {});
  });
}
