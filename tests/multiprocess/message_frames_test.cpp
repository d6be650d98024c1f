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

TEST_CASE("a rank takes what comes for it while it waits for something else") {
  test::run_ranks(3, [](SyncGroup& group) {
    for (const std::size_t length : {std::size_t{10}, std::size_t{3} << 20}) {
      std::vector<std::byte> message(length);
      const auto send = [&](int to, int mark) {
        message.front() = message.back() = static_cast<std::byte>(mark);
        group.send(to, message);
      };
      const auto receive = [&](int from, int mark) {
        const std::vector<std::byte> taken = group.receive(from, length);
        RANK_CHECK(taken.size() == length);
        RANK_CHECK(taken.front() == static_cast<std::byte>(mark) && taken.back() == static_cast<std::byte>(mark));
      };
      // Rank 1's comes first out of rank 0, and is received last.
      if (group.rank() == 0) {
        send(1, 1);
        send(2, 2);
        send(1, 3);
      }
      if (group.rank() == 2) {
        receive(0, 2);
        send(1, 4);
      }
      if (group.rank() == 1) {
        receive(2, 4);
        receive(0, 1);
        receive(0, 3);
      }
      // In a round.
      if (group.rank() == 0) send(1, 5);
      group.barrier();
      if (group.rank() == 1) receive(0, 5);
    }
  });
}
