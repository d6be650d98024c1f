// SPDX-License-Identifier: Apache-2.0
// Groups of MPI in several threads of each rank, over two hosts (MUSTER_TEST_GROUP=mpi-2). They run at once if any
// thread may call MPI (MUSTER_TEST_MPI_THREADS=multiple), and one after another if only one thread may at a time
// (serialized). mpi_group_test covers the refusals of other levels.

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/mpi.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int size = 4;
constexpr int threads = 4;

void expect_level(int expected) {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  RANK_CHECK(level == expected);
}

/// Collectives of all kinds. `salt` distinguishes the data of different threads.
void use(Group& group, std::uint64_t salt, int turns) {
  const std::vector<int> ranks = ranks_from(static_cast<int>(salt) % group.size(), group.size());
  const bool is_first = group.rank() == ranks.front();
  const auto seed = [&](int rank) { return salt * 100 + static_cast<std::uint64_t>(rank); };
  for (int turn = 0; turn < turns; ++turn) {
    // Sizes from a payload inside the descriptor to many pieces.
    for (const std::int64_t bytes : {100, 300000, 9 << 20}) {
      const Tensor mine = pattern(DType::u8, {bytes}, seed(group.rank()));
      const GatheredTensors all = get_tensors_parallel(mine, ranks, group);
      RANK_CHECK(all.present().size() == (is_first ? ranks.size() : 0));
      for (const auto& [rank, tensor] : all.present()) RANK_CHECK(is_pattern(tensor, DType::u8, {bytes}, seed(rank)));
    }
    const Tensor part = pattern(DType::u8, {200000}, salt);
    const MergeResult merged = merge_tensor_parallel(part, merge::same(), ranks, group);
    if (is_first) RANK_CHECK(is_pattern(*merged.tensor(), DType::u8, {200000}, salt));
    std::uint64_t given = 0;
    const auto source = [&]() -> std::optional<Config> {
      if (given == 6) return std::nullopt;
      return Config::object({{"w", pattern(DType::u8, {100000}, seed(group.rank()) + given++)}});
    };
    std::uint64_t taken = 0;
    const auto consume = [&](LayerPart& layer) {
      for (const auto& [rank, config] : layer.present())
        RANK_CHECK(is_pattern(config.at("w").as_tensor(), DType::u8, {100000}, seed(rank) + layer.layer));
      ++taken;
    };
    gather_each(source, ranks, group, consume);
    RANK_CHECK(taken == (is_first ? 6 : 0));
    group.barrier();
  }
}

/// Runs `body` in several threads at once. An exception in one of them is the rank's failure.
void at_once(int count, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(count));
  {
    std::vector<std::jthread> all;
    all.reserve(failures.size());
    for (int thread = 0; thread < count; ++thread)
      all.emplace_back([&, thread] {
        try {
          body(thread);
        } catch (...) {
          failures[static_cast<std::size_t>(thread)] = std::current_exception();
        }
      });
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

void in_a_thread(const std::function<void()>& body) {
  at_once(1, [&](int) { body(); });
}

std::vector<MPI_Comm> own_communicators(int count) {
  std::vector<MPI_Comm> comms(static_cast<std::size_t>(count), MPI_COMM_NULL);
  for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  return comms;
}

void free_all(std::vector<MPI_Comm>& comms) {
  for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
}

}  // namespace

TEST_CASE("at once: each thread has its own group over its own communicator") {
  run_ranks(size, [](Group& group) {
    expect_level(MPI_THREAD_MULTIPLE);
    std::vector<MPI_Comm> comms = own_communicators(threads);
    at_once(threads, [&](int thread) {
      for (int turn = 0; turn < 3; ++turn) {
        const auto own = mpi_group(comms[static_cast<std::size_t>(thread)]);
        use(*own, static_cast<std::uint64_t>(thread), 2);
      }
    });
    use(group, 7, 1);
    free_all(comms);
  });
}

TEST_CASE("at once: each thread has a duplicate of one group, and the group itself is used, too") {
  run_ranks(size, [](Group& group) {
    std::vector<std::shared_ptr<Group>> copies;
    for (int thread = 1; thread < threads; ++thread) copies.push_back(group.duplicate());
    at_once(threads, [&](int thread) {
      Group& own = thread == 0 ? group : *copies[static_cast<std::size_t>(thread) - 1];
      use(own, static_cast<std::uint64_t>(thread), 4);
      // One group is destroyed while others are in use.
      if (thread != 0) copies[static_cast<std::size_t>(thread) - 1].reset();
    });
    use(group, 7, 1);
  });
}

TEST_CASE("at once: one thread's group fails, and those of the others remain usable") {
  run_ranks(size, [](Group& group) {
    std::vector<std::shared_ptr<Group>> copies;
    copies.reserve(threads);
    for (int thread = 0; thread < threads; ++thread) copies.push_back(group.duplicate());
    at_once(threads, [&](int thread) {
      Group& own = *copies[static_cast<std::size_t>(thread)];
      if (thread != 2) return use(own, static_cast<std::uint64_t>(thread), 4);
      std::string said;
      try {
        // Other ranks may still be in its last barrier when rank 1 fails.
        use(own, static_cast<std::uint64_t>(thread), 1);
        if (own.rank() == 1) throw Error(ErrorKind::io, "no more");
        own.barrier({.timeout = 10s, .stop = {}, .phase = "barrier"});
      } catch (const Error& error) {
        said = error.what();
        if (own.rank() == 1) own.abort(error);
      }
      RANK_CHECK(said.find("no more") != std::string::npos);
    });
    use(group, 7, 1);
  });
}

TEST_CASE("one after another: threads take turns with one group, and with its streams") {
  run_ranks(size, [](Group& group) {
    expect_level(MPI_THREAD_SERIALIZED);
    for (int thread = 0; thread < threads; ++thread) {
      in_a_thread([&] { use(group, static_cast<std::uint64_t>(thread), 1); });
      use(group, 7, 1);
    }
  });
}

TEST_CASE("one after another: groups are made in one thread, used in another and end in a third") {
  run_ranks(size, [](Group& group) {
    std::vector<MPI_Comm> comms = own_communicators(threads);
    std::vector<std::shared_ptr<Group>> all;
    for (const MPI_Comm comm : comms)
      in_a_thread([&] {
        all.push_back(mpi_group(comm));
        all.push_back(all.back()->duplicate());
      });
    for (const auto& one : all) in_a_thread([&] { use(*one, 3, 1); });
    in_a_thread([&] { all.erase(all.begin(), all.begin() + 3); });
    use(*all.front(), 5, 1);
    // The remaining clean-up is done by this thread and by MPI_Finalize.
    all.clear();
    use(group, 7, 1);
    free_all(comms);
  });
}

TEST_CASE("one after another: unfinished work of a thread does not delay MPI_Finalize") {
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(size, [](Group& group) {
    in_a_thread([&] {
      const auto copy = mpi_group(MPI_COMM_WORLD);
      use(*copy, 1, 1);
    });
    in_a_thread([&] { group.barrier(); });
  });
  // The groups' deadline is 20 s.
  CHECK(std::chrono::steady_clock::now() - begin < 10s);
}
