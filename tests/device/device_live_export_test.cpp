// SPDX-License-Identifier: Apache-2.0
// Live exports of tensors on devices, over the fake driver: nothing is read before the work that is queued on the
// stream, and an asynchronous call has copied everything when it returns.

#include <filesystem>

#include "muster/live_export.hpp"
#include "tests/device/device_ranks.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;

TEST_CASE("tensors on devices are exported bit by bit, and may be freed after an asynchronous call") {
  for (const int size : {1, 3}) {
    CAPTURE(size);
    const TemporaryDirectory work(Medium::memory);
    run_ranks(size, [&](Group& group) {
      const std::int64_t rank = group.rank();
      for (const bool is_async : {false, true}) {
        const std::string out = work / (is_async ? "later" : "now");
        std::vector<TensorPart> parts;
        for (int i = 0; i < 4; ++i)
          parts.push_back({"rows" + std::to_string(i),
                           device_pattern(DType::bf16, {5 * i, 3000}, static_cast<std::uint64_t>(10 * i + rank),
                                          static_cast<int>(rank % 2)),
                           {5 * i * size, 3000},
                           {5 * i * rank, 0}});
        parts.push_back({"same", device_pattern(DType::f32, {777}, 5, 0)});
        parts.push_back({"host", pattern(DType::i64, {33}, 6)});
        const ExportOptions options{.memory_budget = 8 << 20, .writers = is_async ? Writers::all : Writers::rank0};
        if (is_async) {
          auto work_of_export = export_model_async(parts, out, "", group, options);
          parts.clear();
          work_of_export.get();
        } else {
          export_model(parts, out, "", group, options);
        }
      }
    });
    for (const char* out : {"now", "later"}) {
      const auto found = tensors_of(work / out);
      REQUIRE(found.size() == 6);
      CHECK(is_pattern(found.at("same"), DType::f32, {777}, 5));
      CHECK(is_pattern(found.at("host"), DType::i64, {33}, 6));
      for (int i = 0; i < 4; ++i)
        for (int rank = 0; rank < size; ++rank)
          CHECK(is_pattern(found.at("rows" + std::to_string(i)).view().slice(0, 5 * i * rank, 5 * i * (rank + 1)),
                           DType::bf16, {5 * i, 3000}, static_cast<std::uint64_t>(10 * i + rank)));
    }
  }
}

TEST_CASE("one rank reads tensors on a device by several threads") {
  const TemporaryDirectory work(Medium::memory);
  constexpr int count = 300;
  run_ranks(1, [&](Group& group) {
    std::vector<TensorPart> parts;
    for (int i = 0; i < count; ++i)
      parts.push_back({"w" + std::to_string(i), device_pattern(DType::u8, {40000 + i}, static_cast<std::uint64_t>(i))});
    export_model(parts, work / "out", "", group);
  });
  const auto found = tensors_of(work / "out");
  REQUIRE(found.size() == count);
  for (int i = 0; i < count; ++i)
    CHECK(is_pattern(found.at("w" + std::to_string(i)), DType::u8, {40000 + i}, static_cast<std::uint64_t>(i)));
}
