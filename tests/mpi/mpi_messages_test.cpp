// SPDX-License-Identifier: Apache-2.0
// Messages between ranks on two hosts (MUSTER_TEST_GROUP=mpi-2) beside the group's rounds.

#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "src/mpi/transport.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

/// The call of MPI_Improbe that fails, counted from now; below 0: none fails.
std::atomic<int> fails_at{-1};
/// Until then each MPI_Improbe finds nothing, and takes 5 ms.
std::atomic<std::chrono::steady_clock::time_point> finds_from{};
std::atomic<int> found{0};
std::atomic<int> looks{0};

void check_round(Group& group) {
  std::vector<int> all(static_cast<std::size_t>(group.size()), -1);
  const int mine = 100 + group.rank();
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  for (int rank = 0; rank < group.size(); ++rank) RANK_CHECK(all[static_cast<std::size_t>(rank)] == 100 + rank);
}

std::vector<std::byte> message_of(std::size_t bytes, int seed) {
  std::vector<std::byte> message(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    message[i] = static_cast<std::byte>(i * 7 + i / 251 + static_cast<std::size_t>(seed));
  return message;
}

}  // namespace

extern "C" int MPI_Improbe(int from, int tag, MPI_Comm comm, int* flag, MPI_Message* message, MPI_Status* status) {
  if (fails_at.load() >= 0 && fails_at.fetch_sub(1) == 0) return MPI_ERR_OTHER;
  if (finds_from.load() != std::chrono::steady_clock::time_point{}) {
    std::this_thread::sleep_for(5ms);
    if (std::chrono::steady_clock::now() < finds_from.load()) {
      *flag = 0;
      return MPI_SUCCESS;
    }
  }
  ++looks;
  const int code = PMPI_Improbe(from, tag, comm, flag, message, status);
  if (*flag != 0) ++found;
  return code;
}

TEST_CASE("a message sent before a round and received after it is not taken for the round's answer") {
  // One length for each protocol. Senders and receivers are leaders of their host, ranks of the same host, and ranks of
  // the other host.
  run_ranks(6, [](Group& group) {
    for (const std::size_t bytes : {0U, 4U, 24U, 4096U, 4097U, 200U << 10})
      for (int from = 0; from < 6; ++from)
        for (int to = 0; to < 6; ++to) {
          if (from == to) continue;
          if (group.rank() == from) {
            group.send(to, message_of(bytes, 1));
            if (bytes < 4096) group.send(to, message_of(bytes / 2, 2));
          }
          check_round(group);
          group.barrier();
          if (group.rank() == to) {
            RANK_CHECK(group.receive(from, bytes) == message_of(bytes, 1));
            if (bytes < 4096) RANK_CHECK(group.receive(from, bytes) == message_of(bytes / 2, 2));
          }
        }
    check_round(group);
  });
}

TEST_CASE("ranks of two hosts that both send first make progress, up to 256 KiB") {
  run_ranks(4, [](Group& group) {
    const int other = (group.rank() + 2) % 4;
    for (const int messages : {1, 4, 512}) {
      const auto bytes = static_cast<std::size_t>((256 << 10) / messages);
      for (int i = 0; i < messages; ++i) group.send(other, message_of(bytes, i));
      // Rounds and gathers work while the messages are in flight.
      check_round(group);
      const Tensor mine = pattern(DType::u8, {100000}, 1);
      RANK_CHECK(get_tensors_parallel(mine, ranks_from(0, 4), group).empty() == (group.rank() != 0));
      for (int i = 0; i < messages; ++i) RANK_CHECK(group.receive(other, bytes) == message_of(bytes, i));
    }
    // A receiving rank accepts any length.
    constexpr std::size_t large = 5 << 20;
    if (group.rank() < 2) group.send(other, message_of(large, 1));
    if (group.rank() >= 2) RANK_CHECK(group.receive(other, large) == message_of(large, 1));
  });
}

TEST_CASE("a rank of another host that does not receive accepts 256 KiB, then its sender waits until the deadline") {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{1000}, std::size_t{100} << 10}) {
    CAPTURE(bytes);
    run_ranks(2, [&](Group& group) {
      std::size_t sent = 0;
      const Error error = error_of(ErrorKind::timeout, {}, [&] {
        if (group.rank() == 1) group.barrier();
        for (;; ++sent) group.send(1, message_of(bytes, 1), {.timeout = 500ms, .stop = {}, .phase = "sending"});
      });
      RANK_CHECK(error.rank() == 1);
      if (group.rank() == 0) RANK_CHECK(sent * bytes <= 256 << 10 && sent >= (256 << 10) / std::max(bytes, 256UL));
    });
  }
}

