// SPDX-License-Identifier: Apache-2.0
// Messages of one rank to several share a ring: each receiver takes its own, whatever the others' look like inside, and
// waits for those that have to take theirs first.

#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "tests/support/forked_ranks.hpp"

using namespace muster;

TEST_CASE("a message whose bytes look like a frame for another rank is not taken for one") {
  constexpr int ranks = 7;
  test::run_ranks(ranks, [](SyncGroup& group) {
    for (int turn = 0; turn < 200; ++turn) {
      if (group.rank() == 0) {
        for (int to = 1; to < ranks; ++to) {
          // Words that name the next rank, where a frame would name its receiver.
          const std::vector<std::uint32_t> words(8192, static_cast<std::uint32_t>(to + 1) % ranks);
          group.send(to, std::as_bytes(std::span(words)));
        }
        group.barrier();  // all are in the ring: now everybody reads at once
      } else {
        group.barrier();
        const std::vector<std::byte> message = group.receive(0, 1 << 16);
        RANK_CHECK(message.size() == 4 * 8192);
        std::uint32_t first = 0;
        std::memcpy(&first, message.data(), sizeof first);
        RANK_CHECK(first == static_cast<std::uint32_t>(group.rank() + 1) % ranks);
      }
    }
  });
}

TEST_CASE("who waits behind another rank's message hears at once that this one has gone") {
  for (const bool is_killed : {true, false}) {
    CAPTURE(is_killed);
    const auto begin = std::chrono::steady_clock::now();
    const auto ended = test::try_ranks(3, [&](SyncGroup& group) {
      const std::vector<std::byte> message(1000);
      if (group.rank() == 0) {
        group.send(1, message);
        group.send(2, message);
      }
      group.barrier();
      if (group.rank() == 1) {
        if (is_killed) ::kill(::getpid(), SIGKILL);
        return;  // it leaves the group
      }
      (void)group.receive(group.rank() == 0 ? 2 : 0, 1 << 16);
    });
    CHECK(ended[2].words.find("rank 1") != std::string::npos);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
  }
}
