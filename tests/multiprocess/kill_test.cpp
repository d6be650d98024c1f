// SPDX-License-Identifier: Apache-2.0
// One rank is killed or stopped in each phase of an exchange: the others leave in bounded time with an error that names
// it, nothing stays behind, and what was delivered can still be read.

#include <signal.h>
#include <unistd.h>

#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int size = 4;
const std::vector<int> all_ranks = {0, 1, 2, 3};

enum class Phase { before_barrier, in_round_1, in_copy, while_reading, at_release };
constexpr Phase phases[] = {Phase::before_barrier, Phase::in_round_1, Phase::in_copy, Phase::while_reading,
                            Phase::at_release};

void run_victim_and_others(SyncGroup& group, int victim, Phase phase) {
  const pid_t victim_pid = static_cast<pid_t>(group.info(victim).pid);
  const bool is_victim = group.rank() == victim;
  const Shape shape{48 << 20};
  // Delivered before anything happens: must outlive the victim.
  const Tensor early = pattern(DType::u8, {100000}, static_cast<std::uint64_t>(group.rank()));
  GatheredTensors delivered = get_tensors_parallel(early, all_ranks, group);
  const Tensor mine = Tensor::allocate(DType::u8, shape);
  fill(mine.mutable_data(), mine.nbytes(), 7);
  group.barrier();
  const Clock::time_point begin = Clock::now();
  try {
    if (is_victim && phase == Phase::before_barrier) ::raise(SIGKILL);
    group.barrier();
    if (is_victim && phase == Phase::in_round_1) ::raise(SIGKILL);
    if (is_victim && phase == Phase::in_copy) kill_self_after(4ms);
    {
      const GatheredTensors result = get_tensors_parallel(mine, all_ranks, group);
      if (is_victim && phase == Phase::while_reading) ::raise(SIGKILL);
      for (const auto& [rank, tensor] : result.present())
        RANK_CHECK(tensor.data()[tensor.nbytes() - 1] == mine.data()[mine.nbytes() - 1]);
    }
    if (is_victim && phase == Phase::at_release) ::raise(SIGKILL);
    for (;;) {
      std::this_thread::sleep_for(1ms);
      group.barrier();
    }
  } catch (const Error& error) {
    check_named(error, begin, victim, victim_pid, 2s);
  }
  for (const auto& [rank, tensor] : delivered.present())
    RANK_CHECK(is_pattern(tensor, DType::u8, {100000}, static_cast<std::uint64_t>(rank)));
  // Everyone hears the first cause again, at once.
  bool again = false;
  try {
    group.barrier();
  } catch (const Error& error) {
    again = error.rank() == victim;
  }
  RANK_CHECK(again);
}

}  // namespace

TEST_CASE("every rank of four killed in every phase: the others name rank and pid within two seconds") {
  for (const Phase phase : phases) {
    for (int victim = 0; victim < size; ++victim) {
      CAPTURE(static_cast<int>(phase));
      CAPTURE(victim);
      const auto ended = try_ranks(
          size, [&](SyncGroup& group) { run_victim_and_others(group, victim, phase); }, 20s);
      for (int rank = 0; rank < size; ++rank) {
        const Ended& one = ended[static_cast<std::size_t>(rank)];
        if (rank == victim)
          CHECK(one.signal == SIGKILL);
        else
          CHECK_MESSAGE(one.ok(), "rank ", rank, ": ", one.words);
      }
    }
  }
  CHECK(shared_memory_names().empty());
}

TEST_CASE("a rank hangs alive: a stopped rank ends in a timeout that names it") {
  const GroupOf group(3);
  Ranks ranks(3, [&](int rank) {
    auto mine = group.join(rank);
    const pid_t stopped = static_cast<pid_t>(mine->info(2).pid);
    if (rank == 2) ::raise(SIGSTOP);
    const Tensor tensor = pattern(DType::u8, {1000}, 1);
    try {
      (void)get_tensors_parallel(tensor, std::vector<int>{0, 1, 2}, *mine, {.timeout = 300ms});
    } catch (const Error& error) {
      RANK_CHECK(error.kind() == ErrorKind::timeout);
      RANK_CHECK(error.rank() == 2);
      const std::string words = error.what();
      RANK_CHECK(words.find("pid " + std::to_string(stopped)) != std::string::npos);
      RANK_CHECK(words.find("stopped") != std::string::npos);
      RANK_CHECK(words.find("gather: round 1") != std::string::npos);
      ::kill(stopped, SIGKILL);
      return;
    }
    throw RankFailure("no timeout");
  });
  const auto ended = ranks.wait(20s);
  CHECK_MESSAGE(ended[0].ok(), ended[0].words);
  CHECK_MESSAGE(ended[1].ok(), ended[1].words);
}

