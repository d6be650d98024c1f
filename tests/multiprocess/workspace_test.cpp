// SPDX-License-Identifier: Apache-2.0
// NFSWorkspace, and gathers through a workspace: what is written, what is read, what is left, and who hears of what
// went wrong.

#include "muster/workspace.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/state_file.hpp"
#include "src/os/fault.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/survey.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

std::vector<std::string> files_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

std::size_t files_of(const std::string& directory, workspace::NameKind kind) {
  return static_cast<std::size_t>(std::ranges::count_if(files_in(directory), [&](const std::string& file) {
    const auto name = workspace::parse_name(file);
    return name && name->kind == kind;
  }));
}

/// Only the mark.
bool is_clean(const std::string& directory) {
  const auto files = files_in(directory);
  for (const std::string& file : files)
    if (file != "muster-workspace.json") MESSAGE("left: " << file);
  return files == std::vector<std::string>{"muster-workspace.json"};
}

Config layer_of(int rank, int seed = 0) {
  Config layer = Config::object({{"rank", rank}, {"seed", seed}, {"scale", 0.5}, {"none", nullptr}});
  layer["attention"]["weight"] = pattern(DType::bf16, {33, 65}, static_cast<std::uint64_t>(100 * rank + seed));
  layer["norm"] = pattern(DType::f32, {}, static_cast<std::uint64_t>(rank));
  layer["$tensor"] = "a user's own key";
  return layer;
}

// Lets one call on paths with a part in them fail, from the nth on for some times.
struct Fault {
  std::string call;
  std::string path;
  int error = 0;
  int after = 0;
  int times = 1 << 30;
};
Fault the_fault;
int seen_calls = 0;

int inject(std::string_view call, std::string_view path) {
  if (call != the_fault.call || path.find(the_fault.path) == std::string_view::npos) return 0;
  const int count = seen_calls++;
  return count >= the_fault.after && count < the_fault.after + the_fault.times ? the_fault.error : 0;
}

/// For as long as it lives.
class Injected {
 public:
  explicit Injected(Fault fault) {
    the_fault = std::move(fault);
    seen_calls = 0;
    os::set_fault_hook(inject);
  }
  ~Injected() { os::set_fault_hook(nullptr); }
  Injected(const Injected&) = delete;
  Injected& operator=(const Injected&) = delete;
};

std::string words_of_gather(SyncGroup& group, ErrorKind kind, const GatherOptions& options, int rank_of_error = -1) {
  const Tensor mine = pattern(DType::u8, {5000}, 1);
  try {
    (void)get_tensors_parallel(mine, ranks_from(0, group.size()), group, options);
  } catch (const Error& error) {
    if (error.kind() != kind) throw RankFailure(std::string("another kind: ") + error.what());
    if (rank_of_error >= 0) RANK_CHECK(error.rank() == rank_of_error);
    return error.what();
  }
  throw RankFailure("nothing was thrown");
}

}  // namespace

TEST_CASE("a workspace without a path is not initialised") {
  for (const auto& path : {std::optional<std::string>(), std::optional<std::string>("")}) {
    NFSWorkspace workspace(path, single_group());
    CHECK(!workspace.is_initialized());
    CHECK(workspace.path().empty());
    CHECK(has(words_of(ErrorKind::argument, [&] { workspace.write_configs_and_weights({}); }), "not initialised"));
    CHECK(has(words_of(ErrorKind::argument, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }),
              "not initialised"));
  }
  CHECK(!NFSWorkspace().is_initialized());
}

