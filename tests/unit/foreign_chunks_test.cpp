// SPDX-License-Identifier: Apache-2.0
// Elements of foreign HDF5 files: decoders, and runs of elements out of chunks.

#include <doctest/doctest.h>
#include <fmt/core.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/inspect/chunk_decoder.hpp"
#include "src/inspect/chunked_reader.hpp"
#include "src/inspect/foreign_report.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::inspect;
using namespace muster::test;

namespace {

using Bytes = std::vector<std::byte>;

Bytes counted(std::size_t count) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * i % 251);
  return bytes;
}

Bytes deflated(const Bytes& bytes) {
  Bytes out(::compressBound(bytes.size()));
  uLongf size = out.size();
  ::compress(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  out.resize(size);
  return out;
}

Bytes zstd(const Bytes& bytes) {
  Bytes out(::ZSTD_compressBound(bytes.size()));
  out.resize(::ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), 1));
  return out;
}

Bytes shuffled(const Bytes& bytes, std::size_t item) {
  Bytes out = bytes;
  const std::size_t count = bytes.size() / item;
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t byte = 0; byte < item; ++byte) out[byte * count + i] = bytes[i * item + byte];
  return out;
}

Bytes with_checksum(Bytes bytes) {
  const std::uint32_t sum = fletcher32(bytes);
  for (unsigned i = 0; i < 4; ++i) bytes.push_back(static_cast<std::byte>(sum >> (8 * i)));
  return bytes;
}

constexpr ChunkFilter deflate{hdf5::filter_deflate, 6};
constexpr ChunkFilter zstd_filter{hdf5::filter_zstd, 1};
constexpr ChunkFilter sum{hdf5::filter_fletcher32, 0};
ChunkFilter shuffle(std::uint64_t item) {
  return {hdf5::filter_shuffle, item};
}

