// SPDX-License-Identifier: Apache-2.0
// Workspace: the state that a step number selects, the states that are kept, and the states that are read after a
// restart.

#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>
#include <set>

#include "doctest/doctest.h"
#include "muster/state_file.hpp"
#include "muster/workspace.hpp"
#include "src/gather/workspace_route.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/survey.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/workspaces.hpp"

using namespace muster;
using namespace muster::test;
using Generations = std::set<std::uint64_t>;

namespace {

Config state_of(int rank, std::uint64_t step) {
  return Config::object({{"rank", rank}, {"weight", pattern(DType::f32, {50, 50}, 100 * step + 1)}});
}

bool is_state(const std::optional<WorkspaceState>& read, int rank, std::uint64_t step) {
  return read && read->step == step && join(read->state) == state_of(rank, step);
}

/// Returns the steps of one rank's states, of any job.
Generations there(const std::string& directory, int rank) {
  Generations steps;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (const auto name = workspace::parse_name(entry.path().filename().string());
        name && name->kind == workspace::NameKind::state && name->rank == rank)
      steps.insert(name->step);
  return steps;
}

}  // namespace

TEST_CASE("a step is the user's number, and selects states for reading") {
  const TemporaryDirectory directory;
  Workspace workspace(directory / "w", single_group(), {.durable = false, .steps_kept = 4});
  for (const std::uint64_t step : {0, 10, 30})
    CHECK(workspace.write_configs_and_weights(state_of(0, step), {}, step) == step);
  CHECK(is_state(workspace.read_configs_and_weights_from_rank(0, {.step = 10}), 0, 10));
  CHECK(is_state(workspace.read_configs_and_weights_from_rank(0, {.step = 0, .on_all_ranks = true}), 0, 0));
  CHECK(is_state(workspace.read_configs_and_weights_from_rank(0, 11), 0, 30));
  CHECK(!workspace.read_configs_and_weights_from_rank(0, {.step = 20}));
  CHECK(!workspace.read_configs_and_weights_from_rank(0, {.min_step = 11, .step = 10}));
  CHECK(workspace.write_configs_and_weights(state_of(0, 31)) == 31);
  for (const std::uint64_t step : {31, 3}) {
    const std::string words = words_of(ErrorKind::invalid_argument,
                                       [&] { workspace.write_configs_and_weights(state_of(0, step), {}, step); });
    CHECK(has(words, "the steps of a job must ascend"));
    CHECK(has(words, "rank 0 has written step 31"));
  }
  CHECK(workspace::choose_common_states(directory / "w", {}).states.at(0).step == 31);
  CHECK(workspace::choose_common_states(directory / "w", {.step = 10}).states.at(0).step == 10);
  Workspace begin(directory / "begin", single_group());
  begin.write_configs_and_weights(state_of(0, 0), {}, 0);
  CHECK(workspace::choose_common_states(directory / "begin", {}).states.at(0).step == 0);
}

TEST_CASE("the last step that all ranks have is kept, however far one rank is ahead") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](Group& group) {
    Workspace workspace(path, group.shared_from_this(), {.durable = false});
    const auto write = [&](std::uint64_t step) {
      workspace.write_configs_and_weights(state_of(group.rank(), step), {}, step);
    };
    const auto common = [&](std::uint64_t step) {
      group.barrier();
      for (int rank = 0; rank < 3; ++rank)
        RANK_CHECK(is_state(workspace.read_configs_and_weights_from_rank(rank, {.on_all_ranks = true}), rank, step));
      group.barrier();
    };
    // Deletion does not wait for a rank that has not written yet.
    if (group.rank() == 0)
      for (const std::uint64_t step : {1, 2, 3}) write(step);
    RANK_CHECK(group.rank() != 0 || (there(path, 0) == Generations{2, 3}));
    group.barrier();
    if (group.rank() != 0) write(3);
    common(3);
    // Rank 0 is ahead by more steps than are kept. Another rank skips a step.
    if (group.rank() == 0)
      for (const std::uint64_t step : {4, 5, 6, 7, 8}) write(step);
    if (group.rank() == 1) write(4);
    if (group.rank() == 2)
      for (const std::uint64_t step : {5, 6}) write(step);
    common(3);
    if (group.rank() == 1)
      for (const std::uint64_t step : {5, 6, 7}) write(step);
    common(6);
    if (group.rank() != 0) write(8);
    common(8);
    write(9);
    common(9);
    RANK_CHECK((there(path, group.rank()) == Generations{8, 9}));
  });
}

