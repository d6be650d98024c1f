// SPDX-License-Identifier: Apache-2.0
// Tensors on real devices. Without a device the test reports that and is skipped (77). Only forked ranks start the
// driver, because a process that is forked after that has no devices.

#include <algorithm>
#include <cstdio>

#include "muster/cuda.hpp"
#include "muster/process_group.hpp"
#include "tests/device/device_ranks.hpp"

using namespace muster;
using namespace muster::test;

namespace {

int devices = 0;

/// Functions of the driver that Muster does not use.
struct OtherFunctions : cuda::FunctionTable {
  cuda::Function<cuda::Status(cuda::DevicePointer*, std::size_t, cuda::StreamHandle)> allocate_from_pool{
      *this, "cuMemAllocAsync"};
  cuda::Function<cuda::Status(cuda::DevicePointer, cuda::StreamHandle)> free_to_pool{*this, "cuMemFreeAsync"};
  cuda::Function<cuda::Status(cuda::DevicePointer*, std::size_t, unsigned)> allocate_managed{*this,
                                                                                             "cuMemAllocManaged"};
};

const OtherFunctions& others() {
  static OtherFunctions functions;
  const cuda::Missing missing = cuda::find_functions("libcuda.so.1", functions);
  if (!missing.function.empty()) throw RankFailure("the driver does not have " + missing.function);
  return functions;
}

/// Returns the reason why no device is usable; empty: `devices` has their number.
std::string obstacle() {
  Ranks probe(1, [](int) {
    say(cuda_available() ? "devices " + std::to_string(cuda::device_count()) : cuda_unavailable_reason());
  });
  const std::string words = probe.wait().front().words;
  if (std::sscanf(words.c_str(), "devices %d", &devices) == 1) return {};
  return words.empty() ? "the driver ended the process that asked" : words;
}

void gather_and_check(Group& group, const GatherOptions& options, const std::string& way) {
  for (const std::int64_t rows : {1, 1000, 20000}) {
    const auto seed = static_cast<std::uint64_t>(group.rank() + rows);
    const Tensor mine = device_pattern(DType::bf16, {rows, 1024}, seed, group.rank() % cuda::device_count());
    for (int round = 0; round < 3; ++round) {
      const GatheredTensors all = get_tensors_parallel(mine, all_of(group), group, options);
      for (const auto& [rank, tensor] : all.present()) {
        RANK_CHECK(tensor.device().is_host() == (options.devices.destination == Destination::host));
        RANK_CHECK(
            is_pattern(copy_to_host(tensor), DType::bf16, {rows, 1024}, static_cast<std::uint64_t>(rank + rows)));
      }
      if (group.rank() != 0 && all.explain().find(way) == std::string::npos)
        throw RankFailure("not by " + way + ": " + all.explain());
    }
  }
}

}  // namespace

TEST_CASE("to the host: page-locked shared memory") {
  run_ranks(3, [](Group& group) { gather_and_check(group, {}, "page-locked shared memory"); });
}

TEST_CASE("to the root's device: by CUDA IPC, staged, and by NCCL if there are two devices and NCCL") {
  // IPC also works with several ranks on one device.
  run_ranks(3, [](Group& group) { gather_and_check(group, to_device(), "CUDA IPC"); });
  for (const auto& [way, words] : {std::pair("staging", "page-locked shared memory"), std::pair("nccl", "NCCL")}) {
    if (std::string_view(way) == "nccl" && devices < 2) {
      std::puts("skipped: NCCL needs two devices");
      continue;
    }
    const Setting setting("MUSTER_DEVICE_TRANSPORT", way);
    run_ranks(2, [way = way, words = words](Group& group) {
      if (std::string_view(way) == "nccl" && query_cuda().nccl.empty()) return;
      gather_and_check(group, to_device(), words);
    });
  }
}

