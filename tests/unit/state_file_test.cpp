// SPDX-License-Identifier: Apache-2.0
#include "muster/state_file.hpp"

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <random>
#include <thread>

#include "doctest/doctest.h"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

// Values as weights have them: compressible, but not trivially.
Tensor weights(Shape shape, unsigned seed) {
  Tensor tensor = Tensor::allocate(DType::f32, std::move(shape));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.02F);
  auto* values = reinterpret_cast<float*>(tensor.mutable_data());
  for (std::int64_t i = 0; i < tensor.view().elements(); ++i) values[i] = normal(random);
  return tensor;
}

/// One of everything: all dtypes, shapes of all kinds, sizes around what changes places.
std::vector<NamedTensor> gallery() {
  std::vector<NamedTensor> all;
  std::uint64_t seed = 1;
  for (const DType dtype : all_dtypes()) {
    const std::string name(to_string(dtype));
    all.emplace_back("scalar." + name, pattern(dtype, {}, ++seed));
    all.emplace_back("none." + name, pattern(dtype, {0}, ++seed));
    all.emplace_back("empty." + name, pattern(dtype, {3, 0, 7}, ++seed));
    all.emplace_back("odd." + name, pattern(dtype, {3, 5, 7}, ++seed));
    all.emplace_back("rows." + name, pattern(dtype, {37, 64}, ++seed));
    all.emplace_back("large." + name, pattern(dtype, {300, 1024}, ++seed));
  }
  all.emplace_back("weights", weights({256, 512}, 7));
  all.emplace_back("zeros", Tensor::copy_of(TensorView(DType::f32, {400, 100}, std::vector<float>(40'000).data())));
  all.emplace_back("thirty-two dimensions", pattern(DType::u8, Shape(32, 1), ++seed));
  return all;
}

const Config& some_config() {
  static const Config config = parse_json(R"({"quantizer": {"bits": 8, "name": "Gewicht é"}, "list": [1, 2.5, null]})");
  return config;
}

void check_same(const StateFile& file, std::span<const NamedTensor> expected) {
  REQUIRE(file.tensors().size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(expected[i].first);
    CHECK(file.tensors()[i].name == expected[i].first);
    CHECK(file.find(expected[i].first) == i);
    CHECK(bitwise_equal(file.tensor(i), expected[i].second));
  }
}

}  // namespace

TEST_CASE("what is written is read") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = gallery();
  for (const bool compressed : {false, true}) {
    CAPTURE(compressed);
    const std::string path = work / (compressed ? "compressed.h5" : "plain.h5");
    StateFileOptions options{.info = {.generation = 7, .rank = 3, .world_size = 5}};
    options.info.job[0] = std::byte{42};
    if (compressed) options.zstd_level = 1;
    if (compressed) options.chunk_bytes = 10'000;
    write_state_file(path, some_config(), all, options);
    CHECK(StateFile::is_state_file(path));
    for (const FileAccess access : {FileAccess::map, FileAccess::read, FileAccess::automatic}) {
      const StateFile file = StateFile::open(path, access);
      CHECK(file.info().generation == 7);
      CHECK(file.info().rank == 3);
      CHECK(file.info().world_size == 5);
      CHECK(file.info().job == options.info.job);
      CHECK(file.file_bytes() == std::filesystem::file_size(path));
      CHECK(file.format_version() == 1);
      CHECK(file.config() == some_config());
      check_same(file, all);
      CHECK(file.check().empty());
      CHECK(file.load().weights.size() == all.size());
      const StateTensor& named = file.tensors()[file.find("weights").value()];
      CHECK(named.compressed == compressed);
      CHECK((named.stored_bytes < named.bytes || !compressed));
    }
  }
  CHECK(work.count() == 2);
}
