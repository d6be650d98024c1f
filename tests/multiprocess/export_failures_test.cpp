// SPDX-License-Identifier: Apache-2.0
// Exports that fail or are killed at every step. An earlier output is untouched, no incomplete output looks complete,
// and every rank receives the error. A later export completes, and reuses finished files if it may.

#include <doctest/doctest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/log.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/models.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
namespace fs = std::filesystem;

namespace {

void kill_self() {
  ::kill(::getpid(), SIGKILL);
}

struct World {
  World() {
    inspect::write_demo_model(test::llama(), work / "model", 1 << 30);
    inspect::write_demo_model(test::bert(), work / "old", 1 << 30);
    shard_model(work / "model", work / "shards", {.tensor = 3}, "llama");
    fs::copy(work / "old", work / "out");
  }

  [[nodiscard]] ExportOptions options(Writers writers, bool resume = false) const {
    return {.force = true, .max_shard_size = 90'000, .memory_budget = 4 << 20, .writers = writers, .resume = resume};
  }

  /// Runs the export with `fault` on rank `victim`, and returns how the ranks ended. A rank reports "happened" if it
  /// reached the call, and "failed" if the export failed.
  std::vector<test::Ended> run(int victim, const test::CallToFail& fault, const ExportOptions& how) {
    return test::try_ranks(3, [&](Group& group) {
      std::optional<test::FailingCall> failing;
      if (group.rank() == victim) failing.emplace(fault);
      const auto say = [&](const std::string& words) {
        test::say((failing && test::FailingCall::seen() > fault.after ? "happened" : "") + words);
      };
      try {
        export_model(work / "shards", work / "out", "llama", group, how);
        say("");
      } catch (const Error& error) {
        RANK_CHECK(std::string(error.what()).find('\n') == std::string::npos);
        say(" failed " + std::string(error.what()));
      }
    });
  }
  /// Checks that all ranks have failed with messages that contain `parts`, and that nothing has changed.
  void check_failed(const std::vector<test::Ended>& ended, const std::vector<std::string>& parts) const {
    test::check_ended(ended);
    for (const test::Ended& rank : ended) {
      CAPTURE(rank.words);
      for (const std::string& part : parts) CHECK(test::has(rank.words, part));
    }
    test::check_equal(work / "old", work / "out");
    CHECK(partials().empty());
  }
  [[nodiscard]] bool is_new() const {
    return fs::file_size(work / "out/config.json") == fs::file_size(work / "model/config.json");
  }
  void bring_back_old() const {
    fs::remove_all(work / "out");
    fs::copy(work / "old", work / "out");
  }

  [[nodiscard]] std::vector<std::string> partials() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(work.path()))
      if (entry.path().filename().string().find(".partial-") != std::string::npos) names.push_back(entry.path());
    return names;
  }

  test::TemporaryDirectory work{test::Medium::memory};
};

}  // namespace

TEST_CASE("every failed call, on the root and on another rank, is a failure of every rank") {
  World world;
  for (const Writers writers : {Writers::all, Writers::rank0}) {
    for (const int victim : {0, 2}) {
      for (const char* call : {"open", "mmap", "mkdir", "create", "fallocate", "open-for-writing", "pwrite", "fsync",
                               "fsync-directory", "close", "rename", "exchange"}) {
        int reached = 0;
        // Beyond the last such call the export succeeds. At each earlier call it fails.
        for (int nth = 1; nth < 400; nth = nth < 6 ? nth + 1 : nth + nth / 3) {
          INFO(std::string(call));
          CAPTURE(victim);
          CAPTURE(nth);
          const int error = std::string_view(call) == "pwrite" ? ENOSPC : EIO;
          const auto ended =
              world.run(victim, {.call = call, .error = error, .after = nth - 1, .times = 1}, world.options(writers));
          test::check_ended(ended);
          if (ended[static_cast<std::size_t>(victim)].words.find("happened") == std::string::npos) {
            for (const test::Ended& rank : ended) CHECK(rank.words.empty());
            break;
          }
          ++reached;
          for (const test::Ended& rank : ended) {
            CAPTURE(rank.words);
            CHECK(test::has(rank.words, "failed"));
          }
          // The parent of the output is the last directory that is synced. The new output has its name by then.
          const bool is_renamed = std::string_view(call) == "fsync-directory" && world.is_new();
          test::check_equal(world.work / (is_renamed ? "model" : "old"), world.work / "out");
          CHECK(world.partials().empty());
          if (is_renamed) world.bring_back_old();
        }
        INFO(std::string(call));
        test::check_equal(world.work / "model", world.work / "out");
        world.bring_back_old();
        if (victim == 0) CHECK(reached > 0);
      }
    }
  }
}

