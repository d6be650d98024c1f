// SPDX-License-Identifier: Apache-2.0
// Reports of the reader for third-party HDF5 files. A report is untrusted input.

#include <doctest/doctest.h>
#include <fmt/core.h>

#include <random>
#include <span>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/checkpoint/thirdparty/hdf5/file.hpp"
#include "src/checkpoint/thirdparty/hdf5/reader.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
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
  /// Adds a tensor, of F32 or another dtype number. `stored` is its number of bytes in the file, at `offset` if that is
  /// not 0.
  Report& tensor(std::string_view name, std::uint64_t extent, std::uint64_t offset, std::uint64_t stored,
                 std::uint64_t dtype = 11) {
    return add(RecordBytes(ForeignRecord::tensor)
                   .text(name)
                   .number(dtype)
                   .number(1)
                   .number(extent)
                   .number(4711)
                   .number(stored)
                   .number(offset));
  }
  Report& listed() { return add(RecordBytes(ForeignRecord::listed)); }
  Report& end() { return add(RecordBytes(ForeignRecord::end)); }
  [[nodiscard]] std::span<const std::byte> bytes() const { return std::as_bytes(std::span(text_)); }
  [[nodiscard]] ForeignReport parse(std::uint64_t file_bytes = 10'000) const {
    return parse_foreign_report(bytes(), file_bytes);
  }

 private:
  std::string text_{hdf5::foreign_report_magic};
};

/// Returns "path: reason" for each issue.
std::string issues_of(const ForeignReport& report) {
  std::string all;
  for (const Omission& issue : report.omissions) all += fmt::format("[{}: {}]", issue.name, issue.reason);
  return all;
}

