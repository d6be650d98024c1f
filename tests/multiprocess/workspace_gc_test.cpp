// SPDX-License-Identifier: Apache-2.0
// The report of a survey of a workspace, and the files that a clean-up deletes and keeps.

#include "src/workspace/gc.hpp"

#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "doctest/doctest.h"
#include "muster/state_file.hpp"
#include "muster/workspace.hpp"
#include "src/workspace/group_directory.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/survey.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/workspaces.hpp"

using namespace muster;
using namespace muster::test;
using namespace muster::workspace;
using namespace std::chrono_literals;

namespace {

const std::string job_a(32, 'a');
const std::string job_b(32, 'b');

void make_older(const std::string& path, std::chrono::hours age) {
  std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - age);
}

void write_state(const TemporaryDirectory& directory, const std::string& job, int rank, int size, std::uint64_t step) {
  const Name name{.kind = NameKind::state, .job = job, .rank = rank, .world_size = size, .step = step};
  const std::vector<NamedTensor> weights = {{"w", pattern(DType::f32, {100}, step)}};
  write_state_file(
      directory / file_name(name), {}, weights,
      {.info = {.job = *parse_job(job), .step = step, .rank = rank, .world_size = size}, .durable = false});
}

const GcItem& item_of(const GcReport& report, const std::string& file) {
  const auto found = std::ranges::find(report.items, file, &GcItem::file);
  if (found == report.items.end()) throw std::runtime_error("no item " + file);
  return *found;
}

}  // namespace

TEST_CASE("a survey lists jobs, ranks, steps, and incomplete files with the reason") {
  const TemporaryDirectory directory;
  for (const std::uint64_t step : {1, 2}) {
    write_state(directory, job_a, 0, 3, step);
    write_state(directory, job_a, 2, 3, step);
  }
  write_state(directory, job_a, 1, 3, 1);
  write_state(directory, job_b, 0, 1, 7);
  const std::string torn = file_name({.kind = NameKind::state, .job = job_a, .rank = 1, .world_size = 3, .step = 2});
  write_text(directory / torn, std::string(5000, 'x'));
  write_text(directory / "notes.txt", "mine");
  std::filesystem::create_directory(directory / "folder");
  const std::string growing = file_name({.kind = NameKind::growing, .random = std::string(16, '1'), .writer = dead()});
  write_text(directory / growing, std::string(100, 'x'));
  make_older(directory / file_name({.kind = NameKind::state, .job = job_b, .rank = 0, .world_size = 1, .step = 7}), 5h);
  const Survey survey = workspace::survey(directory.path());
  CHECK(survey.marked == Marked::by_names);
  REQUIRE(survey.jobs.size() == 2);
  const SurveyJob& job = survey.jobs[0];  // the newest first
  CHECK(job.nonce == job_a);
  CHECK(job.world_size == 3);
  REQUIRE(job.states.size() == 6);
  CHECK(job.common_step == 1);
  CHECK(job.missing_ranks.empty());
  for (const SurveyState& state : job.states) {
    CHECK(state.complete == (state.entry.file != torn));
    CHECK(state.problem.empty() == state.complete);
    if (state.complete) CHECK((state.tensors == 1 && state.tensor_bytes == 400 && !state.compressed));
  }
  CHECK(survey.jobs[1].common_step == 7);
  REQUIRE(survey.temporary.size() == 1);
  CHECK(survey.temporary[0].writer == os::Life::dead);
  REQUIRE(survey.foreign.size() == 2);
  CHECK(survey.files == 10);
  // Only names are read.
  const Survey quick = workspace::survey(directory.path(), {.open_states = false});
  CHECK(quick.jobs[0].common_step == 2);
}

TEST_CASE("missing ranks are listed; a name that claims two thousand million ranks costs nothing") {
  const TemporaryDirectory directory;
  write_state(directory, job_a, 1, 4, 1);
  write_text(
      directory / file_name({.kind = NameKind::state, .job = job_b, .rank = 0, .world_size = 2147483647, .step = 1}),
      "");
  const Survey survey = workspace::survey(directory.path());
  for (const SurveyJob& job : survey.jobs) {
    if (job.nonce == job_a) CHECK((job.missing_ranks == std::vector<int>{0, 2, 3}));
    if (job.nonce == job_b) CHECK(job.missing_ranks.size() <= 1024);
    CHECK(!job.common_step);
  }
}

