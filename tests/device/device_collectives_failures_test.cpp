// SPDX-License-Identifier: Apache-2.0
// Failures of collectives on devices: ranks that disagree, NCCL errors, and killed ranks; over a fake driver and a fake
// NCCL (fake/).

#include <csignal>
#include <random>
#include <thread>

#include "muster/process_group.hpp"
#include "tests/device/device_ranks.hpp"
#include "tests/support/kills.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

Tensor mine_of(const ProcessGroup& group, std::int64_t count = 1000) {
  return on_device(Tensor::take(std::vector<float>(static_cast<std::size_t>(count), 1)), group.rank());
}

/// Requires the same error on all ranks, after which the group works as before.
void refused(ProcessGroup& group, ErrorKind kind, const std::vector<std::string>& parts,
             const std::function<void()>& call) {
  error_of(kind, parts, call);
  const Tensor tensor = mine_of(group);
  group.all_reduce(tensor);
  RANK_CHECK(
      bitwise_equal(copy_to_host(tensor), Tensor::take(std::vector<float>(1000, static_cast<float>(group.size())))));
}

}  // namespace

TEST_CASE("contradictory and invalid arguments are an error on every rank before a byte is moved") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  run_ranks(3, [](Group& outer) {
    ProcessGroup group(outer);
    const int self = group.rank();
    const Tensor there = mine_of(group);
    const Tensor here = copy_to_host(there);
    const Tensor wide = on_device(pattern(DType::f32, {6, 6}, 1), self);
    const auto refuse = [&](ErrorKind kind, const std::vector<std::string>& parts, const std::function<void()>& call) {
      refused(group, kind, parts, call);
    };
    refuse(ErrorKind::rank_mismatch, {"on a device", "rank 1"},
           [&] { (void)group.all_gather(self == 1 ? here : there); });
    refuse(ErrorKind::rank_mismatch, {"on a device", "rank 0"}, [&] { group.broadcast(self == 0 ? here : there, 2); });
    refuse(ErrorKind::rank_mismatch, {"all_reduce", "broadcast"}, [&] {
      if (self == 2)
        group.all_reduce(there);
      else
        group.broadcast(there, 0);
    });
    refuse(ErrorKind::invalid_argument, {"is on host", "cuda:"},
           [&] { group.all_reduce_into(self == 1 ? here : there, there); });
    refuse(ErrorKind::invalid_argument, {"is on cuda:", "Copy it to the host"},
           [&] { group.all_reduce_into(self == 1 ? there : here, here); });
    refuse(ErrorKind::unsupported, {"I16", "copy_to_host"},
           [&] { group.all_reduce(on_device(pattern(DType::i16, {4}, 1), self)); });
    refuse(ErrorKind::unsupported, {"BOOL", "copy_to_host"}, [&] {
      (void)group.reduce_scatter(on_device(Tensor::allocate(DType::boolean, {6}), self), 0, ReduceOp::max);
    });
    refuse(ErrorKind::invalid_argument, {"Make it contiguous"},
           [&] { (void)group.all_gather(wide.view().slice(1, 0, 2)); });
    refuse(ErrorKind::invalid_argument, {"root 3"}, [&] { group.broadcast(there, 3); });
    refuse(ErrorKind::invalid_argument, {"device cuda:9 does not exist"}, [&] {
      (void)group.all_gather(self == 1 ? TensorView(DType::f32, {1000}, there.data(), {}, {Device::Kind::cuda, 9})
                                       : there.view());
    });
    refuse(ErrorKind::invalid_argument, {"its address is not on a device"}, [&] {
      (void)group.all_gather(self == 2 ? TensorView(DType::f32, {1000}, here.data(), {}, {Device::Kind::cuda, self})
                                       : there.view());
    });
    refuse(ErrorKind::unsupported, {"rank 0", "rank 2", "use one device"},
           [&] { (void)group.all_gather(on_device(here, self % 2)); });
    // Calls for host memory only.
    refuse(ErrorKind::unsupported, {"copy_to_host"}, [&] { (void)group.all_reduce_shared(there); });
    refuse(ErrorKind::unsupported, {"copy_to_host"}, [&] { (void)group.all_gather_shared(there); });
    refuse(ErrorKind::invalid_argument, {"Copy it to the host"},
           [&] { (void)group.broadcast_config(Config(there), 0); });
    if (self == 0) error_of(ErrorKind::unsupported, {"send", "copy_to_host"}, [&] { group.send(there, 1); });
    if (self == 1) error_of(ErrorKind::unsupported, {"recv", "copy_to_host"}, [&] { (void)group.recv(there, 0); });
    // One rank does not have enough memory.
    const Tensor large = mine_of(group, 30000);
    refuse(ErrorKind::out_of_space, {"bytes on cuda:1, "}, [&] {
      (void)trim(group.group());
      const Setting memory("FAKE_CUDA_MEMORY", self == 1 ? "1000" : "100000000");
      (void)group.reduce_scatter(large, 0);
    });
  });
}

