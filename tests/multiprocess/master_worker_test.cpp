// SPDX-License-Identifier: Apache-2.0
// A master and its workers: tensors by handle, errors that reach the master, and ranks that die.

#include "muster/compat/master_worker.hpp"

#include <sys/resource.h>

#include <functional>
#include <limits>
#include <numeric>
#include <thread>

#include "doctest/doctest.h"
#include "tests/support/kills.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

/// Runs `play` in the master, and serves in the other ranks.
std::function<void(Group&)> playing(std::function<void(MasterWorker&)> play) {
  return [play = std::move(play)](Group& group) {
    MasterWorker ranks(group);
    if (!ranks.is_master()) return ranks.serve();
    play(ranks);
    ranks.shutdown();
  };
}

Tensor counted(std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0.0F);
  return Tensor::take(std::move(values));
}

}  // namespace

TEST_CASE("tensors are made, filled, copied, added and fetched on workers") {
  for (const int size : {2, 4}) {
    run_ranks(size, playing([size](MasterWorker& ranks) {
                // Small tensors, and tensors that do not fit into a packet.
                for (const std::int64_t count : {0, 1, 1000, 300000}) {
                  std::vector<RemoteTensor> sums;
                  for (int worker = 1; worker < size; ++worker) {
                    const RemoteTensor ones = ranks.make(worker, DType::f32, {count});
                    sums.push_back(ranks.make(worker, DType::f32, {count}));
                    RANK_CHECK(ones.worker() == worker);
                    ranks.fill(ones, 1.0F);
                    ranks.copy(sums.back(), counted(count));
                    for (int i = 0; i < worker; ++i) ranks.add(sums.back(), ones);
                  }
                  for (int worker = 1; worker < size; ++worker) {
                    const Tensor got = ranks.fetch(sums[static_cast<std::size_t>(worker - 1)]);
                    const Tensor expected = counted(count);
                    for (float& value : expected.mutable_values<float>()) value += static_cast<float>(worker);
                    RANK_CHECK(bitwise_equal(got, expected));
                  }
                  // Copies around all workers, and from two workers to each other.
                  for (int worker = 1; worker < size; ++worker) {
                    const auto at = static_cast<std::size_t>(worker - 1);
                    ranks.copy(sums[(at + 1) % sums.size()], sums[at]);
                  }
                  const Tensor first = ranks.fetch(sums[0]);
                  for (const RemoteTensor& each : sums) RANK_CHECK(bitwise_equal(ranks.fetch(each), first));
                }
                const RemoteTensor zeros = ranks.make(1, DType::bf16, {3, 5});
                const Tensor nothing = ranks.fetch(zeros);
                for (const std::byte byte : nothing.bytes()) RANK_CHECK(byte == std::byte{0});
                const RemoteTensor scalar = ranks.make(1, DType::i64, {});
                ranks.fill(scalar, std::int64_t{1} << 62);
                RANK_CHECK(ranks.fetch(scalar).values<std::int64_t>()[0] == std::int64_t{1} << 62);
                const RemoteTensor packed = ranks.make(1, DType::u4, {7});
                ranks.copy(packed, pattern(DType::u4, {7}, 3));
                RANK_CHECK(is_pattern(ranks.fetch(packed), DType::u4, {7}, 3));
                // A worker also accepts its own tensor as the source.
                ranks.add(scalar, scalar);
                ranks.copy(scalar, scalar);
                RANK_CHECK(ranks.fetch(scalar).values<std::int64_t>()[0] == std::numeric_limits<std::int64_t>::min());
                ranks.wait();
              }));
  }
}

TEST_CASE("an error of a worker is thrown by the next call that waits for it, and the worker continues to serve") {
  run_ranks(
      3, playing([](MasterWorker& ranks) {
        const RemoteTensor well = ranks.make(1, DType::f32, {4});
        const RemoteTensor elsewhere = ranks.make(2, DType::f32, {4});
        const RemoteTensor too_large = ranks.make(1, DType::f32, {std::int64_t{1} << 50});
        ranks.fill(too_large, 1.0F);
        ranks.fill(elsewhere, 2.0F);
        RANK_CHECK(ranks.fetch(elsewhere).values<float>()[3] == 2);
        const Error error = error_of(ErrorKind::out_of_space, {"rank 1 (host", "F32 [1125899906842624]", "available"},
                                     [&] { (void)ranks.fetch(well); });
        RANK_CHECK(error.rank() == 1);
        RANK_CHECK(ranks.fetch(well).values<float>()[3] == 0);
        error_of(ErrorKind::not_found, {"rank 1", "does not exist"}, [&] { (void)ranks.fetch(too_large); });
        const RemoteTensor no_sum = ranks.make(2, DType::f8_e8m0, {4});
        ranks.add(no_sum, no_sum);
        error_of(ErrorKind::unsupported, {"rank 2"}, [&] { ranks.wait(); });
        ranks.wait();
        // Neither worker waits for data that cannot arrive.
        const RemoteTensor target = ranks.make(2, DType::f32, {std::int64_t{1} << 50});
        ranks.wait(1);
        error_of(ErrorKind::out_of_space, {"rank 2"}, [&] { ranks.wait(2); });
        ranks.copy(target, too_large);
        error_of(ErrorKind::not_found, {"rank 1"}, [&] { ranks.wait(1); });
        error_of(ErrorKind::not_found, {"rank 2"}, [&] { ranks.wait(2); });
        // Calls that the master itself can check.
        const RemoteTensor other = ranks.make(1, DType::f32, {5});
        error_of(ErrorKind::invalid_argument, {"F32 [5]", "F32 [4]"}, [&] { ranks.add(well, other); });
        error_of(ErrorKind::invalid_argument, {"F32 [5]", "F32 [4]"}, [&] { ranks.copy(well, other); });
        error_of(ErrorKind::invalid_argument, {"F32 [2]", "F32 [4]"}, [&] { ranks.copy(well, counted(2)); });
        error_of(ErrorKind::invalid_argument, {"rank 2", "rank 1"}, [&] { ranks.add(well, elsewhere); });
        error_of(ErrorKind::invalid_argument, {"F32 [4]", "F64"}, [&] { ranks.fill(well, 1.0); });
        error_of(ErrorKind::invalid_argument, {"one element"}, [&] { ranks.fill(well, counted(2)); });
        error_of(ErrorKind::invalid_argument, {"rank 0", "1 to 2"}, [&] { (void)ranks.make(0, DType::f32, {1}); });
        error_of(ErrorKind::invalid_argument, {"rank 3", "1 to 2"}, [&] { ranks.wait(3); });
        error_of(ErrorKind::invalid_argument, {"it is empty"}, [&] { ranks.fill(RemoteTensor(), 1.0F); });
        error_of(ErrorKind::invalid_argument, {"master"}, [&] { ranks.serve(); });
      }));
  run_ranks(2, [](Group& group) {
    MasterWorker ranks(group);
    MasterWorker others(group);
    if (ranks.is_master()) {
      const RemoteTensor tensor = ranks.make(1, DType::f32, {1});
      return (void)error_of(ErrorKind::invalid_argument, {"another MasterWorker"}, [&] { others.fill(tensor, 1.0F); });
    }
    error_of(ErrorKind::invalid_argument, {"rank 1", "worker"}, [&] { (void)ranks.make(1, DType::f32, {1}); });
  });
}