TEST_CASE("ranks that write and remove as fast as they can always have a step in common") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  run_ranks(3, [&](Group& group) {
    Workspace workspace(path, group.shared_from_this(), {.durable = false, .steps_kept = 1});
    workspace.write_configs_and_weights(state_of(group.rank(), 1));
    group.barrier();
    for (std::uint64_t step = 2; step <= 60; ++step) {
      workspace.write_configs_and_weights(state_of(group.rank(), step));
      RANK_CHECK(
          workspace.read_configs_and_weights_from_rank((group.rank() + 1) % 3, {.on_all_ranks = true}).has_value());
    }
  });
}

TEST_CASE("after a restart the states of the earlier job are read, whatever the number of ranks") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  const WorkspaceQuery newest{.job = WorkspaceJob::newest};
  const WorkspaceQuery together{.on_all_ranks = true, .job = WorkspaceJob::newest};
  // Rank 0 writes one step more than the others, then all ranks exit.
  run_ranks(3, [&](Group& group) {
    Workspace workspace(path, group.shared_from_this());
    for (const std::uint64_t step : {100, 200})
      workspace.write_configs_and_weights(state_of(group.rank(), step), {}, step);
    if (group.rank() == 0) workspace.write_configs_and_weights(state_of(0, 300), {}, 300);
  });
  run_ranks(2, [&](Group& group) {
    Workspace workspace(path, group.shared_from_this());
    RANK_CHECK(!workspace.read_configs_and_weights_from_rank(1));
    for (int rank = 0; rank < 3; ++rank) {
      const auto read = workspace.read_configs_and_weights_from_rank(rank, together);
      RANK_CHECK(is_state(read, rank, 200));
      RANK_CHECK(read->job != group.nonce());
      RANK_CHECK(read->world_size == 3);
    }
    RANK_CHECK(is_state(workspace.read_configs_and_weights_from_rank(0, newest), 0, 300));
    RANK_CHECK(
        is_state(workspace.read_configs_and_weights_from_rank(2, {.step = 100, .job = WorkspaceJob::newest}), 2, 100));
    RANK_CHECK(!workspace.read_configs_and_weights_from_rank(3, newest));
    RANK_CHECK(!workspace.read_configs_and_weights_from_rank(0, {.min_step = 301, .job = WorkspaceJob::newest}));
    // Until all ranks of the new job have written, only the earlier job has a state on all ranks.
    group.barrier();
    if (group.rank() == 0) workspace.write_configs_and_weights(state_of(0, 1));
    group.barrier();
    const auto read = workspace.read_configs_and_weights_from_rank(0, newest);
    RANK_CHECK(is_state(read, 0, 1));
    RANK_CHECK(read->job == group.nonce());
    RANK_CHECK(is_state(workspace.read_configs_and_weights_from_rank(1, together), 1, 200));
    group.barrier();
    if (group.rank() == 1) workspace.write_configs_and_weights(state_of(1, 1));
    group.barrier();
    RANK_CHECK(is_state(workspace.read_configs_and_weights_from_rank(1, together), 1, 1));
  });
  // No state of the earlier job was deleted.
  CHECK(there(path, 2) == Generations{100, 200});
}

