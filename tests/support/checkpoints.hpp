// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes, damages and compares checkpoints.

#include <doctest/doctest.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "muster/tensor.hpp"
#include "tests/support/temporary_directory.hpp"

namespace muster::test {

inline std::map<std::string, Tensor> tensors_of(const std::string& directory) {
  const ModelDir model = ModelDir::open(directory);
  std::map<std::string, Tensor> tensors;
  for (std::size_t i = 0; i < model.tensors().size(); ++i) tensors.emplace(model.tensors()[i].name, model.tensor(i));
  return tensors;
}

/// Compares names, dtypes, shapes, bytes and config.json.
inline void check_equal(const std::string& a, const std::string& b) {
  const auto left = tensors_of(a);
  const auto right = tensors_of(b);
  REQUIRE(left.size() == right.size());
  for (const auto& [name, tensor] : left) {
    CAPTURE(name);
    REQUIRE(right.contains(name));
    CHECK(bitwise_equal(tensor, right.at(name)));
  }
  CHECK(read_text(a + "/config.json") == read_text(b + "/config.json"));
}

/// Writes a safetensors file.
inline void write_tensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                          const std::map<std::string, std::string>& metadata = {}) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back({name, tensor.dtype(), tensor.shape()});
  SafetensorsWriter writer(path, entries, metadata);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

/// Returns the bytes that this process has read, from the page cache or the disk. Reads of mappings are not included.
inline std::uint64_t bytes_read() {
  std::ifstream file("/proc/self/io");
  std::string word;
  std::uint64_t bytes = 0;
  file >> word >> bytes;
  return bytes;
}

inline void flip_byte(const std::string& path, std::uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const auto byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(byte);
}

}  // namespace muster::test
