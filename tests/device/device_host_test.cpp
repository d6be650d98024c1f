// SPDX-License-Identifier: Apache-2.0
// Tensors on devices, gathered to the host, between real processes, over a fake driver (fake/fake_cuda.hpp). The tests
// prove that nothing is read too early and nothing remains allocated. They do not prove that a real device works.

#include "muster/async.hpp"
#include "tests/device/device_ranks.hpp"

using namespace muster;
using namespace muster::test;

namespace {

Config layer_of(int rank, int devices = 1) {
  Config layer = Config::object({{"rank", rank}, {"name", "layer"}});
  for (int i = 0; i < 9; ++i)
    layer["w" + std::to_string(i)] =
        device_pattern(DType::bf16, {i % 4, 130 + i}, static_cast<std::uint64_t>(rank * 100 + i), i % devices);
  return layer;
}

void check_layer(const Config& layer, int rank) {
  RANK_CHECK(layer.at("rank").as_int() == rank);
  for (int i = 0; i < 9; ++i) {
    const Tensor& tensor = layer.at("w" + std::to_string(i)).as_tensor();
    RANK_CHECK(tensor.nbytes() == 0 || tensor.device().is_host());
    if (tensor.nbytes() != 0)
      RANK_CHECK(is_pattern(tensor, DType::bf16, {i % 4, 130 + i}, static_cast<std::uint64_t>(rank * 100 + i)));
  }
}

}  // namespace

TEST_CASE("configs of all ranks arrive in host memory, the root's own too") {
  for (const int size : {1, 2, 4}) {
    CAPTURE(size);
    run_ranks(size, [](Group& group) {
      const Config mine = layer_of(group.rank());
      for (int round = 0; round < 3; ++round) {
        const std::vector<int> ranks = ranks_from(round % group.size(), group.size());
        const GatheredConfigs all = get_configs_parallel(&mine, ranks, group);
        RANK_CHECK(all.report().route == Route::device);
        for (const auto& [rank, layer] : all.present()) check_layer(layer, rank);
        RANK_CHECK(all.present().size() == (group.rank() == ranks.front() ? ranks.size() : 0));
      }
      RANK_CHECK(pageable_copies() == 0);
    });
  }
}

TEST_CASE("tensors of several pieces, and of several devices of one rank") {
  run_ranks(2, [](Group& group) {
    const auto seed = static_cast<std::uint64_t>(group.rank());
    gather_patterns(group, device_pattern(DType::f32, {9, 1 << 20}, seed, group.rank()), 0, {}, 1);
    const Config mine = layer_of(group.rank(), 2);
    const GatheredConfigs layers = get_configs_parallel(&mine, all_of(group), group);
    for (const auto& [rank, layer] : layers.present()) check_layer(layer, rank);
  });
}

TEST_CASE("ranks without a config or without tensors follow those that have them on devices, each rank as root") {
  run_ranks(4, [](Group& group) {
    const Config layer = layer_of(group.rank());
    const Config words = Config::object({{"name", "nothing"}, {"layers", Config::array({1, 2, 3})}});
    const Config host = pattern(DType::u8, {100}, 1);
    for (const int first : {0, 1, 2, 3}) {
      const Config* const mine = group.rank() == 0 ? nullptr : group.rank() == 1 ? &words : &layer;
      const GatheredConfigs all = get_configs_parallel(mine, ranks_from(first, 4), group);
      RANK_CHECK(all.report().route == Route::device);
      RANK_CHECK((all.report().rounds == 2 || group.kind() == "file"));
      RANK_CHECK(all.present().size() == (group.rank() == first ? 3 : 0));
      for (const auto& [rank, config] : all.present()) {
        RANK_CHECK(rank != 0);
        if (rank == 1)
          RANK_CHECK(config == words);
        else
          check_layer(config, rank);
      }
    }
    // If it is forced, the device route is used even if no rank has tensors. Host tensors use the same route as before.
    RANK_CHECK(get_configs_parallel(&words, all_of(group), group, {.route = Route::device}).report().route ==
               Route::device);
    const auto gather = [&](const Config& mine, Route route = Route::auto_) {
      return get_configs_parallel(&mine, all_of(group), group, {.route = route}).report().route;
    };
    RANK_CHECK(gather(host) != Route::device);
    error_of(ErrorKind::unsupported, {"are on the host"}, [&] { (void)gather(host, Route::device); });
    error_of(ErrorKind::invalid_argument, {"rank 3: the host"},
             [&] { (void)gather(group.rank() == 3 ? host : layer); });
  });
}

