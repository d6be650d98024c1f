// SPDX-License-Identifier: Apache-2.0
// Failures of transfers of tensors on devices: between real processes, over a fake driver and a fake NCCL (fake/).

#include <csignal>
#include <thread>

#include "tests/device/device_ranks.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

TEST_CASE("host and device in one call: refused on all ranks before a byte is moved, with the remedy") {
  run_ranks(3, [](Group& group) {
    const Tensor here = pattern(DType::u8, {100}, 1);
    const Tensor there = on_device(here);
    const Config mixed = Config::object({{"a", here}, {"b", there}});
    const Counted before = calls("cuMemcpyDtoHAsync_v2");
    error_of(ErrorKind::invalid_argument, {"host"},
             [&] { (void)get_tensors_parallel(group.rank() == 1 ? there : here, all_of(group), group); });
    error_of(ErrorKind::invalid_argument, {"host"}, [&] { (void)get_configs_parallel(&mixed, all_of(group), group); });
    RANK_CHECK(calls("cuMemcpyDtoHAsync_v2") == before);
    (void)get_tensors_parallel(here, all_of(group), group);
    (void)get_tensors_parallel(there, all_of(group), group);
  });
}

TEST_CASE("different destinations are refused on all ranks") {
  run_ranks(3, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {100}, 1);
    error_of(ErrorKind::rank_mismatch, {"have different destinations"}, [&] {
      (void)get_tensors_parallel(mine, all_of(group), group, group.rank() == 2 ? to_device() : GatherOptions{});
    });
    (void)get_tensors_parallel(mine, all_of(group), group);
  });
}

TEST_CASE("a tensor whose memory is not on the device of its view: refused on all ranks" * over_fake) {
  run_ranks(2, [](Group& group) {
    const Tensor host = pattern(DType::u8, {100}, 1);
    const Tensor there = on_device(host, 1);
    error_of(ErrorKind::invalid_argument, {"its address is not on a device"}, [&] {
      (void)get_tensors_parallel(TensorView(DType::u8, {100}, host.data(), {}, {Device::Kind::cuda, 0}), all_of(group),
                                 group);
    });
    error_of(ErrorKind::invalid_argument, {"its address is on cuda:1"}, [&] {
      (void)get_tensors_parallel(TensorView(DType::u8, {100}, there.data(), {}, {Device::Kind::cuda, 0}), all_of(group),
                                 group);
    });
    group.barrier();
  });
}

TEST_CASE("too little memory on the root's device: every rank receives the error, the group remains usable" *
          over_fake) {
  run_ranks(3, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {100000}, 1, group.rank() % 2);
    if (group.rank() == 0) ::setenv("FAKE_CUDA_MEMORY", "150000", 1);
    error_of(ErrorKind::out_of_space, {"gather to the host"},
             [&] { (void)get_tensors_parallel(mine, all_of(group), group, to_device()); });
    gather_patterns(group, mine, 1);
  });
}

TEST_CASE("a device that hangs ends in a timeout that names it" * over_fake) {
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(2, [](Group& group) {
    group.set_timeout(1s);
    const Tensor mine = device_pattern(DType::u8, {100000}, 1);
    if (group.rank() == 1) ::setenv("FAKE_CUDA_HANG", "1", 1);
    error_of(ErrorKind::timeout, {"cuda:0"}, [&] { (void)get_tensors_parallel(mine, all_of(group), group); });
    error_of(ErrorKind::timeout, {"cuda:0"}, [&] { group.barrier(); });
  });
  CHECK(std::chrono::steady_clock::now() - begin < 10s);
}

TEST_CASE("a device that hangs while it reads staged data: the CPU does not wait in the driver" * over_fake) {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "staging");
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(2, [](Group& group) {
    group.set_timeout(1s);
    const Tensor mine = device_pattern(DType::u8, {100000}, 1);
    if (group.rank() == 0) {
      ::setenv("FAKE_CUDA_HANG", "1", 1);
      error_of(ErrorKind::timeout, {"cuda:0"},
               [&] { (void)get_tensors_parallel(mine, all_of(group), group, to_device()); });
      // Copies by hand behave in the same way.
      const Setting timeout("MUSTER_TIMEOUT", "1");
      error_of(ErrorKind::timeout, {"cuda:0"}, [&] { (void)copy_to_host(mine); });
      error_of(ErrorKind::timeout, {"cuda:0"}, [&] { (void)copy_to_device(pattern(DType::u8, {10}, 1), 0); });
    } else {
      (void)get_tensors_parallel(mine, all_of(group), group, to_device());
    }
  });
  CHECK(std::chrono::steady_clock::now() - begin < 20s);
}

TEST_CASE("a device whose context is lost fails every call, on all ranks; host tensors still work" * over_fake) {
  run_ranks(2, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {1000}, 4, group.rank());
    (void)get_tensors_parallel(mine, all_of(group), group);
    if (group.rank() == 1) fake<void(int)>("libcuda.so.1", "fake_cuda_break")(700);
    for (int round = 0; round < 2; ++round)
      error_of(ErrorKind::io, {"CUDA_ERROR_700"}, [&] { (void)get_tensors_parallel(mine, all_of(group), group); });
    const Tensor host = pattern(DType::u8, {1000}, 5);
    gather_patterns(group, host, 5);
  });
}

