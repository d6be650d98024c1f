// SPDX-License-Identifier: Apache-2.0
// Workspace: writing, reading, and the files left after a failure.

#include "muster/workspace.hpp"

#include <chrono>
#include <optional>
#include <thread>

#include "doctest/doctest.h"
#include "muster/state_file.hpp"
#include "src/workspace/survey.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/workspaces.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

TEST_CASE("a workspace without a path is not initialised") {
  for (const auto& path : {std::optional<std::string>(), std::optional<std::string>("")}) {
    Workspace workspace(path, single_group());
    CHECK(!workspace.is_initialized());
    CHECK(workspace.path().empty());
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { workspace.write_configs_and_weights({}); }),
              "not initialised"));
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }),
              "not initialised"));
  }
  CHECK(!Workspace().is_initialized());
}

TEST_CASE("states: written, read and counted, with a limited number kept") {
  const TemporaryDirectory directory;
  const auto group = single_group();
  Workspace workspace(directory / "deep/er", group);
  REQUIRE(workspace.is_initialized());
  CHECK(!workspace.read_configs_and_weights_from_rank(0));
  CHECK_THROWS_AS((void)workspace.read_configs_and_weights_from_rank(1), Error);
  for (int turn = 1; turn <= 4; ++turn) {
    CHECK(workspace.write_configs_and_weights(layer_of(0, turn)) == static_cast<std::uint64_t>(turn));
    const auto read = workspace.read_configs_and_weights_from_rank(0);
    REQUIRE(read);
    CHECK(read->step == static_cast<std::uint64_t>(turn));
    CHECK(join(read->state) == layer_of(0, turn));
    CHECK(!workspace.read_configs_and_weights_from_rank(0, static_cast<std::uint64_t>(turn) + 1));
  }
  CHECK(files_of(workspace.path(), workspace::NameKind::state) == 2);
  // A result that was read remains valid after its file is deleted.
  const auto held = workspace.read_configs_and_weights_from_rank(0);
  for (int turn = 5; turn < 8; ++turn) workspace.write_configs_and_weights(layer_of(0, turn));
  CHECK(!std::filesystem::exists(held->path));
  CHECK(join(held->state) == layer_of(0, 4));
  // A second workspace of the same group continues the count and finds the existing files.
  Workspace again(directory / "deep/er", group, {.zstd_level = 1, .durable = false, .steps_kept = 1});
  CHECK(again.read_configs_and_weights_from_rank(0)->step == 7);
  CHECK(again.write_configs_and_weights(layer_of(0, 8)) == 8);
  CHECK(join(again.read_configs_and_weights_from_rank(0, 8)->state) == layer_of(0, 8));
  CHECK(files_of(workspace.path(), workspace::NameKind::state) == 1);
}

TEST_CASE("weights beside a config, configs without tensors, and invalid inputs") {
  const TemporaryDirectory directory;
  Workspace workspace(directory / "w", single_group());
  const std::vector<NamedTensor> weights = {{"a", pattern(DType::f8_e4m3fn, {7, 9}, 1)},
                                            {"b/..", pattern(DType::i64, {0}, 2)}};
  workspace.write_configs_and_weights(Config::object({{"x", 1}}), weights);
  const auto read = workspace.read_configs_and_weights_from_rank(0);
  REQUIRE(read->state.weights.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(read->state.weights[i].first == weights[i].first);
    CHECK(bitwise_equal(read->state.weights[i].second, weights[i].second));
  }
  CHECK(read->state.config == Config::object({{"x", 1}}));
  const Config plain = Config::object({{"$tensor", "x"}});
  workspace.write_configs_and_weights(plain);
  CHECK(join(workspace.read_configs_and_weights_from_rank(0)->state) == plain);
  CHECK_THROWS_AS(workspace.write_configs_and_weights(layer_of(0), weights), Error);
  const std::vector<NamedTensor> twice = {weights[0], weights[0]};
  CHECK_THROWS_AS(workspace.write_configs_and_weights({}, twice), Error);
  CHECK_THROWS_AS(Workspace(directory / "w", single_group(), {.steps_kept = 0}), Error);
  CHECK(join(workspace.read_configs_and_weights_from_rank(0)->state) == plain);
}

