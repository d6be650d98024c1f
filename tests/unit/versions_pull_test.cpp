// SPDX-License-Identifier: Apache-2.0
// pull_version(): chains of all kinds, the record of the copy, refusals, and callers at the same time.

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "muster/publish.hpp"
#include "src/os/directory.hpp"
#include "src/os/lock_file.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/versions/local_copy.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/version_chain.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

const std::string first_file = "model-00001-of-00002.safetensors";
const std::string second_file = "model-00002-of-00002.safetensors";

/// Everything below a directory: the bytes of files.
std::map<std::string, std::string> bytes_by_name(const std::string& directory) {
  std::map<std::string, std::string> contents;
  if (!fs::exists(directory)) return contents;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    contents[entry.path().string().substr(directory.size())] =
        entry.is_regular_file() ? read_text(entry.path().string()) : std::string();
  return contents;
}

std::uint64_t inode(const std::string& path) {
  const auto status = os::file_status(path);
  REQUIRE(status);
  return status->identity.number;
}

bool has_text(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

/// A chain and a place for the copy.
struct Case {
  explicit Case(std::uint64_t seed = 1) : chain(root, seed), local(root / "host/copy") {
    fs::create_directories(root / "host");
  }

  PullReport pull(std::optional<std::uint64_t> version = {}, bool has_base = true) const {
    PullOptions options;
    options.base = has_base ? chain.base() : std::string();
    options.version = version;
    PullReport report = pull_version(chain.source(), local, options);
    chain.check(local, report.version);
    check_no_leftovers();
    return report;
  }
  void check_no_leftovers() const {
    std::vector<std::string> names = test::names_in(fs::path(local).parent_path());
    std::erase(names, "copy");
    std::erase(names, ".copy.muster-lock");
    CHECK(names.empty());
  }
  /// Requires that a pull fails, and that the copy is unchanged.
  std::string refused(ErrorKind kind, const PullOptions& options) const {
    const auto before = bytes_by_name(local);
    const bool is_there = fs::exists(local);
    const std::string words = words_of(kind, [&] { (void)pull_version(chain.source(), local, options); });
    CHECK(fs::exists(local) == is_there);
    CHECK(bytes_by_name(local) == before);
    check_no_leftovers();
    return words;
  }
  PullOptions options() const {
    PullOptions options;
    options.base = chain.base();
    return options;
  }

  TemporaryDirectory root{Medium::memory};
  VersionChain chain;
  std::string local;
};

}  // namespace

TEST_CASE("the first pull copies the base, and the next ones continue the copy") {
  Case test;
  test.chain.change({"layer1.weight", "layer1.scale"});
  test.chain.publish_delta();
  PullReport report = test.pull();
  CHECK(report.version == 1);
  CHECK(report.is_changed);
  CHECK_FALSE(report.previous);
  CHECK(report.begun_at == "base");
  CHECK(report.applied == std::vector<std::uint64_t>{1});
  CHECK(report.changed_tensors == 2);
  CHECK(report.bytes_linked == 0);
  // No file of the base is shared.
  for (const std::string& file : {first_file, second_file, std::string("config.json")})
    CHECK(inode(test.local + "/" + file) != inode(test.chain.base() + "/" + file));
  CHECK(read_text(test.local + "/config.json") == read_text(test.chain.base() + "/config.json"));
  CHECK(fs::exists(test.local + "/model.safetensors.index.json"));

  test.chain.change({"layer2.bias"});
  test.chain.publish_delta({.encoding = DeltaEncoding::overwrite});
  test.chain.change({"layer2.weight"});
  test.chain.publish_delta({.checksums = versions::ChecksumFormat::adler32});
  const std::uint64_t unchanged = inode(test.local + "/" + first_file);
  const std::uint64_t lock = inode(test.local + "/.weight_sync/lock");
  std::ifstream reader(test.local + "/" + second_file, std::ios::binary);
  const std::string before = read_text(test.local + "/" + second_file);
  report = test.pull();
  CHECK(report.version == 3);
  CHECK(report.previous == 1);
  CHECK(report.begun_at == "local");
  CHECK(report.applied == std::vector<std::uint64_t>{2, 3});
  CHECK(inode(test.local + "/" + first_file) == unchanged);
  CHECK(report.bytes_linked == fs::file_size(test.local + "/" + first_file));
  CHECK(report.bytes_written == fs::file_size(test.local + "/" + second_file));
  CHECK(inode(test.local + "/.weight_sync/lock") == lock);
  // A process that has the old file open keeps it.
  CHECK(std::string{std::istreambuf_iterator<char>(reader), {}} == before);

  report = test.pull();
  CHECK_FALSE(report.is_changed);
  CHECK(report.version == 3);
  CHECK(report.bytes_written == 0);
}

