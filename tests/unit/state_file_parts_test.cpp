// SPDX-License-Identifier: Apache-2.0
// The components of a state file, tested separately.

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "src/statefile/chunk_codec.hpp"
#include "src/statefile/format.hpp"
#include "src/statefile/writer_state.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::statefile;
using namespace muster::test;

TEST_CASE("chunks cover a tensor once, in order, each in one range") {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    Shape shape(1 + random() % 4);
    for (std::int64_t& extent : shape) extent = 1 + static_cast<std::int64_t>(random() % 40);
    const DType dtype = all_dtypes()[random() % all_dtypes().size()];
    const std::uint64_t bytes = byte_size(dtype, shape);
    const std::uint64_t wanted = 64 + random() % 5000;
    const ChunkGrid grid = ChunkGrid::make(dtype, shape, wanted);
    CHECK(grid.chunk_bytes() <= wanted);
    std::uint64_t at = 0;
    std::uint64_t product = 1;
    for (const std::uint64_t extent : grid.chunk_shape()) product *= extent;
    CHECK(product * std::max<std::uint64_t>(itemsize(dtype), 1) == grid.chunk_bytes());
    for (std::uint64_t chunk = 0; chunk < grid.count(); ++chunk) {
      REQUIRE(grid.begin(chunk) == at);
      REQUIRE(grid.bytes(chunk) > 0);
      REQUIRE(grid.bytes(chunk) <= grid.chunk_bytes());
      REQUIRE(grid.chunk_at(at) == chunk);
      REQUIRE(grid.chunk_at(at + grid.bytes(chunk) - 1) == chunk);
      at += grid.bytes(chunk);
    }
    CHECK(at == bytes);
    const auto again = ChunkGrid::of(dtype, shape, grid.dim(), grid.rows());
    REQUIRE(again.has_value());
    CHECK(again->count() == grid.count());
  }
}

TEST_CASE("chunks of usual tensors have about the requested size") {
  const ChunkGrid rows = ChunkGrid::make(DType::bf16, {1000, 4096}, 1 << 20);
  CHECK(rows.chunk_shape() == std::vector<std::uint64_t>{125, 4096});
  // The last of 3000 rows is not a separate chunk.
  const ChunkGrid inner = ChunkGrid::make(DType::bf16, {8, 3000, 700}, 1 << 20);
  CHECK(inner.chunk_shape() == std::vector<std::uint64_t>{1, 600, 700});
  CHECK(inner.count() == 40);
  const ChunkGrid packed = ChunkGrid::make(DType::f4_e2m1, {1000, 4095}, 1 << 20);
  CHECK(packed.chunk_shape().size() == 1);
}

TEST_CASE("chunk grids that a file may not have") {
  CHECK_FALSE(ChunkGrid::of(DType::f32, {}, 0, 1).has_value());
  CHECK_FALSE(ChunkGrid::of(DType::f32, {4}, 1, 1).has_value());
  CHECK_FALSE(ChunkGrid::of(DType::f32, {4}, 0, 0).has_value());
  CHECK_FALSE(ChunkGrid::of(DType::f32, {4}, 0, 5).has_value());
  CHECK_FALSE(ChunkGrid::of(DType::f32, {4, 0}, 0, 1).has_value());
  CHECK_FALSE(ChunkGrid::of(DType::f32, {1 << 30}, 0, (1 << 24) + 1).has_value());
  CHECK(ChunkGrid::of(DType::f32, {1 << 30}, 0, 1 << 24).has_value());
  CHECK_FALSE(ChunkGrid::of(DType::f32, {4, std::int64_t{1} << 58}, 0, 1).has_value());
}

TEST_CASE("shuffling equals that of HDF5, and can be inverted") {
  for (const std::size_t item : {1U, 2U, 4U, 8U}) {
    for (const std::size_t count : {0U, 1U, 15U, 16U, 17U, 100U, 513U, 4096U}) {
      const Tensor source = pattern(DType::u8, {static_cast<std::int64_t>(item * count)}, item + count);
      const auto bytes = source.bytes();
      std::vector<std::byte> shuffled(bytes.size());
      shuffle(bytes, item, shuffled.data());
      for (std::size_t i = 0; i < count; ++i)
        for (std::size_t b = 0; b < item; ++b) REQUIRE(shuffled[b * count + i] == bytes[i * item + b]);
      for (const std::size_t wanted : {count, count / 2, count / 3}) {
        std::vector<std::byte> back(item * wanted);
        unshuffle(shuffled, item, wanted, back.data());
        CHECK(std::equal(back.begin(), back.end(), bytes.begin()));
      }
    }
  }
}

