// SPDX-License-Identifier: Apache-2.0
// Every byte of a small state file is changed, and the file is truncated to every length. Each damage must be detected,
// and nothing may crash.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "src/core/checksum.hpp"
#include "src/os/fd.hpp"
#include "src/statefile/format.hpp"
#include "tests/support/state_files.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

/// Returns the defect that a reader and a checker report; nullopt: the file is as written.
std::optional<std::string> defect_of(const std::string& path, FileAccess access) {
  try {
    const StateFile file = StateFile::open(path, access);
    const std::vector<StateProblem> problems = file.check();
    try {
      static_cast<void>(file.load());
    } catch (const Error& error) {
      // Loading compares less than checking, so checking must find every defect that loading finds.
      if (problems.empty()) return "load: " + std::string(error.what());
      CHECK((error.kind() == ErrorKind::corrupt));
    }
    if (problems.empty()) return std::nullopt;
    CHECK_FALSE(problems[0].words.empty());
    return problems[0].words;
  } catch (const Error& error) {
    CHECK((error.kind() == ErrorKind::corrupt));
    CHECK(error.path() == path);
    return error.what();
  }
}

class Damage {
 public:
  explicit Damage(std::optional<int> level) {
    const std::vector<NamedTensor> tensors = {
        {"weight", normal_weights({12, 25}, 1)},       {"noise", pattern(DType::bf16, {3, 200}, 2)},
        {"bias", pattern(DType::f16, {31}, 3)},        {"second", pattern(DType::u8, {5}, 6)},
        {"scale/0", pattern(DType::f8_e4m3fn, {}, 4)}, {"none", pattern(DType::i64, {0, 3}, 5)}};
    write_state_file(path, some_config(), tensors, {.zstd_level = level, .chunk_bytes = 1000});
    bytes = read_text(path);
    fd = os::Fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  }
  void put(std::size_t at, std::string_view what) const {
    REQUIRE(::pwrite(fd.get(), what.data(), what.size(), static_cast<off_t>(at)) == static_cast<ssize_t>(what.size()));
  }
  void restore(std::size_t at, std::size_t count) const { put(at, std::string_view(bytes).substr(at, count)); }

  TemporaryDirectory work;
  std::string path = work / "file";
  std::string bytes;
  os::Fd fd;
};

}  // namespace

TEST_CASE("every changed byte is detected") {
  for (const std::optional<int> level : {std::optional<int>(), std::optional<int>(1)}) {
    CAPTURE(level.has_value());
    const Damage damage(level);
    REQUIRE_FALSE(defect_of(damage.path, FileAccess::map).has_value());
    std::size_t missed = 0;
    for (std::size_t at = 0; at < damage.bytes.size(); ++at) {
      // Flips one bit, another one in each byte.
      const char changed = static_cast<char>(damage.bytes[at] ^ (1 << (at * 5 % 8)));
      damage.put(at, {&changed, 1});
      if (!defect_of(damage.path, at % 2 == 0 ? FileAccess::map : FileAccess::read)) {
        MESSAGE("missed at " << at);
        ++missed;
      }
      damage.restore(at, 1);
    }
    CHECK(missed == 0);
    CHECK_FALSE(defect_of(damage.path, FileAccess::read).has_value());
  }
}

TEST_CASE("sectors that were never written are detected") {
  const Damage damage(1);
  for (std::size_t at = 0; at < damage.bytes.size(); at += 512) {
    const std::size_t count = std::min<std::size_t>(512, damage.bytes.size() - at);
    if (damage.bytes.substr(at, count) == std::string(count, '\0')) continue;
    damage.put(at, std::string(count, '\0'));
    CHECK(defect_of(damage.path, FileAccess::read).has_value());
    damage.restore(at, count);
  }
}

TEST_CASE("a truncated file is reported as truncated") {
  for (const std::optional<int> level : {std::optional<int>(), std::optional<int>(1)}) {
    const Damage damage(level);
    for (std::size_t length = damage.bytes.size(); length-- > 0;) {
      REQUIRE(::ftruncate(damage.fd.get(), static_cast<off_t>(length)) == 0);
      CHECK(thrown_by(ErrorKind::corrupt, [&] { StateFile::open(damage.path); }).os_error() == ENODATA);
    }
  }
}

TEST_CASE("two tensors with one name are refused, even if all checksums match") {
  const Damage damage({});
  const auto whole = std::as_bytes(std::span(damage.bytes));
  statefile::UserBlock block =
      statefile::decode_user_block(whole.first(statefile::head_bytes), whole.size(), damage.path);
  std::string catalogue = damage.bytes.substr(block.catalogue.offset, block.catalogue.bytes);
  // The new name has the same length.
  const std::size_t name = catalogue.find("weight");
  REQUIRE(name != std::string::npos);
  REQUIRE(catalogue.find("second") != std::string::npos);
  catalogue.replace(catalogue.find("second"), 6, "weight");
  block.catalogue_checksum = tensor_checksum(std::as_bytes(std::span(catalogue)));
  const auto head = statefile::encode_user_block(block);
  damage.put(block.catalogue.offset, catalogue);
  damage.put(0, {reinterpret_cast<const char*>(head.data()), head.size()});
  CHECK(has(words_of(ErrorKind::corrupt, [&] { StateFile::open(damage.path); }),
            "tensor \"weight\": the name is duplicated"));
}

TEST_CASE("a file that is truncated while it is open is an error, not a crash") {
  const Damage damage({});
  const StateFile read = StateFile::open(damage.path, FileAccess::read);
  const StateFile mapped = StateFile::open(damage.path, FileAccess::map);
  REQUIRE(::ftruncate(damage.fd.get(), 4200) == 0);
  CHECK_THROWS_AS(static_cast<void>(read.tensor(0)), Error);
  CHECK_THROWS_AS(static_cast<void>(read.config_text()), Error);
  CHECK_THROWS_AS(static_cast<void>(mapped.config_text()), Error);
  CHECK_FALSE(read.check().empty());
}