TEST_CASE("a long chain is applied in groups") {
  for (const bool is_from_local : {false, true}) {
    CAPTURE(is_from_local);
    Case test;
    if (is_from_local) test.pull(0);
    for (int i = 0; i < 200; ++i) {
      test.chain.change({i % 50 == 0 ? "layer2.weight" : "layer1.bias", "layer1.scale"}, 1000);
      test.chain.publish_delta({.encoding = i % 3 == 0 ? DeltaEncoding::overwrite : DeltaEncoding::exclusive_or});
    }
    const PullReport report = test.pull();
    CHECK(report.applied.size() == 200);
    CHECK(report.begun_at == (is_from_local ? "local" : "base"));
  }
}

TEST_CASE("a full version gives the copy its names and its config") {
  for (const bool has_config : {true, false}) {
    CAPTURE(has_config);
    Case test;
    test.pull(0);
    test.chain.change({"layer1.weight"});
    test.chain.publish_full(has_config, has_config);
    test.chain.change({"layer2.weight"});
    test.chain.publish_delta({.has_own_facts = has_config, .files = 2});
    const PullReport report = test.pull();
    CHECK(report.begun_at == "weight_v000001");
    CHECK(report.applied == std::vector<std::uint64_t>{2});
    CHECK(fs::exists(test.local + "/model-00001-of-00001.safetensors"));
    CHECK_FALSE(fs::exists(test.local + "/" + first_file));
    CHECK(has(read_text(test.local + "/config.json"), has_config ? "full" : "llama"));
    CHECK(fs::exists(test.local + "/tokenizer.json") == !has_config);
    CHECK_FALSE(has_text(read_text(test.local + "/model.safetensors.index.json"), "delta_encoding"));
    // Without a base, the full version is early enough.
    fs::remove_all(test.local);
    CHECK(test.pull(2, false).begun_at == "weight_v000001");
  }
}

TEST_CASE("versions of other programs have no facts of Muster") {
  Case test;
  const DeltaChoice other{.has_own_facts = false};
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta(other);
  test.chain.publish_delta(other);  // without changes
  CHECK(test.pull(1).begun_at == "base");
  PullReport report = test.pull(2);
  CHECK(report.begun_at == "local");
  CHECK(report.changed_tensors == 0);
  CHECK(report.bytes_written == 0);
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta(other);
  CHECK(test.pull().begun_at == "local");

  // A version of one file needs no index.
  test.chain.publish_full(false);
  fs::remove(test.chain.version(4) + "/model.safetensors.index.json");
  fs::rename(test.chain.version(4) + "/model-00001-of-00001.safetensors", test.chain.version(4) + "/model.safetensors");
  CHECK(test.pull().version == 4);
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta(other);
  CHECK(test.pull().version == 5);
}

TEST_CASE("older versions and the base can be pulled") {
  Case test;
  for (int i = 0; i < 3; ++i) {
    test.chain.change({"layer1.weight", "layer2.bias"});
    test.chain.publish_delta();
  }
  test.pull();
  PullReport report = test.pull(2);
  CHECK(report.begun_at == "base");
  CHECK(report.previous == 3);
  CHECK_FALSE(report.notes.empty());
  CHECK(test.pull(3).begun_at == "local");
  CHECK(test.pull(0).is_changed);
  CHECK_FALSE(test.pull(0).is_changed);
  CHECK(test.pull(1).begun_at == "local");
}