TEST_CASE("a directory that is not a workspace is not surveyed") {
  const TemporaryDirectory directory;
  CHECK(workspace::survey(directory.path()).marked == Marked::empty);
  CHECK(has(words_of(ErrorKind::not_found, [&] { workspace::survey(directory / "none"); }), "does not exist"));
  write_text(directory / "file", "");
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { workspace::survey(directory / "file"); }), "it is a file"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { workspace::survey(directory.path()); }),
            "is not a Muster workspace: it contains other files"));
}

TEST_CASE("a clean-up deletes files of dead processes, and the rest only with an age; the rules of gc.hpp") {
  const TemporaryDirectory directory;
  write_state(directory, job_a, 0, 1, 1);
  write_state(directory, job_a, 0, 1, 2);
  write_state(directory, job_b, 0, 1, 1);
  const std::string random(16, '7');
  struct Kinds {
    std::string dead, alive, elsewhere;
  };
  std::vector<Kinds> passing;
  for (Name name :
       {Name{.kind = NameKind::exchange, .job = job_a, .rank = 0, .world_size = 2, .step = 1},
        Name{.kind = NameKind::token, .job = job_a, .rank = 0, .random = random},
        Name{.kind = NameKind::probe, .random = random}, Name{.kind = NameKind::growing, .random = random}}) {
    Kinds& kinds = passing.emplace_back();
    for (const auto& [file, writer] : {std::pair(&kinds.dead, dead()), std::pair(&kinds.alive, os::own_identity()),
                                       std::pair(&kinds.elsewhere, elsewhere())}) {
      name.writer = writer;
      *file = file_name(name);
      write_text(directory / *file, "x");
    }
  }
  write_text(directory / "mine.txt", "x");
  // File groups: all processes dead, one alive, all left, one on another host.
  const auto group = [&](char digit, const std::vector<std::pair<int, os::ProcessIdentity>>& members,
                         const std::vector<int>& gone) {
    const std::string path = directory / file_name({.kind = NameKind::job, .job = std::string(32, digit)});
    std::filesystem::create_directory(path);
    for (const auto& [rank, writer] : members) write_text(path + "/" + member_name(rank, writer), "");
    for (const int rank : gone) write_text(path + "/" + gone_name(rank), "");
    write_text(path + "/g0.round-1-0-5", "12345");
    return file_name({.kind = NameKind::job, .job = std::string(32, digit)});
  };
  const std::string all_dead = group('1', {{0, dead()}, {1, dead()}}, {});
  const std::string one_alive = group('2', {{0, dead()}, {1, os::own_identity()}}, {});
  const std::string all_left = group('3', {{0, os::own_identity()}, {1, elsewhere()}}, {0, 1});
  const std::string one_elsewhere = group('4', {{0, dead()}, {1, elsewhere()}}, {});
  const std::string meeting = file_name({.kind = NameKind::meeting, .random = random});
  std::filesystem::create_directory(directory / meeting);
  write_text(directory / (meeting + "/" +
                          meeting_file_name({.kind = MeetingName::Kind::hello,
                                             .version = 1,
                                             .rank = 0,
                                             .size = 2,
                                             .token = random,
                                             .writer = dead()})),
             "");

  const GcReport dry = collect_garbage(directory.path());
  // Four files, two directories of file groups with 3 and 5 files, and a rendezvous directory with one.
  CHECK(dry.removed_files == 4 + 3 + 5 + 1);
  for (const Kinds& kinds : passing) {
    CHECK(item_of(dry, kinds.dead).verdict == GcVerdict::remove);
    CHECK(has(item_of(dry, kinds.dead).reason, "has ended"));
    CHECK(item_of(dry, kinds.alive).verdict == GcVerdict::keep);
    CHECK(has(item_of(dry, kinds.alive).reason, "is running"));
    CHECK(item_of(dry, kinds.elsewhere).verdict == GcVerdict::keep);
    CHECK(has(item_of(dry, kinds.elsewhere).reason, "--stale-after"));
  }
  CHECK(item_of(dry, all_dead).verdict == GcVerdict::remove);
  CHECK(item_of(dry, one_alive).verdict == GcVerdict::keep);
  CHECK(item_of(dry, all_left).verdict == GcVerdict::remove);
  CHECK(item_of(dry, one_elsewhere).verdict == GcVerdict::keep);
  CHECK(item_of(dry, meeting).verdict == GcVerdict::remove);
  CHECK(std::ranges::none_of(dry.items, [](const GcItem& item) { return item.file == "mine.txt"; }));
  for (const GcItem& item : dry.items) CHECK(std::filesystem::exists(directory / item.file));

  const GcReport wet = collect_garbage(directory.path(), {.dry_run = false});
  CHECK(wet.removed_files == dry.removed_files);
  for (const GcItem& item : wet.items)
    CHECK(std::filesystem::exists(directory / item.file) == (item.verdict == GcVerdict::keep));

  // With an age: the states of a job together, by the newest.
  const auto state = [&](const std::string& job, std::uint64_t step) {
    return file_name({.kind = NameKind::state, .job = job, .rank = 0, .world_size = 1, .step = step});
  };
  make_older(directory / state(job_a, 1), 72h);
  make_older(directory / state(job_b, 1), 72h);
  make_older(directory / passing[3].elsewhere, 72h);
  make_older(directory / passing[3].alive, 72h);
  const GcReport old = collect_garbage(directory.path(), {.dry_run = false, .older_than = 48h});
  CHECK(old.removed_files == 2);
  CHECK(std::filesystem::exists(directory / state(job_a, 1)));
  CHECK(!std::filesystem::exists(directory / state(job_b, 1)));
  CHECK(!std::filesystem::exists(directory / passing[3].elsewhere));
  CHECK(std::filesystem::exists(directory / passing[3].alive));
  CHECK(item_of(old, passing[3].elsewhere).age >= 71h);
}