TEST_CASE("an NCCL failure on one rank fails the group at once, and leaves no batch open") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  struct Failing {
    const char* name;
    const char* value;
    int rank;
  };
  for (const Failing& failing :
       {Failing{"FAKE_NCCL_FAIL", "ncclAllReduce", 1}, Failing{"FAKE_NCCL_FAIL", "ncclGroupEnd", 0},
        Failing{"FAKE_NCCL_FAIL", "ncclCommInitRankConfig", 1}, Failing{"FAKE_CUDA_FAIL", "cuEventRecord:700", 2}}) {
    CAPTURE(std::string(failing.value));
    const auto begin = std::chrono::steady_clock::now();
    run_ranks(3, [&](Group& outer) {
      {
        ProcessGroup group(outer);
        const Tensor tensor = mine_of(group);
        if (group.rank() == failing.rank) ::setenv(failing.name, failing.value, 1);
        error_of(ErrorKind::io, {}, [&] {
          group.all_reduce(tensor);
          group.barrier();
        });
        RANK_CHECK(fake<int()>("libnccl.so.2", "fake_nccl_depth")() == 0);
        ::unsetenv(failing.name);
        error_of(ErrorKind::io, {}, [&] { group.barrier(); });
        // Earlier work in the stream has ended.
        (void)copy_to_host(tensor);
      }
      ProcessGroup group(outer);
      refused(group, ErrorKind::invalid_argument, {"root 3"}, [&] { group.broadcast(mine_of(group), 3); });
    });
    CHECK(std::chrono::steady_clock::now() - begin < 10s);
  }
}

TEST_CASE("NCCL that cannot create an ID: every rank receives the error, and the group remains usable") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  run_ranks(2, [](Group& outer) {
    ProcessGroup group(outer);
    const Tensor tensor = mine_of(group);
    if (group.rank() == 0) ::setenv("FAKE_NCCL_FAIL", "ncclGetUniqueId", 1);
    error_of(ErrorKind::io, {"NCCL", "identity"}, [&] { group.all_reduce(tensor); });
    ::unsetenv("FAKE_NCCL_FAIL");
    group.all_reduce(tensor);
    (void)copy_to_host(tensor);
  });
}

TEST_CASE("a rank that never joins the NCCL communicator ends in a timeout") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  run_ranks(2, [](Group& outer) {
    ProcessGroup group(outer);
    const Tensor tensor = mine_of(group);
    if (group.rank() == 1) ::setenv("FAKE_NCCL_SILENT", "1", 1);
    error_of(ErrorKind::timeout, {"NCCL to connect"},
             [&] { group.all_reduce(tensor, ReduceOp::sum, {.timeout = 500ms}); });
  });
}

TEST_CASE("a network failure between devices is reported by the next call") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  run_ranks(2, [](Group& outer) {
    ProcessGroup group(outer);
    const Tensor tensor = mine_of(group);
    group.all_reduce(tensor);
    (void)copy_to_host(tensor);
    ::setenv("FAKE_NCCL_STUCK", "1", 1);
    error_of(ErrorKind::io, {"NCCL"}, [&] {
      for (int i = 0; i < 1000; ++i) group.all_reduce(tensor);
    });
    (void)copy_to_host(tensor);
  });
}