TEST_CASE("each rank writes, each reads all; with min_step and a barrier it reads the newest") {
  const TemporaryDirectory directory;
  run_ranks(3, [&](Group& group) {
    // A subgroup without rank 0 also creates the directory.
    if (group.rank() == 0) std::this_thread::sleep_for(20ms);
    Workspace workspace(directory / "w", group.shared_from_this());
    for (int turn = 1; turn <= 5; ++turn) {
      const std::uint64_t mine = workspace.write_configs_and_weights(layer_of(group.rank(), turn));
      group.barrier();
      for (int rank = 0; rank < 3; ++rank) {
        const auto read = workspace.read_configs_and_weights_from_rank(rank, mine);
        RANK_CHECK(read.has_value());
        RANK_CHECK(join(read->state) == layer_of(rank, static_cast<int>(read->step)));
      }
    }
  });
}

TEST_CASE("a reader gets the previous state, the next one, or no state: never a mixture") {
  const TemporaryDirectory directory;
  run_ranks(2, [&](Group& group) {
    Workspace workspace(directory / "w", group.shared_from_this(), {.durable = false});
    group.barrier();
    std::uint64_t last = 0;
    for (int turn = 1; turn <= 40; ++turn) {
      if (group.rank() == 0) {
        workspace.write_configs_and_weights(layer_of(0, turn));
        continue;
      }
      const auto read = workspace.read_configs_and_weights_from_rank(0);
      if (!read) continue;
      RANK_CHECK(read->step >= last);
      last = read->step;
      RANK_CHECK(join(read->state) == layer_of(0, static_cast<int>(last)));
    }
    group.barrier();
  });
}

TEST_CASE("two jobs in one workspace stay separate, and delete no files of each other") {
  const TemporaryDirectory directory;
  const auto a = single_group();
  const auto b = single_group();
  Workspace first(directory / "w", a);
  first.write_configs_and_weights(layer_of(0, 1));
  Workspace second(directory / "w", b);
  CHECK(!second.read_configs_and_weights_from_rank(0));
  second.write_configs_and_weights(layer_of(0, 2));
  CHECK(join(first.read_configs_and_weights_from_rank(0)->state) == layer_of(0, 1));
  CHECK(join(second.read_configs_and_weights_from_rank(0)->state) == layer_of(0, 2));
  CHECK(workspace::survey(directory / "w").jobs.size() == 2);
}

TEST_CASE("a directory that cannot be a workspace is refused with an error, and not changed") {
  const TemporaryDirectory directory;
  const auto make = [&](const std::string& path) { Workspace workspace(path, single_group()); };
  write_text(directory / "file", "x");
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { make(directory / "file"); }), "it is a file"));
  std::filesystem::create_symlink("nowhere", directory / "link");
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { make(directory / "link"); }),
            "it is a link to a path that does not exist"));
  CHECK(!std::filesystem::exists(directory / "nowhere"));
  std::filesystem::create_directory(directory / "mine");
  write_text(directory / "mine/thesis.tex", "x");
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { make(directory / "mine"); }), "thesis.tex"));
  CHECK(test::names_in(directory / "mine") == std::vector<std::string>{"thesis.tex"});
  std::filesystem::create_directory(directory / "newer");
  write_text(directory / "newer/muster-workspace.json", R"({"muster_workspace": 2})");
  CHECK(has(words_of(ErrorKind::version, [&] { make(directory / "newer"); }), "has version 2"));
  CHECK(has(words_of(ErrorKind::version, [&] { workspace::survey(directory / "newer"); }), "has version 2"));
  write_text(directory / "newer/muster-workspace.json", "no JSON");
  CHECK(has(words_of(ErrorKind::corrupt, [&] { make(directory / "newer"); }), "corrupted"));
  CHECK_THROWS_AS(make(directory / "file/below"), Error);
  {
    const FailingCall read_only({.call = "mkdir", .path = "w1", .error = EROFS});
    CHECK(has(words_of(ErrorKind::io, [&] { make(directory / "w1"); }), "Read-only file system"));
  }
  {
    const FailingCall full({.call = "create", .path = "w2", .error = ENOSPC});
    CHECK(has(words_of(ErrorKind::out_of_space, [&] { make(directory / "w2"); }), "No space left"));
  }
  // The directory is deleted while a workspace uses it.
  Workspace workspace(directory / "w3", single_group());
  workspace.write_configs_and_weights({});
  std::filesystem::remove_all(directory / "w3");
  CHECK(has(words_of(ErrorKind::not_found, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }),
            "does not exist any more"));
  CHECK_THROWS_AS(workspace.write_configs_and_weights({}), Error);
}