TEST_CASE(
    "a file that Muster did not write is kept in a job's folder or a rendezvous directory, with the folder, whatever "
    "its age") {
  const TemporaryDirectory directory;
  const std::string job = file_name({.kind = NameKind::job, .job = job_a});
  const std::string meeting = file_name({.kind = NameKind::meeting, .random = std::string(16, '7')});
  for (const std::string& folder : {job, meeting}) {
    std::filesystem::create_directory(directory / folder);
    write_text(directory / (folder + "/notes.txt"), "mine");
    std::filesystem::create_directory(directory / (folder + "/mine"));
  }
  const std::string member = job + "/" + member_name(0, dead());
  write_text(directory / member, "");
  const GcReport report = collect_garbage(directory.path(), {.dry_run = false, .older_than = 0h});
  for (const std::string& folder : {job, meeting}) {
    CHECK(item_of(report, folder).verdict == GcVerdict::keep);
    CHECK(has(item_of(report, folder).reason, "which is not a file of Muster. Move that file away first"));
    CHECK(read_text(directory / (folder + "/notes.txt")) == "mine");
    CHECK(std::filesystem::exists(directory / (folder + "/mine")));
  }
  CHECK(report.removed_files == 0);
  // The files that the last rank of a group removes when it leaves.
  remove_group_directory(directory / job);
  CHECK(!std::filesystem::exists(directory / member));
  CHECK(read_text(directory / (job + "/notes.txt")) == "mine");
}

TEST_CASE("the next start removes the files of killed writers") {
  const TemporaryDirectory directory;
  for (int turn = 0; turn < 3; ++turn) {
    Ranks ranks(2, [&](int rank) {
      const auto group =
          file_group({.directory = directory.path(), .key = "k", .rank = rank, .size = 2, .timeout = 10s});
      Workspace workspace(directory.path().string(), group, {.durable = false});
      const Config state = Config::object({{"w", pattern(DType::u8, {8 << 20}, 1)}});
      group->barrier();
      for (;;) workspace.write_configs_and_weights(state);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(150 + 7 * turn));
    for (int rank = 0; rank < 2; ++rank) ranks.signal(rank, SIGKILL);
    (void)ranks.wait();
  }
  run_processes(2, [&](int rank) {
    file_group({.directory = directory.path(), .key = "k", .rank = rank, .size = 2, .timeout = 10s})->barrier();
  });
  const Survey survey = workspace::survey(directory.path());
  for (const SurveyEntry& entry : survey.temporary) FAIL_CHECK(entry.file);
  for (const SurveyJob& job : survey.jobs) {
    CHECK(job.passing.empty());
    for (const SurveyState& state : job.states) CHECK_MESSAGE(state.complete, state.problem);
  }
}
