// SPDX-License-Identifier: Apache-2.0
// Checkpoints that other software wrote (tests/interop/foreign_samples.py): each tensor bit for bit as that has it
// whole. MUSTER_TEST_SAMPLES names more of them.

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/checkpoint/foreign/checkpoint.hpp"

using namespace muster;

namespace {

namespace fs = std::filesystem;

std::vector<std::byte> read(const TensorSource& source, std::size_t tensor, std::uint64_t piece) {
  const std::uint64_t bytes = source.tensors()[tensor].bytes;
  std::vector<std::byte> out(bytes);
  for (std::uint64_t at = 0; at < bytes; at += piece)
    source.read(tensor, at, std::span(out).subspan(at, std::min(piece, bytes - at)));
  return out;
}

void check_sample(const fs::path& sample) {
  CAPTURE(sample.string());
  std::vector<std::string> notes;
  const auto found = foreign::find_checkpoint((sample / "in").string());
  REQUIRE(found.has_value());
  const auto tensors = open_checkpoint(*found, 0, {}, notes);
  const SafetensorsFile expected = SafetensorsFile::open((sample / "expected.safetensors").string());
  CHECK(tensors->tensors().size() == expected.tensors().size());
  for (std::size_t i = 0; i < expected.tensors().size(); ++i) {
    const TensorEntry& entry = expected.tensors()[i];
    CAPTURE(entry.name);
    const auto place = tensors->find(entry.name);
    REQUIRE(place.has_value());
    CHECK(tensors->tensors()[*place].dtype == entry.dtype);
    CHECK(tensors->tensors()[*place].shape == entry.shape);
    std::vector<std::byte> bytes(entry.bytes);
    expected.read(i, 0, bytes);
    // Whole, and in pieces that end anywhere.
    for (const std::uint64_t piece : {std::uint64_t{1} << 30, std::uint64_t{13}, std::uint64_t{8}})
      CHECK(read(*tensors, *place, piece) == bytes);
  }
}

}  // namespace

TEST_CASE("samples are read as who wrote them has them") {
  std::vector<fs::path> folders = {fs::path(MUSTER_TEST_DATA) / "foreign"};
  if (const char* more = std::getenv("MUSTER_TEST_SAMPLES")) folders.emplace_back(more);
  std::size_t count = 0;
  for (const fs::path& folder : folders)
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      check_sample(entry.path());
      ++count;
    }
  CHECK(count > 0);
}
