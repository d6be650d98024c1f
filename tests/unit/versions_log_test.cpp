// SPDX-License-Identifier: Apache-2.0
// read_versions(): sound chains, every kind of defect, and directories in which clean-up has deleted versions; and the
// clean-up of unfinished versions.

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "muster/publish.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/versions/unfinished.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/version_chain.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

/// Three deltas, a full version, and two deltas.
struct LogCase {
  explicit LogCase(const DeltaChoice& choice = {}) {
    for (int i = 1; i <= 6; ++i) {
      chain.change({"layer1.weight", "layer2.bias"});
      if (i == 4)
        chain.publish_full(choice.has_own_facts);
      else
        chain.publish_delta(choice);
    }
  }

  [[nodiscard]] VersionLog log(bool verify = true, bool has_base = true) const {
    return read_versions(chain.source(), {.base = has_base ? chain.base() : std::string(), .verify = verify});
  }
  [[nodiscard]] std::string file(std::uint64_t version) const {
    for (const auto& entry : fs::directory_iterator(chain.version(version)))
      if (entry.path().extension() == ".safetensors") return entry.path().string();
    FAIL("no file");
    return {};
  }
  /// Changes one byte near the end of a file, which belongs to a tensor.
  void damage(std::uint64_t version) const {
    std::string text = read_text(file(version));
    text[text.size() - 40] ^= 1;
    write_text(file(version), text);
  }

  TemporaryDirectory root{Medium::memory};
  VersionChain chain{root};
};

std::string problems_of(const VersionLog& log) {
  std::string all;
  for (const VersionInfo& info : log.versions)
    for (const std::string& problem : info.problems) all += problem + "\n";
  for (const std::string& problem : log.problems) all += problem + "\n";
  return all;
}

bool tells(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::uint64_t> numbers_with_problems(const VersionLog& log) {
  std::vector<std::uint64_t> numbers;
  for (const VersionInfo& info : log.versions)
    if (!info.problems.empty()) numbers.push_back(info.version);
  return numbers;
}

using Numbers = std::vector<std::uint64_t>;

}  // namespace

TEST_CASE("the log describes each version") {
  const LogCase test;
  const VersionLog log = test.log(false);
  REQUIRE(log.versions.size() == 6);
  CHECK(log.is_sound());
  CHECK(log.unfinished.empty());
  CHECK(log.other_names.empty());
  CHECK_FALSE(log.local);
  const VersionInfo& delta = log.versions[1];
  CHECK(delta.version == 2);
  CHECK(delta.kind == VersionKind::delta);
  CHECK(delta.base_version == 1);
  CHECK(delta.begins_at == 0);
  CHECK(delta.encoding == DeltaEncoding::exclusive_or);
  CHECK(delta.checksum_format == "xxh3-128");
  CHECK(delta.tensors == 2);
  CHECK(delta.files == 1);
  CHECK(delta.bytes == fs::file_size(test.file(2)));
  CHECK(delta.stream == "stream-1");
  CHECK(delta.publisher == "test");
  CHECK(delta.digest.size() == 32);
  const VersionInfo& full = log.versions[3];
  CHECK(full.kind == VersionKind::full);
  CHECK(full.begins_at == 4);
  CHECK(full.tensors == 6);
  CHECK_FALSE(full.base_version);
  CHECK(log.versions[5].begins_at == 4);
}

TEST_CASE("sound chains of all encodings and checksums are verified") {
  for (const DeltaEncoding encoding : {DeltaEncoding::exclusive_or, DeltaEncoding::overwrite})
    for (const auto sums : {versions::ChecksumFormat::xxh3_128, versions::ChecksumFormat::adler32})
      for (const bool has_own_facts : {true, false}) {
        const LogCase test({.encoding = encoding, .checksums = sums, .has_own_facts = has_own_facts, .files = 2});
        const VersionLog log = test.log();
        INFO(problems_of(log));
        CHECK(log.is_sound());
        CHECK(log.versions.size() == 6);
      }
}

TEST_CASE("the bytes that a verification reports as progress are those that it announces") {
  const LogCase test;
  Progress last;
  const VersionLog log =
      read_versions(test.chain.source(),
                    {.base = test.chain.base(), .verify = true, .progress = [&](const Progress& now) { last = now; }});
  CHECK(log.is_sound());
  CHECK(last.bytes == last.total_bytes);
  CHECK(last.bytes > 0);
}

TEST_CASE("verification needs a base if the chain begins there") {
  LogCase test;
  const std::string words = words_of(ErrorKind::invalid_argument, [&] { (void)test.log(true, false); });
  CHECK(tells(words, "--base"));
  for (const int version : {1, 2, 3}) fs::remove_all(test.chain.version(static_cast<std::uint64_t>(version)));
  CHECK(test.log(true, false).is_sound());
}

TEST_CASE("a damaged tensor is named, and versions that follow are not verified") {
  const LogCase test({.has_own_facts = false});
  test.damage(2);
  const VersionLog log = test.log();
  CHECK(numbers_with_problems(log) == Numbers{2, 3});
  REQUIRE(log.versions[1].problems.size() == 1);
  CHECK(tells(log.versions[1].problems[0], "weight_v000002"));
  CHECK(tells(log.versions[1].problems[0], "tensor \"layer"));
  CHECK(tells(log.versions[2].problems[0], "not verified"));
  CHECK(test.log(false).is_sound());  // its header is sound
}

TEST_CASE("a damaged file is named even if its tensors cannot show it") {
  const LogCase test;
  test.damage(5);
  const VersionLog log = test.log();
  CHECK(numbers_with_problems(log) == Numbers{5, 6});
  CHECK(tells(problems_of(log), "data is corrupted"));
  CHECK(tells(problems_of(log), "model-00000-of-00001.safetensors"));
}

