// SPDX-License-Identifier: Apache-2.0
// Writes state files with every feature into a folder, for readers that are not part of Muster: state_file_gallery
// FOLDER

#include <string>

#include "muster/state_file.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;

int main(int, char** arguments) {
  std::vector<NamedTensor> all;
  std::uint64_t seed = 1;
  for (const DType dtype : all_dtypes()) {
    const std::string name(to_string(dtype));
    all.emplace_back("scalar." + name, test::pattern(dtype, {}, ++seed));
    all.emplace_back("empty." + name, test::pattern(dtype, {3, 0, 7}, ++seed));
    all.emplace_back("odd/" + name, test::pattern(dtype, {3, 5, 7}, ++seed));
    all.emplace_back("large." + name, test::pattern(dtype, {5, 60, 700}, ++seed));
    Tensor repeated = test::pattern(dtype, {700, 77}, ++seed);
    for (std::size_t i = 1; i < repeated.nbytes(); ++i)
      repeated.mutable_data()[i] = static_cast<std::byte>(i % 16 < 8 ? i / 1000 : 0);
    all.emplace_back("compressible." + name, std::move(repeated));
  }
  const Config config = parse_json(R"({"name": "Gewicht é", "list": [1, 2.5, null]})");
  const std::string folder = arguments[1];
  write_state_file(folder + "/plain.h5", config, all, {.info = {.step = 7, .rank = 3, .world_size = 5}});
  write_state_file(folder + "/compressed.h5", config, all, {.zstd_level = 1, .chunk_bytes = 10'000});
}