TEST_CASE("strided tensors: rows with gaps are copied, other strides are refused on all ranks with the remedy") {
  run_ranks(2, [](Group& group) {
    const auto seed = static_cast<std::uint64_t>(group.rank());
    const Tensor host = pattern(DType::f32, {64, 48}, seed);
    const Tensor whole = on_device(host);
    const GatheredTensors all = get_tensors_parallel(whole.view().slice(1, 8, 24), all_of(group), group);
    if (group.rank() == 0)
      for (std::size_t i = 0; i < 2; ++i)
        RANK_CHECK(bitwise_equal(*all[i], pattern(DType::f32, {64, 48}, i).view().slice(1, 8, 24)));
    const Tensor other = cuda_allocate(DType::f32, {48, 64}, 0);
    const TensorView strided = group.rank() == 1 ? whole.view().transposed() : other.view();
    const Error error = error_of(ErrorKind::invalid_argument, {"Make it contiguous first"},
                                 [&] { (void)get_tensors_parallel(strided, all_of(group), group); });
    RANK_CHECK(error.rank() == 1);
    group.barrier();
  });
}

TEST_CASE("what the caller has queued comes first, without and with a named stream") {
  run_ranks(2, [](Group& group) {
    const auto seed = static_cast<std::uint64_t>(group.rank());
    const auto gather_from = [&](UserStream& stream, std::uint64_t round) {
      const Tensor target = cuda_allocate(DType::u8, {100000}, 0);
      const std::vector<Tensor> work = work_of(many_seeds(seed + 10 * round, 100));
      stream.write_all(target, work);
      const GatheredTensors all = get_tensors_parallel(target, all_of(group), group);
      // After this the source belongs to the caller again.
      const Tensor after = page_locked(pattern(DType::u8, {100000}, 999));
      stream.write(target, after);
      group.barrier();
      if (group.rank() == 0)
        for (std::size_t i = 0; i < 2; ++i) RANK_CHECK(is_pattern(*all[i], DType::u8, {100000}, i + 10 * round + 2000));
      (void)copy_to_host(target);
    };
    UserStream ordinary(0, true);
    gather_from(ordinary, 1);
    UserStream apart(0);
    const cuda::Current current(0);
    const CudaStreamScope scope(apart.handle());
    gather_from(apart, 2);
  });
}

TEST_CASE("a named stream applies to tensors on its own device, whichever device is current in the thread" *
          over_fake) {
  run_ranks(2, [](Group& group) {
    for (const int current_one : {-1, 0, 1}) {
      std::optional<cuda::Current> current;
      if (current_one >= 0) current.emplace(current_one);
      for (const int device : {0, 1}) {
        const Tensor target = cuda_allocate(DType::u8, {100000}, device);
        const std::vector<Tensor> work = work_of(many_seeds(0, 1));
        const UserStream apart(device);
        apart.write_all(target, work);
        const CudaStreamScope scope(apart.handle());
        gather_patterns(group, target, 20);
        RANK_CHECK(cuda::current_device() == (current_one < 0 ? std::nullopt : std::optional(current_one)));
      }
    }
  });
}

TEST_CASE("a stream of a context that the program has created is refused when it is named" * over_fake) {
  run_ranks(1, [](Group&) {
    (void)cuda::driver();
    void* const context = fake<void*(int)>("libcuda.so.1", "fake_cuda_context")(1);
    cuda::StreamHandle stream = nullptr;
    {
      const cuda::Current current(static_cast<cuda::Context>(context));
      cuda::check(cuda::driver().stream_create(&stream, cuda::stream_non_blocking), "a stream");
    }
    error_of(ErrorKind::invalid_argument, {"Use a stream of the device's primary context"},
             [&] { const CudaStreamScope scope(stream); });
  });
}

