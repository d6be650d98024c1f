// SPDX-License-Identifier: Apache-2.0
// Ranks on two hosts (MUSTER_TEST_GROUP=mpi-2): one is killed or stopped in each phase, or a host dies as a whole. All
// others end in bounded time with an error that names it.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

// Two hosts of two ranks.
constexpr int size = 4;
const std::vector<int> all_ranks = {0, 1, 2, 3};

enum class Phase { between_calls, in_rounds, moving, streaming, merging, messages };
constexpr Phase phases[] = {Phase::between_calls, Phase::in_rounds, Phase::moving,
                            Phase::streaming,     Phase::merging,   Phase::messages};

void work_once(SyncGroup& group, Phase phase, const Tensor& mine) {
  switch (phase) {
    case Phase::between_calls:
    case Phase::in_rounds:
      group.barrier();
      return;
    case Phase::moving:
      (void)get_tensors_parallel(mine, all_ranks, group);
      return;
    case Phase::streaming: {
      int layer = 0;
      gather_each(
          [&]() -> std::optional<Config> {
            if (layer == 20) return std::nullopt;
            return Config::object({{"layer", layer++}, {"weight", mine}});
          },
          all_ranks, group, [](LayerPart&) {}, {.memory_budget = std::uint64_t{64} << 20});
      return;
    }
    case Phase::merging:
      (void)merge_tensor_parallel(mine, concat(0), all_ranks, group);
      return;
    case Phase::messages: {
      // Round about: every rank waits for one of the other host.
      const std::byte word{1};
      group.send((group.rank() + 2) % size, std::span(&word, 1));
      (void)group.receive((group.rank() + 2) % size, 1);
      return;
    }
  }
}

/// As the error of a failed exchange asks: what was being sent stays until the process ends.
const Tensor& tensor_of(const SyncGroup& group) {
  return *new Tensor(pattern(DType::u8, {8 << 20}, static_cast<std::uint64_t>(group.rank())));
}

std::uint64_t now_in_us() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count());
}

/// In a survivor: works until it fails, and checks that it fails in time and by name.
void work_until(SyncGroup& group, Phase phase, int victim, SharedWords& words, std::chrono::milliseconds within) {
  const Tensor& mine = tensor_of(group);
  const std::string host = group.info(victim).host;
  try {
    for (;;) work_once(group, phase, mine);
  } catch (const Error& error) {
    const std::uint64_t late = now_in_us() - words[0].load();
    const std::string said = error.what();
    if (error.rank() != victim || said.find("rank " + std::to_string(victim)) == std::string::npos ||
        said.find(host) == std::string::npos)
      throw RankFailure("rank " + std::to_string(group.rank()) + " blames another: " + said);
    if (std::chrono::microseconds(late) > within)
      throw RankFailure("rank " + std::to_string(group.rank()) + " says it after " + std::to_string(late / 1000) +
                        " ms: " + said);
    // Everybody hears it again, at once.
    try {
      group.barrier();
      throw RankFailure("the group works again");
    } catch (const Error& again) {
      RANK_CHECK(again.rank() == victim);
    }
  }
}

void check(const std::vector<Ended>& ended, const std::vector<int>& victims) {
  for (int rank = 0; rank < size; ++rank) {
    const Ended& one = ended[static_cast<std::size_t>(rank)];
    if (std::ranges::find(victims, rank) != victims.end())
      CHECK(one.signal == SIGKILL);
    else
      CHECK_MESSAGE(one.ok(), "rank ", rank, ": status ", one.exit_status, ", signal ", one.signal, ": ", one.words);
  }
}

}  // namespace

TEST_CASE("a rank of two hosts killed in each phase: the others of both name it within two seconds") {
  int victim = 0;
  for (const Phase phase : phases) {
    for (int turn = 0; turn < 2; ++turn, victim = (victim + 1) % size) {
      CAPTURE(static_cast<int>(phase));
      CAPTURE(victim);
      SharedWords words;
      const auto ended = try_ranks(
          size,
          [&](SyncGroup& group) {
            const Tensor& mine = tensor_of(group);
            group.barrier();
            if (group.rank() != victim) return work_until(group, phase, victim, words, 2s);
            std::thread([&] {
              std::this_thread::sleep_for(30ms);
              words[0].store(now_in_us());
              ::kill(::getpid(), SIGKILL);
            }).detach();
            if (phase == Phase::between_calls) std::this_thread::sleep_for(10s);
            for (;;) work_once(group, phase, mine);
          },
          30s);
      check(ended, {victim});
    }
  }
  CHECK(shared_memory_names().empty());
}

TEST_CASE("a rank of two hosts stopped: the others of both name it at the deadline") {
  for (const int victim : {1, 2}) {
    CAPTURE(victim);
    SharedWords words;
    const GroupOf job(size);
    Ranks ranks(size, [&](int rank) {
      const auto group = job.join(rank);
      group->barrier();
      group->set_timeout(700ms);
      if (rank != victim) return work_until(*group, Phase::in_rounds, victim, words, 700ms + 2s);
      words[0].store(now_in_us());
      ::raise(SIGSTOP);
    });
    std::this_thread::sleep_for(3s);
    ranks.signal(victim, SIGKILL);
    check(ranks.wait(20s), {victim});
  }
}

TEST_CASE("a whole host killed: the other one names it at the deadline") {
  for (const int first : {0, 2}) {
    CAPTURE(first);
    SharedWords words;
    const auto ended = try_ranks(
        size,
        [&](SyncGroup& group) {
          group.set_timeout(700ms);
          group.barrier();
          if (group.rank() / 2 != first / 2) return work_until(group, Phase::in_rounds, first, words, 700ms + 2s);
          std::this_thread::sleep_for(20ms);
          words[0].store(now_in_us());
          ::raise(SIGKILL);
        },
        30s);
    check(ended, {first, first + 1});
  }
}

TEST_CASE("a rank of another host that leaves in order is named as one that left") {
  const auto ended = try_ranks(
      size,
      [&](SyncGroup& group) {
        std::shared_ptr<SyncGroup> other = group.duplicate();
        if (group.rank() == 2) {
          other.reset();
        } else {
          try {
            other->barrier({.timeout = 10s, .stop = {}, .phase = "barrier"});
            throw RankFailure("no error");
          } catch (const Error& error) {
            RANK_CHECK(error.kind() == ErrorKind::peer_lost);
            RANK_CHECK(error.rank() == 2);
            RANK_CHECK(std::string(error.what()).find("left the group") != std::string::npos);
          }
        }
        // The group itself is as it was.
        group.barrier();
      },
      30s);
  for (const Ended& one : ended) CHECK_MESSAGE(one.ok(), one.words);
}

TEST_CASE("a rank waits at its end for one that is killed there: it does not wait for ever") {
  const auto ended = try_ranks(
      size,
      [&](SyncGroup& group) {
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
  check(ended, {3});
}
