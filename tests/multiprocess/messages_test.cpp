// SPDX-License-Identifier: Apache-2.0
// Messages between ranks of one host: complete, in order, limited, and not blocked by messages for another rank or
// purpose.

#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "muster/gather.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t promised = 256 * 1024;  // in flight from one rank to another

}  // namespace

TEST_CASE("a message whose bytes look like a frame for another rank is not taken for one") {
  constexpr int ranks = 7;
  run_ranks(ranks, [](Group& group) {
    for (int turn = 0; turn < 200; ++turn) {
      if (group.rank() == 0) {
        for (int to = 1; to < ranks; ++to) {
          // Bytes with the next rank's number at the position of a frame's receiver.
          const std::vector<std::uint32_t> words(8192, static_cast<std::uint32_t>(to + 1) % ranks);
          group.send(to, std::as_bytes(std::span(words)));
        }
        group.barrier();  // all messages are in the ring: now all ranks read at once
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

TEST_CASE(
    "no message waits for another rank that does not receive: that rank waits, is in a round, was killed, or has "
    "left") {
  SharedWords words;
  const auto wait_for_word = [&](Group& group) {
    const int on[] = {2};
    group.wait_until([&] { return words[0] != 0; }, [](auto longest) { std::this_thread::sleep_for(longest); }, on);
  };
  for (const std::string way : {"waits", "in a round", "killed", "left"}) {
    CAPTURE(way);
    words[0] = 0;
    const auto ended = try_ranks(3, [&](Group& group) {
      // As many bytes to rank 1 as may be in flight, and then a message to rank 2.
      if (group.rank() == 0) {
        group.send(1, std::vector<std::byte>(promised));
        group.barrier();
        group.send(2, std::vector<std::byte>(promised));
        if (way == "in a round") group.barrier();
      }
      if (group.rank() == 1) {
        group.barrier();
        if (way == "killed") ::kill(::getpid(), SIGKILL);
        if (way == "waits") wait_for_word(group);
        if (way == "in a round") group.barrier();
        if (way != "left") RANK_CHECK(group.receive(0, promised).size() == promised);
      }
      if (group.rank() == 2) {
        group.barrier();
        RANK_CHECK(group.receive(0, promised).size() == promised);
        words[0] = 1;
        if (way == "in a round") group.barrier();
      }
    });
    for (const int rank : {0, 2})
      CHECK_MESSAGE(ended[static_cast<std::size_t>(rank)].ok(), ended[static_cast<std::size_t>(rank)].words);
    CHECK_MESSAGE((ended[1].ok() || ended[1].signal == SIGKILL), ended[1].words);
  }
}

TEST_CASE("ranks that all send first make progress up to the promised size, in one message or many") {
  run_ranks(3, [](Group& group) {
    for (const std::size_t length : {promised, promised / 4, promised / 64}) {
      for (int to = 0; to < 3; ++to)
        for (std::size_t sent = 0; to != group.rank() && sent < promised; sent += length)
          group.send(to, std::vector<std::byte>(length, static_cast<std::byte>(to)));
      // Messages of a program do not block a gather.
      const Tensor mine = pattern(DType::u8, {1000}, static_cast<std::uint64_t>(group.rank()));
      (void)get_tensors_parallel(mine, std::vector<int>{2, 0, 1}, group);
      for (int from = 0; from < 3; ++from)
        for (std::size_t got = 0; from != group.rank() && got < promised; got += length)
          RANK_CHECK(group.receive(from, length) ==
                     std::vector<std::byte>(length, static_cast<std::byte>(group.rank())));
    }
  });
}

TEST_CASE("messages to a rank that does not receive are limited") {
  for (const std::string way : {"receives from another", "waits for memory", "is in a round"}) {
    CAPTURE(way);
    run_ranks(3, [&](Group& group) {
      std::size_t sent = 0;
      const Error error = error_of(ErrorKind::timeout, {}, [&] {
        if (group.rank() == 0)
          for (;; sent += 4096) group.send(1, std::vector<std::byte>(4096), {.timeout = 300ms, .phase = "sending"});
        if (group.rank() == 2 || way == "receives from another") (void)group.receive(group.rank() == 2 ? 1 : 2, 1);
        if (way == "is in a round") group.barrier();
        const int on[] = {2};
        group.wait_until([] { return false; }, [](auto longest) { std::this_thread::sleep_for(longest); }, on);
      });
      RANK_CHECK(error.rank() == 1);
      RANK_CHECK(group.rank() != 0 || (sent > promised - 8192 && sent < promised + 8192));
    });
  }
}

TEST_CASE("short messages always use the same few pages") {
  run_ranks(2, [](Group& group) {
    const auto shared_bytes = [] {
      std::ifstream file("/proc/self/status");
      for (std::string word; file >> word;)
        if (word == "RssShmem:" && file >> word) return std::stoul(word) * 1024;
      return 0UL;
    };
    const auto before = shared_bytes();
    for (int turn = 0; turn < 2000; ++turn) {
      if (group.rank() == 0)
        group.send(1, std::vector<std::byte>(1000));
      else
        RANK_CHECK(group.receive(0, 1000).size() == 1000);
      group.barrier();
    }
    RANK_CHECK(shared_bytes() - before < 64 * 1024);
  });
}