TEST_CASE("reports: data outside the file, shared, or implausibly large is an issue") {
  Report report;
  report.tensor("b", 4, 100, 16).tensor("a", 4, 200, 16).tensor("past", 4, 9990, 16);
  report.tensor("wraps", 4, ~std::uint64_t{0} - 3, 16).tensor("shares", 4, 104, 16);
  report.tensor("huge", 1 << 30, 0, 0).tensor("unwritten", 4, 0, 0).tensor("stored", 4, 0, 10'001);
  report.listed().end();
  const ForeignReport parsed = report.parse();
  CHECK(parsed.is_listed);
  CHECK(parsed.is_whole);
  std::string names;
  for (const ForeignTensor& tensor : parsed.tensors) names += fmt::format("{} ", tensor.name);
  CHECK(names == "a b unwritten ");
  const std::string issues = issues_of(parsed);
  CHECK(has(issues, "[past: a corrupted dataset: its elements extend past the end of the file at 10000]"));
  CHECK(has(issues, "[stored: a corrupted dataset: its elements extend past the end of the file at 10000]"));
  CHECK(has(issues, "[wraps: a corrupted dataset: its elements extend past"));
  CHECK(has(issues, "[shares: a corrupted dataset: its bytes overlap those of \"b\"]"));
  CHECK(has(issues, "[huge: it claims 4294967296 bytes, more than 1024 times the 10000 bytes of the file: refused]"));
}

TEST_CASE("reports: dtypes that attributes name") {
  const auto text = [](Report& report, std::string_view path, std::string_view name, std::string_view value) {
    report.add(RecordBytes(ForeignRecord::text).text(path).text(name).text(value));
  };
  Report report;
  report.tensor("f8", 4, 100, 4, 1);
  report.tensor("f4", 8, 200, 8, 1);
  report.tensor("odd", 8, 300, 8, 1);
  report.tensor("f32", 8, 400, 8, 1);
  report.tensor("f6", 6, 500, 6, 1).tensor("fnuz", 4, 600, 4, 1).tensor("short", 6, 700, 6, 1);
  report.listed();
  text(report, "f8", "dtype", "F8_E4M3");
  text(report, "f4", "dtype", "F4");
  text(report, "f4", "nibble_order", "low_first");
  text(report, "odd", "dtype", "I4");
  text(report, "odd", "nibble_order", "high_first");
  text(report, "f32", "dtype", "F32");
  text(report, "f6", "dtype", "F6_E3M2");
  text(report, "fnuz", "dtype", "F8_E5M2FNUZ");
  text(report, "short", "dtype", "F6_E2M3");
  report.add(RecordBytes(ForeignRecord::shape).number(1).number(2).number(3).number(5));
  report.add(RecordBytes(ForeignRecord::shape).number(2).number(1).number(16));
  report.add(RecordBytes(ForeignRecord::shape).number(4).number(2).number(2).number(4));
  report.add(RecordBytes(ForeignRecord::shape).number(6).number(2).number(2).number(5));
  report.end();
  const ForeignReport parsed = report.parse();
  REQUIRE(parsed.tensors.size() == 7);
  CHECK(parsed.tensors[0].name == "f32");
  CHECK(parsed.tensors[0].dtype == DType::u8);
  CHECK(parsed.tensors[1].dtype == DType::f4_e2m1);
  CHECK(parsed.tensors[1].shape == Shape{3, 5});
  CHECK(parsed.tensors[2].dtype == DType::f6_e3m2);
  CHECK(parsed.tensors[2].shape == Shape{2, 4});
  CHECK(parsed.tensors[3].dtype == DType::f8_e4m3fn);
  CHECK(parsed.tensors[4].dtype == DType::f8_e5m2fnuz);
  CHECK(parsed.tensors[5].dtype == DType::u8);
  // Its shape takes eight bytes.
  CHECK(parsed.tensors[6].name == "short");
  CHECK(parsed.tensors[6].dtype == DType::u8);
  CHECK(parsed.texts.size() == 4);
}

TEST_CASE("malformed reports are refused") {
  const auto words = [](const Report& report) { return words_of(ErrorKind::corrupt, [&] { (void)report.parse(); }); };
  const auto tensor = [](std::uint64_t dtype, std::uint64_t rank) {
    return RecordBytes(ForeignRecord::tensor).text("t").number(dtype).number(rank);
  };
  CHECK(has(words(Report().add(RecordBytes(static_cast<ForeignRecord>(77)))), "unknown kind 77"));
  CHECK(has(words(Report().add(RecordBytes(ForeignRecord::end))), "text before the tensors"));
  CHECK(has(words(Report().listed().tensor("t", 4, 100, 16)), "a tensor after the last"));
  CHECK(has(words(Report().listed().end().listed()), "more after its end"));
  CHECK(has(words(Report().tensor("t", 4, 100, 17)), "another size than the shape"));
  CHECK(has(words(Report().add(tensor(200, 0))), "an invalid dtype"));
  CHECK(has(words(Report().add(tensor(16, 0))), "an invalid dtype"));
  CHECK(has(words(Report().add(tensor(11, 33))), "a rank of 33"));
  CHECK(has(words(Report().add(RecordBytes(tensor(11, 2)).number(1ULL << 40).number(1ULL << 40))), "overflows"));
  CHECK(has(words(Report().add(RecordBytes(ForeignRecord::text).text(std::string(5000, 'x')))), "text before"));
  CHECK(has(words(Report().listed().add(RecordBytes(ForeignRecord::shape).number(0))), "the tensor 0"));
  const std::string other(40, 'x');
  CHECK(has(words_of(ErrorKind::version, [&] { (void)parse_foreign_report(std::as_bytes(std::span(other)), 0); }),
            "different builds"));
}

TEST_CASE("reports that are truncated or changed anywhere are read up to that point, or refused") {
  Report report;
  report.add(RecordBytes(ForeignRecord::fence).number(7));
  report.tensor("a", 4, 100, 16).tensor("c", 64, 0, 60).tensor("k", 3, 0, 12);
  report.listed();
  report.add(RecordBytes(ForeignRecord::shape).number(2).number(2).number(3).number(1));
  report.add(RecordBytes(ForeignRecord::text).text("").text("format").text("pt"));
  report.add(
      RecordBytes(ForeignRecord::issue).text("soft").text("a soft link to \"/a\n\x1b[2J\": not followed").number(0));
  report.end();
  const ForeignReport whole = report.parse();
  REQUIRE(whole.tensors.size() == 3);
  CHECK(whole.tensors[1].address == 4711);
  CHECK(whole.tensors[1].stored_bytes == 60);
  CHECK(whole.texts.at("@format") == "pt");
  CHECK(issues_of(whole) == R"([soft: a soft link to "/a\n\x1b[2J": not followed])");

  const Bytes bytes(report.bytes().begin(), report.bytes().end());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const ForeignReport cut = parse_foreign_report(std::span(bytes).first(length), 10'000);
    CHECK_FALSE(cut.is_whole);
    CHECK(cut.tensors.size() <= 3);
  }
  std::mt19937 random(8);
  for (std::size_t at = hdf5::foreign_report_magic.size(); at < bytes.size(); ++at) {
    for (int value = 0; value < 256; value += 1 + static_cast<int>(random() % 5)) {
      Bytes changed = bytes;
      changed[at] = static_cast<std::byte>(value);
      try {
        const ForeignReport parsed = parse_foreign_report(changed, 10'000);
        for (const ForeignTensor& tensor : parsed.tensors)
          CHECK((tensor.offset == 0 || tensor.offset + tensor.bytes <= 10'000));
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::corrupt);
      }
    }
  }
}

}  // namespace