TEST_CASE("a record that does not describe the copy is void") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  test.pull();
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  const std::string record = test.local + "/.weight_sync/muster.json";
  const std::string text = read_text(record);
  std::string reason;
  SUBCASE("a restart of the host") {
    const std::string boot = os::own_identity().boot;
    std::string changed = text;
    changed.replace(changed.find(boot), boot.size(), std::string(boot.size(), '7'));
    write_text(record, changed);
    reason = "restarted";
  }
  SUBCASE("a file that was replaced") {
    const std::string file = test.local + "/" + first_file;
    fs::copy_file(file, file + ".new");
    fs::rename(file + ".new", file);
    reason = first_file;
  }
  SUBCASE("a file that was written to") {
    flip_byte(test.local + "/" + second_file, fs::file_size(test.local + "/" + second_file) - 1);
    reason = second_file;
  }
  SUBCASE("a file that is missing") {
    fs::remove(test.local + "/" + second_file);
    reason = "is missing";
  }
  SUBCASE("another marker") {
    write_text(test.local + "/.weight_sync/state.json", R"({"version": "000000"})");
    reason = "marker";
  }
  SUBCASE("no marker") {
    fs::remove(test.local + "/.weight_sync/state.json");
  }
  SUBCASE("no record") {
    fs::remove(record);
    reason = "another program";
  }
  SUBCASE("a record of a newer Muster") {
    std::string changed = text;
    const std::string_view format = "\"muster_copy\":1";
    REQUIRE(changed.find(format) != std::string::npos);
    changed.replace(changed.find(format), format.size(), "\"muster_copy\":2");
    write_text(record, changed);
    reason = "format 2";
  }
  SUBCASE("a record that is damaged at any place") {
    for (std::size_t at = 0; at < text.size(); at += 97) {
      CAPTURE(at);
      std::string changed = text;
      changed[at] ^= 1;
      write_text(record, changed);
      const versions::LocalCopy copy = versions::read_local_copy(test.local);
      // A damaged name of the stream or of the boot is possible, but never another state.
      if (copy.record) CHECK(copy.record->state == versions::parse_record(text).state);
      write_text(record, text.substr(0, at));
      CHECK_FALSE(versions::read_local_copy(test.local).record);
    }
    reason = "damaged";
  }
  CHECK_FALSE(versions::read_local_copy(test.local).record);
  const PullReport report = test.pull();
  CHECK(report.begun_at == "base");
  if (!reason.empty()) {
    REQUIRE(report.notes.size() == 1);
    CHECK(has(report.notes[0], reason));
  }
  CHECK_FALSE(test.pull().is_changed);
}

TEST_CASE("a synced copy is valid after a restart") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  PullOptions options = test.options();
  pull_version(test.chain.source(), test.local, options);
  options.durability = PullDurability::synced;
  {
    // The same version, but now it must survive a power failure.
    const FailingCall calls({.call = "fsync", .path = "copy"});
    CHECK_FALSE(pull_version(test.chain.source(), test.local, options).is_changed);
    CHECK(FailingCall::seen() >= 7);
  }
  const FailingCall calls({.call = "fsync", .path = "copy"});
  CHECK_FALSE(pull_version(test.chain.source(), test.local, options).is_changed);
  CHECK(FailingCall::seen() == 0);
  const std::string record = test.local + "/.weight_sync/muster.json";
  std::string text = read_text(record);
  const std::string boot = os::own_identity().boot;
  text.replace(text.find(boot), boot.size(), std::string(boot.size(), '7'));
  write_text(record, text);
  CHECK(versions::read_local_copy(test.local).record);
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  CHECK(test.pull().begun_at == "local");
}

TEST_CASE("a copy for this boot syncs nothing") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  const FailingCall calls({.call = "", .path = "copy", .times = 0});
  test.pull();
  for (const std::string& call : FailingCall::calls()) CHECK(call.find("sync") == std::string::npos);
}

TEST_CASE("a copy that was changed in memory is seeded again") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  test.pull();
  // As a write to a mapping on tmpfs, which leaves the times unchanged.
  const std::string file = test.local + "/" + first_file;
  const auto time = fs::last_write_time(file);
  flip_byte(file, fs::file_size(file) - 1);
  flip_byte(file, fs::file_size(file) / 2);
  fs::last_write_time(file, time);
  REQUIRE(versions::read_local_copy(test.local).record);
  test.chain.change({"layer1.weight", "layer1.scale"});
  test.chain.publish_delta();
  const PullReport report = test.pull();
  CHECK(report.begun_at == "base");
  REQUIRE(report.notes.size() == 1);
  CHECK(has(report.notes[0], "layer1."));
}

