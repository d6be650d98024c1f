// SPDX-License-Identifier: Apache-2.0
// Layers on devices in a stream (gather_each): brought to the host part by part, between real processes, over a fake
// driver (fake/fake_cuda.hpp).

#include <cstring>
#include <map>

#include "tests/device/device_ranks.hpp"

using namespace muster;
using namespace muster::test;

namespace {

constexpr std::uint64_t budget = 4 << 20;

std::uint64_t seed_of(int rank, std::uint64_t layer) {
  return static_cast<std::uint64_t>(rank) * 1000 + layer * 10;
}

/// A small layer on two devices, one that is larger than a part, one with tensors of the host, too.
Config layer_of(int rank, std::uint64_t layer) {
  const std::uint64_t seed = seed_of(rank, layer);
  const std::int64_t rows = layer % 3 == 1 ? 1500 : 5;
  Config config = Config::object({{"rank", rank},
                                  {"a", device_pattern(DType::f32, {rows, 900}, seed, 0)},
                                  {"none", cuda_allocate(DType::f32, {0, 3}, 1)},
                                  {"b", device_pattern(DType::bf16, {77}, seed + 1, 1)}});
  if (layer % 3 == 2) config["host"] = pattern(DType::u8, {300}, seed + 2);
  return config;
}

/// What has come of a layer, whole again.
class Whole {
 public:
  void take(const LayerPart& part) {
    for (const auto& [rank, config] : part.present())
      for (const char* name : {"a", "b", "host"}) {
        const Config* const leaf = config.is_object() ? config.as_object().find(name) : nullptr;
        if (leaf == nullptr || !leaf->is_tensor()) continue;
        const Tensor& tensor = leaf->as_tensor();
        RANK_CHECK(tensor.device().is_host());
        std::vector<std::byte>& bytes = bytes_[{rank, name}];
        std::uint64_t at = 0;
        for (const TensorSlice& slice : part.slices)
          if (slice.rank == rank && slice.path == std::string("/") + name)
            at = static_cast<std::uint64_t>(slice.first) * itemsize(tensor.dtype());
        bytes.resize(std::max<std::size_t>(bytes.size(), at + tensor.nbytes()));
        std::memcpy(bytes.data() + at, tensor.data(), tensor.nbytes());
      }
  }
  void check(const std::vector<int>& ranks, std::uint64_t layer) {
    for (const int rank : ranks) {
      const std::uint64_t seed = seed_of(rank, layer);
      const std::int64_t rows = layer % 3 == 1 ? 1500 : 5;
      check_one(rank, "a", pattern(DType::f32, {rows, 900}, seed));
      check_one(rank, "b", pattern(DType::bf16, {77}, seed + 1));
      if (layer % 3 == 2) check_one(rank, "host", pattern(DType::u8, {300}, seed + 2));
    }
    bytes_.clear();
  }

 private:
  void check_one(int rank, const char* name, const Tensor& expected) {
    const std::vector<std::byte>& bytes = bytes_[{rank, name}];
    RANK_CHECK(bytes.size() == expected.nbytes());
    RANK_CHECK(std::memcmp(bytes.data(), expected.data(), bytes.size()) == 0);
  }
  std::map<std::pair<int, std::string>, std::vector<std::byte>> bytes_;
};

StreamReport stream(SyncGroup& group, std::uint64_t layers) {
  std::uint64_t given = 0;
  const LayerSource source = [&]() -> std::optional<Config> {
    if (given == layers) return std::nullopt;
    return layer_of(group.rank(), given++);
  };
  Whole whole;
  std::uint64_t taken = 0;
  const LayerConsumer consume = [&](LayerPart& part) {
    whole.take(part);
    if (!part.is_last()) return;
    whole.check(part.ranks, part.layer);
    ++taken;
  };
  const StreamReport report =
      gather_each(source, all_of(group), group, consume, {.memory_budget = budget, .pipeline_depth = 2});
  RANK_CHECK(taken == (group.rank() == 0 ? layers : 0));
  return report;
}

}  // namespace

TEST_CASE("layers on devices arrive on the host, whatever they are larger than") {
  for (const int size : {1, 2, 4}) {
    CAPTURE(size);
    run_ranks(size, [](SyncGroup& group) {
      for (int round = 0; round < 2; ++round) {
        const StreamReport report = stream(group, 7);
        RANK_CHECK(report.parts > 7 || group.size() == 1);
        // Where parts travel in slots nothing is taken besides them, else one part more.
        if (group.size() > 1) RANK_CHECK(report.peak_slot_bytes <= budget + report.part_bytes + (256 << 10));
      }
      RANK_CHECK(pageable_copies() == 0);
      group.barrier();
      trim(group);
      RANK_CHECK(still_open("locks") == 0);
      RANK_CHECK(still_open("host") == 0);
    });
  }
}

TEST_CASE("parts on one host go into their slots at once: no memory besides, and pages are locked once a slot") {
  run_ranks(3, [](SyncGroup& group) {
    std::uint64_t given = 0;
    const Tensor weight = device_pattern(DType::u8, {100000}, static_cast<std::uint64_t>(group.rank()));
    // By which the test has made its tensor.
    cuda::pinned_pool_of_process()->trim();
    const LayerSource source = [&]() -> std::optional<Config> {
      if (given++ == 20) return std::nullopt;
      return weight;
    };
    (void)gather_each(source, all_of(group), group, [](LayerPart& part) {
      for (const auto& [rank, config] : part.present())
        RANK_CHECK(is_pattern(config.as_tensor(), DType::u8, {100000}, static_cast<std::uint64_t>(rank)));
    });
    if (group.rank() == 0) return;
    RANK_CHECK(still_open("host") == 0);
    RANK_CHECK(calls("cuMemHostRegister_v2") <= 3);
  });
}

TEST_CASE("what the caller has queued comes before each layer, and the layer is the caller's again after it") {
  run_ranks(2, [](SyncGroup& group) {
    const Tensor target = cuda_allocate(DType::u8, {100000}, 0);
    const std::vector<Tensor> work = work_of(many_seeds(0, 1));
    UserStream apart(0);
    const cuda::Current current(0);
    const CudaStreamScope scope(apart.handle());
    std::uint64_t given = 0;
    const LayerSource source = [&]() -> std::optional<Config> {
      if (given == 4) return std::nullopt;
      ++given;
      for (std::uint64_t i = 0; i < 3 * given; ++i) apart.write(target, work[i]);
      return target;
    };
    (void)gather_each(source, all_of(group), group, [](LayerPart& part) {
      for (const auto& [rank, config] : part.present())
        RANK_CHECK(is_pattern(config.as_tensor(), DType::u8, {100000}, 3 * part.layer + 2));
    });
  });
}

TEST_CASE("a device that fails in a stream ends it on all ranks, with its words; the next stream goes") {
  run_ranks(3, [](SyncGroup& group) {
    for (const int failing : {0, 1}) {
      if (group.rank() == failing) ::setenv("FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync_v2:700", 1);
      const Error error = error_of(ErrorKind::io, {"CUDA_ERROR_700"}, [&] { (void)stream(group, 3); });
      RANK_CHECK(error.rank() == failing);
      ::unsetenv("FAKE_CUDA_FAIL");
      (void)stream(group, 3);
    }
  });
}
