// SPDX-License-Identifier: Apache-2.0
// Writes seeds for fuzz_descriptor into a folder: what the encoder makes of trees of each kind, and of these some with
// defects.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "src/core/descriptor.hpp"
#include "tests/support/random_config.hpp"

namespace {

using namespace muster;

std::filesystem::path folder;

void write(const std::string& name, const std::vector<std::byte>& bytes) {
  std::ofstream(folder / name, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

std::vector<std::byte> encoded(const Config& config, bool in_arena = false) {
  return core::encode_descriptor(config, [&](const Tensor&) {
    return in_arena ? std::optional(core::Place{1, 64}) : std::optional<core::Place>();
  });
}

void write_defects(const std::vector<std::byte>& good) {
  std::vector<std::byte> bytes = good;
  bytes.resize(bytes.size() / 2);
  write("defect_cut", bytes);
  bytes = good;
  bytes.push_back(std::byte{0});
  write("defect_longer", bytes);
  bytes = good;
  bytes[1] = std::byte{9};
  write("defect_version", bytes);
  write("defect_empty", {});
  const auto of = [](std::initializer_list<int> numbers) {
    std::vector<std::byte> made = {std::byte{0x4d}, std::byte{1}};
    for (const int number : numbers) made.push_back(static_cast<std::byte>(number));
    return made;
  };
  write("defect_count", of({7, 0xff, 0xff, 0xff, 0xff, 0x0f, 0}));
  write("defect_key_twice", of({8, 2, 1, 'a', 0, 1, 'a', 0}));
  write("defect_text", of({6, 1, 0xff}));
  write("defect_kind", of({9, 5}));
  write("defect_extents", of({9, 0, 12, 2, 0xff, 0xff, 0xff, 0xff, 0x0f, 0xff, 0xff, 0xff, 0xff, 0x0f}));
  std::vector<std::byte> deep = of({});
  for (int i = 0; i <= max_config_depth; ++i) deep.insert(deep.end(), {std::byte{7}, std::byte{1}});
  deep.push_back(std::byte{0});
  write("defect_deep", deep);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: seed_descriptor FOLDER\n");
    return 2;
  }
  folder = arguments[1];
  std::filesystem::create_directories(folder);
  const Tensor tensor = test::pattern(DType::bf16, {2, 3}, 1);
  const Config layer = Config::object({{"weight", tensor}, {"bias", test::pattern(DType::f32, {3}, 2)}});
  write("null", encoded({}));
  write("scalars", encoded(Config::array({true, false, 0, -1, INT64_MIN, UINT64_MAX, 1.5, NAN, -0.0, "text"})));
  write("text", encoded("\xc3\xa9\xf0\x9f\x98\x80"));
  write("containers", encoded(Config::object({{"", Config::array()}, {"o", Config::object()}})));
  write("one_tensor", encoded(tensor));
  write("one_in_arena", encoded(tensor, true));
  write("layer", encoded(layer));
  write("layers", encoded(Config::object({{"layers", Config::array({layer, layer, {}})}, {"rank", 1}})));
  write("layers_in_arena", encoded(Config::array({layer, layer}), true));
  Config dtypes;
  for (const DType dtype : all_dtypes()) dtypes[to_string(dtype)] = test::pattern(dtype, {2, 0, 1}, 1);
  write("dtypes", encoded(dtypes));
  for (const std::uint64_t seed : {1U, 4U, 7U}) {
    test::RandomConfig random(seed);
    ConfigArray trees;
    for (int i = 0; i < 8; ++i) trees.push_back(random.tree(3));
    write("trees_" + std::to_string(seed), encoded(trees));
  }
  write_defects(encoded(Config::array({layer, "x", 5})));
  return 0;
}
