// SPDX-License-Identifier: Apache-2.0
// Tensors on devices whose destination is the root's device, by CUDA IPC, by NCCL, and staged: between real processes,
// over a fake driver and a fake NCCL (fake/).

#include "tests/device/device_ranks.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "src/cuda/destination.hpp"

using namespace muster;
using namespace muster::test;

namespace {

std::uint64_t nccl_meetings() {
  return fake<std::uint64_t()>("libnccl.so.2", "fake_nccl_inits")();
}

Config layer_of(int rank, std::uint64_t round, int device) {
  const auto seed = static_cast<std::uint64_t>(rank) * 1000 + round * 10;
  return Config::object({{"rank", rank},
                         {"a", device_pattern(DType::bf16, {3, 100}, seed, device)},
                         {"none", cuda_allocate(DType::f32, {0}, device)},
                         {"b", device_pattern(DType::f32, {77}, seed + 1, device)}});
}

void check_layer(const Config& layer, int rank, std::uint64_t round, int device) {
  const auto seed = static_cast<std::uint64_t>(rank) * 1000 + round * 10;
  RANK_CHECK(layer.at("rank").as_int() == rank);
  for (const char* name : {"a", "b"})
    RANK_CHECK(layer.at(name).as_tensor().device() == (Device{Device::Kind::cuda, device}));
  RANK_CHECK(is_pattern(copy_to_host(layer.at("a").as_tensor()), DType::bf16, {3, 100}, seed));
  RANK_CHECK(is_pattern(copy_to_host(layer.at("b").as_tensor()), DType::f32, {77}, seed + 1));
}

/// Gathers several times, each rank from its own device. Each rank reports its last explain() text.
std::vector<Ended> gather_rounds(int size, int rounds, const std::function<void(Group&)>& after = {}) {
  return try_ranks(size, [&](Group& group) {
    const int device = group.rank() % cuda::device_count();
    std::string words;
    for (int round = 0; round < rounds; ++round) {
      const Config mine = layer_of(group.rank(), static_cast<std::uint64_t>(round), device);
      const GatheredConfigs all = get_configs_parallel(&mine, all_of(group), group, to_device());
      for (const auto& [rank, layer] : all.present()) check_layer(layer, rank, static_cast<std::uint64_t>(round), 0);
      RANK_CHECK(all.present().size() == (group.rank() == 0 ? static_cast<std::size_t>(group.size()) : 0));
      words = all.explain();
    }
    if (after) after(group);
    say(words);
  });
}

void check_all(const std::vector<Ended>& ended, int from, const std::string& words) {
  for (std::size_t rank = 0; rank < ended.size(); ++rank) {
    CAPTURE(rank);
    CAPTURE(ended[rank].words);
    CHECK(ended[rank].ok());
    if (static_cast<int>(rank) >= from) CHECK(ended[rank].words.find(words) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("on one host by CUDA IPC: an allocation is opened once, however often it is used") {
  const std::vector<Ended> ended = gather_rounds(3, 4, [](Group& group) {
    // Layers are allocated again in each round. Their memory must not be confused with earlier memory at the same
    // address.
    if (group.rank() == 0) RANK_CHECK(still_open("opened") <= 2 * 2 * 2);
    group.barrier();
    trim(group);
    RANK_CHECK(still_open("opened") == 0);
  });
  check_all(ended, 1, "CUDA IPC");
}

TEST_CASE("an allocation that remains is opened once; one that was freed is closed") {
  run_ranks(2, [](Group& group) {
    {
      const Tensor mine = device_pattern(DType::u8, {4096}, static_cast<std::uint64_t>(group.rank()), group.rank());
      for (int round = 0; round < 5; ++round) (void)get_tensors_parallel(mine, all_of(group), group, to_device());
      if (group.rank() == 0) RANK_CHECK(calls("cuIpcOpenMemHandle_v2") == 1);
      if (group.rank() == 1) RANK_CHECK(calls("cuIpcGetMemHandle") == 1);
    }
    const Tensor other = device_pattern(DType::u8, {4096}, 7, group.rank());
    gather_patterns(group, other, 7, to_device());
    if (group.rank() == 0) {
      RANK_CHECK(calls("cuIpcOpenMemHandle_v2") == 2);
      RANK_CHECK(still_open("opened") == 1);
    }
  });
}

TEST_CASE("more allocations in one exchange than remain open after it") {
  run_ranks(2, [](Group& group) {
    const std::vector<int> ranks = all_of(group);
    Config mine = Config::array();
    if (group.rank() == 1)
      for (std::uint64_t i = 0; i < 300; ++i) mine.push_back(device_pattern(DType::u8, {64}, i, 1));
    for (int round = 0; round < 2; ++round) {
      const GatheredConfigs all = get_configs_parallel(&mine, ranks, group, to_device());
      if (group.rank() != 0) continue;
      for (std::uint64_t i = 0; i < 300; ++i)
        RANK_CHECK(is_pattern(copy_to_host(all[1]->at(i).as_tensor()), DType::u8, {64}, i));
      RANK_CHECK(still_open("opened") == 256);
    }
  });
}

TEST_CASE("a malformed offer is an error on all ranks, and the group remains usable" * over_fake) {
  /// Sets a byte of the descriptor, with its hash, and then changes the header.
  struct Forgery {
    const char* words;
    std::size_t at;
    int value;
    void (*change)(cuda::OfferHeader&);
  };
  static const Forgery* forgery = nullptr;
  // The descriptor: magic number, version, tag, kind, dtype, rank, four extents, and the place of IPC.
  const std::vector<Forgery> by_both = {
      {"differs from the announced one", 1, 1, [](cuda::OfferHeader& header) { ++header.body_hash; }},
      {"differs from the announced one", 1, 1, [](cuda::OfferHeader& header) { ++header.body_bytes; }},
      {"too short", 1, 1, [](cuda::OfferHeader& header) { header.exports = 1000; }},
      {"a tensor exceeds the announced bytes", 6, 127, nullptr}};
  const std::vector<Forgery> by_ipc = {{"is in no allocation that was offered", 10, 2, nullptr},
                                       {"a tensor exceeds the announced bytes", 11, 127, nullptr}};
  for (const char* const method : {"ipc", "nccl"}) {
    const Setting way("MUSTER_DEVICE_TRANSPORT", method);
    run_ranks(2, [&](Group& group) {
      // As large as an allocation.
      const Config mine = device_pattern(DType::f64, {8, 8, 8, 16}, 1, group.rank());
      const auto refuse = [&](const Forgery& each) {
        forgery = &each;
        if (group.rank() == 1)
          os::set_damage_hook([](std::span<std::byte> message) {
            cuda::OfferHeader header;
            if (message.size() < sizeof header) return;
            std::memcpy(&header, message.data(), sizeof header);
            const auto body = message.last(header.body_bytes);
            body[forgery->at] = static_cast<std::byte>(forgery->value);
            header.body_hash = XXH3_64bits(body.data(), body.size());
            if (forgery->change != nullptr) forgery->change(header);
            std::memcpy(message.data(), &header, sizeof header);
            os::set_damage_hook(nullptr);
          });
        fails_alike(group, ErrorKind::corrupt, {"device tensors of rank 1", each.words},
                    [&] { (void)get_configs_parallel(&mine, all_of(group), group, to_device()); });
      };
      for (const Forgery& each : by_both) refuse(each);
      if (std::string_view(method) == "ipc")
        for (const Forgery& each : by_ipc) refuse(each);
      const GatheredConfigs all = get_configs_parallel(&mine, all_of(group), group, to_device());
      if (group.rank() == 0) RANK_CHECK(is_pattern(copy_to_host(all[1]->as_tensor()), DType::f64, {8, 8, 8, 16}, 1));
    });
  }
}

TEST_CASE("several ranks on one device: IPC") {
  const Setting one("FAKE_CUDA_ONE_DEVICE", "1");
  check_all(gather_rounds(3, 2), 1, "CUDA IPC");
}

TEST_CASE("IPC copies a snapshot: later writes of the caller are not in the result, its queued work is") {
  run_ranks(2, [](Group& group) {
    const int device = device_at(group.rank());
    UserStream stream(device);
    const cuda::Current current(device);
    const CudaStreamScope scope(stream.handle());
    const Tensor target = cuda_allocate(DType::u8, {100000}, device);
    const std::vector<Tensor> work = work_of(many_seeds(0, 100));
    stream.write_all(target, work);
    GatherOptions options = to_device();
    options.root_tensors = RootTensors::copy;
    const GatheredTensors all = get_tensors_parallel(target, all_of(group), group, options);
    stream.write(target, work.front());
    (void)copy_to_host(target);
    group.barrier();
    for (const auto& [rank, tensor] : all.present())
      RANK_CHECK(is_pattern(copy_to_host(tensor), DType::u8, {100000}, 2000));
  });
}

TEST_CASE("memory that cannot be opened is staged, and explain() reports it" * over_fake) {
  const Setting failing("FAKE_CUDA_FAIL", "cuIpcOpenMemHandle_v2:217");
  check_all(gather_rounds(3, 2), 1, "page-locked shared memory");
}

TEST_CASE("memory that cannot be exported, although the driver reports that it can, is staged" * over_fake) {
  for (const char* const failing : {"cuIpcGetMemHandle:801", "cuMemGetAddressRange_v2:500"}) {
    CAPTURE(std::string(failing));
    const Setting setting("FAKE_CUDA_FAIL", failing);
    check_all(gather_rounds(3, 2), 1, "page-locked shared memory");
  }
}

TEST_CASE("addresses that were freed without notice to the root are closed, and opened again" * over_fake) {
  run_ranks(2, [](Group& group) {
    const auto gather = [&](std::uint64_t seed, std::uintptr_t& address, bool fails = false) {
      const Tensor mine = device_pattern(DType::u8, {1 << 20}, seed, group.rank());
      if (fails && group.rank() == 1) ::setenv("FAKE_CUDA_FAIL", "cuEventRecord:999", 1);
      address = reinterpret_cast<std::uintptr_t>(mine.data());
      const GatheredTensors all = gather_patterns(group, mine, seed, to_device());
      if (group.rank() == 1) RANK_CHECK(all.explain().find("CUDA IPC") != std::string::npos);
    };
    std::uintptr_t before = 0;
    std::uintptr_t after = 0;
    gather(1, before);
    // The sender's offer, which lists freed memory, is lost.
    error_of([&] { gather(2, after, true); });
    ::unsetenv("FAKE_CUDA_FAIL");
    const Counted opens = calls("cuIpcOpenMemHandle_v2");
    gather(3, after);
    RANK_CHECK(before == after || group.rank() == 0);
    if (group.rank() == 0) RANK_CHECK(calls("cuIpcOpenMemHandle_v2") == opens + 2);
  });
}

TEST_CASE("opened memory is closed when its sender has freed it, even if another method was used" * over_fake) {
  run_ranks(2, [](Group& group) {
    const auto gather = [&](bool has_two) {
      Config mine = Config::array();
      for (int i = 0; i <= (has_two ? 1 : 0); ++i)
        mine.push_back(device_pattern(DType::u8, {has_two ? 4096 : 8192}, 1, group.rank()));
      (void)get_configs_parallel(&mine, all_of(group), group, to_device());
    };
    // The second allocation cannot be opened, so all of it is staged.
    ::setenv("FAKE_CUDA_FAIL", "cuIpcOpenMemHandle_v2:217:2", 1);
    gather(true);
    ::unsetenv("FAKE_CUDA_FAIL");
    if (group.rank() == 0) RANK_CHECK(still_open("opened") == 1);
    gather(false);
    if (group.rank() == 0) RANK_CHECK(still_open("opened") == 1);
    // From here on the method is staging.
    const Setting way("MUSTER_DEVICE_TRANSPORT", "staging");
    gather(false);
    RANK_CHECK(still_open("opened") == 0);
  });
}

TEST_CASE("two groups of the same ranks: if one has an address open, the other one stages its data") {
  run_ranks(2, [](Group& group) {
    const auto other = group.duplicate();
    std::uint64_t seed = 1;
    for (Group* const each : {&group, other.get(), &group, other.get()}) {
      const Tensor mine = device_pattern(DType::u8, {1 << 20}, ++seed, group.rank());
      gather_patterns(*each, mine, seed, to_device());
    }
    // Both groups open the same allocation, and both close it.
    const Tensor mine = device_pattern(DType::u8, {1 << 20}, 77, group.rank());
    for (Group* const each : {&group, other.get(), &group}) {
      gather_patterns(*each, mine, 77, to_device());
      trim(*each);
    }
    if (group.rank() != 0) return;
    trim(*other);
    RANK_CHECK(still_open("opened") == 0);
  });
}

TEST_CASE("own tensors on several devices: work that the caller has queued on each is done first" * over_fake) {
  run_ranks(1, [](Group& group) {
    const std::vector<Tensor> work = work_of(many_seeds(0, 100));
    Config mine = Config::array();
    std::vector<std::unique_ptr<UserStream>> streams;
    for (const int device : {0, 1}) {
      const Tensor target = cuda_allocate(DType::u8, {100000}, device);
      mine.push_back(target);
      streams.push_back(std::make_unique<UserStream>(device, true));
      // The second device has more work, so a wait for the first one is not enough.
      for (int times = 0; times <= 3 * device; ++times) streams.back()->write_all(target, work);
    }
    GatherOptions options = to_device();
    options.root_tensors = RootTensors::copy;
    const GatheredConfigs all = get_configs_parallel(&mine, all_of(group), group, options);
    for (const std::size_t i : {0U, 1U}) {
      const Tensor& copy = all[0]->at(i).as_tensor();
      RANK_CHECK(copy.device() == (Device{Device::Kind::cuda, 0}));
      RANK_CHECK(is_pattern(copy_to_host(copy), DType::u8, {100000}, 2000));
    }
  });
}

TEST_CASE("pool memory cannot be exported: it is staged" * over_fake) {
  run_ranks(2, [](Group& group) {
    unsigned long long pointer = 0;
    {
      (void)cuda::driver();
      const cuda::Current current(0);
      RANK_CHECK(fake<int(unsigned long long*, std::uint64_t)>("libcuda.so.1", "fake_cuda_allocate_from_pool")(
                     &pointer, 5000) == 0);
    }
    const TensorView mine = cuda_view(DType::u8, {5000}, cuda::address_of(pointer));
    const GatheredTensors all = get_tensors_parallel(mine, all_of(group), group, to_device());
    if (group.rank() == 0) RANK_CHECK(bitwise_equal(copy_to_host(*all[1]), copy_to_host(mine)));
    if (group.rank() == 1) RANK_CHECK(all.explain().find("page-locked shared memory") != std::string::npos);
    RANK_CHECK(calls("cuIpcGetMemHandle") == 0);
  });
}

TEST_CASE("staging, forced") {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "staging");
  check_all(gather_rounds(2, 3), 1, "page-locked");
}

TEST_CASE("NCCL, forced: one communicator for all rounds" * over_fake) {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "nccl");
  const Setting devices("FAKE_CUDA_DEVICES", "3");
  const auto after = [](Group&) {
    RANK_CHECK(nccl_meetings() == 1);
    // No staging memory remains, except that of the test's own copies.
    cuda::pinned_pool_of_process()->trim();
    RANK_CHECK(still_open("host") == 0);
  };
  check_all(gather_rounds(3, 4, after), 1, "NCCL");
}

TEST_CASE("NCCL moves more data than a socket buffer takes, and many tensors" * over_fake) {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "nccl");
  run_ranks(2, [](Group& group) {
    const auto seed = static_cast<std::uint64_t>(group.rank());
    gather_patterns(group, device_pattern(DType::f32, {3 << 20}, seed, group.rank()), 0, to_device(), 1);
    const Tensor part = device_pattern(DType::u8, {1100, 16}, 50 + seed, group.rank());
    Config many = Config::array();
    for (int i = 0; i < 1100; ++i) many.push_back(Tensor::borrow(part.view().slice(0, i, i + 1)));
    const GatheredConfigs configs = get_configs_parallel(&many, all_of(group), group, to_device());
    if (group.rank() != 0) return;
    const Tensor expected = pattern(DType::u8, {1100, 16}, 51);
    for (const int i : {0, 511, 512, 1099})
      RANK_CHECK(bitwise_equal(copy_to_host(configs[1]->at(static_cast<std::size_t>(i)).as_tensor()),
                               expected.view().slice(0, i, i + 1)));
  });
}

TEST_CASE("NCCL, forced, with two ranks on one device: refused on all ranks, and the group remains usable") {
  const Setting way("MUSTER_DEVICE_TRANSPORT", "nccl");
  run_ranks(3, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {100}, 1, 0);
    error_of(ErrorKind::unsupported, {"a different device for each rank"},
             [&] { (void)get_tensors_parallel(mine, all_of(group), group, to_device()); });
    gather_patterns(group, mine, 1);
  });
}