TEST_CASE("a rank that never joins the NCCL communicator ends in a timeout" * over_fake) {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "nccl");
  run_ranks(2, [](Group& group) {
    group.set_timeout(1s);
    const Tensor mine = device_pattern(DType::u8, {1000}, 1, group.rank());
    if (group.rank() == 1) ::setenv("FAKE_NCCL_SILENT", "1", 1);
    error_of(ErrorKind::timeout, {"NCCL"},
             [&] { (void)get_tensors_parallel(mine, all_of(group), group, to_device()); });
  });
}

TEST_CASE("an NCCL failure on one rank ends the exchange on all, at once, and leaves no batch open" * over_fake) {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "nccl");
  const Setting devices("FAKE_CUDA_DEVICES", "3");
  struct Failing {
    const char* name;
    const char* value;
    int rank;
  };
  for (const Failing& failing :
       {Failing{"FAKE_NCCL_FAIL", "ncclSend", 1}, Failing{"FAKE_NCCL_FAIL", "ncclRecv", 0},
        Failing{"FAKE_NCCL_FAIL", "ncclGroupEnd", 1}, Failing{"FAKE_NCCL_FAIL", "ncclCommInitRankConfig", 1},
        Failing{"FAKE_NCCL_STUCK", "1", 2}, Failing{"FAKE_NCCL_STUCK", "1", 0}}) {
    CAPTURE(std::string(failing.value));
    CAPTURE(failing.rank);
    const auto begin = std::chrono::steady_clock::now();
    run_ranks(3, [&](Group& outer) {
      const Tensor mine = device_pattern(DType::u8, {1000}, 1, outer.rank());
      {
        const auto group = outer.duplicate();
        if (outer.rank() == failing.rank) ::setenv(failing.name, failing.value, 1);
        error_of(ErrorKind::io, {"NCCL"},
                 [&] { (void)get_tensors_parallel(mine, all_of(*group), *group, to_device()); });
        RANK_CHECK(fake<int()>("libnccl.so.2", "fake_nccl_depth")() == 0);
        ::unsetenv(failing.name);
      }
      outer.barrier();
      gather_patterns(outer, mine, 1, to_device());
    });
    CHECK(std::chrono::steady_clock::now() - begin < 20s);
  }
}

TEST_CASE("NCCL that cannot create an ID is an error on all ranks at once, and the group remains usable" * over_fake) {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "nccl");
  const Setting devices("FAKE_CUDA_DEVICES", "3");
  run_ranks(3, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {1000}, 1, group.rank());
    if (group.rank() == 0) ::setenv("FAKE_NCCL_FAIL", "ncclGetUniqueId", 1);
    const auto begin = std::chrono::steady_clock::now();
    error_of(ErrorKind::io, {"rank 0 (host"},
             [&] { (void)get_tensors_parallel(mine, all_of(group), group, to_device()); });
    RANK_CHECK(std::chrono::steady_clock::now() - begin < 2s);
    ::unsetenv("FAKE_NCCL_FAIL");
    gather_patterns(group, mine, 1, to_device());
  });
}

TEST_CASE("a refused call does not affect NCCL communicators" * over_fake) {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "nccl");
  run_ranks(2, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {1000}, 1, group.rank());
    gather_patterns(group, mine, 1, to_device());
    error_of(ErrorKind::rank_mismatch, {"have different destinations"}, [&] {
      (void)get_tensors_parallel(mine, all_of(group), group, group.rank() == 0 ? to_device() : GatherOptions{});
    });
    // Refused after the start: a rank has too little memory.
    if (group.rank() == 0) ::setenv("FAKE_CUDA_MEMORY", "1", 1);
    const Tensor large = group.rank() == 0 ? mine : device_pattern(DType::u8, {1 << 20}, 1, 1);
    const Config config(large);
    error_of(ErrorKind::out_of_space, {"gather to the host"},
             [&] { (void)get_configs_parallel(&config, all_of(group), group, to_device()); });
    ::unsetenv("FAKE_CUDA_MEMORY");
    gather_patterns(group, mine, 1, to_device());
    RANK_CHECK(fake<std::uint64_t()>("libnccl.so.2", "fake_nccl_inits")() == 1);
  });
}

