// SPDX-License-Identifier: Apache-2.0
// Groups of MPI communicators: refused ones, communicators of every shape, threads, many groups at once and in
// succession, and resources after their end. Ranks are on two hosts (MUSTER_TEST_GROUP=mpi-2).

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/mpi.hpp"
#include "muster/version.hpp"
#include "src/group/group.hpp"
#include "src/mpi/transport.hpp"
#include "src/multihost/hosts.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

/// A communicator of this test, freed at the end of its scope.
struct OwnComm {
  MPI_Comm comm = MPI_COMM_NULL;
  OwnComm() = default;
  OwnComm(const OwnComm&) = delete;
  OwnComm& operator=(const OwnComm&) = delete;
  ~OwnComm() {
    if (comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
  }
};

}  // namespace

/// Imitates an MPI that has the largest tag only on MPI_COMM_WORLD, as the standard requires.
extern "C" int MPI_Comm_get_attr(MPI_Comm comm, int key, void* value, int* flag) {
  if (key == MPI_TAG_UB && comm != MPI_COMM_WORLD) {
    *flag = 0;
    return MPI_SUCCESS;
  }
  return PMPI_Comm_get_attr(comm, key, value, flag);
}

TEST_CASE("communicators that cannot be a group are refused with the remedy, and no process is terminated") {
  run_ranks(4, [](Group& group) {
    error_of(ErrorKind::invalid_argument, {"MPI_COMM_NULL"}, [] { mpi_group(MPI_COMM_NULL); });
    OwnComm half;
    MPI_Comm_split(MPI_COMM_WORLD, group.rank() % 2, group.rank(), &half.comm);
    OwnComm both;
    MPI_Intercomm_create(half.comm, 0, MPI_COMM_WORLD, group.rank() % 2 == 0 ? 1 : 0, 5, &both.comm);
    error_of(ErrorKind::invalid_argument, {"MPI_Intercomm_merge"}, [&] { mpi_group(both.comm); });
    // Its error handler has not changed: errors are fatal, as the standard requires.
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
    RANK_CHECK(handler == MPI_ERRORS_ARE_FATAL);
    MPI_Errhandler_free(&handler);
    gather_and_check(group);
  });
}

TEST_CASE("a group waits for a missing rank until the deadline, and the other ranks report it") {
  const auto ended = try_ranks(3, [](Group& group) {
    if (group.rank() == 1) {
      std::this_thread::sleep_for(600ms);
    } else {
      error_of(ErrorKind::timeout, {"not all ranks of the communicator called it"},
               [] { mpi_group(MPI_COMM_WORLD, {.timeout = 300ms}); });
    }
    group.barrier();
    // MPI waits for the duplicate that one rank has not made.
    ::_exit(0);
  });
  check_ended(ended);
}

TEST_CASE("groups of parts, in another order, of this rank alone, several at once") {
  run_ranks(5, [](Group& group) {
    // The order is not that of hosts, and rank 0's host is not first.
    OwnComm reversed;
    MPI_Comm_split(MPI_COMM_WORLD, 0, (group.rank() * 3 + 2) % 5, &reversed.comm);
    const auto turned = mpi_group(reversed.comm);
    RANK_CHECK(turned->rank() == (group.rank() * 3 + 2) % 5);
    OwnComm part;
    MPI_Comm_split(MPI_COMM_WORLD, group.rank() % 2, -group.rank(), &part.comm);
    const auto odd_or_even = mpi_group(part.comm);
    const auto alone = mpi_group(MPI_COMM_SELF);
    RANK_CHECK(alone->size() == 1);
    for (int i = 0; i < 3; ++i) {
      gather_and_check(*turned);
      gather_and_check(*odd_or_even);
      gather_and_check(*alone);
      gather_and_check(group);
    }
    RANK_CHECK(group.split(all_ranks)->size() == group.size());
    // In a group of a reordered communicator, error messages use the communicator's rank numbers.
    const auto odd = turned->split(turned->rank() % 2 == 1 ? std::vector{3, 1} : std::vector<int>{});
    RANK_CHECK((odd != nullptr) == (turned->rank() % 2 == 1));
    if (odd) {
      RANK_CHECK(odd->info(0).global_rank == 3);
      gather_and_check(*odd);
    }
    const auto copy = turned->duplicate();
    const auto companion = group::inside(*copy).companion();
    companion->barrier();
    gather_and_check(*copy);
    // Each rank destroys the groups in another order, because the destructor of a group does not wait for other ranks.
    std::vector<std::shared_ptr<Group>> all = {turned, odd_or_even, alone, copy};
    std::rotate(all.begin(), all.begin() + group.rank() % 4, all.end());
    all.clear();
    gather_and_check(group);
  });
}

