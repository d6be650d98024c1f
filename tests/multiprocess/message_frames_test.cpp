// SPDX-License-Identifier: Apache-2.0
// Messages of one rank to several share a ring: each receiver takes its own, whatever the others' look like inside.

#include <doctest/doctest.h>

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