TEST_CASE("a killed sender is named by all others within about a second, with every method") {
  for (const char* way : {"host", "staging", "ipc", "nccl"}) {
    CAPTURE(std::string(way));
    // NCCL needs a device for each rank.
    if (is_driver_real() && std::string(way) == "nccl") continue;
    const bool is_to_device = std::string(way) != "host";
    std::optional<Setting> setting;
    if (is_to_device) setting.emplace("MUSTER_DEVICE_TRANSPORT", way);
    const Setting devices("FAKE_CUDA_DEVICES", "3");
    const GroupOf groups(3);
    Ranks ranks(3, [&](int rank) {
      const auto group = groups.join(rank);
      const Tensor mine = device_pattern(DType::u8, {8 << 20}, 1, rank);
      const GatherOptions options = is_to_device ? to_device() : GatherOptions{};
      const Error error = error_of(ErrorKind::peer_lost, {}, [&] {
        for (;;) (void)get_tensors_parallel(mine, all_of(*group), *group, options);
      });
      RANK_CHECK(error.rank() == 1);
    });
    // A real driver takes seconds to start.
    std::this_thread::sleep_for(is_driver_real() ? 5s : 300ms);
    ranks.signal(1, SIGKILL);
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<Ended> ended = ranks.wait(20s);
    CHECK(std::chrono::steady_clock::now() - begin < 5s);
    check_ended(ended, {1});
  }
  CHECK(shared_memory_names().empty());
}

TEST_CASE("a sender that fails at any step is an error on all ranks" * over_fake) {
  for (const char* const failing :
       {"cuEventCreate:999:2", "cuEventRecord:999", "cuMemcpyDtoDAsync_v2:999", "cuStreamIsCapturing:999"}) {
    CAPTURE(std::string(failing));
    run_ranks(2, [&](Group& group) {
      const Tensor mine = device_pattern(DType::u8, {1000}, 4, group.rank());
      ::setenv("FAKE_CUDA_FAIL", failing, 1);
      error_of(ErrorKind::io, {"CUDA_ERROR_999"},
               [&] { (void)get_tensors_parallel(mine, all_of(group), group, to_device()); });
      ::unsetenv("FAKE_CUDA_FAIL");
      gather_patterns(group, mine, 4, to_device());
    });
  }
}

TEST_CASE("a device that fails on any one rank, whichever step, is every rank's error at once" * over_fake) {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  for (const Destination destination : {Destination::host, Destination::device}) {
    const Setting way("MUSTER_DEVICE_TRANSPORT", destination == Destination::host ? "ipc" : "staging");
    run_ranks(4, [&](Group& group) {
      const GatherOptions options = landing_at(destination);
      const Tensor mine = device_pattern(DType::u8, {100000}, 4, group.rank());
      // If the destination is the root's device, the root copies after the others have closed the exchange.
      for (int failing = destination == Destination::host ? 0 : 1; failing < 4; ++failing)
        for (const char* const function : {"cuMemcpyDtoHAsync_v2", "cuStreamWaitEvent", "cuEventQuery"}) {
          if (group.rank() == failing) ::setenv("FAKE_CUDA_FAIL", (std::string(function) + ":999").c_str(), 1);
          const auto begin = std::chrono::steady_clock::now();
          error_of(ErrorKind::io, {"rank " + std::to_string(failing) + " (host"},
                   [&] { (void)get_tensors_parallel(mine, all_of(group), group, options); });
          RANK_CHECK(std::chrono::steady_clock::now() - begin < 2s);
          ::unsetenv("FAKE_CUDA_FAIL");
          gather_patterns(group, mine, 4, options);
        }
    });
  }
}

TEST_CASE("page-locked copies observe the memory budget: refused on all ranks, and the group remains usable") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {1 << 20}, 3, group.rank() % 2);
    for (const Destination destination : {Destination::host, Destination::device}) {
      const Setting way("MUSTER_DEVICE_TRANSPORT", "staging");
      GatherOptions options = landing_at(destination);
      // The budget covers two tensors of the other host, and the root's own.
      options.memory_budget = 3 << 20;
      for (int round = 0; round < 3; ++round) {
        gather_patterns(group, mine, 3, options);
        group.barrier();
      }
      options.memory_budget = group.rank() == 3 ? 1 << 19 : 3 << 20;
      error_of(ErrorKind::out_of_space, {"rank 3 (host"},
               [&] { (void)get_tensors_parallel(mine, all_of(group), group, options); });
      (void)get_tensors_parallel(mine, all_of(group), group, {.devices = {.destination = destination}});
      trim(group);
    }
  });
}

TEST_CASE("after fork the child has no devices, and its calls report that") {
  run_ranks(1, [](Group&) {
    const Tensor mine = device_pattern(DType::u8, {1000}, 4);
    Ranks child(1, [&](int) {
      RANK_CHECK(!cuda_available());
      RANK_CHECK(cuda_unavailable_reason().find("forked") != std::string::npos);
      // The destructors of the parent's objects do nothing.
      Tensor copy = mine;
    });
    for (const Ended& ended : child.wait()) RANK_CHECK(ended.ok());
    RANK_CHECK(is_pattern(copy_to_host(mine), DType::u8, {1000}, 4));
  });
}

TEST_CASE("without a device: host tensors work as always, and the reason has a remedy" * over_fake) {
  const Setting none("FAKE_CUDA_DEVICES", "0");
  run_ranks(2, [](Group& group) {
    RANK_CHECK(!cuda_available());
    RANK_CHECK(cuda_unavailable_reason().find("nvidia-smi") != std::string::npos);
    const GatheredTensors all = get_tensors_parallel(pattern(DType::u8, {100}, 1), all_of(group), group);
    RANK_CHECK(all.report().route == Route::shm);
  });
}
