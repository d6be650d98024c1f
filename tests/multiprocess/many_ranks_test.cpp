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
#include "tests/support/shared_words.hpp"

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
    run_processes(many, [&](int rank) {
      const auto mine = group.join(rank);
      for (int turn = 0; turn < 3; ++turn) gather_and_check(*mine);
    });
  }
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST_CASE("one of a hundred ranks is killed: all others name it, soon") {
  constexpr int victim = 61;
  using Clock = std::chrono::steady_clock;
  const GroupOf group(many);
  run_processes(many, {victim}, [&](int rank) {
    const auto mine = group.join(rank);
    gather_and_check(*mine);
    mine->barrier();
    if (rank == victim) ::raise(SIGKILL);
    const Clock::time_point begin = Clock::now();
    const Error error = error_of([&] { gather_and_check(*mine); });
    RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == victim);
    RANK_CHECK(Clock::now() - begin < std::chrono::seconds(3));
  });
}

TEST_CASE("a rank that waits alone sees the death of any other of a hundred") {
  constexpr int victim = 99;
  const GroupOf group(many);
  SharedWords heard;
  run_processes(many, {victim}, [&](int rank) {
    const auto mine = group.join(rank);
    mine->barrier();
    if (rank == victim) ::raise(SIGKILL);
    if (rank != 0) {
      // Nobody but rank 0 is inside: it is alone with the watch.
      while (heard[0] == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    const Error error = error_of([&] { mine->barrier(); });
    const auto end = std::chrono::steady_clock::now();
    heard[0] = 1;
    RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == victim);
    RANK_CHECK(end - begin < std::chrono::milliseconds(1500));
  });
}