TEST_CASE("a message in flight outlives its sender's group") {
  run_ranks(2, [](Group& group) {
    auto copy = group.duplicate();
    if (group.rank() == 0) {
      copy->send(1, message_of(256 << 10, 1));
      copy.reset();
      // The sender works without an MPI call. Until then the receiver knows only that the sender has left.
      std::this_thread::sleep_for(1s);
    } else {
      RANK_CHECK(copy->receive(0, 256 << 10) == message_of(256 << 10, 1));
    }
    group.barrier();
  });
}

TEST_CASE("a message that was found in a round and is longer than its receiver allows fails the group") {
  const auto ended = try_ranks(4, [](Group& group) {
    const Error error = error_of(ErrorKind::corrupt, {}, [&] {
      if (group.rank() == 0) group.send(1, message_of(100, 1));
      group.barrier();
      if (group.rank() == 1) (void)group.receive(0, 99);
      group.barrier();
    });
    say(error.what());
  });
  for (const Ended& one : ended) {
    CHECK_MESSAGE(one.ok(), one.words);
    CHECK(one.words == "rank 0 announces a message of 100 bytes, but at most 99 bytes are allowed");
  }
}

TEST_CASE("an error of MPI on one rank fails the group: no rank waits until the deadline") {
  const auto ended = try_ranks(4, [](Group& group) {
    const auto begin = std::chrono::steady_clock::now();
    const Error error = error_of(ErrorKind::peer_lost, {}, [&] {
      group.barrier();
      if (group.rank() == 2) fails_at = 3;
      if (group.rank() == 0) std::this_thread::sleep_for(300ms);
      group.barrier();
    });
    RANK_CHECK(std::chrono::steady_clock::now() - begin < 3s);
    RANK_CHECK(group.error().has_value());
    say(error.what());
    // The rank stays alive, because the others also receive the error from it.
    std::this_thread::sleep_for(1s);
  });
  for (const Ended& one : ended) {
    CHECK_MESSAGE(one.ok(), one.words);
    CHECK_MESSAGE(one.words.find("\"barrier\": rank 2 with rank 0 (host ") == 0, one.words);
  }
}

TEST_CASE("a message that arrives just before its departed sender is reported as lost is not lost") {
  run_ranks(2, [](Group& group) {
    for (int turn = 0; turn < 24; ++turn) {
      auto copy = group.duplicate();
      if (group.rank() == 1) {
        copy->send(0, message_of(8, turn));
        copy.reset();
      } else {
        // The receiver learns that the sender has left, and reports the error 200 ms later.
        std::this_thread::sleep_for(20ms);
        found = 0;
        finds_from = std::chrono::steady_clock::now() + 190ms + turn * 2ms;
        try {
          RANK_CHECK(copy->receive(1, 8) == message_of(8, turn));
        } catch (const Error& error) {
          finds_from = std::chrono::steady_clock::time_point{};
          RANK_CHECK(error.kind() == ErrorKind::peer_lost);
          RANK_CHECK(found == 0);
        }
        finds_from = std::chrono::steady_clock::time_point{};
      }
      group.barrier();
    }
  });
}

TEST_CASE("while MPI may still read memory that its caller frees, a waiting thread makes no more MPI calls") {
  ::setenv("MUSTER_TEST_MPI_THREADS", "multiple", 1);
  const auto ended = try_ranks(2, [](Group& group) {
    const auto transport = mpi::MpiTransport::over(MPI_COMM_WORLD, mpi::MpiThreads::all, 10s);
    group.barrier();
    if (group.rank() == 0) {
      std::this_thread::sleep_for(2s);
      ::_exit(0);
    }
    std::atomic<int> looks_before{0};
    std::thread beside([&] {
      std::this_thread::sleep_for(300ms);
      const std::vector<std::byte> tensor(4 << 20);
      { const mpi::PendingTransfer abandoned = transport->send(0, 1, tensor, nullptr, mpi::SendEnd::sent); }
      RANK_CHECK(mpi::must_rest());
      std::this_thread::sleep_for(50ms);
      looks_before = looks.load();
    });
    const auto begin = std::chrono::steady_clock::now();
    const Error error = error_of([&] { (void)group.receive(0, 8); });
    beside.join();
    RANK_CHECK(says(error, mpi::resting_words));
    RANK_CHECK(std::chrono::steady_clock::now() - begin < 1500ms);
    std::this_thread::sleep_for(200ms);
    RANK_CHECK(looks == looks_before);
    ::_exit(0);
  });
  check_ended(ended);
  ::unsetenv("MUSTER_TEST_MPI_THREADS");
}