TEST_CASE("work queued on the caller's stream is done first, and the source is free after the call") {
  run_ranks(2, [](Group& group) {
    UserStream stream(0);
    const cuda::Current current(0);
    const CudaStreamScope scope(stream.handle());
    constexpr std::int64_t bytes = 64 << 20;
    const Tensor target = cuda_allocate(DType::u8, {bytes}, 0);
    const std::vector<Tensor> work = work_of({0, 1, 2, 3}, bytes);
    for (int round = 0; round < 10; ++round) {
      stream.write_all(target, work);
      const GatheredTensors all = get_tensors_parallel(target, all_of(group), group);
      stream.write(target, work.front());
      group.barrier();
      if (group.rank() == 0) RANK_CHECK(is_pattern(*all[1], DType::u8, {bytes}, 3));
    }
    (void)copy_to_host(target);
  });
}

TEST_CASE("rows with gaps, empty tensors, memory that is released and allocated again") {
  run_ranks(2, [](Group& group) {
    const Tensor whole = on_device(pattern(DType::f32, {640, 480}, 1));
    for (int round = 0; round < 3; ++round) {
      const GatheredTensors all = get_tensors_parallel(whole.view().slice(1, 8, 240), all_of(group), group);
      if (group.rank() == 0)
        RANK_CHECK(bitwise_equal(*all[1], pattern(DType::f32, {640, 480}, 1).view().slice(1, 8, 240)));
      (void)get_tensors_parallel(cuda_allocate(DType::f32, {0}, 0), all_of(group), group);
      group.barrier();
      trim(group);
    }
  });
}

TEST_CASE("layers on a device, in a stream") {
  run_ranks(3, [](Group& group) {
    const auto layer_of = [](int rank, bool on_devices) {
      const auto seed = static_cast<std::uint64_t>(rank);
      const Tensor small = pattern(DType::bf16, {3, 100}, seed);
      const Tensor large = pattern(DType::f32, {9000, 1024}, seed + 10);
      return Config::object(
          {{"small", on_devices ? on_device(small) : small}, {"large", on_devices ? on_device(large) : large}});
    };
    stream_and_check(
        group, all_of(group), 6, [&](int rank, std::uint64_t) { return layer_of(rank, false); },
        {.memory_budget = 16 << 20}, [&](int rank, std::uint64_t) { return layer_of(rank, true); });
  });
}

TEST_CASE("memory of a pool is staged, and managed memory is refused") {
  run_ranks(2, [](Group& group) {
    (void)cuda::driver();
    const cuda::Current current(0);
    cuda::DevicePointer pooled = 0;
    cuda::DevicePointer managed = 0;
    constexpr std::int64_t bytes = 5 << 20;
    cuda::check(others().allocate_from_pool(&pooled, bytes, nullptr), "allocating from a pool");
    const Tensor expected = pattern(DType::u8, {bytes}, static_cast<std::uint64_t>(group.rank()));
    const Tensor locked = page_locked(expected);
    cuda::check(cuda::driver().copy_to_device(pooled, locked.data(), bytes, nullptr), "writing");
    const TensorView mine = cuda_view(DType::u8, {bytes}, cuda::address_of(pooled));
    for (const Destination destination : {Destination::host, Destination::device}) {
      const GatheredTensors all = gather_patterns(group, mine, 0, landing_at(destination), 1);
      if (group.rank() == 1) RANK_CHECK(all.explain().find("page-locked shared memory") != std::string::npos);
    }
    cuda::check(others().free_to_pool(pooled, nullptr), "freeing to a pool");
    cuda::check(others().allocate_managed(&managed, 4096, 1), "allocating managed memory");
    error_of(ErrorKind::invalid_argument, {"copy managed memory"},
             [&] { (void)cuda_view(DType::u8, {4096}, cuda::address_of(managed)); });
    cuda::check(cuda::driver().free(managed), "freeing managed memory");
  });
}

