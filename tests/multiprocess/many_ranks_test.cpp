// SPDX-License-Identifier: Apache-2.0
// Many more ranks than cores: they meet, gather, and see who dies; bench/control_plane has 512.

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

namespace {

constexpr int many = 100;

void gather_and_check(SyncGroup& group) {
  const auto tensor_of = [](int rank) { return pattern(DType::u8, {300}, static_cast<std::uint64_t>(rank)); };
  const Tensor mine = tensor_of(group.rank());
  const GatheredTensors all = get_tensors_parallel(mine, ranks_from(0, group.size()), group);
  for (const auto& [rank, tensor] : all.present()) RANK_CHECK(bitwise_equal(tensor, tensor_of(rank)));
  RANK_CHECK(all.present().size() == (group.rank() == 0 ? static_cast<std::size_t>(group.size()) : 0));
}

}  // namespace

TEST_CASE("a hundred ranks gather, with room for fewer open files than that takes at first") {
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit tight{std::min<rlim_t>(before.rlim_max, 2 * many), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &tight) == 0);
  const GroupOf group(many);
  {
    // The test's own pipes need some, and its children raise their limit by themselves.
    Ranks ranks(many, [&](int rank) {
      const auto mine = group.join(rank);
      for (int turn = 0; turn < 3; ++turn) gather_and_check(*mine);
    });
    for (const Ended& ended : ranks.wait()) CHECK_MESSAGE(ended.ok(), ended.words);
  }
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST_CASE("one of a hundred ranks is killed: all others name it, soon") {
  constexpr int victim = 61;
  using Clock = std::chrono::steady_clock;
  const GroupOf group(many);
  Ranks ranks(many, [&](int rank) {
    const auto mine = group.join(rank);
    gather_and_check(*mine);
    mine->barrier();
    if (rank == victim) ::raise(SIGKILL);
    const Clock::time_point begin = Clock::now();
    try {
      gather_and_check(*mine);
      throw RankFailure("nothing was thrown");
    } catch (const Error& error) {
      RANK_CHECK(error.kind() == ErrorKind::peer_lost);
      RANK_CHECK(error.rank() == victim);
    }
    RANK_CHECK(Clock::now() - begin < std::chrono::seconds(3));
  });
  const std::vector<Ended> all = ranks.wait();
  for (int rank = 0; rank < many; ++rank) {
    const Ended& ended = all[static_cast<std::size_t>(rank)];
    if (rank == victim)
      CHECK(ended.signal == SIGKILL);
    else
      CHECK_MESSAGE(ended.ok(), "rank ", rank, ": ", ended.words);
  }
}

TEST_CASE("a rank that waits alone sees the death of any other of a hundred") {
  constexpr int victim = 99;
  const GroupOf group(many);
  Ranks ranks(many, [&](int rank) {
    const auto mine = group.join(rank);
    mine->barrier();
    if (rank == victim) ::raise(SIGKILL);
    if (rank != 0) {
      // Nobody but rank 0 is inside: it is alone with the watch.
      std::this_thread::sleep_for(std::chrono::seconds(3));
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    try {
      mine->barrier();
      throw RankFailure("nothing was thrown");
    } catch (const Error& error) {
      RANK_CHECK(error.kind() == ErrorKind::peer_lost);
      RANK_CHECK(error.rank() == victim);
    }
    RANK_CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(1500));
  });
  const std::vector<Ended> all = ranks.wait();
  for (int rank = 0; rank < many; ++rank)
    if (rank != victim)
      CHECK_MESSAGE(all[static_cast<std::size_t>(rank)].ok(), all[static_cast<std::size_t>(rank)].words);
}
