// SPDX-License-Identifier: Apache-2.0
// The checksum file, and the checksums themselves.

#include "src/checkpoint/assembly/checksums.hpp"
#include "src/core/checksum.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "src/os/file.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::words_of;

TEST_CASE("checksums are XXH3-64 with seed 0") {
  const std::string_view text = "muster";
  CHECK(checksum_text(tensor_checksum({})) == "2d06800538d394c2");  // XXH3-64 of no bytes
  CHECK(tensor_checksum(std::as_bytes(std::span(text))) != tensor_checksum({}));
  CHECK(checksum_text(0xabc) == "0000000000000abc");
}

TEST_CASE("pieces of any size give the checksum of the whole") {
  std::vector<std::byte> bytes(100'000);
  test::fill(bytes.data(), bytes.size(), 5);
  for (const std::size_t step : {1UL, 7UL, 240UL, 241UL, 4096UL, 99'999UL}) {
    TensorChecksum checksum;
    for (std::size_t at = 0; at < bytes.size(); at += step)
      checksum.add(std::span(bytes).subspan(at, std::min(step, bytes.size() - at)));
    CHECK(checksum.value() == tensor_checksum(bytes));
    checksum.add({});
    TensorChecksum moved = std::move(checksum);
    CHECK(moved.value() == tensor_checksum(bytes));
  }
}

TEST_CASE("a mapped tensor is summed in pieces, and one flipped bit is detected") {
  const test::TemporaryDirectory work;
  std::string bytes(static_cast<std::size_t>(20 << 20) + 13, '\0');
  test::fill(reinterpret_cast<std::byte*>(bytes.data()), bytes.size(), 3);
  test::write_text(work / "file", bytes);
  const auto file = os::MappedFile::open(work / "file");
  std::uint64_t seen = 0;
  const std::uint64_t checksum =
      mapped_checksum(file->bytes().subspan(1), file->path(), [&](std::uint64_t count) { seen += count; });
  CHECK(seen == bytes.size() - 1);
  CHECK(checksum == tensor_checksum(std::as_bytes(std::span(bytes)).subspan(1)));
  bytes[15'000'000] ^= 1;
  CHECK(checksum != tensor_checksum(std::as_bytes(std::span(bytes)).subspan(1)));
}

TEST_CASE("checksums are read back, and their file is not copied with the model") {
  const test::TemporaryDirectory work;
  CHECK_FALSE(read_checksums(work.path()).has_value());
  for (const ChecksumAlgorithm algorithm : {ChecksumAlgorithm::crc64_xz, ChecksumAlgorithm::xxh3_64}) {
    const Checksums checksums = {{{"a", 0}, {"b \"\n\xc3\xa4", ~std::uint64_t{0}}, {"c", 0x0123456789abcdef}},
                                 algorithm};
    write_checksums(work.path(), checksums);
    CHECK(read_checksums(work.path()) == checksums);
  }
  write_checksums(work.path(), Checksums{});
  CHECK(read_checksums(work.path())->tensors.empty());
  test::write_text(work / "config.json", "{}");
  CHECK(extra_files_of(work.path()).names == std::vector<std::string>{"config.json"});
  CHECK(test::read_text(work / std::string(checksums_file_name)).find("\"xxh3-64\"") != std::string::npos);
}

TEST_CASE("malformed checksum files") {
  const test::TemporaryDirectory work;
  const auto error = [&](ErrorKind kind, const std::string& text) {
    test::write_text(work / std::string(checksums_file_name), text);
    return words_of(kind, [&] { (void)read_checksums(work.path()); });
  };
  const auto with = [](const std::string& checksum) {
    return R"({"muster_checksums": 1, "algorithm": "xxh3-64", "tensors": {"a": )" + checksum + "}}";
  };
  CHECK(has(error(ErrorKind::corrupt, ""), "muster.checksums.json"));
  CHECK(has(error(ErrorKind::corrupt, "{\n,"), "line 2"));
  CHECK(has(error(ErrorKind::corrupt, "[]"), "a JSON object"));
  CHECK(has(error(ErrorKind::corrupt, "{}"), "\"muster_checksums\" is missing"));
  CHECK(has(error(ErrorKind::version, R"({"muster_checksums": 2})"), "unknown version"));
  CHECK(has(error(ErrorKind::corrupt, R"({"muster_checksums": 1, "tensors": {}})"), "\"algorithm\" is missing"));
  CHECK(has(error(ErrorKind::unsupported, R"({"muster_checksums": 1, "algorithm": "md5", "tensors": {}})"), "md5"));
  CHECK(has(error(ErrorKind::corrupt, R"({"muster_checksums": 1, "algorithm": "xxh3-64"})"), "object \"tensors\""));
  for (const char* wrong : {"1", "\"\"", "\"0123456789abcde\"", "\"0123456789abcdef0\"", "\"0123456789ABCDEF\"",
                            "\"0123456789abcdeg\"", "\"-123456789abcdef\"", "null"})
    CHECK(has(error(ErrorKind::corrupt, with(wrong)), "16 hexadecimal digits"));
  std::filesystem::remove(work / std::string(checksums_file_name));
  std::filesystem::create_directory(work / std::string(checksums_file_name));
  CHECK_THROWS_AS((void)read_checksums(work.path()), Error);
}