TEST_CASE("states: written, read, counted, and only so many kept") {
  const TemporaryDirectory directory;
  const auto group = single_group();
  NFSWorkspace workspace(directory / "deep/er", group);
  REQUIRE(workspace.is_initialized());
  CHECK(!workspace.read_configs_and_weights_from_rank(0));
  CHECK_THROWS_AS((void)workspace.read_configs_and_weights_from_rank(1), Error);
  for (int turn = 1; turn <= 4; ++turn) {
    CHECK(workspace.write_configs_and_weights(layer_of(0, turn)) == static_cast<std::uint64_t>(turn));
    const auto read = workspace.read_configs_and_weights_from_rank(0);
    REQUIRE(read);
    CHECK(read->generation == static_cast<std::uint64_t>(turn));
    CHECK(join(read->state) == layer_of(0, turn));
    CHECK(!workspace.read_configs_and_weights_from_rank(0, static_cast<std::uint64_t>(turn) + 1));
  }
  CHECK(files_of(workspace.path(), workspace::NameKind::state) == 2);
  // What was read stays when its file has gone.
  const auto held = workspace.read_configs_and_weights_from_rank(0);
  for (int turn = 5; turn < 8; ++turn) workspace.write_configs_and_weights(layer_of(0, turn));
  CHECK(!std::filesystem::exists(held->path));
  CHECK(join(held->state) == layer_of(0, 4));
  // A second one of the same group goes on counting, and finds what is there.
  NFSWorkspace again(directory / "deep/er", group, {.zstd_level = 1, .durable = false, .generations_kept = 1});
  CHECK(again.read_configs_and_weights_from_rank(0)->generation == 7);
  CHECK(again.write_configs_and_weights(layer_of(0, 8)) == 8);
  CHECK(join(again.read_configs_and_weights_from_rank(0, 8)->state) == layer_of(0, 8));
  CHECK(files_of(workspace.path(), workspace::NameKind::state) == 1);
}

TEST_CASE("weights beside a config, configs without tensors, and what cannot be") {
  const TemporaryDirectory directory;
  NFSWorkspace workspace(directory / "w", single_group());
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
  CHECK_THROWS_AS(NFSWorkspace(directory / "w", single_group(), {.generations_kept = 0}), Error);
  CHECK(join(workspace.read_configs_and_weights_from_rank(0)->state) == plain);
}

TEST_CASE("each rank writes, each reads all; at_least and a barrier make it the newest") {
  const TemporaryDirectory directory;
  run_ranks(3, [&](SyncGroup& group) {
    // A subgroup without rank 0 makes the directory as well.
    if (group.rank() == 0) std::this_thread::sleep_for(20ms);
    NFSWorkspace workspace(directory / "w", group.shared_from_this());
    for (int turn = 1; turn <= 5; ++turn) {
      const std::uint64_t mine = workspace.write_configs_and_weights(layer_of(group.rank(), turn));
      group.barrier();
      for (int rank = 0; rank < 3; ++rank) {
        const auto read = workspace.read_configs_and_weights_from_rank(rank, mine);
        RANK_CHECK(read.has_value());
        RANK_CHECK(join(read->state) == layer_of(rank, static_cast<int>(read->generation)));
      }
    }
  });
}

TEST_CASE("a reader gets the state before, the next one, or none: never a mixture") {
  const TemporaryDirectory directory;
  run_ranks(2, [&](SyncGroup& group) {
    NFSWorkspace workspace(directory / "w", group.shared_from_this(), {.durable = false});
    group.barrier();
    std::uint64_t last = 0;
    for (int turn = 1; turn <= 40; ++turn) {
      if (group.rank() == 0) {
        workspace.write_configs_and_weights(layer_of(0, turn));
        continue;
      }
      const auto read = workspace.read_configs_and_weights_from_rank(0);
      if (!read) continue;
      RANK_CHECK(read->generation >= last);
      last = read->generation;
      RANK_CHECK(join(read->state) == layer_of(0, static_cast<int>(last)));
    }
    group.barrier();
  });
}

TEST_CASE("two jobs in one workspace do not meet, and remove nothing of each other") {
  const TemporaryDirectory directory;
  const auto a = single_group();
  const auto b = single_group();
  NFSWorkspace first(directory / "w", a);
  first.write_configs_and_weights(layer_of(0, 1));
  NFSWorkspace second(directory / "w", b);
  CHECK(!second.read_configs_and_weights_from_rank(0));
  second.write_configs_and_weights(layer_of(0, 2));
  CHECK(join(first.read_configs_and_weights_from_rank(0)->state) == layer_of(0, 1));
  CHECK(join(second.read_configs_and_weights_from_rank(0)->state) == layer_of(0, 2));
  CHECK(workspace::survey(directory / "w").jobs.size() == 2);
}