TEST_CASE("chunks are restored, whole or in part, compressible or not") {
  ChunkEncoder encoder(1);
  ChunkDecoder decoder;
  for (const std::size_t item : {1U, 2U, 4U, 8U}) {
    for (const std::size_t elements : {1000U, 4096U, 5U}) {
      for (const bool zero : {false, true}) {
        const std::size_t chunk_bytes = item * 4096;
        Tensor source = pattern(DType::u8, {static_cast<std::int64_t>(item * elements)}, item);
        if (zero) std::fill_n(source.mutable_data(), source.nbytes(), std::byte{0});
        const ChunkEncoder::Encoded encoded = encoder.encode(source.bytes(), chunk_bytes, item);
        CHECK(encoded.bytes.size() <= chunk_bytes);
        if (zero) CHECK_FALSE(encoded.is_raw);
        std::vector<std::byte> back(item * elements);
        REQUIRE(decoder.decode(encoded.bytes, encoded.is_raw, chunk_bytes, item, back));
        CHECK(std::ranges::equal(back, source.bytes()));
        // Another length is refused, in both directions.
        CHECK_FALSE(decoder.decode(encoded.bytes, encoded.is_raw, chunk_bytes + item, item, back));
        if (back.size() < chunk_bytes)
          CHECK_FALSE(decoder.decode(encoded.bytes, encoded.is_raw, chunk_bytes - item, item, back));
        if (encoded.bytes.size() > 1)
          CHECK_FALSE(
              decoder.decode(encoded.bytes.first(encoded.bytes.size() - 1), encoded.is_raw, chunk_bytes, item, back));
      }
    }
  }
}

TEST_CASE("link names are escaped as little as possible, and remain distinct") {
  CHECK(link_name("layers.0.weight") == "layers.0.weight");
  CHECK(link_name("a/b%c") == "a%2Fb%25c");
  CHECK(link_name(".") == "%2E");
  CHECK(link_name("..") == "%2E%2E");
  CHECK(link_name("...") == "...");
  CHECK(link_name("\n\x7f") == "%0A%7F");
  CHECK(link_name("\xc3\xa9 x") == "\xc3\xa9 x");
  std::set<std::string> links;
  const std::vector<std::string> names = {"/", "%2F", "%252F", "%", "%25", ".", "%2E", "%2e", "..", "\n", "%0A"};
  for (const std::string& name : names) links.insert(link_name(name));
  CHECK(links.size() == names.size());
}

TEST_CASE("a failure of libhdf5 is reported, and the next call works") {
  const Shape shape = {4};
  const std::vector<hdf5::Dataset> twice(
      2, {.link_name = "same", .dtype_name = "U8", .shape = shape, .bytes = 4, .offset = 8192});
  hdf5::MetadataPlan plan{.user_block_bytes = 4096,
                          .config_offset = 8256,
                          .config_bytes = 2,
                          .catalogue_offset = 8264,
                          .catalogue_bytes = 64,
                          .metadata_offset = 8328};
  for (int i = 0; i < 3; ++i) {
    plan.datasets = twice;
    CHECK(has(words_of(ErrorKind::io, [&] { make_metadata(plan); }), "H5Dcreate2"));
    plan.datasets = std::span(twice).first(1);
    const hdf5::Metadata made = make_metadata(plan);
    CHECK(made.superblock.size() == superblock_bytes);
    CHECK(made.structures.size() < 2000);
    CHECK(made.failure.empty());
  }
}

