// SPDX-License-Identifier: Apache-2.0
// What reads foreign HDF5 files in this process: decoders, runs out of chunks, and reports that may say anything.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/hdf5/foreign_report_writer.hpp"
#include "src/inspect/chunk_decoder.hpp"
#include "src/inspect/chunked_reader.hpp"
#include "src/inspect/foreign_report.hpp"
#include "src/inspect/foreign_words.hpp"
#include "src/statefile/shuffle.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::inspect;
using namespace muster::test;
using hdf5::ForeignRecord;
using hdf5::RecordBytes;

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
    tensor.name = "t";
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

class Report {
 public:
  Report& add(const RecordBytes& record) {
    text_ += record.bytes();
    return *this;
  }
  Report& contiguous(std::string_view name, std::uint64_t extent, std::uint64_t offset, std::uint64_t bytes) {
    return add(RecordBytes(ForeignRecord::tensor)
                   .text(name)
                   .number(11)
                   .number(0)
                   .number(1)
                   .number(extent)
                   .text("")
                   .number(0)
                   .number(offset)
                   .number(bytes));
  }
  Report& listed() { return add(RecordBytes(ForeignRecord::listed)); }
  Report& end() { return add(RecordBytes(ForeignRecord::end)); }
  [[nodiscard]] std::span<const std::byte> bytes() const { return std::as_bytes(std::span(text_)); }
  [[nodiscard]] ForeignReport parse(std::uint64_t file_bytes = 10'000) const {
    return parse_foreign_report(bytes(), {file_bytes, 1024});
  }

 private:
  std::string text_{hdf5::foreign_report_magic};
};

/// "path: words" of each.
std::string issues_of(const ForeignReport& report) {
  std::string all;
  for (const ForeignIssue& issue : report.issues) all += fmt::format("[{}: {}]", issue.path, issue.words);
  return all;
}

TEST_CASE("reports: what is outside the file, shared or too much to believe is an issue") {
  Report report;
  report.contiguous("b", 4, 100, 16).contiguous("a", 4, 200, 16).contiguous("past", 4, 9990, 16);
  report.contiguous("wraps", 4, ~std::uint64_t{0} - 3, 16).contiguous("shares", 4, 104, 16);
  report.contiguous("huge", 1 << 30, 0, 0).contiguous("unwritten", 4, 0, 0);
  report.listed().end();
  const ForeignReport parsed = report.parse();
  CHECK(parsed.is_listed);
  CHECK(parsed.is_whole);
  std::string names;
  for (const ForeignTensor& tensor : parsed.tensors) names += fmt::format("{} ", tensor.name);
  CHECK(names == "a b unwritten ");
  const std::string issues = issues_of(parsed);
  CHECK(has(issues, "[past: a damaged dataset: elements past the file's end at 10000]"));
  CHECK(has(issues, "[wraps: a damaged dataset: elements past"));
  CHECK(has(issues, "[shares: a damaged dataset: some of its bytes are those of \"b\" too]"));
  CHECK(has(issues, "[huge: claims 4294967296 bytes, more than 1024 times the 10000 of the file: refused]"));
}

TEST_CASE("reports: dtypes that attributes name") {
  const auto bytes = [](Report& report, std::string_view name, std::uint64_t extent, std::uint64_t offset) {
    report.add(RecordBytes(ForeignRecord::tensor)
                   .text(name)
                   .number(1)
                   .number(0)
                   .number(1)
                   .number(extent)
                   .text("")
                   .number(0)
                   .number(offset)
                   .number(extent));
  };
  const auto text = [](Report& report, std::string_view path, std::string_view name, std::string_view value) {
    report.add(RecordBytes(ForeignRecord::text).text(path).text(name).text(value));
  };
  Report report;
  bytes(report, "f8", 4, 100);
  bytes(report, "f4", 8, 200);
  bytes(report, "odd", 8, 300);
  bytes(report, "f32", 8, 400);
  report.listed();
  text(report, "f8", "dtype", "F8_E4M3");
  text(report, "f4", "dtype", "F4");
  text(report, "f4", "nibble_order", "low_first");
  text(report, "odd", "dtype", "I4");
  text(report, "odd", "nibble_order", "high_first");
  text(report, "f32", "dtype", "F32");
  report.add(RecordBytes(ForeignRecord::shape).number(1).number(2).number(3).number(5));
  report.add(RecordBytes(ForeignRecord::shape).number(2).number(1).number(16));
  report.end();
  const ForeignReport parsed = report.parse();
  REQUIRE(parsed.tensors.size() == 4);
  CHECK(parsed.tensors[0].name == "f32");
  CHECK(parsed.tensors[0].dtype == DType::u8);
  CHECK(parsed.tensors[1].dtype == DType::f4_e2m1);
  CHECK(parsed.tensors[1].shape == Shape{3, 5});
  CHECK(parsed.tensors[2].dtype == DType::f8_e4m3fn);
  CHECK(parsed.tensors[3].dtype == DType::u8);
  CHECK(parsed.texts.size() == 3);
}