TEST_CASE("what cannot be a workspace is refused with a word, and not changed") {
  const TemporaryDirectory directory;
  const auto make = [&](const std::string& path) { NFSWorkspace workspace(path, single_group()); };
  write_text(directory / "file", "x");
  CHECK(has(words_of(ErrorKind::argument, [&] { make(directory / "file"); }), "it is a file"));
  std::filesystem::create_symlink("nowhere", directory / "link");
  CHECK(has(words_of(ErrorKind::argument, [&] { make(directory / "link"); }), "a link to what is not there"));
  CHECK(!std::filesystem::exists(directory / "nowhere"));
  std::filesystem::create_directory(directory / "mine");
  write_text(directory / "mine/thesis.tex", "x");
  CHECK(has(words_of(ErrorKind::argument, [&] { make(directory / "mine"); }), "thesis.tex"));
  CHECK(files_in(directory / "mine") == std::vector<std::string>{"thesis.tex"});
  std::filesystem::create_directory(directory / "newer");
  write_text(directory / "newer/muster-workspace.json", R"({"muster_workspace": 2})");
  CHECK(has(words_of(ErrorKind::version, [&] { make(directory / "newer"); }), "of version 2"));
  CHECK(has(words_of(ErrorKind::version, [&] { workspace::survey(directory / "newer"); }), "of version 2"));
  write_text(directory / "newer/muster-workspace.json", "no JSON");
  CHECK(has(words_of(ErrorKind::corrupt, [&] { make(directory / "newer"); }), "damaged"));
  CHECK_THROWS_AS(make(directory / "file/below"), Error);
  {
    const Injected read_only({.call = "mkdir", .path = "w1", .error = EROFS});
    CHECK(has(words_of(ErrorKind::io, [&] { make(directory / "w1"); }), "Read-only file system"));
  }
  {
    const Injected full({.call = "create", .path = "w2", .error = ENOSPC});
    CHECK(has(words_of(ErrorKind::no_space, [&] { make(directory / "w2"); }), "No space left"));
  }
  // A directory that goes away under a workspace.
  NFSWorkspace workspace(directory / "w3", single_group());
  workspace.write_configs_and_weights({});
  std::filesystem::remove_all(directory / "w3");
  CHECK(has(words_of(ErrorKind::not_found, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }), "is gone"));
  CHECK_THROWS_AS(workspace.write_configs_and_weights({}), Error);
}

TEST_CASE("a write that fails leaves the state before it, and nothing else") {
  const TemporaryDirectory directory;
  NFSWorkspace workspace(directory / "w", single_group());
  workspace.write_configs_and_weights(layer_of(0, 1));
  auto before = files_in(workspace.path());
  int last = 1;
  for (const char* call : {"create", "fallocate", "pwrite", "fsync", "fdatasync", "close", "rename"})
    for (int after = 0; after < 6; ++after)
      for (const int error : {ENOSPC, EIO, ESTALE}) {
        CAPTURE(std::string(call));
        CAPTURE(after);
        CAPTURE(error);
        bool has_failed = false;
        {
          const Injected fault({.call = call, .path = workspace.path(), .error = error, .after = after, .times = 1});
          try {
            workspace.write_configs_and_weights(layer_of(0, last + 1));
          } catch (const Error& failure) {
            has_failed = true;
            CHECK(failure.os_error() == error);
            CHECK(failure.path().find(workspace.path()) == 0);
          }
        }
        if (!has_failed) {
          // There are not that many such calls.
          before = files_in(workspace.path());
          ++last;
        }
        INFO(files_in(workspace.path()).size(), " files, ", before.size(), " before");
        CHECK(files_in(workspace.path()) == before);
        CHECK(join(workspace.read_configs_and_weights_from_rank(0)->state) == layer_of(0, last));
      }
}

TEST_CASE("what reading finds stale is read again; what stays wrong is told with its path") {
  const TemporaryDirectory directory;
  NFSWorkspace workspace(directory / "w", single_group(), {.timeout = 400ms});
  workspace.write_configs_and_weights(layer_of(0, 1));
  for (const char* call : {"open", "fstat", "pread"}) {
    CAPTURE(call);
    {
      const Injected fault({.call = call, .path = "state-", .error = ESTALE, .times = 3});
      CHECK(join(workspace.read_configs_and_weights_from_rank(0)->state) == layer_of(0, 1));
      CHECK(seen_calls > 3);
    }
    const Injected fault({.call = call, .path = "state-", .error = ESTALE});
    const std::string words = words_of(ErrorKind::io, [&] { (void)workspace.read_configs_and_weights_from_rank(0); });
    CHECK(has(words, "ESTALE"));
    CHECK(has(words, "state-"));
    CHECK(has(words, "tried"));
  }
  {
    const Injected fault({.call = "pread", .path = "state-", .error = EIO, .times = 1});
    CHECK(has(words_of(ErrorKind::io, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }), "EIO"));
  }
  // Damage is damage: what is on this host's disk does not mend.
  const std::string path = workspace.read_configs_and_weights_from_rank(0)->path;
  std::string bytes = read_text(path);
  bytes[100] ^= 1;
  write_text(path, bytes);
  const auto since = std::chrono::steady_clock::now();
  CHECK(has(words_of(ErrorKind::corrupt, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }), path));
  CHECK(std::chrono::steady_clock::now() - since < 900ms);
}

