// SPDX-License-Identifier: Apache-2.0
// A queue of one writer and many readers: every message to all, in order, whoever is slow or dies.

#include "muster/message_queue.hpp"

#include <random>
#include <thread>

#include "doctest/doctest.h"
#include "tests/support/kills.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

std::vector<std::byte> message(std::uint64_t number, std::size_t bytes) {
  std::vector<std::byte> all(bytes);
  fill(all.data(), bytes, number);
  return all;
}

/// Lengths that come to every place of a small ring, empty and longer than it, too.
std::size_t length_of(std::uint64_t number) {
  std::mt19937_64 random(number);
  switch (random() % 8) {
    case 0:
      return 0;
    case 1:
      return random() % 300000;
    default:
      return random() % 2000;
  }
}

}  // namespace

TEST_CASE("every message comes to every reader, in order, whole") {
  for (const int size : {1, 2, 4})
    for (const std::uint64_t capacity : {std::uint64_t{64} << 10, std::uint64_t{1000000}}) {
      run_ranks(size, [&](SyncGroup& group) {
        const int writer = size - 1;
        MessageQueue queue(group, {.writer = writer, .capacity = capacity});
        for (std::uint64_t i = 0; i < 3000; ++i) {
          if (group.rank() == writer) {
            queue.put(message(i, length_of(i)));
          } else {
            if (i % 1000 == 500 + static_cast<std::uint64_t>(group.rank())) std::this_thread::sleep_for(5ms);
            RANK_CHECK(queue.get() == message(i, length_of(i)));
          }
        }
        RANK_CHECK(!queue.has_message());
        group.barrier();
        const Config config = Config::object({{"step", 3}});
        if (group.rank() == writer)
          queue.put_config(config);
        else
          RANK_CHECK(queue.get_config() == config);
      });
    }
}

TEST_CASE("what a dead writer has written is still read, then it is named; one that leaves is told") {
  for (const bool is_killed : {true, false}) {
    CAPTURE(is_killed);
    const auto ended = try_ranks(3, [&](SyncGroup& group) {
      const auto pid = static_cast<pid_t>(group.info(0).pid);
      auto queue = std::make_unique<MessageQueue>(group);
      if (group.rank() == 0) {
        for (std::uint64_t i = 0; i < 100; ++i) queue->put(message(i, 1000));
        if (is_killed) ::raise(SIGKILL);
        queue = nullptr;
        group.barrier();
        return;
      }
      if (is_killed)
        while (::kill(pid, 0) == 0 && group.rank() == 1) std::this_thread::sleep_for(1ms);
      else
        group.barrier();
      for (std::uint64_t i = 0; i < 100; ++i) RANK_CHECK(queue->get() == message(i, 1000));
      const auto since = std::chrono::steady_clock::now();
      const Error error = error_of([&] { (void)queue->get(); });
      if (is_killed)
        check_named(error, since, 0, pid, 1s);
      else
        RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == 0);
    });
    check_ended(ended, is_killed ? std::vector<int>{0} : std::vector<int>{});
  }
}

TEST_CASE("a dead reader is dropped, or fails the writer once it is too far behind") {
  for (const auto policy : {QueueOptions::DeadReader::drop, QueueOptions::DeadReader::fail}) {
    const bool drops = policy == QueueOptions::DeadReader::drop;
    CAPTURE(drops);
    const auto ended = try_ranks(3, [&](SyncGroup& group) {
      const auto pid = static_cast<pid_t>(group.info(2).pid);
      MessageQueue queue(group, {.capacity = 64 << 10, .dead_reader = policy});
      if (group.rank() == 2) ::raise(SIGKILL);
      const auto work = [&] {
        for (std::uint64_t i = 0; i < 500; ++i) {
          if (group.rank() == 0)
            queue.put(message(i, 1000));
          else
            RANK_CHECK(queue.get() == message(i, 1000));
        }
      };
      if (drops) return work();
      const Error error = error_of(work);
      RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == 2);
      RANK_CHECK(says(error, std::to_string(pid)));
    });
    check_ended(ended, {2});
  }
}

TEST_CASE(
    "a writer that waits for a slow reader ends at its deadline, which names it; so does a reader that gets nothing") {
  run_ranks(2, [](SyncGroup& group) {
    MessageQueue full(group, {.capacity = 64 << 10});
    MessageQueue empty(group);
    if (group.rank() == 0)
      error_of(ErrorKind::timeout, {"rank 1", "queue: put"}, [&] {
        for (;;) full.put(message(1, 1000), {.timeout = 100ms});
      });
    else
      error_of(ErrorKind::timeout, {"rank 0", "queue: get"}, [&] { (void)empty.get({.timeout = 100ms}); });
    group.barrier();
  });
}

TEST_CASE("what cannot be is everyone's error, or the caller's own") {
  run_ranks(3, [](SyncGroup& group) {
    error_of(ErrorKind::argument, {"writer 3"}, [&] { MessageQueue(group, {.writer = 3}); });
    error_of(ErrorKind::argument, {"writer -1"}, [&] { MessageQueue(group, {.writer = -1}); });
    error_of(ErrorKind::argument, {"64 KiB"}, [&] { MessageQueue(group, {.capacity = 1000}); });
    error_of(ErrorKind::rank_mismatch, {"ranks 0 and 2"},
             [&] { MessageQueue(group, {.writer = group.rank() == 2 ? 1 : 0}); });
    MessageQueue queue(group, {.writer = 1});
    if (group.rank() == 1)
      error_of(ErrorKind::argument, {"writer"}, [&] { (void)queue.get(); });
    else
      error_of(ErrorKind::argument, {"reads"}, [&] { queue.put({}); });
    if (group.rank() == 1)
      queue.put(message(5, 10));
    else
      RANK_CHECK(queue.get() == message(5, 10));
  });
}