TEST_CASE("a marker file that a power failure has emptied is written again, and refuses no rank") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  Workspace(path, single_group()).write_configs_and_weights(state_of(0, 1));
  const std::string mark = path + "/muster-workspace.json";
  const std::string whole = read_text(mark);
  for (const std::string& lost : {std::string(), std::string(whole.size(), '\0')}) {
    write_text(mark, lost);
    CHECK(workspace::survey(path).marked == workspace::Marked::by_names);
    CHECK(read_text(mark) == lost);
    Workspace workspace(path, single_group());
    CHECK(read_text(mark) == whole);
    CHECK(is_state(workspace.read_configs_and_weights_from_rank(0, {.job = WorkspaceJob::newest}), 0, 1));
  }
}

TEST_CASE("a file size limit is an error of a workspace and of a state, and keeps the existing files") {
  const TemporaryDirectory directory;
  Workspace workspace(directory / "w", single_group());
  workspace.write_configs_and_weights(state_of(0, 1));
  struct rlimit ordinary {};
  ::getrlimit(RLIMIT_FSIZE, &ordinary);
  const struct rlimit small { 10, ordinary.rlim_max };
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::vector<std::string> all = {
      words_of(ErrorKind::out_of_space, [&] { workspace.write_configs_and_weights(state_of(0, 2)); }),
      words_of(ErrorKind::out_of_space, [&] { Workspace(directory / "other", single_group()); })};
  ::setrlimit(RLIMIT_FSIZE, &ordinary);
  for (const std::string& words : all) CHECK(has(words, "ulimit -f"));
  CHECK((there(directory / "w", 0) == Generations{1}));
  CHECK(directory.count() == 4);  // two directories, a marker file and a state
}

TEST_CASE("a forked child removes none of its parent's files") {
  const TemporaryDirectory directory;
  write_text(directory / "passing", "x");
  gather::PassingFile passing(directory / "passing");
  StateFileWriter writer(directory / "state", {}, {});
  Ranks child(1, [&](int) {
    { const gather::PassingFile taken = std::move(passing); }
    { const StateFileWriter taken = std::move(writer); }
  });
  CHECK(child.wait().front().ok());
  CHECK(directory.count() == 2);
  writer.commit();
  passing = gather::PassingFile();
  CHECK(directory.count() == 1);
}

TEST_CASE(
    "a FIFO, a directory or a dangling link under a state's name is an error of its reader, which does not wait") {
  const TemporaryDirectory directory;
  Workspace workspace(directory / "w", single_group(), {.timeout = std::chrono::milliseconds(200)});
  workspace.write_configs_and_weights(state_of(0, 1));
  const std::string path = workspace.read_configs_and_weights_from_rank(0)->path;
  for (const auto& make : std::vector<std::function<void()>>{
           [&] { REQUIRE(::mkfifo(path.c_str(), 0600) == 0); }, [&] { std::filesystem::create_directory(path); },
           [&] { std::filesystem::create_symlink("nowhere", path); }}) {
    std::filesystem::remove(path);
    make();
    CHECK_THROWS_AS((void)workspace.read_configs_and_weights_from_rank(0), Error);
  }
}

TEST_CASE("an unknown file system is treated like a network file system") {
  CHECK(os::file_system_of("/proc").is_network);
  CHECK(os::ReadableFile::open("/proc/self/stat").is_remote());
  CHECK(!os::file_system_of("/dev/shm").is_network);
}

TEST_CASE("creating a workspace removes unfinished files of dead processes on this host, and nothing else") {
  const TemporaryDirectory directory;
  const std::string path = directory / "w";
  Workspace(path, single_group()).write_configs_and_weights(state_of(0, 1));
  std::vector<std::string> files;
  for (const os::ProcessIdentity& writer : {dead(), elsewhere(), os::own_identity()}) {
    files.push_back(
        path + "/" +
        workspace::file_name({.kind = workspace::NameKind::growing, .random = std::string(16, 'a'), .writer = writer}));
    write_text(files.back(), "x");
  }
  const Workspace workspace(path, single_group());
  CHECK(!std::filesystem::exists(files[0]));
  CHECK(std::filesystem::exists(files[1]));
  CHECK(std::filesystem::exists(files[2]));
  CHECK((there(path, 0) == Generations{1}));
}
