// SPDX-License-Identifier: Apache-2.0
// Many more ranks than cores: they rendezvous, gather, and detect a killed rank. bench/control_plane has 512 ranks.

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/process_group.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/sandbox.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int many = 100;

void gather_of_all(Group& group) {
  gather_and_check(group, ranks_from(0, many), 300, 0);
}

}  // namespace

TEST_CASE("a hundred ranks gather, with a limit of open files that is too low at first") {
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit tight{std::min<rlim_t>(before.rlim_max, 2 * many), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &tight) == 0);
  // The pipes of the test need some descriptors. The children raise their limit themselves.
  run_ranks(many, [](Group& group) {
    for (int turn = 0; turn < 3; ++turn) gather_of_all(group);
  });
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST_CASE("all ranks name the rank whose limit of open files is too low for the group") {
  constexpr int ranks = 30;
  const std::string key = unique_key();
  SharedWords come;
  run_processes(ranks, [&](int rank) {
    ++come[0];
    if (rank == 5) {
      limit_open_files(45, 45);
      // Rank 0 sends the cause to ranks that come soon afterwards.
      while (come[0] < ranks) std::this_thread::sleep_for(5ms);
    }
    const Error error = error_of(
        ErrorKind::io, {"rank 5 (host ", "a group of 30 ranks on one host needs 60 more open files", "ulimit -n"},
        [&] { (void)local_group({.key = key, .rank = rank, .size = ranks, .timeout = 20s}); });
    RANK_CHECK(error.rank() == 5);
  });
}

TEST_CASE("one of a hundred ranks is killed: all others name it soon, and so does one that waits alone") {
  using Clock = std::chrono::steady_clock;
  for (const bool is_alone : {false, true}) {
    CAPTURE(is_alone);
    const int victim = is_alone ? 99 : 61;
    SharedWords heard;
    run_ranks(many,
              [&](Group& group) {
                gather_of_all(group);
                group.barrier();
                if (group.rank() == victim) ::raise(SIGKILL);
                // Only rank 0 is in a call, so no other rank checks for dead ranks.
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
                RANK_CHECK(took < (is_alone ? 1500ms : 3000ms) * (under_sanitizer ? 3 : 1));
              },
              {victim});
  }
}

TEST_CASE("150 ranks: slices longer than a rank's share of a chunk") {
  // With 150 ranks a rank's share of a chunk is 832 bytes. An input of at most 944 bytes uses the slot of the card.
  if (under_sanitizer) return;  // a build with this sanitizer needs minutes for this many processes
  constexpr int ranks = 150;
  run_ranks(ranks, [](Group& group) {
    ProcessGroup all(group);
    const int self = all.rank();
    for (const std::int64_t elements : {1, 208, 209, 232, 235, 236, 237, 450, 2000}) {
      // One rank gets nearly all elements. The other slices are empty or have one element.
      for (const int heavy : {0, 77, 149}) {
        std::vector<std::int64_t> sizes(ranks, 0);
        sizes[3] = elements > 208 ? 1 : 0;
        sizes[static_cast<std::size_t>(heavy)] += elements - sizes[3];
        std::vector<std::int32_t> values;
        for (std::int64_t i = 0; i < elements; ++i) values.push_back(static_cast<std::int32_t>(i + self));
        const Tensor tensor = Tensor::take(values);
        const Tensor slice = all.reduce_scatterv(tensor, sizes);
        std::int64_t begin = 0;
        for (int rank = 0; rank < self; ++rank) begin += sizes[static_cast<std::size_t>(rank)];
        const auto at = [](const Tensor& from, std::int64_t i) {
          std::int32_t value = 0;
          std::memcpy(&value, from.data() + i * 4, sizeof value);
          return value;
        };
        bool is_right = slice.shape()[0] == sizes[static_cast<std::size_t>(self)];
        for (std::int64_t i = 0; is_right && i < slice.shape()[0]; ++i)
          is_right = at(slice, i) == ranks * (begin + i) + ranks * (ranks - 1) / 2;
        RANK_CHECK(is_right);
        // The reverse: the elements of the heavy rank reach all ranks.
        const Tensor gathered = all.all_gatherv(slice, 0, sizes);
        RANK_CHECK(at(gathered, elements - 1) == ranks * (elements - 1) + ranks * (ranks - 1) / 2);
        const Tensor moved = all.all_to_allv(tensor, sizes);
        RANK_CHECK(moved.shape()[0] == ranks * sizes[static_cast<std::size_t>(self)]);
        for (int rank = 0; moved.shape()[0] != 0 && rank < ranks; ++rank)
          RANK_CHECK(at(moved, (rank + 1) * sizes[static_cast<std::size_t>(self)] - 1) ==
                     begin + sizes[static_cast<std::size_t>(self)] - 1 + rank);
      }
    }
  });
}