namespace {

/// A catalogue of four tensors and its block, for a file of 1 MiB.
struct SampleFile {
  SampleFile() {
    Catalogue catalogue;
    catalogue.tensors = {
        {.name = "plain", .dtype = DType::f32, .shape = {10, 10}, .bytes = 400, .stored_bytes = 400, .offset = 8192},
        {.name = "none", .dtype = DType::u8, .shape = {0, 5}},
        {.name = "chunked",
         .dtype = DType::bf16,
         .shape = {100, 10},
         .bytes = 2000,
         .stored_bytes = 1300,
         .compressed = true},
        {.name = "packed", .dtype = DType::u4, .shape = {3, 3}, .bytes = 5, .stored_bytes = 5, .offset = 16384}};
    catalogue.chunking = {{}, {}, {60, 0, 0}, {}};
    catalogue.chunks = {{20'000, 100, 0, 1}, {20'100, 1200, 3, 2}};
    bytes = encode_catalogue(catalogue);
    block.file_bytes = 1 << 20;
    block.tensors = 4;
    block.catalogue = {40'000, bytes.size()};
    block.config = {39'000, 100};
  }
  std::string refused() const {
    return words_of(ErrorKind::corrupt, [&] { decode_catalogue(bytes, block, "file"); });
  }
  template <class Number>
  void put(std::size_t at, Number value) {
    std::memcpy(bytes.data() + at, &value, sizeof value);
  }
  std::size_t entry(std::size_t tensor) const { return 64 + 64 * tensor; }
  std::size_t extents() const { return entry(4); }
  std::size_t chunk(std::size_t number) const { return extents() + 8 * 8 + 24 * number; }

  std::vector<std::byte> bytes;
  UserBlock block;
};

}  // namespace

TEST_CASE("a catalogue is restored") {
  const SampleFile sample;
  CHECK(sample.bytes.size() == 64 + 4 * 64 + 8 * 8 + 2 * 24 + 22);
  const Catalogue catalogue = decode_catalogue(sample.bytes, sample.block, "file");
  CHECK(encode_catalogue(catalogue) == sample.bytes);
  CHECK(catalogue.tensors[2].compressed);
  CHECK(stored_extents(catalogue).size() == 4);
}

TEST_CASE("contradictory catalogues are refused") {
  const auto with = [](auto&& change) {
    SampleFile sample;
    change(sample);
    return sample.refused();
  };
  CHECK(has(with([](SampleFile& s) { s.bytes.pop_back(); }), "length"));
  CHECK(has(with([](SampleFile& s) { s.bytes.resize(63); }), "malformed catalogue"));
  CHECK(has(with([](SampleFile& s) { s.bytes.emplace_back(); }), "length"));
  CHECK(has(with([](SampleFile& s) { s.put(0, std::uint64_t{0}); }), "malformed catalogue"));
  for (const std::size_t count : {8U, 16U, 24U, 32U})
    for (const std::uint64_t value : {0ULL, 3ULL, 1ULL << 60, ~0ULL, 1ULL << 58})
      CHECK(has(with([&](SampleFile& s) { s.put(count, value); }), "length"));
  CHECK(has(with([](SampleFile& s) { s.put(40, std::uint8_t{1}); }), "length"));
  CHECK(has(with([](SampleFile& s) { s.block.tensors = 5; }), "commit mark"));
  // Entries.
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 52, std::uint8_t{99}); }), "unknown dtype 99"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 52, std::uint8_t{0}); }), "its length contradicts its shape"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 53, std::uint8_t{33}); }), "dimensions"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(3) + 53, std::uint8_t{3}); }), "dimensions"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(3) + 53, std::uint8_t{0}); }), "length"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 55, std::uint8_t{1}); }), "unknown bits"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 48, std::uint32_t{0}); }), "name"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 48, std::uint32_t{4097}); }), "name"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(3) + 48, std::uint32_t{5}); }), "more than"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(3) + 48, std::uint32_t{7}); }), "name"));
  CHECK(has(with([](SampleFile& s) { s.put(s.bytes.size() - 1, std::uint8_t{0xff}); }), "is not text"));
  CHECK(has(with([](SampleFile& s) { s.put(s.bytes.size() - 1, std::uint8_t{0}); }), "is not text"));
  CHECK(has(with([](SampleFile& s) { s.put(s.extents(), std::int64_t{-1}); }), "negative"));
  CHECK(has(with([](SampleFile& s) { s.put(s.extents(), INT64_MAX); }), "63 bits"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0), std::uint64_t{8193}); }), "cannot begin at offset 8193"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0), std::uint64_t{0}); }), "two parts overlap"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0), std::uint64_t{4096}); }), "two parts overlap"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0), std::uint64_t{16384}); }), "two parts overlap"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0), std::uint64_t{1} << 20); }), "out of range"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0), ~std::uint64_t{63}); }), "out of range"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0), std::uint64_t{39'936}); }), "two parts overlap"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(1), std::uint64_t{64}); }), "cannot begin"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 8, std::uint64_t{399}); }), "contradicts"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 24, std::uint64_t{401}); }), "length"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(0) + 40, std::uint64_t{1}); }), "contradicts"));
  // Chunks.
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(2), std::uint64_t{64}); }), "cannot have such chunks"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(2) + 32, std::uint64_t{101}); }), "cannot have such chunks"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(2) + 54, std::uint8_t{2}); }), "cannot have such chunks"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(2) + 32, std::uint64_t{1}); }), "contradict"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(2) + 32, std::uint64_t{100}); }), "stored length"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(2) + 40, std::uint64_t{1}); }), "contradict"));
  CHECK(has(with([](SampleFile& s) { s.put(s.entry(2) + 8, std::uint64_t{1301}); }), "stored length"));
  CHECK(has(with([](SampleFile& s) { s.put(s.chunk(0) + 8, std::uint32_t{0}); }), "chunk 0"));
  CHECK(has(with([](SampleFile& s) { s.put(s.chunk(0) + 8, std::uint32_t{1200}); }), "chunk 0"));
  CHECK(has(with([](SampleFile& s) { s.put(s.chunk(0) + 12, std::uint32_t{2}); }), "chunk 0"));
  CHECK(has(with([](SampleFile& s) { s.put(s.chunk(1) + 12, std::uint32_t{0}); }), "chunk 1"));
  CHECK(has(with([](SampleFile& s) { s.put(s.chunk(0), std::uint64_t{20'001}); }), "two parts overlap"));
  CHECK(has(with([](SampleFile& s) { s.put(s.chunk(0), ~std::uint64_t{0}); }), "out of range"));
}
