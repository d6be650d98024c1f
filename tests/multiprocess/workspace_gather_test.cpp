// SPDX-License-Identifier: Apache-2.0
// Gathers, merges and streams through a workspace: the remaining files, and the ranks that receive errors.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/state_file.hpp"
#include "src/statefile/format.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/survey.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/shared_words.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/workspaces.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

std::string words_of_gather(Group& group, ErrorKind kind, const GatherOptions& options, int rank_of_error = -1) {
  const Tensor mine = pattern(DType::u8, {5000}, 1);
  const Error error =
      error_of(kind, {}, [&] { (void)get_tensors_parallel(mine, ranks_from(0, group.size()), group, options); });
  if (rank_of_error >= 0) RANK_CHECK(error.rank() == rank_of_error);
  return error.what();
}

}  // namespace

TEST_CASE("gathers, merges and streams over a given workspace; no file remains") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(4, [&](Group& group) {
    const int rank = group.rank();
    for (const int first : {0, 2})
      for (const std::optional<int> level : {std::optional<int>(), std::optional<int>(1)}) {
        const GatherOptions options{.workspace = {.path = path, .zstd_level = level}};
        const Config mine = layer_of(rank);
        // One rank passes no config.
        const auto all = get_configs_parallel(rank == 3 ? nullptr : &mine, ranks_from(first, 4), group, options);
        if (rank == first)
          for (std::size_t i = 0; i < 4; ++i) {
            const int from = all.ranks()[i];
            RANK_CHECK(all[i].has_value() == (from != 3));
            if (from != 3) RANK_CHECK(*all[i] == layer_of(from));
          }
        RANK_CHECK(all.report().route == Route::workspace);
        RANK_CHECK(all.explain().find("route workspace") != std::string::npos);
        RANK_CHECK(all.wait_released(0ms));
        const Tensor tensor = pattern(DType::f32, {40, 30}, static_cast<std::uint64_t>(rank));
        const auto merged = merge_tensor_parallel(tensor, merge::concat(1), ranks_from(first, 4), group, options);
        if (rank == first) RANK_CHECK((merged.tensor()->shape() == Shape{40, 120}));
        const Model model = [](int from, std::uint64_t layer) { return layer_of(from, static_cast<int>(layer)); };
        stream_and_check(group, ranks_from(first, 4), 20, model, {.workspace = {.path = path, .zstd_level = level}});
      }
    // Lists of some of the ranks, and two at a time.
    const Tensor tensor = pattern(DType::u8, {100}, static_cast<std::uint64_t>(rank));
    const std::vector<int> half = rank % 2 == 0 ? std::vector<int>{2, 0} : std::vector<int>{1, 3};
    const auto some = get_tensors_parallel(tensor, half, group, {.workspace = {.path = path}});
    if (rank == half[0]) RANK_CHECK(is_pattern(*some[1], DType::u8, {100}, static_cast<std::uint64_t>(half[1])));
    // One list over files, the other over memory.
    const GatherOptions only_even{.workspace = {.path = rank % 2 == 0 ? path : std::string()}};
    const auto mixed = get_tensors_parallel(tensor, half, group, only_even);
    RANK_CHECK(mixed.report().route == (rank % 2 == 0 ? Route::workspace : Route::shm));
  });
  CHECK(is_clean(path));
}

TEST_CASE("two jobs gather through one workspace at the same time") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  const GroupOf first(3);
  const GroupOf second(3);
  run_processes(6, [&](int process) {
    const auto group = (process < 3 ? first : second).join(process % 3);
    const int job = process / 3;
    for (int round = 0; round < 12; ++round) {
      const Config mine = layer_of(group->rank(), 100 * job + round);
      const auto all = get_configs_parallel(&mine, ranks_from(round % 3, 3), *group, {.workspace = {.path = path}});
      for (const auto& [rank, config] : all.present()) RANK_CHECK(config == layer_of(rank, 100 * job + round));
    }
  });
  CHECK(is_clean(path));
}

TEST_CASE("kept files stay complete, and a survey lists them") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](Group& group) {
    const Config mine = layer_of(group.rank());
    for (const bool keep : {false, true}) {
      const FailingCall recorded({.path = path, .times = 0});
      (void)get_configs_parallel(&mine, ranks_from(1, 3), group, {.workspace = {.path = path, .keep_files = keep}});
      // Only a kept file must survive a power failure.
      const std::vector<std::string> calls = FailingCall::calls();
      const auto named = std::ranges::find(calls.rbegin(), calls.rend(), "rename").base();
      RANK_CHECK((std::ranges::find(calls.begin(), named, "fdatasync") != named) == keep);
      if (keep) RANK_CHECK(std::ranges::find(named, calls.end(), "fsync-directory") != calls.end());
    }
  });
  const workspace::Survey survey = workspace::survey(path);
  REQUIRE(survey.jobs.size() == 1);
  REQUIRE(survey.jobs[0].kept.size() == 3);
  CHECK(survey.jobs[0].passing.empty());
  for (int rank = 0; rank < 3; ++rank) {
    const workspace::SurveyState& kept = survey.jobs[0].kept[static_cast<std::size_t>(rank)];
    CHECK(kept.rank == rank);
    CHECK(kept.complete);
    CHECK(kept.tensors == 2);
    CHECK(join(StateFile::open(path + "/" + kept.entry.file).load()) == layer_of(rank));
  }
  // Only an age removes them.
  CHECK(workspace::collect_garbage(path, {.dry_run = false}).removed_files == 0);
  CHECK(workspace::collect_garbage(path, {.dry_run = true, .older_than = 0s}).removed_files == 3);
  CHECK(files_of(path, workspace::NameKind::kept) == 3);
  CHECK(workspace::collect_garbage(path, {.dry_run = false, .older_than = 0s}).removed_files == 3);
  CHECK(is_clean(path));
}

