// SPDX-License-Identifier: Apache-2.0
// A queue of one writer and many readers: every message reaches all readers in order, even if a rank is slow or dies.

#include "muster/message_queue.hpp"

#include <sys/resource.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>

#include "doctest/doctest.h"
#include "src/group/region.hpp"
#include "src/os/pages.hpp"
#include "src/shm/segment.hpp"
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

/// Lengths that end at every position of a small ring, including empty messages and those longer than the ring.
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

TEST_CASE("every message reaches every reader, in order and complete") {
  for (const int size : {1, 2, 4})
    for (const std::uint64_t capacity : {std::uint64_t{64} << 10, std::uint64_t{1000000}}) {
      run_ranks(size, [&](Group& group) {
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

TEST_CASE("messages of a dead writer are still read, then it is named; a writer that leaves is reported") {
  for (const bool is_killed : {true, false}) {
    CAPTURE(is_killed);
    const auto ended = try_ranks(3, [&](Group& group) {
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

TEST_CASE("a chunk that is longer than the ring fails the queue on all ranks") {
  const std::uint64_t capacity = 64 << 10;
  run_ranks(3, [&](Group& group) {
    const auto region = group::Region::own();
    std::uint64_t place = region->take(os::page_size());
    MessageQueue queue(group, {.writer = 0, .capacity = capacity});
    if (group.rank() == 0) {
      queue.put(message(1, 10));
      // The header of the message, which begins with its length, follows the words of the writer and of each rank.
      const std::uint64_t heads = 64 * (1 + static_cast<std::uint64_t>(group.size()));
      for (bool is_found = false; !is_found; place += os::page_size()) {
        RANK_CHECK(place < region->size());
        try {
          const shm::RemoteSegment segment(*region, place, os::Access::read_write);
          is_found = segment.capacity() == heads + capacity;
          if (is_found) std::memcpy(segment.mapping().data() + heads, &capacity, sizeof capacity);
        } catch (const Error&) {
          continue;  // no segment begins here
        }
      }
    }
    group.barrier();
    error_of(ErrorKind::corrupt, {"longer than its ring"}, [&] {
      if (group.rank() != 0) (void)queue.get();
      group.barrier();
      queue.put(message(2, 10));
    });
    if (group.rank() != 0) group.barrier();
  });
}

TEST_CASE("a dead reader is dropped, or fails the writer once it is too far behind") {
  for (const auto policy : {QueueOptions::DeadReader::drop, QueueOptions::DeadReader::fail}) {
    const bool drops = policy == QueueOptions::DeadReader::drop;
    CAPTURE(drops);
    const auto ended = try_ranks(3, [&](Group& group) {
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

TEST_CASE("a writer that waits for a slow reader names it at its deadline; a reader without a message does the same") {
  run_ranks(2, [](Group& group) {
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

TEST_CASE("invalid calls are an error on all ranks, or only on the caller") {
  run_ranks(3, [](Group& group) {
    error_of(ErrorKind::invalid_argument, {"writer 3"}, [&] { MessageQueue(group, {.writer = 3}); });
    error_of(ErrorKind::invalid_argument, {"writer -1"}, [&] { MessageQueue(group, {.writer = -1}); });
    error_of(ErrorKind::invalid_argument, {"64 KiB"}, [&] { MessageQueue(group, {.capacity = 1000}); });
    error_of(ErrorKind::rank_mismatch, {"ranks 0 and 2"},
             [&] { MessageQueue(group, {.writer = group.rank() == 2 ? 1 : 0}); });
    MessageQueue queue(group, {.writer = 1});
    if (group.rank() == 1)
      error_of(ErrorKind::invalid_argument, {"writer"}, [&] { (void)queue.get(); });
    else
      error_of(ErrorKind::invalid_argument, {"only its writer"}, [&] { queue.put({}); });
    if (group.rank() == 1)
      queue.put(message(5, 10));
    else
      RANK_CHECK(queue.get() == message(5, 10));
  });
}

namespace {

/// Runs `rank` in each rank of a group, and `writer` in a process outside the group. The writer's end is the last
/// element of the result.
std::vector<Ended> with_outside(int ranks, const std::function<void(Group&, const QueueOptions&)>& rank,
                                const std::function<void(const QueueOptions&)>& writer) {
  const GroupOf group(ranks);
  const QueueOptions options{.external_writer = make_queue_handle(ranks), .capacity = 64 << 10};
  Ranks all(ranks + 1, [&](int self) {
    if (self == ranks) return writer(options);
    const std::shared_ptr<Group> own = group.join(self);
    rank(*own, options);
  });
  return all.wait();
}

}  // namespace

TEST_CASE("a writer outside the group, by a handle") {
  for (const int size : {1, 3}) {
    const auto ended = with_outside(
        size,
        [](Group& group, const QueueOptions& options) {
          MessageQueue queue(group, options);
          for (std::uint64_t i = 0; i < 1000; ++i) RANK_CHECK(queue.get() == message(i, length_of(i)));
          error_of(ErrorKind::invalid_argument, {"writer"}, [&] { queue.put({}); });
          // The config is in the writer's memory, and the writer may have exited by now.
          const Config large = queue.get_config();
          RANK_CHECK(error_of([&] { (void)queue.get(); }).kind() == ErrorKind::peer_lost);
          RANK_CHECK(is_pattern(large.at("all").as_tensor(), DType::u8, {100000}, 1));
          group.barrier();
        },
        [](const QueueOptions& options) {
          MessageQueue queue = MessageQueue::attach_writer(options);
          for (std::uint64_t i = 0; i < 1000; ++i) queue.put(message(i, length_of(i)));
          queue.put_config(Config::object({{"all", pattern(DType::u8, {100000}, 1)}}));
        });
    check_ended(ended);
  }
}

TEST_CASE("a writer outside that is killed: its messages are still read, then its process is named") {
  const auto ended = with_outside(
      2,
      [](Group& group, const QueueOptions& options) {
        MessageQueue queue(group, options);
        std::int64_t pid = 0;
        const std::vector<std::byte> first = queue.get();
        std::memcpy(&pid, first.data(), sizeof pid);
        if (group.rank() == 1) std::this_thread::sleep_for(200ms);
        for (std::uint64_t i = 0; i < 50; ++i) RANK_CHECK(queue.get() == message(i, 1000));
        const auto since = std::chrono::steady_clock::now();
        const Error error = error_of([&] {
          for (;;) (void)queue.get();
        });
        RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.pid() == pid && !error.rank());
        RANK_CHECK(says(error, "external writer") && says(error, std::to_string(pid)));
        RANK_CHECK(std::chrono::steady_clock::now() - since < 1s);
        group.barrier();  // the group has not failed
      },
      [](const QueueOptions& options) {
        MessageQueue queue = MessageQueue::attach_writer(options);
        const std::int64_t pid = ::getpid();
        queue.put(std::as_bytes(std::span(&pid, 1)));
        for (std::uint64_t i = 0; i < 50; ++i) queue.put(message(i, 1000));
        // The next message is longer than the ring: the writer dies in the middle of it.
        kill_self_after(20ms);
        for (;;) queue.put(message(1, 1 << 20));
      });
  check_ended(ended, {2});
  CHECK(shared_memory_names().empty());
}

TEST_CASE("a writer outside gets an error that names the dead reader, or continues without it") {
  for (const auto policy : {QueueOptions::DeadReader::drop, QueueOptions::DeadReader::fail}) {
    const bool drops = policy == QueueOptions::DeadReader::drop;
    CAPTURE(drops);
    const auto ended = with_outside(
        2,
        [&](Group& group, QueueOptions options) {
          options.dead_reader = policy;
          MessageQueue queue(group, options);
          if (group.rank() == 1) {
            (void)queue.get();
            ::raise(SIGKILL);
          }
          const auto read_all = [&] {
            for (std::uint64_t i = 0; i < 300; ++i) RANK_CHECK(queue.get() == message(i, 1000));
          };
          if (drops)
            read_all();
          else
            RANK_CHECK(error_of(read_all).rank() == 1);
        },
        [&](QueueOptions options) {
          options.dead_reader = policy;
          MessageQueue queue = MessageQueue::attach_writer(options);
          const auto write_all = [&] {
            for (std::uint64_t i = 0; i < 300; ++i) queue.put(message(i, 1000));
          };
          if (drops)
            write_all();
          else
            RANK_CHECK(error_of(write_all).rank() == 1);
        });
    check_ended(ended, {1});
  }
}

TEST_CASE("invalid handles, handles for another number of ranks, and handles whose writer never arrives") {
  CHECK_THROWS_WITH_AS((void)make_queue_handle(0), doctest::Contains("0 ranks"), Error);
  CHECK(make_queue_handle(3) != make_queue_handle(3));
  for (const std::string bad : {"", "muster-queue:", "muster-queue:2,", "muster-queue:2,0123", "muster-queue:-2,x",
                                "queue", "muster-queue:2000000000,0123456789abcdef0123456789abcdef"})
    CHECK_THROWS_AS((void)MessageQueue::attach_writer({.external_writer = bad}), Error);
  const std::string handle = make_queue_handle(2);
  const std::string other = make_queue_handle(2);
  const std::string of_three = make_queue_handle(3);
  run_ranks(2, [&](Group& group) {
    error_of(ErrorKind::invalid_argument, {"queue handle"},
             [&] { MessageQueue(group, {.external_writer = handle + " "}); });
    error_of(ErrorKind::invalid_argument, {"for 3 ranks", "has 2"},
             [&] { MessageQueue(group, {.external_writer = of_three}); });
    // An invalid argument on one rank is an error on all ranks, and the group remains usable.
    error_of(ErrorKind::invalid_argument, {"rank 1", "for 3 ranks", "has 2"},
             [&] { MessageQueue(group, {.external_writer = group.rank() == 0 ? handle : of_three}); });
    error_of(ErrorKind::rank_mismatch, {"ranks 0 and 1"},
             [&] { MessageQueue(group, {.external_writer = group.rank() == 0 ? handle : other}); });
    error_of(ErrorKind::timeout, {"external writer", "rank 2"},
             [&] { MessageQueue(group, {.external_writer = handle, .wait = {.timeout = 200ms}}); });
    group.barrier();
  });
  const auto ended = with_outside(
      2,
      [](Group& group, const QueueOptions& options) {
        error_of(ErrorKind::rank_mismatch, {"external writer"}, [&] { MessageQueue(group, options); });
      },
      [](QueueOptions options) {
        options.capacity *= 2;
        error_of(ErrorKind::rank_mismatch, {"external writer"}, [&] { MessageQueue::attach_writer(options); });
      });
  check_ended(ended);
}

TEST_CASE("a queue with one reader, which may be the writer itself") {
  run_ranks(3, [](Group& group) {
    MessageQueue own(group, {.writer = 1, .reader = 1, .capacity = 64 << 10});
    MessageQueue to_last(group, {.writer = 1, .reader = 2});
    if (group.rank() == 1) {
      for (std::uint64_t i = 0; i < 1000; ++i) {
        own.put(message(i, 500));
        own.put(message(i, 10000));
        RANK_CHECK(own.has_message());
        RANK_CHECK(own.get() == message(i, 500));
        RANK_CHECK(own.get() == message(i, 10000));
        RANK_CHECK(!own.has_message());
        to_last.put(message(i, 100));
      }
      const Config large = Config::object({{"all", pattern(DType::u8, {1 << 20}, 3)}});
      own.put_config(large);
      RANK_CHECK(own.get_config() == large);
      error_of(ErrorKind::invalid_argument, {"itself"}, [&] { (void)own.get(); });
      error_of(ErrorKind::invalid_argument, {"itself"}, [&] {
        for (;;) own.put(message(1, 10000));  // the queue has space for some
      });
      RANK_CHECK(own.get() == message(1, 10000));
    } else if (group.rank() == 2) {
      for (std::uint64_t i = 0; i < 1000; ++i) RANK_CHECK(to_last.get() == message(i, 100));
    } else {
      error_of(ErrorKind::invalid_argument, {"one reader"}, [&] { (void)to_last.get(); });
      error_of(ErrorKind::invalid_argument, {"only its writer"}, [&] { to_last.put({}); });
    }
    group.barrier();
    error_of(ErrorKind::invalid_argument, {"reader 3"}, [&] { MessageQueue(group, {.reader = 3}); });
    error_of(ErrorKind::rank_mismatch, {"ranks 0 and 2"},
             [&] { MessageQueue(group, {.reader = group.rank() == 2 ? 1 : 0}); });
  });
}

TEST_CASE("a reader that waits sleeps") {
  run_ranks(2, [](Group& group) {
    MessageQueue queue(group);
    if (group.rank() == 0) {
      std::this_thread::sleep_for(600ms);
      queue.put({});
      return;
    }
    const auto used = [] {
      rusage usage{};
      ::getrusage(RUSAGE_THREAD, &usage);
      return std::chrono::seconds(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
             std::chrono::microseconds(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
    };
    const auto before = used();
    (void)queue.get();
    // The reader wakes up 30 times, for about 30 us each.
    const auto most = under_sanitizer ? 50ms : 3ms;
    RANK_CHECK(used() - before < most);
  });
}

TEST_CASE("a large Config is copied once, by its writer: readers read it in place") {
  run_ranks(3, [](Group& group) {
    MessageQueue queue(group, {.writer = 1, .capacity = 1 << 20});
    const auto config_of = [](std::uint64_t number) {
      return Config::object(
          {{"number", static_cast<std::int64_t>(number)},
           {"small", pattern(DType::u8, {3}, number)},
           {"large",
            pattern(DType::f32, {number % 3 == 0 ? 1000 : 30000 + 1000 * static_cast<std::int64_t>(number)}, number)}});
    };
    std::uint64_t room = 0;
    std::vector<Config> kept;
    for (std::uint64_t i = 0; i < 60; ++i) {
      const Config config = config_of(i % 20);
      if (group.rank() == 1) {
        queue.put_config(config);
        queue.put(message(i, 3000));
        // Once the largest configs have been sent no more memory is taken, if no reader keeps a config.
        if (i == 39) room = group::Region::own()->room();
        group.barrier();
        continue;
      }
      {
        const Config got = queue.get_config();
        RANK_CHECK(got == config);
        RANK_CHECK(got.at("large").as_tensor().is_writable() == (i % 20 % 3 == 0));
        RANK_CHECK(queue.get() == message(i, 3000));
        if (i < 3) kept.push_back(got);
      }
      group.barrier();
    }
    if (group.rank() == 1) RANK_CHECK(group::Region::own()->room() == room);
    for (std::uint64_t i = 0; i < kept.size(); ++i) RANK_CHECK(kept[i] == config_of(i));
    // A config is also received as bytes, and may be longer than the ring.
    const Config huge = Config::object({{"all", pattern(DType::u8, {5 << 20}, 7)}});
    for (int i = 0; i < 3; ++i)
      if (group.rank() == 1)
        queue.put_config(huge);
      else if (i == 1)
        RANK_CHECK(queue.get().size() > (5U << 20));
      else
        RANK_CHECK(queue.get_config() == huge);
  });
}

TEST_CASE("large Configs that wait for a slow reader have a bound") {
  run_ranks(2, [](Group& group) {
    MessageQueue queue(group, {.capacity = 1 << 20});
    const Config config = Config::object({{"all", pattern(DType::u8, {300000}, 7)}});
    if (group.rank() == 0) {
      int put = 0;
      error_of(ErrorKind::timeout, {"queue: put"}, [&] {
        for (;; ++put) queue.put_config(config, {.timeout = 100ms});
      });
      RANK_CHECK(put == 3);
    } else {
      std::this_thread::sleep_for(300ms);
      // These configs are still read.
      for (int i = 0; i < 3; ++i) RANK_CHECK(queue.get_config() == config);
      RANK_CHECK(error_of([&] { (void)queue.get_config(); }).kind() == ErrorKind::timeout);
    }
  });
}

TEST_CASE("memory shared by a dead writer stays valid; memory held by dead readers is reused") {
  const auto ended = try_ranks(3, [](Group& group) {
    const auto config = [](std::uint64_t number) {
      return Config::object({{"all", pattern(DType::u8, {200000}, number)}});
    };
    MessageQueue queue(group, {.dead_reader = QueueOptions::DeadReader::drop});
    if (group.rank() == 0) {
      const std::uint64_t room = group::Region::own()->room();
      for (std::uint64_t i = 0; i < 100; ++i) queue.put_config(config(i));
      // Of 20 MB, at most 4 MiB may be in flight.
      RANK_CHECK(room - group::Region::own()->room() < (6U << 20));
      for (std::uint64_t i = 0; i < 3; ++i) queue.put_config(config(i));
      ::raise(SIGKILL);
    }
    for (std::uint64_t i = 0; i < 100; ++i) {
      const Config got = queue.get_config();
      RANK_CHECK(got == config(i));
      if (group.rank() == 2 && i == 30) ::raise(SIGKILL);
    }
    std::this_thread::sleep_for(100ms);
    std::vector<Config> last;
    for (std::uint64_t i = 0; i < 3; ++i) last.push_back(queue.get_config());
    RANK_CHECK(error_of([&] { (void)queue.get_config(); }).rank() == 0);
    for (std::uint64_t i = 0; i < 3; ++i) RANK_CHECK(last[i] == config(i));
  });
  check_ended(ended, {0, 2});
}

TEST_CASE("a rank that is killed at any moment is named, and earlier messages are complete") {
  for (int round = 0; round < 24; ++round) {
    const int victim = round % 3;
    CAPTURE(round);
    const auto ended = try_ranks(3, [&](Group& group) {
      const auto pid = static_cast<pid_t>(group.info(victim).pid);
      // Sent through the ring, in pieces, and by reference.
      const auto config_of = [](std::uint64_t number) {
        const std::int64_t bytes = number % 3 == 0 ? 100 : number % 3 == 1 ? 40000 : 150000;
        return Config::object({{"all", pattern(DType::u8, {bytes}, number)}});
      };
      MessageQueue queue(group, {.capacity = 128 << 10});
      if (group.rank() == victim) kill_self_after(std::chrono::microseconds(round * 300));
      auto since = std::chrono::steady_clock::now();
      const Error error = error_of([&] {
        for (std::uint64_t i = 0;; ++i) {
          since = std::chrono::steady_clock::now();
          if (group.rank() == 0)
            queue.put_config(config_of(i));
          else
            RANK_CHECK(queue.get_config() == config_of(i));
        }
      });
      check_named(error, since, victim, pid, 1s);
    });
    check_ended(ended, {victim});
  }
  CHECK(shared_memory_names().empty());
}
