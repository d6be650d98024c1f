// SPDX-License-Identifier: Apache-2.0
// Groups of ranks on two hosts (MUSTER_TEST_GROUP=mpi-2) are created at the same time and destroyed, and release all
// resources.

#include <mpi.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <set>
#include <stop_token>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/mpi.hpp"
#include "src/mpi/transport.hpp"
#include "src/multihost/context.hpp"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

void stream_nothing(SyncGroup& group) {
  (void)gather_each([]() -> std::optional<Config> { return std::nullopt; }, ranks_from(0, group.size()), group,
                    [](LayerPart&) {});
}

std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

/// Sends whose completion has not been read from MPI.
struct OpenSends {
  std::mutex mutex;
  std::multiset<MPI_Request> requests;
} open_sends;

/// The number of tensor pieces after which this rank is cancelled, counted from now.
std::atomic<int> stops_at{0};
std::stop_source stops;

/// If true, no such send may exist when MPI_Finalize is called.
std::atomic<bool> no_sends_at_end{false};

/// The collective operation in the destruction of groups that delays this rank, counted from now; below 0: none.
std::atomic<int> holds_up_at{-1};
/// The shortest time that MPI_Finalize must take. All groups have ended before it is called.
std::atomic<std::chrono::milliseconds> least_finalize{0ms};

}  // namespace

extern "C" int MPI_Isend(const void* bytes, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  const int code = PMPI_Isend(bytes, count, type, to, tag, comm, request);
  if (count == 4 << 20 && stops_at.fetch_sub(1) == 1) stops.request_stop();
  const std::lock_guard lock(open_sends.mutex);
  open_sends.requests.insert(*request);
  return code;
}

extern "C" int MPI_Issend(const void* bytes, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                          MPI_Request* request) {
  const int code = PMPI_Issend(bytes, count, type, to, tag, comm, request);
  const std::lock_guard lock(open_sends.mutex);
  open_sends.requests.insert(*request);
  return code;
}

extern "C" int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  const MPI_Request before = *request;
  const int code = PMPI_Test(request, flag, status);
  const std::lock_guard lock(open_sends.mutex);
  if (const auto found = open_sends.requests.find(before); *flag != 0 && found != open_sends.requests.end())
    open_sends.requests.erase(found);
  return code;
}

extern "C" int MPI_Iallreduce(const void* mine, void* all, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                              MPI_Request* request) {
  const int code = PMPI_Iallreduce(mine, all, count, type, op, comm, request);
  if (holds_up_at.load() < 0 || holds_up_at.fetch_sub(1) != 0) return code;
  PMPI_Wait(request, MPI_STATUS_IGNORE);
  std::this_thread::sleep_for(3s);
  return code;
}

extern "C" int MPI_Finalize() {
  const std::chrono::milliseconds least = least_finalize.load();
  const auto closing = std::chrono::steady_clock::now();
  while (least != 0ms && std::chrono::steady_clock::now() - closing < 300ms) multihost::advance_endings("mpi");
  const auto begin = std::chrono::steady_clock::now();
  const int code = PMPI_Finalize();
  if (std::chrono::steady_clock::now() - begin < least) ::_exit(3);
  if (no_sends_at_end && !open_sends.requests.empty()) ::_exit(4);
  return code;
}

TEST_CASE("a group that had a stream is freed with its last owner, with its descriptors") {
  run_ranks(4, [](SyncGroup& group) {
    std::ptrdiff_t before = 0;
    for (int turn = 0; turn < 20; ++turn) {
      const auto copy = group.duplicate();
      stream_nothing(*copy);
      if (turn == 1) before = open_descriptors();
    }
    group.barrier();
    RANK_CHECK(open_descriptors() <= before);
  });
}

TEST_CASE("the other ranks name a rank that leaves a group with an earlier stream, at once") {
  const auto ended = try_ranks(4, [](SyncGroup& group) {
    auto copy = group.duplicate();
    stream_nothing(*copy);
    group.barrier();
    if (group.rank() == 2) {
      copy.reset();
    } else {
      const auto begin = std::chrono::steady_clock::now();
      error_of(ErrorKind::peer_lost, {"left the group"}, [&] { copy->barrier(); });
      RANK_CHECK(std::chrono::steady_clock::now() - begin < 2s);
    }
    group.barrier();
  });
  check_ended(ended);
}

