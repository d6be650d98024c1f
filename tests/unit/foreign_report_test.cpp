// SPDX-License-Identifier: Apache-2.0
// Reports of the reader of foreign HDF5 files, which may say anything.

#include <doctest/doctest.h>
#include <fmt/core.h>

#include <random>
#include <span>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/hdf5/foreign_report_writer.hpp"
#include "src/inspect/foreign_report.hpp"
#include "src/inspect/foreign_words.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::inspect;
using namespace muster::test;
using hdf5::ForeignRecord;
using hdf5::RecordBytes;

namespace {

using Bytes = std::vector<std::byte>;

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

TEST_CASE("reports: chunks that are far larger than the file") {
  const auto chunked = [](std::string_view name, std::uint64_t chunk) {
    return RecordBytes(ForeignRecord::tensor)
        .text(name)
        .number(1)
        .number(0)
        .number(1)
        .number(chunk)
        .text("")
        .number(2)
        .number(chunk)
        .number(0)
        .number(0)
        .number(1)
        .number(1)
        .signed_number(100)
        .number(50)
        .number(0);
  };
  const ForeignReport parsed =
      Report().add(chunked("small", 16 << 20)).add(chunked("large", (16 << 20) + 8)).listed().end().parse();
  // Both are told to lie in the same place, which comes second.
  CHECK(issues_of(parsed) ==
        "[large: its chunks have 16777224 bytes, more than 8 times the 10000 of the file: refused]");
  REQUIRE(parsed.tensors.size() == 1);
  CHECK(parsed.tensors[0].name == "small");
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
