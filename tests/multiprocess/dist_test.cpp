// SPDX-License-Identifier: Apache-2.0
// muster::dist: the rules of torch.distributed, over each kind of rendezvous.

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "muster/compat/dist.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;

namespace {

Tensor row(float value) {
  return Tensor::take(std::vector<float>(3, value));
}
bool is_row(const Tensor& tensor, float value) {
  return bitwise_equal(tensor, row(value));
}
std::vector<Tensor> empty_rows(int count) {
  std::vector<Tensor> all;
  for (int i = 0; i < count; ++i) all.push_back(row(-1));
  return all;
}

void all_calls() {
  const int self = dist::get_rank();
  const auto mine = static_cast<float>(self);
  RANK_CHECK(dist::get_world_size() == 4);
  Tensor tensor = row(mine);
  dist::all_reduce(tensor);
  RANK_CHECK(is_row(tensor, 6));
  tensor = row(mine);
  dist::reduce(tensor, 3, ReduceOp::max);
  RANK_CHECK(is_row(tensor, self == 3 ? 3 : mine));
  dist::broadcast(tensor, 2);
  RANK_CHECK(is_row(tensor, 2));
  const std::vector<Tensor> all = empty_rows(4);
  dist::all_gather(all, row(mine));
  for (int rank = 0; rank < 4; ++rank)
    RANK_CHECK(is_row(all[static_cast<std::size_t>(rank)], static_cast<float>(rank)));
  const std::vector<Tensor> some = empty_rows(self == 1 ? 4 : 0);
  dist::gather(row(mine), 1, some);
  if (self == 1) RANK_CHECK(is_row(some[3], 3));
  tensor = row(-1);
  dist::scatter(tensor, 1, some);
  RANK_CHECK(is_row(tensor, mine));
  dist::barrier();

  // In a group, `src` and `dst` remain ranks of the job.
  const dist::Group odd = dist::new_group({3, 1});
  if (self % 2 == 1) {
    tensor = row(mine);
    dist::broadcast(tensor, 3, odd);
    RANK_CHECK(is_row(tensor, 3));
    dist::all_reduce(tensor, ReduceOp::sum, odd);
    RANK_CHECK(is_row(tensor, 6));
    error_of(ErrorKind::invalid_argument, {"rank 2 is not in this group"}, [&] { dist::broadcast(tensor, 2, odd); });
    dist::barrier(odd);
  } else {
    error_of(ErrorKind::invalid_argument, {"not in this group"}, [&] { dist::all_reduce(tensor, ReduceOp::sum, odd); });
  }
  error_of(ErrorKind::invalid_argument, {"rank 4 is not in this group"}, [&] { dist::reduce(tensor, 4); });
  error_of(ErrorKind::invalid_argument, {"must pass 4 tensors"}, [&] { dist::all_gather(empty_rows(3), row(mine)); });
  error_of(ErrorKind::invalid_argument, {"rank 7 is out of range for size"}, [&] { dist::send(tensor, 7); });

  // Messages around a ring, and from any source.
  Work<void> sent = dist::isend(row(mine), (self + 1) % 4);
  tensor = row(-1);
  Work<int> received = dist::irecv(tensor, (self + 3) % 4);
  RANK_CHECK(received.get() == (self + 3) % 4);
  sent.get();
  RANK_CHECK(is_row(tensor, static_cast<float>((self + 3) % 4)));
  if (self == 0)
    for (int i = 0; i < 3; ++i) {
      const int from = dist::recv(tensor);
      RANK_CHECK(is_row(tensor, static_cast<float>(from)));
    }
  else
    dist::send(row(mine), 0);
  dist::barrier();
}

}  // namespace