TEST_CASE("ranks that disagree about the workspace are an error on all, and the group remains usable") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](Group& group) {
    const std::string words = words_of_gather(group, ErrorKind::rank_mismatch,
                                              {.workspace = {.path = group.rank() == 1 ? path : std::string()}});
    RANK_CHECK(words.find("rank 1 workspace") != std::string::npos);
    // A directory with the same name may be another one. The test uses another name for another directory.
    const std::string other = words_of_gather(group, ErrorKind::invalid_argument,
                                              {.workspace = {.path = group.rank() == 2 ? path + "2" : path}}, 2);
    RANK_CHECK(other.find("the hosts use different directories") != std::string::npos);
    // Another name for the same directory.
    const Tensor mine = pattern(DType::u8, {5000}, 1);
    (void)get_tensors_parallel(mine, ranks_from(0, 3), group,
                               {.workspace = {.path = group.rank() == 2 ? path + "/../w/" : path}});
    // The path was verified once, and then changed on one rank only.
    const std::string changed = words_of_gather(group, ErrorKind::invalid_argument,
                                                {.workspace = {.path = group.rank() == 1 ? path + "3" : path}}, 1);
    RANK_CHECK(changed.find("Change workspace.path on all ranks") != std::string::npos);
    (void)words_of_gather(group, ErrorKind::invalid_argument, {.route = Route::shm, .workspace = {.path = path}});
    (void)words_of_gather(group, ErrorKind::invalid_argument, {.workspace = {.keep_files = true}});
    (void)words_of_gather(group, ErrorKind::unsupported, {.route = Route::workspace});
    // A path that cannot be a workspace on one rank is an error on all.
    if (group.rank() == 0) write_text(path + "-file", "x");
    group.barrier();
    const std::string file =
        words_of_gather(group, ErrorKind::invalid_argument, {.workspace = {.path = path + "-file"}}, 0);
    RANK_CHECK(file.find("it is a file") != std::string::npos);
    group.barrier();
  });
  for (const char* end : {"", "2", "3"}) CHECK(is_clean(path + end));
}

TEST_CASE(
    "a rank whose disk fails is named by all, whichever rank it is; no file remains, and the group remains usable") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](Group& group) {
    const Tensor mine = pattern(DType::u8, {5000}, 1);
    (void)get_tensors_parallel(mine, ranks_from(0, 3), group, {.workspace = {.path = path}});
    for (const auto& [call, error, kind] :
         {std::tuple("pwrite", ENOSPC, ErrorKind::out_of_space), std::tuple("rename", EIO, ErrorKind::io),
          std::tuple("close", EIO, ErrorKind::io), std::tuple("create", EACCES, ErrorKind::io)}) {
      std::optional<FailingCall> fault;
      if (group.rank() == 2) fault.emplace(CallToFail{.call = call, .path = path, .error = error});
      const std::string words = words_of_gather(group, kind, {.workspace = {.path = path}}, 2);
      RANK_CHECK(words.find("exchange-") != std::string::npos || words.find("growing") != std::string::npos);
    }
    {
      // A file that the root cannot read.
      std::optional<FailingCall> fault;
      if (group.rank() == 0) fault.emplace(CallToFail{.call = "open", .path = "exchange-", .error = EIO});
      const std::string words = words_of_gather(group, ErrorKind::io, {.workspace = {.path = path}}, 0);
      RANK_CHECK(words.find("reading the state file of rank 1") != std::string::npos);
    }
    {
      // A file that becomes visible to the root late.
      std::optional<FailingCall> fault;
      if (group.rank() == 0)
        fault.emplace(CallToFail{.call = "open", .path = "exchange-", .error = ENOENT, .times = 5});
      (void)get_tensors_parallel(mine, ranks_from(0, 3), group, {.workspace = {.path = path}});
    }
    (void)get_tensors_parallel(mine, ranks_from(0, 3), group, {.workspace = {.path = path}});
    group.barrier();
  });
  CHECK(is_clean(path));
}