TEST_CASE("a renamed state is not taken for another rank's") {
  const TemporaryDirectory directory;
  const auto group = single_group();
  NFSWorkspace workspace(directory / "w", group);
  workspace.write_configs_and_weights({});
  const std::string path = workspace.read_configs_and_weights_from_rank(0)->path;
  auto name = *workspace::parse_name(std::filesystem::path(path).filename().string());
  ++name.generation;
  std::filesystem::rename(path, workspace.path() + "/" + workspace::file_name(name));
  CHECK(has(words_of(ErrorKind::corrupt, [&] { (void)workspace.read_configs_and_weights_from_rank(0); }),
            "it was renamed or copied"));
  CHECK(has(workspace::survey(workspace.path()).jobs.at(0).states.at(0).problem, "it was renamed or copied"));
}

TEST_CASE("gathers, merges and streams over a workspace that is given; nothing is left") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(4, [&](SyncGroup& group) {
    const int rank = group.rank();
    for (const int first : {0, 2})
      for (const std::optional<int> level : {std::optional<int>(), std::optional<int>(1)}) {
        const GatherOptions options{.workspace = {.path = path, .zstd_level = level}};
        const Config mine = layer_of(rank);
        // One rank has none.
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
        std::uint64_t taken = 0;
        std::uint64_t given = 0;
        gather_each(
            [&] {
              return given++ < 20 ? std::optional<Config>(layer_of(rank, static_cast<int>(given))) : std::nullopt;
            },
            ranks_from(first, 4), group,
            [&](LayerPart& part) {
              for (const auto& [from, config] : part.present())
                RANK_CHECK(config == layer_of(from, static_cast<int>(part.layer) + 1));
              ++taken;
            },
            {.workspace = {.path = path, .zstd_level = level}});
        RANK_CHECK(taken == (rank == first ? 20 : 0));
      }
    // A list of some ranks, and two at a time.
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
  Ranks ranks(6, [&](int process) {
    const auto group = (process < 3 ? first : second).join(process % 3);
    const int job = process / 3;
    for (int round = 0; round < 12; ++round) {
      const Config mine = layer_of(group->rank(), 100 * job + round);
      const auto all = get_configs_parallel(&mine, ranks_from(round % 3, 3), *group, {.workspace = {.path = path}});
      for (const auto& [rank, config] : all.present()) RANK_CHECK(config == layer_of(rank, 100 * job + round));
    }
  });
  for (const Ended& ended : ranks.wait()) CHECK_MESSAGE(ended.ok(), ended.words);
  CHECK(is_clean(path));
}

TEST_CASE("kept files stay, whole and told by a survey") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](SyncGroup& group) {
    const Config mine = layer_of(group.rank());
    (void)get_configs_parallel(&mine, ranks_from(1, 3), group, {.workspace = {.path = path, .keep_files = true}});
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
  // Only with an age do they go.
  CHECK(workspace::collect_garbage(path, {.dry_run = false}).removed_files == 0);
  CHECK(workspace::collect_garbage(path, {.dry_run = true, .older_than = 0s}).removed_files == 3);
  CHECK(files_of(path, workspace::NameKind::kept) == 3);
  CHECK(workspace::collect_garbage(path, {.dry_run = false, .older_than = 0s}).removed_files == 3);
  CHECK(is_clean(path));
}