TEST_CASE("a root that has no tensors of its own uses its current device, or the first one" * over_fake) {
  run_ranks(2, [](Group& group) {
    for (const int chosen : {0, 1}) {
      const cuda::Current current(chosen);
      const Config mine = layer_of(group.rank(), 1, 0);
      const GatheredConfigs all =
          get_configs_parallel(group.rank() == 0 ? nullptr : &mine, all_of(group), group, to_device());
      for (const auto& [rank, layer] : all.present()) check_layer(layer, rank, 1, chosen);
      RANK_CHECK(group.rank() != 0 || all.present().size() == 1);
    }
  });
}

TEST_CASE("memory that results release is reused") {
  run_ranks(2, [](Group& group) {
    const Tensor mine = device_pattern(DType::u8, {1 << 20}, 3, group.rank());
    std::optional<Counted> allocated;
    for (int round = 0; round < 6; ++round) {
      (void)get_tensors_parallel(mine, all_of(group), group, to_device());
      if (round == 1) allocated = calls("cuMemAlloc_v2");
    }
    RANK_CHECK(calls("cuMemAlloc_v2") == *allocated);
  });
}

TEST_CASE("several hosts, not forced: IPC on the root's host, NCCL or staging from others" * over_fake) {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  const std::vector<Ended> ended = gather_rounds(4, 2);
  check_all(ended, 1, "device: ");
  const bool is_apart =
      std::getenv("MUSTER_TEST_GROUP") != nullptr && std::string(std::getenv("MUSTER_TEST_GROUP")) == "mpi-2";
  std::size_t by_nccl = 0;
  std::size_t by_ipc = 0;
  for (const Ended& each : ended) {
    by_nccl += each.words.find("device: NCCL") != std::string::npos ? 1 : 0;
    by_ipc += each.words.find("device: CUDA IPC") != std::string::npos ? 1 : 0;
  }
  CHECK(by_nccl == (is_apart ? 2 : 0));
  CHECK(by_ipc == (is_apart ? 1 : 3));
  // Two ranks of the other host use one device: their data is staged and sent.
  const Setting one("FAKE_CUDA_ONE_DEVICE", "1");
  const std::vector<Ended> staged = gather_rounds(4, 2);
  check_all(staged, 1, "device: ");
  std::size_t by_staging = 0;
  for (const Ended& each : staged) by_staging += each.words.find("sent on") != std::string::npos ? 1 : 0;
  CHECK(by_staging == (is_apart ? 2 : 0));
}