TEST_CASE("a stream that is being captured into a graph cannot be named, and the capture is unharmed" * over_fake) {
  run_ranks(2, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {1000}, static_cast<std::uint64_t>(group.rank()), 0);
    const auto capture = fake<void(void*, bool)>("libcuda.so.1", "fake_cuda_capture");
    const auto is_whole = fake<bool()>("libcuda.so.1", "fake_cuda_capture_is_whole");
    const auto gather = [&] { gather_patterns(group, mine, 0, {}, 1); };
    const auto refused = [&](const char* words) {
      error_of(ErrorKind::invalid_argument, {words}, gather);
      RANK_CHECK(is_whole());
    };
    const cuda::Current current(0);
    const UserStream apart(0);
    const UserStream blocking(0, true);
    // A captured stream that is unrelated to the exchange. The first exchange allocates memory and queries events.
    capture(apart.handle(), true);
    gather();
    RANK_CHECK(is_whole());
    {
      const CudaStreamScope scope(apart.handle());
      refused("cannot contain an exchange");
    }
    capture(apart.handle(), false);
    // A captured stream for which the default stream would wait.
    capture(blocking.handle(), true);
    refused("Name the stream of the tensors");
    {
      const CudaStreamScope scope(apart.handle());
      gather();
      RANK_CHECK(is_whole());
    }
    capture(blocking.handle(), false);
    gather();
  });
}

TEST_CASE("rows that are farther apart than the device copies in one operation" * over_fake) {
  const Setting pitch("FAKE_CUDA_MAX_PITCH", "100");
  run_ranks(2, [](Group& group) {
    const auto seed = static_cast<std::uint64_t>(group.rank());
    const Tensor whole = on_device(pattern(DType::f32, {64, 48}, seed));
    const GatheredTensors all = get_tensors_parallel(whole.view().slice(1, 8, 24), all_of(group), group);
    if (group.rank() == 0) RANK_CHECK(bitwise_equal(*all[1], pattern(DType::f32, {64, 48}, 1).view().slice(1, 8, 24)));
  });
}

TEST_CASE("the current device does not change, even after errors" * over_fake) {
  run_ranks(2, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {1000}, 1, 0);
    RANK_CHECK(cuda::current_device() == std::nullopt);
    (void)get_tensors_parallel(mine, all_of(group), group);
    RANK_CHECK(cuda::current_device() == std::nullopt);
    const cuda::Current current(1);
    (void)get_tensors_parallel(mine, all_of(group), group);
    RANK_CHECK(cuda::current_device() == 1);
    {
      const Setting failing("FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync_v2:700");
      error_of(ErrorKind::io, {"CUDA_ERROR_700"}, [&] { (void)get_tensors_parallel(mine, all_of(group), group); });
    }
    RANK_CHECK(cuda::current_device() == 1);
    // The group is still usable.
    gather_patterns(group, mine, 1);
  });
}

TEST_CASE("pages that cannot be locked: small buffers in turn" * over_fake) {
  const Setting failing("FAKE_CUDA_FAIL", "cuMemHostRegister_v2:2");
  run_ranks(2, [](Group& group) {
    const auto seed = static_cast<std::uint64_t>(group.rank());
    const Tensor mine = device_pattern(DType::f32, {6 << 20}, seed);
    for (int round = 0; round < 2; ++round) {
      const Counted before = pageable_copies();
      const GatheredTensors all = gather_patterns(group, mine, 0, {}, 1);
      RANK_CHECK(pageable_copies() == before);
      if (group.rank() == 1) RANK_CHECK(all.explain().find("cannot be page-locked") != std::string::npos);
    }
    const Tensor wide = pattern(DType::f32, {3000, 2000}, seed);
    const GatheredTensors rows = get_tensors_parallel(on_device(wide).view().slice(1, 0, 1500), all_of(group), group);
    if (group.rank() == 0)
      RANK_CHECK(bitwise_equal(*rows[1], pattern(DType::f32, {3000, 2000}, 1).view().slice(1, 0, 1500)));
  });
}

TEST_CASE("page locks are made once per slot, grow with it, and are released with its memory") {
  run_ranks(2, [](Group& group) {
    const auto gather_of = [&](std::int64_t bytes, std::uint64_t seed) {
      const Tensor mine = device_pattern(DType::u8, {bytes}, seed + static_cast<std::uint64_t>(group.rank()));
      const GatheredTensors all = gather_patterns(group, mine, seed, {}, 1);
      if (group.rank() == 1) RANK_CHECK(all.explain().find("page-locked shared memory") != std::string::npos);
    };
    for (std::uint64_t round = 0; round < 5; ++round) {
      gather_of(50000, round);
      // The root has released the slot. Otherwise the next round would take and lock another one.
      group.barrier();
    }
    const bool sends = group.rank() == 1;
    if (sends) RANK_CHECK(calls("cuMemHostRegister_v2") == 1);
    gather_of(500000, 7);
    gather_of(50000, 8);
    if (sends) RANK_CHECK(still_open("locks") >= 1);
    // Released memory has other pages when it is allocated again, so a lock on the old pages would show here.
    group.barrier();
    trim(group);
    if (sends) RANK_CHECK(still_open("locks") == 0);
    gather_of(500000, 9);
    gather_of(400000, 10);
  });
  // A group releases all its resources when it is destroyed.
  const GroupOf groups(2);
  Ranks ranks(2, [&](int rank) {
    {
      const auto group = groups.join(rank);
      const Tensor mine = device_pattern(DType::u8, {50000}, 1);
      (void)get_tensors_parallel(mine, all_of(*group), *group);
      group->barrier();
    }
    // Frees the buffer of copies by hand, with which the test has made its tensor.
    cuda::pinned_pool_of_process()->trim();
    for (const char* what : {"locks", "host", "streams", "events", "memory"}) {
      if (still_open(what) != 0) throw RankFailure(std::string("left: ") + what);
    }
  });
  check_ended(ranks.wait());
}