TEST_CASE("chunks decode through every pipeline") {
  for (const std::size_t size : {0UL, 1UL, 7UL, 64UL, 1000UL, 70'001UL}) {
    CAPTURE(size);
    const Bytes plain = counted(size);
    CHECK(decode_chunk(plain, {}, 0, size) == plain);
    CHECK(decode_chunk(deflated(plain), std::vector{deflate}, 0, size) == plain);
    CHECK(decode_chunk(zstd(plain), std::vector{zstd_filter}, 0, size) == plain);
    CHECK(decode_chunk(with_checksum(plain), std::vector{sum}, 0, size) == plain);
    for (const std::size_t item : {2UL, 3UL, 4UL, 8UL, 16UL}) {
      const Bytes columns = shuffled(plain, item);
      CHECK(decode_chunk(columns, std::vector{shuffle(item)}, 0, size) == plain);
      CHECK(decode_chunk(with_checksum(deflated(columns)), std::vector{shuffle(item), deflate, sum}, 0, size) == plain);
      CHECK(decode_chunk(zstd(with_checksum(columns)), std::vector{shuffle(item), sum, zstd_filter}, 0, size) == plain);
      // Filters whose bits are in the mask were left out.
      CHECK(decode_chunk(columns, std::vector{shuffle(item), deflate, sum}, 0b110, size) == plain);
      CHECK(decode_chunk(deflated(plain), std::vector{shuffle(item), deflate, sum}, 0b101, size) == plain);
    }
  }
}

TEST_CASE("chunks that do not have exactly their size are refused") {
  const Bytes plain = counted(1000);
  const auto words = [&](const Bytes& stored, std::vector<ChunkFilter> filters, std::size_t size) {
    return words_of(ErrorKind::corrupt, [&] { (void)decode_chunk(stored, filters, 0, size); });
  };
  CHECK(has(words(plain, {}, 999), "has 1000 bytes where 999 belong"));
  CHECK(has(words(deflated(plain), {deflate}, 999), "more than the 999 bytes"));
  CHECK(has(words(deflated(plain), {deflate}, 1001), "has 1000 bytes where 1001 belong"));
  CHECK(has(words(zstd(plain), {zstd_filter}, 999), "does not decode to 999 bytes"));
  CHECK(has(words(zstd(plain), {zstd_filter}, 1001), "has 1000 bytes where 1001 belong"));
  Bytes cut = deflated(plain);
  cut.resize(cut.size() / 2);
  CHECK(has(words(cut, {deflate}, 1000), "is cut off"));
  CHECK(has(words(counted(100), {deflate}, 1000), "is damaged"));
  CHECK(has(words(counted(100), {zstd_filter}, 1000), "does not decode"));
  CHECK(has(words({}, {deflate}, 1000), "is cut off"));
  CHECK(has(words(counted(3), {sum}, 1000), "too short for its checksum"));
  Bytes wrong = with_checksum(plain);
  wrong[500] ^= std::byte{1};
  CHECK(has(words(wrong, {sum}, 1000), "its checksum is"));
  CHECK_FALSE(can_decode(std::vector{deflate, zstd_filter}));
  CHECK_FALSE(can_decode(std::vector<ChunkFilter>{{32000, 0}}));
  CHECK(can_decode(std::vector{shuffle(4), deflate, sum}));
}

TEST_CASE("checksums as HDF5 has them") {
  // Words of 16 bits, the higher byte first; sums modulo 65535, where nothing but nothing is 0.
  CHECK(fletcher32(Bytes{}) == 0);
  CHECK(fletcher32(Bytes(100)) == 0);
  CHECK(fletcher32(Bytes{std::byte{1}, std::byte{2}}) == 0x01020102);
  CHECK(fletcher32(Bytes{std::byte{1}, std::byte{2}, std::byte{3}}) == 0x05040402);
  CHECK(fletcher32(Bytes(2, std::byte{0xff})) == 0xffffffff);
  CHECK(fletcher32(Bytes(1 << 20, std::byte{0xff})) == 0xffffffff);
}

/// A tensor [extents] of u16 in chunks in a file, element i = i; some chunks are missing.
struct InFile {
  TemporaryDirectory folder;
  ForeignTensor tensor;
  Bytes expected;

  InFile(const Shape& extents, const Shape& chunk, std::mt19937& random, bool is_sparse) {
    tensor.name.assign(1, 't');
    tensor.dtype = DType::u16;
    tensor.item_bytes = 2;
    tensor.shape = tensor.stored_shape = extents;
    tensor.bytes = byte_size(DType::u16, extents);
    tensor.layout = hdf5::StorageLayout::chunked;
    tensor.chunk_shape = chunk;
    tensor.chunk_bytes = byte_size(DType::u16, chunk);
    tensor.filters = {shuffle(2), zstd_filter};
    tensor.fill = {std::byte{0xab}, std::byte{0xcd}};
    expected.resize(tensor.bytes);
    Shape grid(extents.size());
    for (std::size_t dim = 0; dim < grid.size(); ++dim) grid[dim] = (extents[dim] + chunk[dim] - 1) / chunk[dim];
    std::string file = "head";
    const auto chunks = static_cast<std::uint64_t>(element_count(grid));
    for (std::uint64_t number = 0; number < chunks; ++number) {
      const bool is_missing = is_sparse && random() % 3 == 0;
      const bool is_raw = random() % 4 == 0;
      Bytes elements(tensor.chunk_bytes, std::byte{0x77});
      for (std::uint64_t i = 0; i < tensor.chunk_bytes / 2; ++i) {
        std::uint64_t in_tensor = 0;
        bool is_inside = true;
        std::uint64_t of_grid = chunks;
        std::uint64_t of_chunk = tensor.chunk_bytes / 2;
        for (std::size_t dim = 0; dim < extents.size(); ++dim) {
          of_grid /= static_cast<std::uint64_t>(grid[dim]);
          of_chunk /= static_cast<std::uint64_t>(chunk[dim]);
          const std::uint64_t at =
              number / of_grid % static_cast<std::uint64_t>(grid[dim]) * static_cast<std::uint64_t>(chunk[dim]) +
              i / of_chunk % static_cast<std::uint64_t>(chunk[dim]);
          is_inside = is_inside && at < static_cast<std::uint64_t>(extents[dim]);
          in_tensor = in_tensor * static_cast<std::uint64_t>(extents[dim]) + at;
        }
        if (!is_inside) continue;
        const auto value = static_cast<std::uint16_t>(in_tensor);
        std::memcpy(elements.data() + 2 * i, &value, 2);
        std::memcpy(expected.data() + 2 * in_tensor, is_missing ? tensor.fill.data() : elements.data() + 2 * i, 2);
      }
      if (is_missing) continue;
      const Bytes stored = is_raw ? elements : zstd(shuffled(elements, 2));
      tensor.chunks.push_back({file.size(), static_cast<std::uint32_t>(stored.size()),
                               static_cast<std::uint32_t>(number & 0xffffffU), is_raw ? 3U : 0U});
      file.append(reinterpret_cast<const char*>(stored.data()), stored.size());
    }
    write_text(folder / "chunks", file);
  }
};

TEST_CASE("runs of elements out of chunks of any shape") {
  std::mt19937 random(5);
  const std::vector<std::pair<Shape, Shape>> shapes = {{{1}, {1}},
                                                       {{10}, {3}},
                                                       {{7}, {20}},
                                                       {{6, 7}, {2, 3}},
                                                       {{6, 7}, {6, 7}},
                                                       {{6, 7}, {1, 7}},
                                                       {{6, 7}, {4, 7}},
                                                       {{5, 4, 6}, {2, 4, 6}},
                                                       {{5, 4, 6}, {2, 3, 4}},
                                                       {{3, 1, 4, 5}, {2, 1, 3, 2}},
                                                       {{2, 3, 2, 2, 3}, {1, 2, 2, 1, 2}}};
  for (const auto& [extents, chunk] : shapes) {
    for (const bool is_sparse : {false, true}) {
      INFO(fmt::format("{} in {}", to_string(extents), to_string(chunk)));
      const InFile in(extents, chunk, random, is_sparse);
      const auto file = os::ReadableFile::open(in.folder / "chunks");
      ChunkCache cache(1 << 10);
      const std::size_t elements = in.expected.size() / 2;
      bool is_equal = true;
      for (std::size_t begin = 0; begin < elements; ++begin) {
        for (std::size_t end = begin; end <= elements; end += 1 + random() % 3) {
          Bytes target(2 * (end - begin));
          read_chunked(file, in.tensor, 3, begin, target, cache);
          is_equal = is_equal && std::equal(target.begin(), target.end(),
                                            in.expected.begin() + 2 * static_cast<std::ptrdiff_t>(begin));
        }
      }
      CHECK(is_equal);
    }
  }
}

TEST_CASE("piece after piece decodes a chunk once while the cache has room") {
  std::mt19937 random(6);
  const InFile in({64, 64}, {16, 16}, random, false);
  const auto file = os::ReadableFile::open(in.folder / "chunks");
  ChunkCache cache(std::uint64_t{1} << 20);
  for (std::size_t at = 0; at < in.expected.size(); at += 100) {
    Bytes target(std::min<std::size_t>(100, in.expected.size() - at));
    read_chunked(file, in.tensor, 0, at / 2, target, cache);
    CHECK(std::equal(target.begin(), target.end(), in.expected.begin() + static_cast<std::ptrdiff_t>(at)));
  }
  CHECK(cache.misses() == 16);
  // Too small for anything: the last one stays.
  ChunkCache none(1);
  Bytes target(in.expected.size());
  read_chunked(file, in.tensor, 0, 0, target, none);
  CHECK(target == in.expected);
  CHECK(none.misses() == 16);
}

TEST_CASE("a damaged chunk is named") {
  std::mt19937 random(7);
  InFile in({8, 8}, {4, 4}, random, false);
  in.tensor.chunks[2].filter_mask = 0;
  in.tensor.chunks[2].offset = 0;
  const auto file = os::ReadableFile::open(in.folder / "chunks");
  ChunkCache cache(1 << 20);
  Bytes target(in.expected.size());
  const std::string words = words_of(ErrorKind::corrupt, [&] { read_chunked(file, in.tensor, 0, 0, target, cache); });
  CHECK(has(words, "the tensor \"t\" of "));
  CHECK(has(words, "its chunk 2 at 0 of the file"));
  in.tensor.chunks[2].offset = 1 << 20;
  CHECK_THROWS_AS(read_chunked(file, in.tensor, 0, 0, target, cache), Error);
}

}  // namespace