TEST_CASE("reports that no reader makes are refused") {
  const auto words = [](const Report& report) { return words_of(ErrorKind::corrupt, [&] { (void)report.parse(); }); };
  const auto tensor = [](std::uint64_t dtype, std::uint64_t order, std::uint64_t rank) {
    return RecordBytes(ForeignRecord::tensor).text("t").number(dtype).number(order).number(rank);
  };
  CHECK(has(words(Report().add(RecordBytes(static_cast<ForeignRecord>(77)))), "unknown kind 77"));
  CHECK(has(words(Report().add(RecordBytes(ForeignRecord::end))), "text before the tensors"));
  CHECK(has(words(Report().listed().contiguous("t", 4, 100, 16)), "a tensor after the last"));
  CHECK(has(words(Report().listed().end().listed()), "more after its end"));
  CHECK(has(words(Report().contiguous("t", 4, 100, 17)), "another size than the shape"));
  CHECK(has(words(Report().add(tensor(200, 0, 0))), "a dtype that is none"));
  CHECK(has(words(Report().add(tensor(16, 0, 0))), "a dtype that is none"));
  CHECK(has(words(Report().add(tensor(11, 2, 0))), "a byte order of 2"));
  CHECK(has(words(Report().add(tensor(11, 0, 33))), "a rank of 33"));
  CHECK(has(words(Report().add(RecordBytes(tensor(11, 0, 2)).number(1ULL << 40).number(1ULL << 40))), "overflows"));
  CHECK(has(words(Report().add(RecordBytes(ForeignRecord::text).text(std::string(5000, 'x')))), "text before"));
  CHECK(has(words(Report().listed().add(RecordBytes(ForeignRecord::compact).number(0))), "the tensor 0"));
  const auto chunked = [&](std::uint64_t extent, std::uint64_t chunk, std::uint64_t count) {
    return RecordBytes(tensor(1, 0, 1))
        .number(extent)
        .text("")
        .number(2)
        .number(chunk)
        .number(0)
        .number(0)
        .number(count);
  };
  CHECK(has(words(Report().add(chunked(100, 0, 0))), "chunks of no elements"));
  CHECK(has(words(Report().add(chunked(100, 1 << 30, 0))), "too large"));
  CHECK(has(words(Report().add(chunked(100, 10, 11))), "more chunks than there is room for"));
  CHECK(has(words(Report().add(chunked(100, 10, 1 << 22))), "a number of chunks of"));
  CHECK(has(words(Report().add(chunked(100, 10, 2)
                                   .number(5)
                                   .signed_number(10)
                                   .number(10)
                                   .number(0)
                                   .number(0)
                                   .signed_number(0)
                                   .number(10)
                                   .number(0))),
            "out of order"));
  const std::string other(40, 'x');
  CHECK(has(words_of(ErrorKind::version, [&] { (void)parse_foreign_report(std::as_bytes(std::span(other)), {}); }),
            "another build"));
}

TEST_CASE("reports that are cut off or changed anywhere are read as far as they go, or refused") {
  Report report;
  report.add(RecordBytes(ForeignRecord::fence).number(7)).contiguous("a", 4, 100, 16);
  report.add(RecordBytes(ForeignRecord::tensor)
                 .text("c")
                 .number(3)
                 .number(1)
                 .number(2)
                 .number(8)
                 .number(8)
                 .text("ab")
                 .number(2)
                 .number(4)
                 .number(4)
                 .number(2)
                 .number(2)
                 .number(2)
                 .number(1)
                 .number(6)
                 .number(1)
                 .number(3)
                 .number(1)
                 .signed_number(300)
                 .number(20)
                 .number(0)
                 .number(1)
                 .signed_number(-70)
                 .number(20)
                 .number(1)
                 .number(2)
                 .signed_number(500)
                 .number(20)
                 .number(0));
  report.add(RecordBytes(ForeignRecord::tensor).text("k").number(1).number(0).number(1).number(3).text("").number(1));
  report.listed();
  report.add(RecordBytes(ForeignRecord::compact).number(2).text("xyz"));
  report.add(RecordBytes(ForeignRecord::text).text("").text("format").text("pt"));
  report.add(RecordBytes(ForeignRecord::issue).text("soft").number(1).number(0).text("/a"));
  report.end();
  const ForeignReport whole = report.parse();
  REQUIRE(whole.tensors.size() == 3);
  CHECK(whole.tensors[1].chunks.size() == 3);
  CHECK(whole.tensors[1].chunks[1].offset == 250);
  CHECK(whole.texts.at("@format") == "pt");
  CHECK(issues_of(whole) == "[soft: a soft link to \"/a\": not followed]");

  const Bytes bytes(report.bytes().begin(), report.bytes().end());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const ForeignReport cut = parse_foreign_report(std::span(bytes).first(length), {10'000, 1024});
    CHECK_FALSE(cut.is_whole);
    CHECK(cut.tensors.size() <= 3);
  }
  std::mt19937 random(8);
  for (std::size_t at = hdf5::foreign_report_magic.size(); at < bytes.size(); ++at) {
    for (int value = 0; value < 256; value += 1 + static_cast<int>(random() % 5)) {
      Bytes changed = bytes;
      changed[at] = static_cast<std::byte>(value);
      try {
        const ForeignReport parsed = parse_foreign_report(changed, {10'000, 1024});
        for (const ForeignTensor& tensor : parsed.tensors)
          for (const StoredChunk& chunk : tensor.chunks) CHECK(chunk.offset + chunk.bytes <= 10'000);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::corrupt);
      }
    }
  }
}

TEST_CASE("every code has words in one printable line") {
  for (int code = 0; code < 40; ++code) {
    const std::string words = issue_words(static_cast<hdf5::IssueCode>(code), 3, "a\n\x1b[2J");
    CHECK_FALSE(words.empty());
    CHECK(words.find('\n') == std::string::npos);
    CHECK(words.find('\x1b') == std::string::npos);
  }
  CHECK(filter_name(32000, "") == "lzf (32000)");
  CHECK(filter_name(4711, "own\n") == "the filter 4711 \"own\\n\"");
}

}  // namespace