TEST_CASE("results outlive their group, and release their memory at the end") {
  run_ranks(2, [](Group& outer) {
    GatheredTensors all;
    {
      const auto group = outer.duplicate();
      const Tensor mine = device_pattern(DType::u8, {5000}, static_cast<std::uint64_t>(group->rank()));
      all = gather_patterns(*group, mine, 0, {}, 1);
    }
    for (const auto& [rank, tensor] : all.present())
      RANK_CHECK(is_pattern(tensor, DType::u8, {5000}, static_cast<std::uint64_t>(rank)));
    all.release();
    cuda::pinned_pool_of_process()->trim();
    RANK_CHECK(still_open("host") == 0);
  });
}

TEST_CASE("asynchronous calls refuse tensors on devices, on all ranks, and the group remains usable") {
  run_ranks(2, [](Group& group) {
    const Config mine = layer_of(group.rank());
    const std::optional<Config> given = group.rank() == 0 ? std::nullopt : std::optional(mine);
    error_of(ErrorKind::unsupported, {"without _async"},
             [&] { (void)get_configs_async(given, all_of(group), group).get(); });
    const auto source = [&]() -> std::optional<Config> { return mine; };
    error_of(ErrorKind::unsupported, {"without _async"},
             [&] { (void)gather_each_async(source, all_of(group), group, [](LayerPart&) {}).get(); });
    (void)get_configs_parallel(&mine, all_of(group), group);
  });
}

TEST_CASE("layers that a stream's source copies by hand") {
  run_ranks(2, [](Group& group) {
    const auto source = layers_of(4, [&](std::uint64_t) { return config_to_host(layer_of(group.rank(), 2)); });
    int taken = 0;
    const LayerConsumer consume = [&](LayerPart& part) {
      for (const auto& [rank, layer] : part.present()) check_layer(layer, rank);
      ++taken;
    };
    (void)gather_each(source, all_of(group), group, consume);
    RANK_CHECK(taken == (group.rank() == 0 ? 4 : 0));
    // The memory of one layer is reused for the next.
    RANK_CHECK(still_open("host") <= 3);
  });
}

TEST_CASE("copies by hand") {
  run_ranks(1, [](Group&) {
    const Tensor host = pattern(DType::i16, {30, 20}, 5);
    const int other = device_at(1);
    const Tensor there = copy_to_device(host.view().transposed(), other);
    RANK_CHECK(there.device() == (Device{Device::Kind::cuda, other}));
    RANK_CHECK(bitwise_equal(copy_to_host(there), host.view().transposed()));
    RANK_CHECK(bitwise_equal(copy_to_host(copy_to_device(host, 0).view().slice(1, 3, 9)), host.view().slice(1, 3, 9)));
    RANK_CHECK(cuda_view(DType::i16, {20, 30}, there.data()).device().index == other);
    error_of(ErrorKind::invalid_argument, {}, [&] { (void)cuda_view(DType::i16, {20, 30}, host.data()); });
    RANK_CHECK(pageable_copies() == 0);
  });
}

TEST_CASE("managed memory is memory neither of a device nor of the host" * over_fake) {
  run_ranks(1, [](Group&) {
    (void)cuda::driver();
    unsigned long long managed = 0;
    {
      const cuda::Current current(0);
      RANK_CHECK(fake<int(unsigned long long*, std::uint64_t)>("libcuda.so.1", "fake_cuda_allocate_managed")(&managed,
                                                                                                             64) == 0);
    }
    error_of(ErrorKind::invalid_argument, {}, [&] { (void)cuda_view(DType::u8, {64}, cuda::address_of(managed)); });
  });
}