TEST_CASE("another stream with the same numbers is not a continuation") {
  Case test;
  for (int i = 0; i < 2; ++i) {
    test.chain.change({"layer1.weight"});
    test.chain.publish_delta();
  }
  test.pull();
  // Another trainer with another model begins again at 1.
  Case other(2);
  for (int i = 0; i < 3; ++i) {
    other.chain.change({"layer1.weight"});
    other.chain.publish_delta();
  }
  PullOptions options = other.options();
  for (const std::uint64_t version : {2, 3}) {
    options.version = version;
    const PullReport report = pull_version(other.chain.source(), test.local, options);
    CHECK(report.is_changed);
    CHECK(report.begun_at == (version == 2 ? "base" : "local"));
    other.chain.check(test.local, version);
  }
  // The wrong base is noticed.
  fs::remove_all(test.local);
  options.base = test.chain.base();
  const std::string words =
      words_of(ErrorKind::corrupt, [&] { (void)pull_version(other.chain.source(), test.local, options); });
  CHECK(has(words, "version 3"));
  CHECK_FALSE(fs::exists(test.local));
}

TEST_CASE("versions of other programs with equal indexes are told apart by their files") {
  Case test;
  const DeltaChoice other{.has_own_facts = false};
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta(other);
  test.pull();
  const std::string index = read_text(test.chain.source() + "/weight_v000001/model.safetensors.index.json");
  // The trainer begins again: other values of the same tensor.
  fs::remove_all(test.chain.source());
  fs::create_directories(test.chain.source());
  const TemporaryDirectory elsewhere(Medium::memory);
  VersionChain again(elsewhere, 1);
  again.change({"layer1.weight"});
  again.change({"layer1.weight"});
  again.publish_delta(other);
  CHECK(read_text(again.source() + "/weight_v000001/model.safetensors.index.json") == index);
  fs::copy(again.source(), test.chain.source(), fs::copy_options::recursive);
  const PullReport report = pull_version(test.chain.source(), test.local, test.options());
  CHECK(report.is_changed);
  CHECK(report.begun_at == "base");
  again.check(test.local, 1);
}

TEST_CASE("the base does not replace a version") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  test.pull();
  fs::remove_all(test.chain.source());
  fs::create_directories(test.chain.source());
  CHECK(has_text(test.refused(ErrorKind::not_found, test.options()), "it has no version"));
  PullOptions options = test.options();
  options.version = 0;
  CHECK(pull_version(test.chain.source(), test.local, options).is_changed);
  CHECK_FALSE(pull_version(test.chain.source(), test.local, test.options()).is_changed);
}

TEST_CASE("a damaged version leaves the copy unchanged") {
  for (const bool has_own_facts : {true, false}) {
    Case test;
    test.chain.change({"layer1.weight"});
    test.chain.publish_delta();
    test.pull();
    test.chain.change({"layer1.weight", "layer2.weight"});
    test.chain.publish_delta({.has_own_facts = has_own_facts});
    const std::string file = test.chain.version(2) + "/model-00000-of-00001.safetensors";
    const std::string intact = read_text(file);
    int refused = 0;
    for (std::size_t at = 1; at < intact.size(); at += intact.size() / 40) {
      CAPTURE(at);
      flip_byte(file, at);
      const auto before = bytes_by_name(test.local);
      try {
        test.pull();
        test.pull(1);  // the changed bit has no meaning, and the tensors are right
      } catch (const Error& error) {
        ++refused;
        INFO(error.what());
        CHECK(to_string(error.kind()) == "corrupt");
        CHECK(bytes_by_name(test.local) == before);
        test.check_no_leftovers();
        CHECK(has(error.what(), file));
        if (at > 1000) CHECK(has(error.what(), "version 2"));
        if (at > 1000) CHECK(has(error.what(), "tensor \"layer"));
      }
      write_text(file, intact);
    }
    CHECK(refused > 30);
    write_text(file, intact.substr(0, intact.size() - 1));
    test.refused(ErrorKind::corrupt, test.options());
    write_text(file, intact);
    test.pull();
  }
}

TEST_CASE("a state digest that does not match is refused") {
  Case test;
  // The changed tensors are right, but another tensor of the base is not the trainer's.
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  const std::string file = test.chain.base() + "/" + second_file;
  flip_byte(file, fs::file_size(file) - 1);
  const std::string words = words_of(ErrorKind::corrupt, [&] { test.pull(); });
  CHECK(has(words, "Pass the base with which the trainer began"));
  CHECK_FALSE(fs::exists(test.local));
}

