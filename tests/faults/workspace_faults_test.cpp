// SPDX-License-Identifier: Apache-2.0
// Workspaces and file groups on a file system with faults: each ends in success after some tries, or in an error on all
// ranks that names file and cause; nothing that is current is destroyed.

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/state_file.hpp"
#include "muster/workspace.hpp"
#include "tests/faults/faulty_mount.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

Config state_of(int seed, std::int64_t bytes = 300'000) {
  return Config::object({{"seed", seed}, {"weight", pattern(DType::u8, {bytes}, static_cast<std::uint64_t>(seed))}});
}

bool is_state(const std::optional<WorkspaceState>& read, int seed) {
  return read && join(read->state) == state_of(seed);
}

std::size_t files_in(const std::string& directory) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(directory), {}));
}

/// How late a host sees what others did, in ms: MUSTER_TEST_DELAY, where a test shall wait longer than it ordinarily
/// does.
std::string delay() {
  const char* text = std::getenv("MUSTER_TEST_DELAY");
  return text == nullptr ? "150" : text;
}

/// Ranks of which rank 0 sees the workspace through one mount and all others through another, as two hosts would.
void over_two_mounts(const std::vector<std::string>& first_rules, const std::vector<std::string>& other_rules, int size,
                     const std::function<void(SyncGroup&, const std::string& path)>& body) {
  const TemporaryDirectory backing;
  { const NFSWorkspace made(backing / "w", single_group()); }
  const FaultyMount first(backing.path(), first_rules);
  const FaultyMount other(backing.path(), other_rules);
  const GroupOf group_of(size);
  Ranks ranks(size, [&](int rank) { body(*group_of.join(rank), (rank == 0 ? first : other) / "w"); });
  check_ended(ranks.wait());
  // Everything was taken away again.
  CHECK(files_in(backing / "w") == 1);
}

GatherOptions through(const std::string& path, std::chrono::milliseconds timeout = 20s) {
  return {.timeout = timeout, .workspace = {.path = path}};
}

void gather_and_check(SyncGroup& group, const GatherOptions& options, int round) {
  const Config mine = state_of(10 * round + group.rank());
  const auto all = get_configs_parallel(&mine, ranks_from(0, group.size()), group, options);
  for (const auto& [rank, config] : all.present()) RANK_CHECK(config == state_of(10 * round + rank));
}

}  // namespace

TEST_CASE("a disk that is full, or fails: the error has file and cause, the state before stays, nothing else does") {
  struct Case {
    const char* rule;
    ErrorKind kind;
    const char* word;
  };
  for (const Case& fault :
       {Case{"space=500000", ErrorKind::no_space, "ENOSPC"}, Case{"fail=write:EIO:8:1:.growing", ErrorKind::io, "EIO"},
        Case{"fail=fsync:EIO:3:1:.growing", ErrorKind::io, "EIO"},
        Case{"fail=flush:EIO:2:9:.growing", ErrorKind::io, "EIO"},
        Case{"fail=flush:ENOSPC:2:9:.growing", ErrorKind::no_space, "ENOSPC"},
        Case{"fail=rename:EIO:1:9:state-", ErrorKind::io, "EIO"},
        Case{"fail=create:EDQUOT:2:9:.growing", ErrorKind::no_space, "EDQUOT"}}) {
    CAPTURE(std::string(fault.rule));
    const TemporaryDirectory backing;
    const FaultyMount mount(backing.path(), {fault.rule});
    NFSWorkspace workspace(mount / "w", single_group(), {.timeout = 2s});
    REQUIRE(workspace.write_configs_and_weights(state_of(1)) == 1);
    const std::size_t before = files_in(backing / "w");
    try {
      // The first of several calls that are well pass; the disk of "space" has room for one state only.
      workspace.write_configs_and_weights(state_of(2));
      FAIL_CHECK("nothing was thrown");
    } catch (const Error& error) {
      INFO(error.what());
      CHECK(error.kind() == fault.kind);
      CHECK(std::strstr(error.what(), fault.word) != nullptr);
      CHECK(error.path().find("state-") != std::string::npos);
    }
    CHECK(files_in(backing / "w") == before);
    CHECK(is_state(workspace.read_configs_and_weights_from_rank(0), 1));
  }
}