TEST_CASE("a rank that is killed while it writes is named by the others, and a resumed export finishes") {
  for (const Writers writers : {Writers::all, Writers::rank0}) {
    for (const int victim : {0, 1}) {
      if (writers == Writers::rank0 && victim != 0) continue;  // it writes nothing
      for (const int nth : {1, 2, 4, 8, 12}) {
        CAPTURE(victim);
        CAPTURE(nth);
        World world;
        // The path excludes the writes of file groups.
        const auto ended = world.run(
            victim, {.call = "pwrite", .path = "/out.partial-", .after = nth - 1, .times = 1, .then = kill_self},
            world.options(writers, true));
        if (ended[static_cast<std::size_t>(victim)].ok()) break;  // it does not write that often
        for (int rank = 0; rank < 3; ++rank) {
          const test::Ended& end = ended[static_cast<std::size_t>(rank)];
          CAPTURE(end.words);
          if (rank == victim) {
            CHECK(end.signal == SIGKILL);
          } else {
            CHECK(end.ok());
            CHECK(test::has(end.words, "failed"));
            CHECK(test::has(end.words, "rank " + std::to_string(victim)));
          }
        }
        test::check_equal(world.work / "old", world.work / "out");
        CHECK(world.partials().size() == 1);
        test::run_ranks(3, [&](Group& group) {
          export_model(world.work / "shards", world.work / "out", "llama", group, world.options(writers, true));
        });
        test::check_equal(world.work / "model", world.work / "out");
        CHECK(world.partials().empty());
        for (const auto& entry : fs::directory_iterator(world.work / "out"))
          CHECK(entry.path().filename().string().find("muster-export") == std::string::npos);
      }
    }
  }
}