TEST_CASE("a world of each backend behaves like torch.distributed, is destroyed, and is created again") {
  const TemporaryDirectory directory;
  const std::string file = "file://" + (directory.path() / "meeting").string();
  struct Way {
    const char* backend;
    std::string method;
  };
  for (const Way& way : {Way{"shm", file}, Way{"shm", "tcp://nowhere:1"}, Way{"tcp", file}, Way{"gloo", file}}) {
    CAPTURE(way.backend);
    run_ranks(4, [&](muster::Group& group) {
      const dist::InitOptions options{
          .init_method = way.method, .world_size = 4, .rank = group.rank(), .group_name = "job", .timeout = {}};
      for (int round = 0; round < 2; ++round) {
        RANK_CHECK(!dist::is_initialized());
        error_of(ErrorKind::invalid_argument, {"init_process_group"}, [] { (void)dist::get_rank(); });
        dist::init_process_group(way.backend, options);
        RANK_CHECK(dist::is_initialized());
        error_of(ErrorKind::invalid_argument, {"already"}, [&] { dist::init_process_group(way.backend, options); });
        all_calls();
        dist::destroy_process_group();
        group.barrier();
      }
    });
  }
}

TEST_CASE("over a part of a job, all calls use the ranks that get_rank() returns") {
  run_ranks(5, [](muster::Group& group) {
    // Ranks 0 to 2 of the world are ranks 4, 1 and 3 of the job.
    const auto part = group.split(std::vector{4, 1, 3});
    if (!part) return;
    set_world(part);
    dist::init_process_group("shm");
    const int self = dist::get_rank();
    RANK_CHECK(dist::get_world_size() == 3);
    RANK_CHECK(self == part->rank());
    const auto mine = static_cast<float>(self);
    for (int root = 0; root < 3; ++root) {
      Tensor tensor = row(mine);
      dist::broadcast(tensor, root);
      RANK_CHECK(is_row(tensor, static_cast<float>(root)));
      tensor = row(1);
      dist::reduce(tensor, root);
      RANK_CHECK(is_row(tensor, self == root ? 3 : 1));
      const std::vector<Tensor> all = empty_rows(self == root ? 3 : 0);
      dist::gather(row(mine), root, all);
      if (self == root) RANK_CHECK(is_row(all[2], 2));
      dist::scatter(tensor, root, all);
      RANK_CHECK(is_row(tensor, mine));
    }
    Tensor tensor = row(-1);
    const int next = (self + 1) % 3;
    const int previous = (self + 2) % 3;
    Work<void> sent = dist::isend(row(mine), next);
    RANK_CHECK(dist::recv(tensor, previous) == previous);
    sent.get();
    sent = dist::isend(row(mine), next);
    RANK_CHECK(dist::irecv(tensor, previous).get() == previous);
    sent.get();
    if (self == 0) {
      const int first = dist::recv(tensor);
      RANK_CHECK(is_row(tensor, static_cast<float>(first)));
      const int second = dist::recv(tensor);
      RANK_CHECK(first + second == 3);
    } else {
      dist::send(row(mine), 0);
    }
    // A group of ranks 2 and 0 of the world.
    const dist::Group pair = dist::new_group({2, 0});
    if (self != 1) {
      tensor = row(mine);
      dist::broadcast(tensor, 2, pair);
      RANK_CHECK(is_row(tensor, 2));
      error_of(ErrorKind::invalid_argument, {"rank 1 is not in this group"}, [&] { dist::broadcast(tensor, 1, pair); });
    }
    for (const int wrong : {-1, 3, 4}) {
      error_of(ErrorKind::invalid_argument, {"is out of range for size"}, [&] { dist::send(tensor, wrong); });
      error_of(ErrorKind::invalid_argument, {"is out of range for size"}, [&] { (void)dist::recv(tensor, wrong); });
      error_of(ErrorKind::invalid_argument, {"is not in this group"}, [&] { dist::broadcast(tensor, wrong); });
    }
    dist::destroy_process_group();
  });
}