TEST_CASE("stale handles, late entries, old bytes and short files are waited for") {
  for (const std::string& rule :
       {std::string("fail=open:ESTALE:0:3:exchange-"), std::string("fail=read:ESTALE:0:2:exchange-"), "late=" + delay(),
        "old=" + delay(), "short=" + delay(), "absent=" + delay(), std::string("fail=getattr:ESTALE:4:2:exchange-")}) {
    CAPTURE(rule);
    over_two_mounts({rule}, {}, 3,
                    [&](SyncGroup& group, const std::string& path) { gather_and_check(group, through(path), 0); });
  }
}

TEST_CASE("senders with late entries and remembered absence: the proof, the files and a stream come through") {
  over_two_mounts({"absent=400"}, {"late=60", "absent=400"}, 3, [&](SyncGroup& group, const std::string& path) {
    gather_and_check(group, through(path), 0);
    int given = 0;
    int taken = 0;
    gather_each([&] { return given < 4 ? std::optional<Config>(state_of(++given)) : std::nullopt; }, ranks_from(0, 3),
                group,
                [&](LayerPart& part) {
                  ++taken;
                  for (const auto& [rank, config] : part.present()) RANK_CHECK(config == state_of(taken));
                },
                {.timeout = 20s, .workspace = {.path = path}});
    RANK_CHECK(taken == (group.rank() == 0 ? 4 : 0));
  });
}

TEST_CASE("a workspace reader through another mount gets the state before, or the new one, whatever is old there") {
  for (const char* rule : {"late=100", "old=100", "short=100", "fail=open:ESTALE:0:5", "fail=read:ESTALE:0:5",
                           "fail=create:EDQUOT:1:100000:.probe"}) {
    CAPTURE(std::string(rule));
    const TemporaryDirectory backing;
    const FaultyMount writer(backing.path(), {});
    const FaultyMount reader(backing.path(), {rule});
    const auto group = single_group();
    NFSWorkspace writing(writer / "w", group);
    // The same job, seen from elsewhere.
    NFSWorkspace reading(reader / "w", group, {.timeout = 5s});
    for (int turn = 1; turn <= 2; ++turn) {
      writing.write_configs_and_weights(state_of(turn));
      const auto read = reading.read_configs_and_weights_from_rank(0);
      if (read) CHECK(is_state(read, static_cast<int>(read->generation)));
      if (!std::string_view(rule).starts_with("late")) CHECK(is_state(read, turn));
    }
    for (int turn = 0; turn < 200 && !reading.read_configs_and_weights_from_rank(0, 2); ++turn)
      std::this_thread::sleep_for(10ms);
    CHECK(is_state(reading.read_configs_and_weights_from_rank(0, 2), 2));
  }
}

TEST_CASE("what stays wrong is an error on all ranks, with file and cause, in time; the group goes on") {
  struct Case {
    const char* rule;
    ErrorKind kind;
    const char* word;
  };
  for (const Case& fault : {Case{"fail=read:EIO:0:1000:exchange-", ErrorKind::io, "EIO"},
                            Case{"fail=open:ESTALE:0:100000:exchange-", ErrorKind::io, "ESTALE"},
                            Case{"late=60000", ErrorKind::argument, "not one directory"}}) {
    CAPTURE(std::string(fault.rule));
    // The first rank reads; the senders look for its token.
    const bool is_proof = fault.kind == ErrorKind::argument;
    const std::vector<std::string> none;
    over_two_mounts(is_proof ? none : std::vector<std::string>{fault.rule},
                    is_proof ? std::vector<std::string>{fault.rule} : none, 3,
                    [&](SyncGroup& group, const std::string& path) {
                      const auto since = std::chrono::steady_clock::now();
                      try {
                        gather_and_check(group, through(path, 500ms), 0);
                        throw RankFailure("nothing was thrown");
                      } catch (const Error& error) {
                        if (error.kind() != fault.kind) throw;
                        RANK_CHECK(std::strstr(error.what(), fault.word) != nullptr);
                        RANK_CHECK(is_proof || error.path().find("exchange-") != std::string::npos);
                        RANK_CHECK(error.rank().has_value());
                      }
                      RANK_CHECK(std::chrono::steady_clock::now() - since < 4s);
                      group.barrier();
                    });
  }
}