TEST_CASE("places that cannot be a copy are refused") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  const auto refused = [&](ErrorKind kind, const std::string& local, std::string_view part) {
    CAPTURE(local);
    CHECK(has(words_of(kind, [&] { (void)pull_version(test.chain.source(), local, test.options()); }), part));
  };
  refused(ErrorKind::invalid_argument, "", "no name");
  refused(ErrorKind::invalid_argument, "/", "root");
  refused(ErrorKind::invalid_argument, test.chain.base(), "is the base");
  refused(ErrorKind::invalid_argument, test.chain.base() + "/copy", "is inside the base");
  refused(ErrorKind::invalid_argument, test.chain.source() + "/copy", "is inside");
  refused(ErrorKind::invalid_argument, test.chain.source(), "is the directory of versions");
  refused(ErrorKind::invalid_argument, test.root.path().string(), "contains");
  refused(ErrorKind::not_found, test.root / "no/such/copy", "does not exist");
  refused(ErrorKind::invalid_argument, "/proc", "mount point");
  write_text(test.root / "file", "");
  refused(ErrorKind::invalid_argument, test.root / "file", "not a directory");
  fs::create_symlink("nothing", test.root / "dangling");
  refused(ErrorKind::invalid_argument, test.root / "dangling", "link");
  fs::create_symlink("base", test.root / "linked");
  refused(ErrorKind::invalid_argument, test.root / "linked", "is the base");
  fs::create_directories(test.local);
  write_text(test.local + "/thesis.tex", "");
  refused(ErrorKind::invalid_argument, test.local, "thesis.tex");
  // The checkpoint of a trainer is not a copy.
  fs::create_directories(test.root / "checkpoint");
  for (const auto& [name, text] : bytes_by_name(test.chain.base())) write_text(test.root / ("checkpoint" + name), text);
  write_text(test.root / "checkpoint/optimizer.pt", "state");
  refused(ErrorKind::invalid_argument, test.root / "checkpoint", "no marker");
  CHECK(read_text(test.root / "checkpoint/optimizer.pt") == "state");
  CHECK(read_text(test.local + "/thesis.tex").empty());
  CHECK(test::names_in(test.root / "host") == std::vector<std::string>{"copy"});  // not even a lock
}

TEST_CASE("a link to a directory and an empty directory can be copies") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  fs::create_directories(test.local);
  test.pull();
  fs::create_symlink("host/copy", test.root / "link");
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  CHECK(pull_version(test.chain.source(), test.root / "link/", test.options()).begun_at == "local");
  CHECK(fs::is_symlink(test.root / "link"));
  test.chain.check(test.local, 2);
  test.check_no_leftovers();
}

TEST_CASE("missing things are named") {
  Case test;
  PullOptions options = test.options();
  options.version = 3;
  CHECK(has(test.refused(ErrorKind::not_found, options), "version 3"));
  options.version = {};
  options.base = test.root / "nobase";
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  CHECK(has(test.refused(ErrorKind::not_found, options), "nobase"));
  options.base.clear();
  CHECK(has(test.refused(ErrorKind::invalid_argument, options), "base"));
  options.base = test.chain.version(1);
  CHECK(has(test.refused(ErrorKind::invalid_argument, options), "delta"));
  options = test.options();
  std::stop_source stop;
  options.stop = stop.get_token();
  options.progress = [&](const Progress& progress) {
    if (progress.bytes != 0) stop.request_stop();
  };
  test.refused(ErrorKind::cancelled, options);
}

TEST_CASE("all callers of a host get the version, and one of them pulls") {
  constexpr int callers = 20;
  Case test;
  test.chain.change({"layer1.weight", "layer2.weight"});
  test.chain.publish_delta();
  SUBCASE("threads") {
    std::atomic<int> changed{0};
    std::atomic<int> done{0};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < callers; ++i)
        threads.emplace_back([&] {
          changed += pull_version(test.chain.source(), test.local, test.options()).is_changed ? 1 : 0;
          ++done;
        });
    }
    CHECK(done == callers);
    CHECK(changed == 1);
  }
  SUBCASE("processes") {
    std::vector<pid_t> children;
    for (int i = 0; i < callers; ++i) {
      const pid_t child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        int status = 2;
        try {
          status = pull_version(test.chain.source(), test.local, test.options()).is_changed ? 1 : 0;
        } catch (const std::exception&) {
          status = 3;
        }
        ::_exit(status);
      }
      children.push_back(child);
    }
    int changed = 0;
    for (const pid_t child : children) {
      int status = -1;
      REQUIRE(::waitpid(child, &status, 0) == child);
      REQUIRE(WIFEXITED(status));
      CHECK(WEXITSTATUS(status) <= 1);
      changed += WEXITSTATUS(status);
    }
    CHECK(changed == 1);
  }
  test.chain.check(test.local, 1);
  test.check_no_leftovers();
}