TEST_CASE("groups created and destroyed leave no sends of their last rounds") {
  run_ranks(4, [](SyncGroup& group) {
    for (int turn = 0; turn < 300; ++turn) group.duplicate()->barrier();
    group.barrier();
    const std::lock_guard lock(open_sends.mutex);
    RANK_CHECK(open_sends.requests.size() < 30);
  });
}

TEST_CASE("an unreceived message of a busy sender delays no rank in the destructor of its group") {
  for (const bool is_too_long : {false, true}) {
    CAPTURE(is_too_long);
    run_ranks(4, [&](SyncGroup& group) {
      auto other = mpi_group(MPI_COMM_WORLD);
      try {
        std::stop_source source;
        if (!is_too_long) source.request_stop();
        if (group.rank() == 2) other->send(0, std::vector<std::byte>(4 << 20), {.stop = source.get_token()});
        if (group.rank() == 0 && is_too_long) (void)other->receive(2, 99);
        other->barrier();
        throw RankFailure("nothing was thrown");
      } catch (const Error& error) {
        RANK_CHECK(error.kind() == (is_too_long ? ErrorKind::corrupt : ErrorKind::cancelled));
      }
      // The second operation is the last one of rank 2 with the other ranks.
      if (group.rank() == 2) holds_up_at = 1;
      other.reset();
      const auto begin = std::chrono::steady_clock::now();
      const std::array<int, 1> on{(group.rank() + 2) % 4};
      group.wait_until([&] { return std::chrono::steady_clock::now() - begin > 1s; },
                       [](std::chrono::nanoseconds) { std::this_thread::sleep_for(1ms); }, on);
      if (group.rank() != 2) RANK_CHECK(std::chrono::steady_clock::now() - begin < 2s);
      if (group.rank() == 2) RANK_CHECK(std::chrono::steady_clock::now() - begin > 3s);
      group.barrier();
      no_sends_at_end = true;
    });
  }
}

TEST_CASE("unreceived messages are dropped at the end, and their sends finish") {
  for (const std::size_t bytes : {8U, 256U << 10}) {
    CAPTURE(bytes);
    run_ranks(4, [&](SyncGroup& group) {
      group.duplicate()->send((group.rank() + 2) % 4, std::vector<std::byte>(bytes));
      group.barrier();
      no_sends_at_end = true;
    });
  }
}

TEST_CASE("a gather that fails between live ranks leaves no open operation: other groups can still use MPI") {
  run_ranks(4, [](SyncGroup& group) {
    // The ranks pass views, so MPI could not keep their memory alive.
    const std::vector<std::byte> memory(64 << 20);
    const TensorView mine(DType::u8, {64 << 20}, memory.data());
    const auto other = group.duplicate();
    if (group.rank() == 2) stops_at = 3;
    error_of(ErrorKind::cancelled, {},
             [&] { (void)get_tensors_parallel(mine, ranks_from(0, 4), *other, {.stop = stops.get_token()}); });
    RANK_CHECK(!mpi::must_rest());
    (void)get_tensors_parallel(mine, ranks_from(0, 4), group);
  });
}

TEST_CASE("MPI_Finalize makes no MPI call for a while even if all groups have ended before it") {
  run_ranks(4, [](SyncGroup& group) {
    group.barrier();
    least_finalize = 200ms;
  });
}

TEST_CASE("threads that duplicate two groups at once get separate groups") {
  ::setenv("MUSTER_TEST_MPI_THREADS", "multiple", 1);
  run_ranks(4, [](SyncGroup& group) {
    const auto work = [&group](SyncGroup& mine, int which, std::string& failure) {
      try {
        for (int turn = 0; turn < 30; ++turn) {
          const auto copy = mine.duplicate();
          for (int round = 0; round < 5; ++round) {
            std::vector<int> all(4);
            const int word = 1000 * which + 10 * turn + group.rank();
            copy->all_gather(std::as_bytes(std::span(&word, 1)), std::as_writable_bytes(std::span(all)));
            for (int rank = 0; rank < 4; ++rank)
              RANK_CHECK(all[static_cast<std::size_t>(rank)] == 1000 * which + 10 * turn + rank);
          }
        }
      } catch (const std::exception& error) {
        failure = error.what();
      }
    };
    const auto first = group.duplicate();
    const auto second = group.duplicate();
    std::array<std::string, 2> failures;
    std::thread beside([&] { work(*second, 2, failures[1]); });
    work(*first, 1, failures[0]);
    beside.join();
    if (!failures[0].empty() || !failures[1].empty()) throw RankFailure(failures[0] + " / " + failures[1]);
  });
  ::unsetenv("MUSTER_TEST_MPI_THREADS");
}