TEST_CASE("many groups in succession, as many as MUSTER_TEST_GROUPS: MPI has 2048 communicators at a time") {
  run_ranks(3, [](Group& group) {
    const char* text = std::getenv("MUSTER_TEST_GROUPS");
    const int count = text == nullptr ? 100 : std::atoi(text);
    for (int i = 0; i < count; ++i) {
      const auto one = mpi_group(MPI_COMM_WORLD);
      if (i % 50 == 0) gather_and_check(*one);
    }
    for (int i = 0; i < 100; ++i) group.duplicate()->barrier();
  });
}

TEST_CASE("groups have as many tags as MPI allows on MPI_COMM_WORLD") {
  run_ranks(2, [](Group& group) {
    void* value = nullptr;
    int flag = 0;
    PMPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&value), &flag);
    RANK_CHECK(flag != 0);
    RANK_CHECK(mpi::MpiTransport::over(MPI_COMM_WORLD, mpi::MpiThreads::one, 10s)->most_tag() ==
               *static_cast<int*>(value));
    group.barrier();
  });
}

TEST_CASE("another thread is refused if MPI was not initialized for it") {
  run_ranks(2, [](Group& group) {
    std::thread([&] {
      error_of(ErrorKind::unsupported, {"MPI_THREAD_MULTIPLE"}, [] { mpi_group(MPI_COMM_SELF); });
      error_of(ErrorKind::unsupported, {"MPI_THREAD_MULTIPLE"}, [&] { group.barrier(); });
    }).join();
    // The group is unharmed by both refusals.
    gather_and_check(group);
  });
}

TEST_CASE("a failure that another thread reports reaches all hosts") {
  run_ranks(4, [](Group& group) {
    const auto copy = group.duplicate();
    if (copy->rank() == 1) std::thread([&] { copy->abort(Error(ErrorKind::cancelled, "enough", {.rank = 1})); }).join();
    error_of(ErrorKind::cancelled, {"enough"}, [&] { copy->barrier({.timeout = 5s, .stop = {}, .phase = "barrier"}); });
    group.barrier();
  });
}

TEST_CASE("a rank that works long inside one call delays those of another host, without a timeout") {
  run_ranks(2, [](Group& group) {
    if (group.rank() == 0) {
      const auto begin = std::chrono::steady_clock::now();
      while (std::chrono::steady_clock::now() - begin < 1500ms) {
        std::this_thread::sleep_for(10ms);
        group.progress();
      }
    }
    group.barrier({.timeout = 1100ms, .stop = {}, .phase = "barrier"});
  });
}

TEST_CASE("groups that the program does not destroy before MPI_Finalize end with it, and report that afterwards") {
  const auto ended = try_ranks(4, [](Group& group) {
    const auto forgotten = group.duplicate();
    gather_and_check(*forgotten);
    MPI_Finalize();
    error_of(ErrorKind::invalid_argument, {"MPI: it has been finalized"}, [&] { forgotten->barrier(); });
    error_of(ErrorKind::invalid_argument, {"has been finalized"}, [] { mpi_group(MPI_COMM_WORLD); });
    ::_exit(0);
  });
  check_ended(ended);
}

TEST_CASE("mpi_group() before MPI_Init") {
  const auto ended = Ranks(1, [](int) {
                       error_of(ErrorKind::invalid_argument, {"MPI_Init_thread"}, [] { mpi_group(MPI_COMM_WORLD); });
                     }).wait();
  CHECK_MESSAGE(ended.front().ok(), ended.front().words);
}

TEST_CASE("ranks of other versions and of other byte order cannot be in one group") {
  std::vector<multihost::RankMetadata> cards(3, multihost::own_card());
  CHECK_NOTHROW(multihost::check_versions(cards));
  std::memcpy(cards[2].version.data(), "0.0.1", 6);
  error_of(ErrorKind::version, {"rank 2 runs Muster 0.0.1, rank 0 runs " + std::string(version())},
           [&] { multihost::check_versions(cards); });
  cards[2] = cards[0];
  // A build of the same version that has no such number.
  cards[2].layout = 0;
  error_of(ErrorKind::version,
           {"rank 2 ", "layout 0", "layout " + std::to_string(group::group_layout), "Install the same version"},
           [&] { multihost::check_versions(cards); });
  cards[2] = cards[0];
  cards[1].magic = __builtin_bswap32(multihost::RankMetadata::right_magic);
  error_of(ErrorKind::version, {"byte order"}, [&] { multihost::check_versions(cards); });
  cards[1] = {};
  cards[1].magic = 7;
  error_of(ErrorKind::version, {"one version"}, [&] { multihost::check_versions(cards); });
}