TEST_CASE("ranks that disagree about the workspace are an error on all, and the group goes on") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](SyncGroup& group) {
    const std::string words = words_of_gather(group, ErrorKind::rank_mismatch,
                                              {.workspace = {.path = group.rank() == 1 ? path : std::string()}});
    RANK_CHECK(words.find("rank 1 workspace") != std::string::npos);
    // A directory that is only called the same: here, one that is called otherwise and is another.
    const std::string other =
        words_of_gather(group, ErrorKind::argument, {.workspace = {.path = group.rank() == 2 ? path + "2" : path}}, 2);
    RANK_CHECK(other.find("it is not one directory") != std::string::npos);
    // Called otherwise, and the same.
    const Tensor mine = pattern(DType::u8, {5000}, 1);
    (void)get_tensors_parallel(mine, ranks_from(0, 3), group,
                               {.workspace = {.path = group.rank() == 2 ? path + "/../w/" : path}});
    // Proved once, changed on one rank only.
    const std::string changed =
        words_of_gather(group, ErrorKind::argument, {.workspace = {.path = group.rank() == 1 ? path + "3" : path}}, 1);
    RANK_CHECK(changed.find("change the path on all ranks") != std::string::npos);
    (void)words_of_gather(group, ErrorKind::argument, {.route = Route::shm, .workspace = {.path = path}});
    (void)words_of_gather(group, ErrorKind::argument, {.workspace = {.keep_files = true}});
    (void)words_of_gather(group, ErrorKind::unsupported, {.route = Route::workspace});
    // What cannot be a workspace on one rank is an error on all.
    if (group.rank() == 0) write_text(path + "-file", "x");
    group.barrier();
    const std::string file = words_of_gather(group, ErrorKind::argument, {.workspace = {.path = path + "-file"}}, 0);
    RANK_CHECK(file.find("it is a file") != std::string::npos);
    group.barrier();
  });
  for (const char* end : {"", "2", "3"}) CHECK(is_clean(path + end));
}

TEST_CASE("a rank whose disk fails is named by all, whoever it is; nothing is left, and the group goes on") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](SyncGroup& group) {
    const Tensor mine = pattern(DType::u8, {5000}, 1);
    (void)get_tensors_parallel(mine, ranks_from(0, 3), group, {.workspace = {.path = path}});
    for (const auto& [call, error, kind] :
         {std::tuple("pwrite", ENOSPC, ErrorKind::no_space), std::tuple("rename", EIO, ErrorKind::io),
          std::tuple("close", EIO, ErrorKind::io), std::tuple("create", EACCES, ErrorKind::io)}) {
      std::optional<Injected> fault;
      if (group.rank() == 2) fault.emplace(Fault{.call = call, .path = path, .error = error});
      const std::string words = words_of_gather(group, kind, {.workspace = {.path = path}}, 2);
      RANK_CHECK(words.find("exchange-") != std::string::npos || words.find("growing") != std::string::npos);
    }
    {
      // What the first rank cannot read.
      std::optional<Injected> fault;
      if (group.rank() == 0) fault.emplace(Fault{.call = "open", .path = "exchange-", .error = EIO});
      const std::string words = words_of_gather(group, ErrorKind::io, {.workspace = {.path = path}}, 0);
      RANK_CHECK(words.find("reading what rank 1") != std::string::npos);
    }
    {
      // What it sees late.
      std::optional<Injected> fault;
      if (group.rank() == 0) fault.emplace(Fault{.call = "open", .path = "exchange-", .error = ENOENT, .times = 5});
      (void)get_tensors_parallel(mine, ranks_from(0, 3), group, {.workspace = {.path = path}});
    }
    (void)get_tensors_parallel(mine, ranks_from(0, 3), group, {.workspace = {.path = path}});
    group.barrier();
  });
  CHECK(is_clean(path));
}

TEST_CASE("a killed sender and a killed first rank are named; what they leave is proved to be nobody's") {
  for (const int victim : {0, 1}) {
    CAPTURE(victim);
    const TemporaryDirectory directory;
    const std::string path = directory / "w";
    SharedWords pids;
    const GroupOf group_of(3);
    Ranks ranks(3, [&](int rank) {
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
    const auto all = ranks.wait();
    for (int rank = 0; rank < 3; ++rank)
      CHECK_MESSAGE((rank == victim ? all[static_cast<std::size_t>(rank)].signal == SIGKILL
                                    : all[static_cast<std::size_t>(rank)].ok()),
                    all[static_cast<std::size_t>(rank)].words);
    const workspace::GcReport dry = workspace::collect_garbage(path);
    for (const workspace::GcItem& item : dry.items)
      CHECK_MESSAGE(item.verdict == workspace::GcVerdict::remove, item.file);
    workspace::sweep_dead(path);
    CHECK(is_clean(path));
  }
}
