// SPDX-License-Identifier: Apache-2.0
// A rank is killed before, during and after a merge: the others leave within a second with an error that names it, what
// was merged before stays readable, and nothing stays behind.

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <thread>

#include "doctest/doctest.h"
#include "muster/merge_gather.hpp"
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

enum class Phase { before, in_round_1, in_first_merge, in_later_merge, after };
constexpr Phase phases[] = {Phase::before, Phase::in_round_1, Phase::in_first_merge, Phase::in_later_merge,
                            Phase::after};

bool is_early(const Tensor& merged) {
  for (int rank = 0; rank < size; ++rank)
    if (!is_pattern(merged.view().slice(0, rank, rank + 1), DType::u8, {1, 100000}, static_cast<std::uint64_t>(rank)))
      return false;
  return true;
}

void run_victim_and_others(SyncGroup& group, const Merge& merge, int victim, Phase phase) {
  const pid_t victim_pid = static_cast<pid_t>(group.info(victim).pid);
  const bool is_victim = group.rank() == victim;
  const Merged early = merge_tensor_parallel(pattern(DType::u8, {100000}, static_cast<std::uint64_t>(group.rank())),
                                             stack(), all_ranks, group);
  const Tensor mine = pattern(DType::u8, {4096, 4096}, 7);
  if (phase != Phase::in_first_merge)
    for (int i = 0; i < 2; ++i) (void)merge_tensor_parallel(mine, merge, all_ranks, group);
  group.barrier();
  auto last_well = Clock::now();
  try {
    if (is_victim && phase == Phase::before) ::raise(SIGKILL);
    group.barrier();
    if (is_victim && phase == Phase::in_round_1) ::raise(SIGKILL);
    if (is_victim && phase == Phase::in_first_merge) kill_self_after(6ms);
    if (is_victim && phase == Phase::in_later_merge) kill_self_after(15ms);
    for (;;) {
      // In a loop: the timer finds this rank anywhere in an exchange.
      last_well = Clock::now();
      const Merged merged = merge_tensor_parallel(mine, merge, all_ranks, group);
      if (is_victim && phase == Phase::after) ::raise(SIGKILL);
      if (merged.tensor()) RANK_CHECK(merged.tensor()->data()[0] == mine.data()[0] || merge == sum());
    }
  } catch (const Error& error) {
    check_named(error, last_well, victim, victim_pid, 1s);
  }
  if (early.tensor()) RANK_CHECK(is_early(*early.tensor()));
  bool again = false;
  try {
    (void)merge_tensor_parallel(mine, merge, all_ranks, group);
  } catch (const Error& error) {
    again = error.rank() == victim;
  }
  RANK_CHECK(again);
}

}  // namespace

TEST_CASE("every rank of four killed in every phase of a merge: the others name it within a second") {
  for (const Merge& merge : {concat(1), sum()}) {
    for (const Phase phase : phases) {
      for (int victim = 0; victim < size; ++victim) {
        CAPTURE(merge_name(merge));
        CAPTURE(static_cast<int>(phase));
        CAPTURE(victim);
        const auto ended = try_ranks(
            size, [&](SyncGroup& group) { run_victim_and_others(group, merge, victim, phase); }, 20s);
        for (int rank = 0; rank < size; ++rank) {
          const Ended& one = ended[static_cast<std::size_t>(rank)];
          if (rank == victim)
            CHECK(one.signal == SIGKILL);
          else
            CHECK_MESSAGE(one.ok(), "rank ", rank, ": ", one.words);
        }
      }
    }
  }
  CHECK(shared_memory_names().empty());
}

TEST_CASE("a rank that hangs alive in a merge ends in a timeout that names it") {
  const GroupOf group(3);
  Ranks ranks(3, [&](int rank) {
    auto mine = group.join(rank);
    const pid_t stopped = static_cast<pid_t>(mine->info(2).pid);
    const Tensor tensor = pattern(DType::f32, {1000}, 1);
    (void)merge_tensor_parallel(tensor, sum(), std::vector<int>{0, 1, 2}, *mine);
    if (rank == 2) ::raise(SIGSTOP);
    try {
      (void)merge_tensor_parallel(tensor, sum(), std::vector<int>{0, 1, 2}, *mine, {.timeout = 300ms});
    } catch (const Error& error) {
      RANK_CHECK(error.kind() == ErrorKind::timeout);
      RANK_CHECK(error.rank() == 2);
      ::kill(stopped, SIGKILL);
      return;
    }
    throw RankFailure("no timeout");
  });
  const auto ended = ranks.wait(20s);
  CHECK_MESSAGE(ended[0].ok(), ended[0].words);
  CHECK_MESSAGE(ended[1].ok(), ended[1].words);
}

TEST_CASE("a rank without room in its address space is an error on all, whatever is merged, and the group goes on") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  MESSAGE("skipped: sanitizers need the address space");
#else
  for (const int victim : {0, 2}) {
    for (const Merge& merge : {concat(0), sum()}) {
      CAPTURE(victim);
      const auto ended = try_ranks(size, [&](SyncGroup& group) {
        // Untouched: the others' memory is not needed for it.
        const Tensor mine = Tensor::allocate(DType::u8, {300 << 20});
        if (group.rank() == victim) {
          const rlimit small{700 << 20, 700 << 20};
          RANK_CHECK(::setrlimit(RLIMIT_AS, &small) == 0);
        }
        bool refused = false;
        try {
          (void)merge_tensor_parallel(mine, merge, all_ranks, group);
        } catch (const Error& error) {
          refused = error.kind() == ErrorKind::no_space && error.rank() == victim;
          if (!refused) throw;
        }
        RANK_CHECK(refused);
        const Merged merged = merge_tensor_parallel(pattern(DType::u8, {1000}, 1), merge, all_ranks, group);
        RANK_CHECK(merged.tensor().has_value() == (group.rank() == 0));
      });
      for (const Ended& one : ended) CHECK_MESSAGE(one.ok(), one.signal, one.words);
    }
  }
#endif
}