TEST_CASE("waiting for a lock ends") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  test.pull(0);
  PullOptions options = test.options();
  options.lock_timeout = std::chrono::milliseconds(50);
  for (const std::string& path : {test.root / "host/.copy.muster-lock", test.local + "/.weight_sync/lock"}) {
    CAPTURE(path);
    os::LockFile lock(path);
    REQUIRE(lock.try_take());
    CHECK(has(test.refused(ErrorKind::timeout, options), path));
    std::stop_source stop;
    options.stop = stop.get_token();
    stop.request_stop();
    test.refused(ErrorKind::cancelled, options);
    options.stop = {};
  }
  const FailingCall calls({.call = "flock", .path = "muster-lock", .error = ENOLCK});
  CHECK(has(test.refused(ErrorKind::unsupported, options), "no locks"));
}

TEST_CASE("leftovers of killed pulls are repaired") {
  Case test;
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  test.pull();
  const std::string partial = os::released_name(os::partial_name(test.local));
  std::string replaced = partial;
  replaced.replace(replaced.find(".partial-"), 9, ".replaced-");
  SUBCASE("while the successor grew") {
    fs::create_directories(partial + "/.weight_sync");
    CHECK_FALSE(test.pull().is_changed);
  }
  SUBCASE("between two renames") {
    fs::copy(test.local, partial, fs::copy_options::recursive);
    fs::rename(test.local, replaced);
    CHECK_FALSE(test.pull().is_changed);
  }
  SUBCASE("before the old directory was deleted") {
    fs::copy(test.local, replaced, fs::copy_options::recursive);
    CHECK_FALSE(test.pull().is_changed);
  }
}

TEST_CASE("file systems without hard links, exchange and copies in the kernel") {
  Case test;
  test.pull(0);
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  CallToFail call;
  SUBCASE("hard links") {
    call = {.call = "link", .error = EPERM};
  }
  SUBCASE("exchange") {
    call = {.call = "exchange", .error = EINVAL};
  }
  SUBCASE("copies in the kernel") {
    call = {.call = "copy_file_range", .error = EXDEV};
  }
  SUBCASE("reserving space") {
    call = {.call = "fallocate", .error = EOPNOTSUPP};
  }
  SUBCASE("short writes") {
    call = {.call = "pwrite", .error = os::short_transfer};
  }
  SUBCASE("short copies") {
    call = {.call = "copy_file_range", .error = os::short_transfer};
  }
  {
    const FailingCall failing(call);
    CHECK(test.pull().begun_at == "local");
    CHECK(FailingCall::seen() > 0);
  }
  test.chain.change({"layer1.weight"});
  test.chain.publish_delta();
  CHECK(test.pull().begun_at == "local");
}

TEST_CASE("any system call may fail: the copy is the old version or the new one") {
  for (const PullDurability durability : {PullDurability::boot, PullDurability::synced}) {
    Case test;
    test.pull(0);
    test.chain.change({"layer1.weight"});
    test.chain.publish_delta();
    PullOptions options = test.options();
    options.durability = durability;
    int calls = 0;
    {
      const FailingCall count({.path = "", .times = 0});
      (void)pull_version(test.chain.source(), test.local, options);
      calls = FailingCall::seen();
    }
    REQUIRE(calls > 50);
    int refused = 0;
    for (int at = 0; at < calls; ++at) {
      CAPTURE(at);
      options.version = 0;
      (void)pull_version(test.chain.source(), test.local, options);
      options.version = 1;
      try {
        const FailingCall failing({.path = "", .error = EIO, .after = at, .times = 1});
        (void)pull_version(test.chain.source(), test.local, options);
      } catch (const Error& error) {
        ++refused;
        CHECK(std::string(error.what()).find(test.root.path().string()) != std::string::npos);
      }
      const auto version = versions::read_marker(test.local);
      REQUIRE(version);
      test.chain.check(test.local, *version);
    }
    CHECK(refused > 10);
    options.version = {};
    (void)pull_version(test.chain.source(), test.local, options);
    test.check_no_leftovers();
  }
}