TEST_CASE("each rank as root, 1, 2, 4 and 7 ranks, shapes of all kinds, both destinations") {
  for (const int size : {1, 2, 4, 7}) {
    CAPTURE(size);
    run_ranks(size, [&](Group& group) {
      const int device = group.rank() % cuda::device_count();
      for (int first = 0; first < size; ++first) {
        const std::vector<int> ranks = ranks_from(first, size);
        for (const Shape& shape : {Shape{}, Shape{0, 3}, Shape{5}, Shape{3, 70}}) {
          const Tensor mine = device_pattern(DType::f32, shape, static_cast<std::uint64_t>(group.rank()), device);
          for (const Destination landing : {Destination::host, Destination::device}) {
            for (const RootTensors own : {RootTensors::borrow, RootTensors::copy}) {
              GatherOptions options = landing_at(landing);
              options.root_tensors = own;
              const GatheredTensors all = get_tensors_parallel(mine, ranks, group, options);
              RANK_CHECK(all.present().size() == (group.rank() == first ? ranks.size() : 0));
              for (const auto& [rank, tensor] : all.present()) {
                if (tensor.nbytes() != 0) RANK_CHECK(tensor.device().is_host() == (landing == Destination::host));
                RANK_CHECK(is_pattern(copy_to_host(tensor), DType::f32, shape, static_cast<std::uint64_t>(rank)));
                const bool is_view = rank == first && landing == Destination::device && own == RootTensors::borrow;
                if (rank == first && tensor.nbytes() != 0) RANK_CHECK((tensor.data() == mine.data()) == is_view);
              }
            }
          }
        }
      }
    });
  }
}

TEST_CASE("several lists in one exchange, one of them on the host, and a rank in no list") {
  run_ranks(5, [](Group& group) {
    const std::vector<std::vector<int>> lists{{1, 0}, {2, 3}, {}};
    const std::vector<int>& mine = lists[static_cast<std::size_t>(group.rank() / 2)];
    const Tensor here = pattern(DType::u8, {300}, static_cast<std::uint64_t>(group.rank()));
    const Tensor value = group.rank() < 2 ? on_device(here, group.rank()) : here;
    for (const Destination landing : {Destination::host, Destination::device}) {
      const GatheredTensors all = get_tensors_parallel(value, mine, group, landing_at(landing));
      RANK_CHECK(all.present().size() == (group.rank() == 1 || group.rank() == 2 ? 2U : 0U));
      for (const auto& [rank, tensor] : all.present())
        RANK_CHECK(is_pattern(copy_to_host(tensor), DType::u8, {300}, static_cast<std::uint64_t>(rank)));
    }
  });
}