TEST_CASE("a rank that is killed before or during a call is named by all, and no stream waits for it") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  std::mt19937 random(2026);
  constexpr int victim = 2;
  for (int turn = 0; turn < 12; ++turn) {
    const auto delay = std::chrono::microseconds(random() % 30000);
    CAPTURE(turn);
    const auto ended = try_ranks(
        4,
        [&](Group& outer) {
          ProcessGroup group(outer);
          const Tensor tensor = mine_of(group, turn % 2 == 0 ? 100 : 100000);
          const auto pid = static_cast<pid_t>(outer.info(victim).pid);
          group.all_reduce(tensor);
          (void)copy_to_host(tensor);
          if (group.rank() == victim && turn > 0) kill_self_after(delay);
          std::chrono::steady_clock::time_point since;
          const Error error = error_of([&] {
            for (int i = 0;; ++i) {
              if (i == 3 && group.rank() == victim && turn == 0) ::raise(SIGKILL);
              since = std::chrono::steady_clock::now();
              group.all_reduce(tensor);
              (void)group.all_gather(tensor);
            }
          });
          check_named(error, since, victim, pid, 1s);
          (void)copy_to_host(tensor);
          error_of(ErrorKind::peer_lost, {"rank 2"}, [&] { group.barrier(); });
        },
        30s);
    check_ended(ended, {victim});
  }
}

TEST_CASE("a rank that is killed while other devices wait for its device is named by the next call, whichever it is") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  constexpr int victim = 1;
  const auto ended = try_ranks(
      3,
      [&](Group& outer) {
        ProcessGroup group(outer);
        const auto pid = static_cast<pid_t>(outer.info(victim).pid);
        const Tensor tensor = mine_of(group);
        group.all_reduce(tensor);
        (void)copy_to_host(tensor);
        // Its device stops: the call remains in its stream.
        if (group.rank() == victim) ::setenv("FAKE_CUDA_HANG", "1", 1);
        const auto since = std::chrono::steady_clock::now();
        const Error error = error_of([&] {
          group.all_reduce(tensor);
          if (group.rank() == victim) ::raise(SIGKILL);
          if (group.rank() == 0)
            group.barrier();
          else  // a message in host memory
            (void)group.recv(Tensor::allocate(DType::u8, {1}), victim);
        });
        check_named(error, since, victim, pid, 1s);
        (void)copy_to_host(tensor);
      },
      30s);
  check_ended(ended, {victim});
}

TEST_CASE("a wait for devices ends with the death of a rank and at the deadline; CUDA's own waits would not end") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  for (const bool is_killed : {true, false}) {
    const auto ended = try_ranks(
        3,
        [&](Group& outer) {
          ProcessGroup group(outer);
          group.wait_for_devices();
          const auto pid = static_cast<pid_t>(outer.info(1).pid);
          const Tensor tensor = mine_of(group);
          group.all_reduce(tensor);
          group.wait_for_devices();
          group.barrier();
          if (group.rank() == 1) ::setenv("FAKE_CUDA_HANG", "1", 1);
          group.all_reduce(tensor);
          group.barrier();
          if (group.rank() == 1 && is_killed) ::raise(SIGKILL);
          const auto since = std::chrono::steady_clock::now();
          if (is_killed)
            check_named(error_of([&] { group.wait_for_devices(); }), since, 1, pid, 1s);
          else
            error_of(ErrorKind::timeout, {"wait_for_devices"}, [&] { group.wait_for_devices({.timeout = 300ms}); });
          if (group.rank() != 1) (void)copy_to_host(tensor);
        },
        30s);
    check_ended(ended, is_killed ? std::vector{1} : std::vector<int>{});
  }
}

TEST_CASE("a rank that is stopped is named at the deadline, as stopped") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  run_ranks(3,
            [](Group& outer) {
              ProcessGroup group(outer);
              const auto pid = static_cast<pid_t>(outer.info(1).pid);
              const Tensor tensor = mine_of(group);
              group.all_reduce(tensor);
              if (group.rank() == 1) ::raise(SIGSTOP);
              error_of(ErrorKind::timeout, {"pid " + std::to_string(pid), "stopped", "all_reduce"},
                       [&] { group.all_reduce(tensor, ReduceOp::sum, {.timeout = 300ms}); });
              ::kill(pid, SIGKILL);
              (void)copy_to_host(tensor);
            },
            {1});
}