TEST_CASE("a worker drops tensors without a handle at the master; shutdown drops all, and it may serve again") {
  run_ranks(2, [](Group& group) {
    MasterWorker ranks(group);
    RemoteTensor last;
    for (int round = 0; round < 2; ++round) {
      if (!ranks.is_master()) {
        const auto peak = [] {
          rusage usage{};
          ::getrusage(RUSAGE_SELF, &usage);
          return usage.ru_maxrss;
        };
        const long before = peak();
        ranks.serve();
        // The limit is in kilobytes, of 480 MiB in all. Three tensors and the message of one exist at a time.
        RANK_CHECK(under_sanitizer || peak() - before < 240L << 10);
        continue;
      }
      if (round == 1) error_of(ErrorKind::not_found, {"shutdown"}, [&] { (void)ranks.fetch(last); });
      // Above 32 MiB malloc() maps each block, so no hole of the heap counts as a kept tensor.
      for (int i = 0; i < 12; ++i) {
        last = ranks.make(1, DType::u8, {40 << 20});
        const RemoteTensor copy = last;
      }
      RANK_CHECK(ranks.fetch(last).nbytes() == 40U << 20);
      ranks.shutdown();
    }
  });
}

TEST_CASE("a worker that is killed is named") {
  for (const bool while_it_is_waited_for : {true, false}) {
    const auto ended = try_ranks(4, [&](Group& group) {
      const auto pid = static_cast<pid_t>(group.info(2).pid);
      MasterWorker ranks(group);
      if (group.rank() == 2) {
        kill_self_after(while_it_is_waited_for ? 100ms : 0ms);
        ranks.serve();
      } else if (group.rank() != 0) {
        const Error error = error_of([&] { ranks.serve(); });
        RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == 2);
      } else {
        const RemoteTensor tensor = ranks.make(2, DType::f32, {100000});
        const RemoteTensor other = ranks.make(1, DType::f32, {100000});
        if (!while_it_is_waited_for) std::this_thread::sleep_for(100ms);
        auto since = std::chrono::steady_clock::now();
        const Error error = error_of([&] {
          for (;;) {
            since = std::chrono::steady_clock::now();
            ranks.copy(tensor, other);
            (void)ranks.fetch(tensor);
          }
        });
        check_named(error, since, 2, pid, 1s);
      }
    });
    check_ended(ended, {2});
  }
}

TEST_CASE("a master that is killed, or leaves, ends its workers") {
  for (const bool is_killed : {true, false}) {
    const auto ended = try_ranks(3, [&](Group& group) {
      const auto pid = static_cast<pid_t>(group.info(0).pid);
      MasterWorker ranks(group);
      if (ranks.is_master()) {
        const RemoteTensor tensor = ranks.make(1, DType::f32, {1000000});
        (void)ranks.fetch(tensor);
        if (is_killed) ::raise(SIGKILL);
        return;
      }
      const Error error = error_of([&] { ranks.serve(); });
      RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == 0);
      RANK_CHECK(says(error, std::to_string(pid)));
    });
    check_ended(ended, is_killed ? std::vector<int>{0} : std::vector<int>{});
  }
}

TEST_CASE("a master that is busy for too long exceeds the deadline") {
  run_ranks(2, [](Group& group) {
    MasterWorker ranks(group);
    if (ranks.is_master()) {
      for (int i = 0; i < 8; ++i) {
        std::this_thread::sleep_for(100ms);
        ranks.group().progress();
      }
      ranks.wait();
      std::this_thread::sleep_for(1s);
      RANK_CHECK(error_of([&] { ranks.wait(); }).kind() == ErrorKind::timeout);
    } else {
      error_of(ErrorKind::timeout, {"rank 0"}, [&] { ranks.serve({.timeout = 500ms}); });
    }
  });
}