TEST_CASE("a write that fails at any call leaves only the earlier state, and does not change the count") {
  const TemporaryDirectory directory;
  Workspace workspace(directory / "w", single_group());
  workspace.write_configs_and_weights(layer_of(0, 1));
  auto before = test::names_in(workspace.path());
  int last = 1;
  for (const char* call : {"create", "fallocate", "pwrite", "fsync", "fdatasync", "close", "rename", "fsync-directory"})
    for (int after = 0; after < 6; ++after)
      for (const int error : {ENOSPC, EIO, ESTALE}) {
        CAPTURE(std::string(call));
        CAPTURE(after);
        CAPTURE(error);
        bool has_failed = false;
        {
          const FailingCall fault({.call = call, .path = workspace.path(), .error = error, .after = after, .times = 1});
          try {
            const std::uint64_t number = workspace.write_configs_and_weights(layer_of(0, last + 1));
            CHECK(number == static_cast<std::uint64_t>(last) + 1);
          } catch (const Error& failure) {
            has_failed = true;
            CHECK(failure.os_error() == error);
            CHECK(failure.path().find(workspace.path()) == 0);
          }
        }
        if (!has_failed) {
          // There are fewer such calls than `last`.
          before = test::names_in(workspace.path());
          ++last;
        }
        INFO(test::names_in(workspace.path()).size(), " files, ", before.size(), " before");
        CHECK(test::names_in(workspace.path()) == before);
        CHECK(join(workspace.read_configs_and_weights_from_rank(0)->state) == layer_of(0, last));
      }
}

TEST_CASE("a stale read is repeated; a persistent error is reported with its path") {
  const TemporaryDirectory directory;
  Workspace workspace(directory / "w", single_group(), {.timeout = 400ms});
  workspace.write_configs_and_weights(layer_of(0, 1));
  for (const char* call : {"open", "fstat", "pread"}) {
    CAPTURE(call);
    {
      const FailingCall fault({.call = call, .path = "state-", .error = ESTALE, .times = 3});
      CHECK(join(workspace.read_configs_and_weights_from_rank(0)->state) == layer_of(0, 1));
      CHECK(FailingCall::seen() > 3);
    }
    const FailingCall fault({.call = call, .path = "state-", .error = ESTALE});
    const std::string words = words_of(ErrorKind::io, [&] { (void)workspace.read_configs_and_weights_from_rank(0); });
    CHECK(has(words, "ESTALE"));
    CHECK(has(words, "state-"));
    CHECK(has(words, "tried"));
  }
  {
    const FailingCall fault({.call = "pread", .path = "state-", .error = EIO, .times = 1});
    CHECK(has(words_of(ErrorKind::io, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }), "EIO"));
  }
  // Damage is not retried: this host's disk does not return other data later.
  const std::string path = workspace.read_configs_and_weights_from_rank(0)->path;
  std::string bytes = read_text(path);
  bytes[100] ^= 1;
  write_text(path, bytes);
  const auto since = std::chrono::steady_clock::now();
  CHECK(has(words_of(ErrorKind::corrupt, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }), path));
  CHECK(std::chrono::steady_clock::now() - since < 900ms);
}

TEST_CASE("a renamed state is not accepted as another rank's") {
  const TemporaryDirectory directory;
  const auto group = single_group();
  Workspace workspace(directory / "w", group);
  workspace.write_configs_and_weights({});
  const std::string path = workspace.read_configs_and_weights_from_rank(0)->path;
  auto name = *workspace::parse_name(std::filesystem::path(path).filename().string());
  ++name.step;
  std::filesystem::rename(path, workspace.path() + "/" + workspace::file_name(name));
  CHECK(has(words_of(ErrorKind::corrupt, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }),
            "was renamed or copied"));
  CHECK(has(workspace::survey(workspace.path()).jobs.at(0).states.at(0).problem, "was renamed or copied"));
}