TEST_CASE("a rank that leaves in order is named as one that left") {
  const GroupOf group(2);
  Ranks ranks(2, [&](int rank) {
    auto mine = group.join(rank);
    if (rank == 1) {
      mine.reset();
      std::this_thread::sleep_for(1s);
      return;
    }
    try {
      mine->barrier();
    } catch (const Error& error) {
      RANK_CHECK(error.kind() == ErrorKind::peer_lost);
      RANK_CHECK(std::string(error.what()).find("left the group") != std::string::npos);
      return;
    }
    throw RankFailure("no error");
  });
  for (const Ended& ended : ranks.wait(20s)) CHECK_MESSAGE(ended.ok(), ended.words);
}

TEST_CASE("a slow rank that makes progress is not a timeout") {
  run_ranks(2, [](SyncGroup& group) {
    if (group.rank() == 1) {
      for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(50ms);
        group.progress();
      }
    }
    group.barrier({.timeout = 300ms});
  });
}

TEST_CASE("a cancelled wait ends at once and tells the others") {
  run_ranks(3, [](SyncGroup& group) {
    const Tensor tensor = pattern(DType::u8, {1000}, 1);
    if (group.rank() == 2) {
      // Never comes by itself: it waits until the others have failed.
      while (!group.failure()) std::this_thread::sleep_for(1ms);
      return;
    }
    std::stop_source source;
    std::jthread canceller;
    if (group.rank() == 0)
      canceller = std::jthread([&] {
        std::this_thread::sleep_for(100ms);
        source.request_stop();
      });
    const auto begin = Clock::now();
    try {
      (void)get_tensors_parallel(tensor, std::vector<int>{0, 1, 2}, group, {.stop = source.get_token()});
    } catch (const Error& error) {
      RANK_CHECK(error.kind() == ErrorKind::cancelled);
      RANK_CHECK(error.rank() == 0);
      RANK_CHECK(Clock::now() - begin < 2s);
      return;
    }
    throw RankFailure("not cancelled");
  });
}

TEST_CASE("a second thread in one group is detected, a duplicate serves it") {
  run_ranks(2, [](SyncGroup& group) {
    auto copy = group.duplicate();
    bool detected = false;
    {
      std::jthread waiting([&] {
        if (group.rank() == 1) std::this_thread::sleep_for(500ms);
        try {
          group.barrier();
        } catch (const Error&) {
        }
      });
      if (group.rank() == 0) {
        std::this_thread::sleep_for(100ms);
        try {
          group.barrier();
        } catch (const Error& error) {
          detected = error.kind() == ErrorKind::argument;
        }
        RANK_CHECK(detected);
      }
      copy->barrier();
    }
  });
}

TEST_CASE("a forked child cannot take part, and its end changes nothing") {
  run_ranks(2, [](SyncGroup& group) {
    const Tensor tensor = pattern(DType::u8, {5000}, static_cast<std::uint64_t>(group.rank()));
    GatheredTensors all = get_tensors_parallel(tensor, std::vector<int>{0, 1}, group, {.own = Own::copy});
    Ranks child(1, [&](int) {
      bool refused = false;
      try {
        group.barrier();
      } catch (const Error& error) {
        refused = error.kind() == ErrorKind::unsupported;
      }
      RANK_CHECK(refused);
      all.release();  // unmaps only: the parent still holds it
    });
    RANK_CHECK(child.wait(10s).front().ok());
    group.barrier();
    if (group.rank() == 1) RANK_CHECK(!all.wait_released(20ms));
    for (const auto& [rank, other] : all.present())
      RANK_CHECK(is_pattern(other, DType::u8, {5000}, static_cast<std::uint64_t>(rank)));
    group.barrier();
  });
}

TEST_CASE("ranks that never come are named at the deadline") {
  const GroupOf group(4);
  Ranks ranks(4, [&](int rank) {
    if (rank == 2) return;
    try {
      (void)group.join(rank, 500ms);
    } catch (const Error& error) {
      RANK_CHECK(error.kind() == ErrorKind::timeout);
      RANK_CHECK(std::string(error.what()).find("rank 2") != std::string::npos);
      return;
    }
    throw RankFailure("joined without rank 2");
  });
  for (const Ended& ended : ranks.wait(20s)) CHECK_MESSAGE(ended.ok(), ended.words);
}

TEST_CASE("two processes of one rank, and ranks of differently large worlds, are refused on all") {
  const std::string key = unique_key();
  Ranks ranks(3, [&](int process) {
    const int rank = process == 2 ? 1 : process;
    try {
      (void)local_group({.key = key, .rank = rank, .size = 3, .timeout = 5s});
    } catch (const Error& error) {
      RANK_CHECK(error.kind() == ErrorKind::rank_mismatch);
      return;
    }
    throw RankFailure("joined");
  });
  for (const Ended& ended : ranks.wait(20s)) CHECK_MESSAGE(ended.ok(), ended.words);
}