TEST_CASE("a damaged full version is found by its digest") {
  const LogCase test;
  test.damage(4);
  const VersionLog log = test.log();
  CHECK(tells(problems_of(log), "weight_v000004"));
  CHECK(tells(problems_of(log), "its tensors have the digest"));
}

TEST_CASE("another base is found") {
  const LogCase test;
  const TemporaryDirectory root(Medium::memory);
  const VersionChain wrong(root, 7);
  const VersionLog log = read_versions(test.chain.source(), {.base = wrong.base(), .verify = true});
  CHECK_FALSE(log.is_sound());
  CHECK(tells(problems_of(log), "weight_v000001"));
}

TEST_CASE("a missing version breaks the chain up to the next full version") {
  const LogCase test;
  fs::remove_all(test.chain.version(2));
  const VersionLog log = test.log();
  CHECK(log.problems == std::vector<std::string>{"version 2 is missing"});
  CHECK(numbers_with_problems(log) == Numbers{3});
  CHECK_FALSE(log.versions[1].begins_at);
  CHECK(log.versions.back().begins_at == 4);
}

TEST_CASE("deltas that clean-up has left before a full version are no defects") {
  const LogCase test;
  for (const int version : {1, 2}) fs::remove_all(test.chain.version(static_cast<std::uint64_t>(version)));
  VersionLog log = test.log(true, false);
  INFO(problems_of(log));
  CHECK(log.is_sound());
  CHECK_FALSE(log.versions.front().begins_at);
  fs::remove_all(test.chain.version(4));
  fs::remove_all(test.chain.version(5));
  fs::remove_all(test.chain.version(6));
  log = test.log(true, false);
  CHECK(tells(problems_of(log), "versions 1 to 2 are missing, and no version is full"));
}

TEST_CASE("a version of another run does not continue the chain") {
  LogCase test;
  test.chain.set_stream("another");
  test.chain.change({"layer1.bias"});
  test.chain.publish_delta();
  const VersionLog log = test.log(false);
  CHECK(numbers_with_problems(log) == Numbers{7});
  CHECK(tells(problems_of(log), "another stream"));
}

TEST_CASE("an unreadable version is an entry with a problem") {
  const LogCase test;
  write_text(test.chain.version(2) + "/model.safetensors.index.json", "{");
  const VersionLog log = test.log(false);
  REQUIRE(log.versions.size() == 6);
  CHECK_FALSE(log.versions[1].kind);
  CHECK(numbers_with_problems(log) == Numbers{2, 3});
  CHECK(tells(problems_of(log), "version 2 cannot be read"));
}

TEST_CASE("versions without an index are not complete") {
  const LogCase test;
  fs::create_directories(test.chain.source() + "/weight_v000007");
  write_text(test.chain.source() + "/notes.txt", "");
  const VersionLog log = test.log();
  CHECK(log.is_sound());
  CHECK(log.unfinished == std::vector<std::string>{"weight_v000007"});
  CHECK(log.other_names == std::vector<std::string>{"notes.txt"});
}

TEST_CASE("the log reports on a local copy") {
  const LogCase test;
  const std::string local = test.root / "local";
  const auto local_of = [&] { return read_versions(test.chain.source(), {.local = local}).local.value(); };
  CHECK_FALSE(local_of().version);
  CHECK_FALSE(local_of().has_record);
  (void)pull_version(test.chain.source(), local, {.base = test.chain.base(), .version = 5});
  CHECK(local_of().version == 5);
  CHECK(local_of().has_record);
  fs::remove(local + "/.weight_sync/muster.json");
  CHECK(local_of().version == 5);
  CHECK_FALSE(local_of().has_record);
  CHECK_FALSE(local_of().reason.empty());
}

TEST_CASE("a stop request ends the log") {
  const LogCase test;
  std::stop_source stop;
  stop.request_stop();
  (void)thrown_by(ErrorKind::cancelled, [&] {
    (void)read_versions(test.chain.source(), {.base = test.chain.base(), .verify = true, .stop = stop.get_token()});
  });
}

TEST_CASE("only unfinished versions of dead processes are deleted") {
  const LogCase test;
  const std::string version = test.chain.source() + "/weight_v000007";
  const std::string mine = os::partial_name(version);
  os::ProcessIdentity dead = os::own_identity();
  dead.start += 1;  // no process with this number began then
  const std::string gone = mine.substr(0, mine.rfind('@') + 1) + os::identity_text(dead);
  os::ProcessIdentity elsewhere = os::own_identity();
  elsewhere.host = "elsewhere";
  const std::string far = os::partial_name(version).substr(0, mine.rfind('@') + 1) + os::identity_text(elsewhere);
  for (const std::string& path : {mine, gone, far}) {
    fs::create_directories(path);
    write_text(path + "/model-00000-of-00001.safetensors", "x");
  }
  CHECK(versions::is_version_directory(test.chain.source()));
  CHECK_FALSE(versions::is_version_directory(test.chain.base()));
  workspace::GcReport report = versions::collect_unfinished(test.chain.source(), {.dry_run = true});
  CHECK(report.items.size() == 3);
  CHECK(report.removed_files == 1);
  CHECK(fs::exists(gone));
  report = versions::collect_unfinished(test.chain.source(), {.dry_run = false});
  CHECK(report.removed_files == 1);
  CHECK_FALSE(fs::exists(gone));
  CHECK(fs::exists(mine));
  CHECK(fs::exists(far));
  report = versions::collect_unfinished(test.chain.source(), {.dry_run = false, .older_than = std::chrono::seconds(0)});
  CHECK(report.removed_files == 1);
  CHECK_FALSE(fs::exists(far));
  CHECK(fs::exists(mine));
  CHECK(test.log().is_sound());
}