TEST_CASE("too little memory on the root's device is an error of all ranks, and the group remains usable") {
  run_ranks(2, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {1 << 20}, 5);
    gather_patterns(group, mine, 5, to_device());
    // Many views of one tensor: larger together than the device.
    const std::uint64_t count = cuda::device_memory(0) / (1 << 30) + 1;
    const Tensor block = cuda_allocate(DType::u8, {1 << 30}, 0);
    Config many = Config::array();
    for (std::uint64_t i = 0; i < count; ++i) many.push_back(Tensor::borrow(block.view()));
    const Config* const given = group.rank() == 0 ? nullptr : &many;
    error_of(ErrorKind::out_of_space, {"device memory", "are free", "gather to the host"},
             [&] { (void)get_configs_parallel(given, all_of(group), group, to_device()); });
    gather_patterns(group, mine, 5, to_device());
  });
}

TEST_CASE("an exchange while another stream is being captured") {
  run_ranks(2, [](Group& group) {
    constexpr std::int64_t bytes = 3 << 20;
    const auto seed = static_cast<std::uint64_t>(group.rank());
    const Tensor mine = device_pattern(DType::u8, {bytes}, seed);
    const Tensor target = cuda_allocate(DType::u8, {bytes}, 0);
    const Tensor locked = page_locked(pattern(DType::u8, {bytes}, 9));
    CudaGraphCapture capture(0);
    {
      const cuda::Current current(0);
      cuda::check(
          cuda::driver().copy_to_device(cuda::device_pointer(target.data()), locked.data(), bytes, capture.stream()),
          "capturing a copy");
    }
    // The named stream is the one that is being captured.
    error_of(ErrorKind::invalid_argument, {"cannot contain an exchange"}, [&] { gather_patterns(group, mine, 0); });
    const UserStream apart(0);
    {
      const CudaStreamScope scope(apart.handle());
      // The first exchange allocates memory, locks pages and queries events.
      gather_patterns(group, mine, 0, {}, 1);
      gather_patterns(group, mine, 0, to_device(), 1);
    }
    const CudaGraph graph = capture.end();
    graph.launch(apart.handle());
    const CudaStreamScope scope(apart.handle());
    RANK_CHECK(is_pattern(copy_to_host(target), DType::u8, {bytes}, 9));
  });
}

TEST_CASE("ranks that share a device cannot make collective calls on it, and the error has the remedy") {
  run_ranks(2, [](Group& outer) {
    if (query_cuda().nccl.empty()) return;
    ProcessGroup group(outer);
    const Tensor mine = device_pattern(DType::f32, {1000}, 1, 0);
    error_of(ErrorKind::unsupported, {"each rank needs its own", "copy_to_host"}, [&] { group.all_reduce(mine); });
    group.barrier();
  });
}

TEST_CASE("collectives by NCCL, with one device per rank, and captured into a graph") {
  run_ranks(std::min(devices, 4), [](Group& outer) {
    if (query_cuda().nccl.empty()) return;
    ProcessGroup group(outer);
    const int n = group.size();
    const int self = group.rank();
    const auto numbers = [&](float value) { return Tensor::take(std::vector<float>(1 << 20, value)); };
    const Tensor mine = on_device(numbers(static_cast<float>(self + 1)), self);
    const Tensor all = group.all_gather(mine);
    const Tensor exchanged = group.all_to_all(all);
    group.all_reduce(mine);
    group.wait_for_devices();
    const auto sum = static_cast<float>(n * (n + 1) / 2);
    RANK_CHECK(bitwise_equal(copy_to_host(mine), numbers(sum)));
    const Tensor host = copy_to_host(exchanged);
    for (int rank = 0; rank < n; ++rank)
      RANK_CHECK(
          bitwise_equal(host.view().slice(0, rank << 20, (rank + 1) << 20), numbers(static_cast<float>(self + 1))));
    CudaGraphCapture capture(self);
    group.all_reduce(mine);
    const CudaGraph graph = capture.end();
    UserStream stream(self);
    graph.launch(stream.handle());
    graph.launch(stream.handle());
    const CudaStreamScope scope(stream.handle());
    RANK_CHECK(bitwise_equal(copy_to_host(mine), numbers(sum * static_cast<float>(n * n))));
  });
}

int main(int argc, char** argv) {
  const std::string reason = obstacle();
  if (!reason.empty()) {
    std::printf("SKIPPED: nothing was run on a device: %s\n", reason.c_str());
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