TEST_CASE("a sender's disk that fails half-way is everybody's error") {
  for (const char* rule : {"space=200000", "fail=write:EIO:3:1000:.growing", "fail=flush:EIO:0:1000:.growing"}) {
    CAPTURE(std::string(rule));
    over_two_mounts({}, {rule}, 2, [&](SyncGroup& group, const std::string& path) {
      try {
        gather_and_check(group, through(path), 0);
        throw RankFailure("nothing was thrown");
      } catch (const Error& error) {
        RANK_CHECK(error.rank() == 1);
        RANK_CHECK(error.kind() == (std::strstr(rule, "space") != nullptr ? ErrorKind::no_space : ErrorKind::io));
        RANK_CHECK(error.path().find("exchange-") != std::string::npos);
      }
      group.barrier();
    });
  }
}

TEST_CASE("a power cut takes nothing that a durable write has returned for, and what it tears is told") {
  const TemporaryDirectory backing;
  const auto group = single_group();
  std::string torn;
  {
    const FaultyMount mount(backing.path(), {});
    NFSWorkspace durable(mount / "w", group, {.generations_kept = 5});
    durable.write_configs_and_weights(state_of(1));
    durable.write_configs_and_weights(state_of(2));
    NFSWorkspace quick = durable;
    mount.cut_power();
    CHECK(read_text(backing / "w/muster-workspace.json").find("muster_workspace") != std::string::npos);
    CHECK(is_state(durable.read_configs_and_weights_from_rank(0), 2));
    CHECK(StateFile::open(durable.read_configs_and_weights_from_rank(0)->path).check().empty());
  }
  {
    const FaultyMount mount(backing.path(), {});
    NFSWorkspace quick(mount / "w2", group, {.durable = false, .timeout = 300ms});
    quick.write_configs_and_weights(state_of(3));
    torn = quick.read_configs_and_weights_from_rank(0)->path;
    mount.cut_power();
    // Remembered pages would hide the loss.
    std::this_thread::sleep_for(10ms);
  }
  const std::string path = backing / ("w2/" + torn.substr(torn.find_last_of('/') + 1));
  CHECK_THROWS_AS((void)StateFile::open(path), Error);
}

TEST_CASE("a file group whose ranks see late entries and remembered absences") {
  const TemporaryDirectory backing;
  const FaultyMount first(backing.path(), {"late=20", "absent=400"});
  const FaultyMount other(backing.path(),
                          {"late=30", "absent=400", "fail=readdir:ESTALE:50:5", "fail=open:ESTALE:0:3:all-"});
  Ranks ranks(3, [&](int rank) {
    const auto group = file_group(
        {.directory = (rank == 0 ? first : other) / "w", .rank = rank, .size = 3, .timeout = 20s, .heartbeat = 100ms});
    for (int round = 0; round < 2; ++round) {
      group->barrier();
      std::array<int, 3> all{};
      group->all_gather(std::as_bytes(std::span(&rank, 1)), std::as_writable_bytes(std::span(all)));
      RANK_CHECK((all == std::array<int, 3>{0, 1, 2}));
    }
    gather_and_check(*group, {}, 1);
  });
  check_ended(ranks.wait());
}

TEST_CASE("a rank of a file group whose disk fails is named by the others") {
  const TemporaryDirectory backing;
  const FaultyMount first(backing.path(), {});
  const FaultyMount other(backing.path(), {"fail=create:EIO:30:100000", "fail=rename:EIO:0:100000:beat"});
  Ranks ranks(2, [&](int rank) {
    try {
      const auto group = file_group({.directory = (rank == 0 ? first : other) / "w",
                                     .rank = rank,
                                     .size = 2,
                                     .timeout = 3s,
                                     .heartbeat = 50ms,
                                     .lost_after = 1s});
      for (int round = 0; round < 100; ++round) group->barrier();
      throw RankFailure("nothing was thrown");
    } catch (const Error& error) {
      // Where rank 1 cannot even tell, rank 0 sees it leave or fall silent.
      RANK_CHECK(error.rank() == 1 || rank == 1);
    }
  });
  check_ended(ranks.wait());
}

int main(int argc, char** argv) {
  const std::string obstacle = FaultyMount::obstacle();
  if (!obstacle.empty()) {
    std::printf("skipped: no FUSE file system here: %s\n", obstacle.c_str());
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
