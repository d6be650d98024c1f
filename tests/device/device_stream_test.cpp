// SPDX-License-Identifier: Apache-2.0
// Layers on devices in a stream (gather_each). They are copied to the host part by part, between real processes, over a
// fake driver (fake/fake_cuda.hpp).

#include "tests/device/device_ranks.hpp"

using namespace muster;
using namespace muster::test;

namespace {

constexpr std::uint64_t budget = 4 << 20;

/// Returns a layer. It is small and on two devices, or larger than a part, or also has a host tensor. Without
/// `on_devices` all of it is in host memory.
Config layer_of(int rank, std::uint64_t layer, bool on_devices) {
  const auto lie = [&](const Tensor& tensor, int device) { return on_devices ? on_device(tensor, device) : tensor; };
  const std::uint64_t seed = static_cast<std::uint64_t>(rank) * 1000 + layer * 10;
  const std::int64_t rows = layer % 3 == 1 ? 1500 : 5;
  Config config = Config::object({{"rank", rank},
                                  {"a", lie(pattern(DType::f32, {rows, 900}, seed), 0)},
                                  {"none", lie(pattern(DType::f32, {0, 3}, 1), 1)},
                                  {"b", lie(pattern(DType::bf16, {77}, seed + 1), 1)}});
  if (layer % 3 == 2) config["host"] = pattern(DType::u8, {300}, seed + 2);
  return config;
}

StreamReport stream(Group& group, std::uint64_t layers) {
  const auto whole = [](int rank, std::uint64_t layer) { return layer_of(rank, layer, false); };
  const auto given = [](int rank, std::uint64_t layer) { return layer_of(rank, layer, true); };
  return stream_and_check(group, all_of(group), layers, whole, {.memory_budget = budget, .pipeline_depth = 2}, given);
}

}  // namespace

TEST_CASE("layers on devices arrive on the host, whatever their size") {
  for (const int size : {1, 2, 4}) {
    CAPTURE(size);
    run_ranks(size, [](Group& group) {
      for (int round = 0; round < 2; ++round) {
        const StreamReport report = stream(group, 7);
        RANK_CHECK(report.parts > 7 || group.size() == 1);
        // With slots, parts need no other memory. Otherwise they need one more part.
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

TEST_CASE(
    "parts on one host are copied directly into their slots: no other memory is used, and each slot is page-locked "
    "once") {
  run_ranks(3, [](Group& group) {
    const Tensor weight = device_pattern(DType::u8, {100000}, static_cast<std::uint64_t>(group.rank()));
    // Frees the buffer with which the test has made its tensor.
    cuda::pinned_pool_of_process()->trim();
    const auto source = layers_of(20, [&](std::uint64_t) { return weight; });
    (void)gather_each(source, all_of(group), group, [](LayerPart& part) {
      for (const auto& [rank, config] : part.present())
        RANK_CHECK(is_pattern(config.as_tensor(), DType::u8, {100000}, static_cast<std::uint64_t>(rank)));
    });
    if (group.rank() == 0) return;
    RANK_CHECK(still_open("host") == 0);
    RANK_CHECK(calls("cuMemHostRegister_v2") <= 3);
  });
}

TEST_CASE("what the caller has queued is done before each layer, and the layer belongs to the caller again after it") {
  run_ranks(2, [](Group& group) {
    const Tensor target = cuda_allocate(DType::u8, {100000}, 0);
    const std::vector<Tensor> work = work_of(many_seeds(0, 1));
    UserStream apart(0);
    const cuda::Current current(0);
    const CudaStreamScope scope(apart.handle());
    const auto source = layers_of(4, [&](std::uint64_t layer) {
      for (std::uint64_t i = 0; i < 3 * (layer + 1); ++i) apart.write(target, work[i]);
      return target;
    });
    (void)gather_each(source, all_of(group), group, [](LayerPart& part) {
      for (const auto& [rank, config] : part.present())
        RANK_CHECK(is_pattern(config.as_tensor(), DType::u8, {100000}, 3 * part.layer + 2));
    });
  });
}

TEST_CASE("a device that fails in a stream ends it on all ranks, with its message; the next stream succeeds" *
          over_fake) {
  run_ranks(3, [](Group& group) {
    for (const int failing : {0, 1}) {
      if (group.rank() == failing) ::setenv("FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync_v2:700", 1);
      const Error error = error_of(ErrorKind::io, {"CUDA_ERROR_700"}, [&] { (void)stream(group, 3); });
      RANK_CHECK(error.rank() == failing);
      ::unsetenv("FAKE_CUDA_FAIL");
      (void)stream(group, 3);
    }
  });
}