TEST_CASE("finished files that verify are not written again; other files are") {
  for (const bool corrupted : {false, true}) {
    CAPTURE(corrupted);
    World world;
    // The third file's rename, after that of the journal: two files are finished.
    const auto ended =
        world.run(0, {.call = "rename", .after = 3, .then = kill_self}, world.options(Writers::all, true));
    CHECK(ended[0].signal == SIGKILL);
    REQUIRE(world.partials().size() == 1);
    std::vector<fs::path> finished;
    for (const auto& entry : fs::directory_iterator(world.partials().front()))
      if (entry.path().extension() == ".safetensors") finished.push_back(entry.path());
    REQUIRE(finished.size() == 2);
    if (corrupted) {
      std::fstream file(finished.front(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-5, std::ios::end);
      file.put('!');
    }
    test::run_ranks(2, [&](Group& group) {
      std::string warnings;
      set_log_hook([&](LogLevel, std::string_view words) { warnings += words; }, LogLevel::warning);
      const ExportReport report =
          export_model(world.work / "shards", world.work / "out", "llama", group, world.options(Writers::all, true));
      set_log_hook({});
      RANK_CHECK(group.rank() != 0 || report.files_resumed == (corrupted ? 1 : 2));
      const std::string again = "\"" + finished.front().filename().string() + "\" is written again: ";
      RANK_CHECK(test::has(warnings, again) == (corrupted && group.rank() == 0));
    });
    test::check_equal(world.work / "model", world.work / "out");
    CHECK(world.partials().empty());
  }
}

TEST_CASE("an export of other shards does not resume the existing output") {
  World world;
  const test::CallToFail third{.call = "rename", .after = 2, .then = kill_self};
  CHECK(world.run(0, third, world.options(Writers::all, true))[0].signal == SIGKILL);
  inspect::write_demo_model(test::llama(true), world.work / "other", 1 << 30);
  shard_model(world.work / "other", world.work / "shards", {.tensor = 3}, "llama", {.force = true});
  test::run_ranks(3, [&](Group& group) {
    const ExportReport report =
        export_model(world.work / "shards", world.work / "out", "llama", group, world.options(Writers::rank0, true));
    RANK_CHECK(report.files_resumed == 0);
  });
  test::check_equal(world.work / "other", world.work / "out");
}

TEST_CASE(
    "an export that finds its name taken at the end keeps its journal, and a resumed export writes nothing again") {
  World world;
  const std::string fresh = world.work / "fresh";
  for (const bool is_second : {false, true}) {
    test::run_ranks(1, [&](Group& group) {
      std::optional<test::FailingCall> taken;
      if (!is_second) taken.emplace(test::CallToFail{.call = "rename", .then = [&] { fs::create_directory(fresh); }});
      const auto run = [&] {
        return export_model(world.work / "shards", fresh, "llama", group, {.max_shard_size = 90'000, .resume = true});
      };
      if (!is_second) {
        test::error_of(ErrorKind::invalid_argument, {"already exists"}, run);
        return;
      }
      const ExportReport report = run();
      RANK_CHECK(report.files_resumed == report.manifest.files);
    });
    if (!is_second) fs::remove(fresh);
  }
  test::check_equal(world.work / "model", fresh);
}

TEST_CASE("a rank that is asked to stop ends the export on all ranks, and no file remains") {
  World world;
  // The stop happens while the output is created, while it is written, and on a rank that only writes.
  for (const auto& [victim, nth] : {std::pair(0, 1), std::pair(0, 5), std::pair(2, 1)}) {
    CAPTURE(victim);
    CAPTURE(nth);
    std::stop_source stop;
    ExportOptions options = world.options(Writers::all);
    options.stop = stop.get_token();
    const auto ended = world.run(
        victim, {.call = "pwrite", .after = nth - 1, .times = 1, .then = [&] { stop.request_stop(); }}, options);
    world.check_failed(ended, {"rank " + std::to_string(victim), "received a stop request"});
  }
}

TEST_CASE("a shard that is truncated while it is read is an error that names it, and terminates no process") {
  for (const Writers writers : {Writers::all, Writers::rank0}) {
    for (const int nth : {1, 4, 9}) {
      CAPTURE(nth);
      World world;
      const std::string shard = world.work / "shards/rank-00001-of-00003.safetensors";
      // This call is after the reads of the header.
      const auto ended = world.run(
          1, {.call = "pread", .path = shard, .after = nth + 1, .then = [&] { fs::resize_file(shard, 3000); }},
          world.options(writers));
      world.check_failed(ended, {"rank 1", "rank-00001-of-00003.safetensors", "it ends before"});
    }
  }
}

TEST_CASE("output of a program with closed standard descriptors reaches no file and no socket of an export") {
  World world;
  const auto ended = test::try_ranks(2, [&](Group& group) {
    for (const int standard : {0, 1, 2}) ::close(standard);
    const test::FailingCall talking({.then = [] {
      static const std::string words(50'000, '!');
      for (const int standard : {0, 1, 2}) RANK_CHECK(::write(standard, words.data(), words.size()) < 0);
    }});
    export_model(world.work / "shards", world.work / "out", "llama", group, world.options(Writers::all));
  });
  test::check_ended(ended);
  test::check_equal(world.work / "model", world.work / "out");
}

TEST_CASE("a budget that is too small is detected before anything is written") {
  World world;
  test::run_ranks(3, [&](Group& group) {
    test::error_of(ErrorKind::invalid_argument, {"too few for 3 ranks. At least"}, [&] {
      export_model(world.work / "shards", world.work / "new", "llama", group, {.memory_budget = 100'000});
    });
    group.barrier();
  });
  CHECK_FALSE(fs::exists(world.work / "new"));
  CHECK(world.partials().empty());
}

TEST_CASE("hosts that do not see the output: refused on all with the remedy, which helps") {
  World world;
  fs::create_directory(world.work / "place");
  const auto run = [&](Writers writers) {
    return test::try_ranks(3, [&](Group& group) {
      // Mounts another directory at the same name, like a host that does not mount the root's directory.
      if (!group.shares_memory(0) &&
          (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
           ::mount("none", (world.work / "place").c_str(), "tmpfs", 0, "size=64m") != 0))
        return test::say("skipped");
      const auto call = [&] {
        export_model(world.work / "shards", world.work / "place/out", "llama", group,
                     {.memory_budget = 1 << 20, .writers = writers});
      };
      if (writers == Writers::rank0) return call();
      test::error_of(ErrorKind::invalid_argument, {"does not see the directory", "--writers rank0"}, call);
      group.barrier();
    });
  };
  const auto refused = run(Writers::all);
  if (refused[2].words == "skipped") {
    MESSAGE("skipped: mounting needs root");
    return;
  }
  test::check_ended(refused);
  CHECK(fs::is_empty(world.work / "place"));
  test::check_ended(run(Writers::rank0));
  test::check_equal(world.work / "model", world.work / "place/out");
}