TEST_CASE("is_initialized() and destroy_process_group() do not wait for a rendezvous on another thread") {
  const std::string key = unique_key();
  run_processes(1, [&](int) {
    const dist::InitOptions options{.init_method = "tcp://127.0.0.1:1",
                                    .world_size = 2,
                                    .rank = 0,
                                    .group_name = key,
                                    .timeout = std::chrono::milliseconds(1500)};
    std::atomic<bool> is_over = false;
    std::thread meeting([&] {
      // The other thread's attempts are refused at once, and so is this one if it meets one of them.
      while (error_of([&] { dist::init_process_group("shm", options); }).kind() != ErrorKind::timeout) continue;
      is_over = true;
    });
    for (bool is_refused = false; !is_refused;) {
      try {
        dist::init_process_group("nowhere", options);
      } catch (const Error& error) {
        is_refused = std::string(error.what()).find("another thread") != std::string::npos;
      }
    }
    RANK_CHECK(!dist::is_initialized());
    dist::destroy_process_group();
    RANK_CHECK(!is_over);
    meeting.join();
    RANK_CHECK(!dist::is_initialized());
  });
}

TEST_CASE("an invalid world is reported at once") {
  struct Bad {
    ErrorKind kind;
    const char* words;
    const char* backend;
    dist::InitOptions options;
  };
  const Bad all[] = {
      {ErrorKind::invalid_argument, "unknown backend \"smoke\"", "smoke", {}},
      {ErrorKind::unsupported, "\"nccl\"", "nccl", {}},
      {ErrorKind::invalid_argument,
       "init_method \"udp://a:1\": malformed",
       "shm",
       {.init_method = "udp://a:1", .world_size = 1, .rank = 0}},
      {ErrorKind::invalid_argument,
       "rank 2 is out of range for size 2",
       "tcp",
       {.init_method = "tcp://a:1", .world_size = 2, .rank = 2}},
      {ErrorKind::invalid_argument, "Set both", "tcp", {.init_method = "tcp://a:1"}},
      {ErrorKind::invalid_argument,
       "the backend \"mpi\" accepts only env://",
       "mpi",
       {.init_method = "file:///a", .world_size = 1, .rank = 0}},
      {ErrorKind::invalid_argument, "rank 0 and world_size 1, but the call has rank 3", "shm", {.rank = 3}},
      {ErrorKind::invalid_argument,
       "rank 0 and world_size 1, but the call has rank 0 and world_size 2",
       "shm",
       {.world_size = 2, .rank = 0}},
  };
  for (const Bad& bad : all) {
    CAPTURE(bad.words);
    try {
      dist::init_process_group(bad.backend, bad.options);
      FAIL("no error");
    } catch (const Error& error) {
      CHECK(error.kind() == bad.kind);
      CHECK(std::string(error.what()).find(bad.words) != std::string::npos);
    }
  }
}

TEST_CASE("a master and its workers in place of a process group") {
  const std::string key = unique_key();
  run_processes(3, [&](int rank) {
    const dist::InitOptions options{
        .init_method = "tcp://127.0.0.1:1", .world_size = 3, .rank = rank, .group_name = key};
    MasterWorker ranks = dist::init_master_worker("shm", options);
    RANK_CHECK(!dist::is_initialized());
    RANK_CHECK(dist::get_rank() == rank);
    RANK_CHECK(dist::get_world_size() == 3);
    error_of(ErrorKind::invalid_argument, {"already"}, [&] { (void)dist::init_master_worker("shm", options); });
    error_of(ErrorKind::invalid_argument, {"already"}, [&] { dist::init_process_group("shm", options); });
    error_of(ErrorKind::invalid_argument, {"master-worker mode"}, [] { dist::barrier(); });
    if (!ranks.is_master()) return ranks.serve();
    const RemoteTensor tensor = ranks.make(2, DType::f32, {3});
    ranks.copy(tensor, row(4));
    RANK_CHECK(is_row(ranks.fetch(tensor), 4));
    ranks.shutdown();
    dist::destroy_process_group();
    error_of(ErrorKind::invalid_argument, {"init_master_worker"}, [] { (void)dist::get_rank(); });
  });
}