TEST_CASE("a file that is damaged before the root reads it is an error on every rank, and the group remains usable") {
  struct Damage {
    const char* words;
    std::function<std::size_t(const statefile::UserBlock&)> place;
    std::optional<int> level = {};
  };
  const auto middle = [](const statefile::UserBlock& block) { return block.file_bytes / 2; };
  const std::vector<Damage> all = {
      {"checksum", [](const auto&) { return 100; }},
      {"checksum", [](const statefile::UserBlock& block) { return block.catalogue.offset + 9; }},
      {"checksum", [](const statefile::UserBlock& block) { return block.config.offset + 3; }},
      {"checksum", middle, 1},
      {"", middle},  // The elements of a tensor that is not compressed are mapped, and not read.
  };
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](Group& group) {
    const auto config_of = [](int rank) {
      Config config = layer_of(rank);
      config["large"] = pattern(DType::u8, {300, 1000}, static_cast<std::uint64_t>(rank));
      return config;
    };
    const Config mine = config_of(group.rank());
    const std::vector<int> ranks = ranks_from(0, 3);
    /// Waits for the file of a rank that sends, and returns its path.
    const auto file_of = [&](const std::string& rank) {
      for (const auto until = std::chrono::steady_clock::now() + 20s; std::chrono::steady_clock::now() < until;)
        for (const std::string& name : names_in(path))
          if (name.starts_with("exchange-") && has(name, rank)) return path + "/" + name;
      throw RankFailure("no file of " + rank);
    };
    /// Calls `spoil` with the file of rank 1 when the root opens it.
    const auto spoiled = [&](const std::function<void(const std::string&)>& spoil, const std::function<void()>& call) {
      std::optional<FailingCall> hook;
      const auto then = [&] { spoil(file_of("-r1-of")); };
      if (group.rank() == 0) hook.emplace(CallToFail{.call = "open", .path = "-r1-of", .times = 1, .then = then});
      call();
      RANK_CHECK(!hook || FailingCall::seen() != 0);
    };
    const auto gather = [&](const std::optional<int>& level) {
      return get_configs_parallel(&mine, ranks, group, {.workspace = {.path = path, .zstd_level = level}});
    };
    (void)gather({});
    for (const Damage& damage : all) {
      const auto flip = [&](const std::string& file) {
        std::string bytes = read_text(file);
        const auto head = std::as_bytes(std::span(bytes)).first(statefile::head_bytes);
        bytes[damage.place(statefile::decode_user_block(head, bytes.size(), file))] ^= 1;
        write_text(file, bytes);
      };
      if (*damage.words == 0) {
        spoiled(flip, [&] {
          const auto configs = gather(damage.level);
          if (group.rank() != 0) return;
          Config intact = config_of(1);
          RANK_CHECK(!(*configs[1] == intact));
          intact["large"] = configs[1]->at("large");
          RANK_CHECK(*configs[1] == intact);
        });
        continue;
      }
      const std::vector<std::string> words = {"reading the state file of rank 1", damage.words};
      spoiled(flip, [&] { fails_alike(group, ErrorKind::corrupt, words, [&] { (void)gather(damage.level); }); });
      spoiled(flip, [&] {
        error_of(ErrorKind::corrupt, words, [&] {
          const Model model = [&](int, std::uint64_t) { return mine; };
          stream_and_check(group, ranks, 3, model, {.workspace = {.path = path, .zstd_level = damage.level}});
        });
      });
    }
    const auto copy = [&](const std::string& file) { write_text(file, read_text(file_of("-r2-of"))); };
    spoiled(copy, [&] {
      fails_alike(group, ErrorKind::corrupt, {"its content contradicts its name: rank 2"}, [&] { (void)gather({}); });
    });
    (void)gather({});
    group.barrier();
  });
  CHECK(is_clean(path));
}

TEST_CASE("a killed sender and a killed root are named; their files are proved to be abandoned") {
  for (const int victim : {0, 1}) {
    CAPTURE(victim);
    const TemporaryDirectory directory;
    const std::string path = directory / "w";
    SharedWords pids;
    const GroupOf group_of(3);
    run_processes(3, {victim}, [&](int rank) {
      pids[rank] = static_cast<std::uint64_t>(::getpid());
      const auto group = group_of.join(rank);
      const Tensor mine = pattern(DType::u8, {8 << 20}, 1);
      (void)get_tensors_parallel(mine, ranks_from(0, 3), *group, {.workspace = {.path = path}});
      group->barrier();
      const auto since = std::chrono::steady_clock::now();
      if (rank == victim) kill_self_after(30ms);
      try {
        for (;;) (void)get_tensors_parallel(mine, ranks_from(0, 3), *group, {.workspace = {.path = path}});
      } catch (const Error& error) {
        check_named(error, since, victim, static_cast<pid_t>(pids[victim].load()), 5s);
      }
    });
    const workspace::GcReport dry = workspace::collect_garbage(path);
    for (const workspace::GcItem& item : dry.items)
      CHECK_MESSAGE(item.verdict == workspace::GcVerdict::remove, item.file);
    workspace::sweep_dead(path);
    CHECK(is_clean(path));
  }
}
