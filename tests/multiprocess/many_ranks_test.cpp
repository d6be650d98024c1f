// SPDX-License-Identifier: Apache-2.0
// Many more ranks than cores: they meet, gather, and see who dies; bench/control_plane has 512.

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int many = 100;

void gather_of_all(SyncGroup& group) {
  gather_and_check(group, ranks_from(0, many), 300, 0);
}

}  // namespace

TEST_CASE("a hundred ranks gather, with room for fewer open files than that takes at first") {
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit tight{std::min<rlim_t>(before.rlim_max, 2 * many), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &tight) == 0);
  // The test's own pipes need some, and its children raise their limit by themselves.
  run_ranks(many, [](SyncGroup& group) {
    for (int turn = 0; turn < 3; ++turn) gather_of_all(group);
  });
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST_CASE("one of a hundred ranks is killed: all others name it, soon, and so does one that waits alone") {
  using Clock = std::chrono::steady_clock;
  for (const bool is_alone : {false, true}) {
    CAPTURE(is_alone);
    const int victim = is_alone ? 99 : 61;
    SharedWords heard;
    run_ranks(many,
              [&](SyncGroup& group) {
                gather_of_all(group);
                group.barrier();
                if (group.rank() == victim) ::raise(SIGKILL);
                // Nobody but rank 0 is inside then: it is alone with the watch.
                while (is_alone && group.rank() != 0 && heard[0] == 0) std::this_thread::sleep_for(20ms);
                if (is_alone && group.rank() != 0) return;
                const Clock::time_point begin = Clock::now();
                const Error error = error_of(ErrorKind::peer_lost, {}, [&] {
                  if (is_alone) return group.barrier();
                  gather_of_all(group);
                });
                const auto took = Clock::now() - begin;
                heard[0] = 1;
                RANK_CHECK(error.rank() == victim);
                RANK_CHECK(took < (is_alone ? 1500ms : 3000ms));
              },
              {victim});
  }
}
