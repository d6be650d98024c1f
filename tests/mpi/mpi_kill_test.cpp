// SPDX-License-Identifier: Apache-2.0
// Ranks on two hosts (MUSTER_TEST_GROUP=mpi-2). One is stopped, leaves or dies at its end, or a whole host dies. All
// others must return in bounded time with an error that names it. kill_test covers ranks that are killed during their
// work.

#include <signal.h>
#include <unistd.h>

#include <thread>

#include "doctest/doctest.h"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

// Two hosts of two ranks.
constexpr int size = 4;

std::uint64_t now_in_us() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count());
}

/// Runs in a survivor: works until a call fails, and checks the time and the named rank.
void work_until(Group& group, int victim, SharedWords& words, std::chrono::milliseconds within) {
  const std::string host = group.info(victim).host;
  try {
    for (;;) group.barrier();
  } catch (const Error& error) {
    const std::uint64_t late = now_in_us() - words[0].load();
    const std::string said = error.what();
    if (error.rank() != victim || said.find("rank " + std::to_string(victim)) == std::string::npos ||
        said.find(host) == std::string::npos)
      throw RankFailure("rank " + std::to_string(group.rank()) + " blames another: " + said);
    if (std::chrono::microseconds(late) > within)
      throw RankFailure("rank " + std::to_string(group.rank()) + " says it after " + std::to_string(late / 1000) +
                        " ms: " + said);
    // The next call throws the same error, at once.
    RANK_CHECK(error_of([&] { group.barrier(); }).rank() == victim);
  }
}

}  // namespace

TEST_CASE("a rank of two hosts stopped: the others of both name it at the deadline") {
  for (const int victim : {1, 2}) {
    CAPTURE(victim);
    SharedWords words;
    const GroupOf job(size);
    Ranks ranks(size, [&](int rank) {
      const auto group = job.join(rank);
      group->barrier();
      group->set_timeout(700ms);
      if (rank != victim) return work_until(*group, victim, words, 700ms + 2s);
      words[0].store(now_in_us());
      ::raise(SIGSTOP);
    });
    std::this_thread::sleep_for(3s);
    ranks.signal(victim, SIGKILL);
    check_ended(ranks.wait(20s), {victim});
  }
}

TEST_CASE("a whole host killed: the other one names it at the deadline") {
  for (const int first : {0, 2}) {
    CAPTURE(first);
    SharedWords words;
    const auto ended = try_ranks(
        size,
        [&](Group& group) {
          group.set_timeout(700ms);
          group.barrier();
          if (group.rank() / 2 != first / 2) return work_until(group, first, words, 700ms + 2s);
          std::this_thread::sleep_for(20ms);
          words[0].store(now_in_us());
          ::raise(SIGKILL);
        },
        30s);
    check_ended(ended, {first, first + 1});
  }
}

TEST_CASE("a rank of another host that leaves in order is reported as a rank that left") {
  const auto ended = try_ranks(
      size,
      [&](Group& group) {
        std::shared_ptr<Group> other = group.duplicate();
        if (group.rank() == 2) {
          other.reset();
        } else {
          const Error error = error_of([&] { other->barrier({.timeout = 10s, .stop = {}, .phase = "barrier"}); });
          RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == 2 && says(error, "left the group"));
        }
        // The parent group remains usable.
        group.barrier();
      },
      30s);
  check_ended(ended);
}

TEST_CASE("a rank that exits waits for one that is killed there, but not forever") {
  const auto ended = try_ranks(
      size,
      [&](Group& group) {
        group.barrier();
        if (group.rank() == 3) ::raise(SIGKILL);
        std::this_thread::sleep_for(200ms);
        try {
          group.barrier();
        } catch (const Error& error) {
          RANK_CHECK(error.rank() == 3);
        }
      },
      20s);
  check_ended(ended, {3});
}
