// SPDX-License-Identifier: Apache-2.0
// Exports whose ranks share no memory, or not all of it: what the file system does not allow is refused in time, and a
// rank that is lost leaves nothing that looks whole.

#include <doctest/doctest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "src/os/fault.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/models.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
namespace fs = std::filesystem;

namespace {

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

struct World {
  World() {
    inspect::write_demo_model(test::llama(), work / "model", 1 << 30);
    shard_model(work / "model", work / "shards", "llama", {.tensor = 4});
    fs::create_directory(work / "place");
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(work / "place")) all.push_back(entry.path().filename());
    return all;
  }
  test::TemporaryDirectory work;
};

void expect_well(const std::vector<test::Ended>& all) {
  for (const test::Ended& rank : all) {
    CHECK(rank.ok());
    CHECK(rank.words.empty());
  }
}

/// Another directory of the same name, as on a host that does not mount the first one's.
bool cover(const std::string& path) {
  return ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("none", path.c_str(), "tmpfs", 0, "size=64m") == 0;
}

int kill_at = 0;
std::atomic<int> calls{0};

// Groups over files write, too.
int die_while_writing(std::string_view call, std::string_view path) {
  if (call == "pwrite" && path.find("/out.partial-") != std::string_view::npos && ++calls == kill_at)
    ::kill(::getpid(), SIGKILL);
  return 0;
}

}  // namespace

TEST_CASE("hosts that do not see the output: refused on all with the remedy, which helps") {
  World world;
  const auto run = [&](Writers writers) {
    return test::try_ranks(4, [&](SyncGroup& group) {
      if (!group.shares_memory(0) && !cover(world.work / "place")) {
        test::say("skipped");
        return;
      }
      try {
        export_model(world.work / "shards", world.work / "place/out", "llama", group,
                     {.memory_budget = 1 << 20, .writers = writers});
      } catch (const Error& error) {
        RANK_CHECK(error.kind() == ErrorKind::argument);
        group.barrier();  // the group is usable
        test::say(error.what());
      }
    });
  };
  const auto refused = run(Writers::owners);
  if (refused[3].words == "skipped") {
    MESSAGE("skipped: mounting needs root");
    return;
  }
  for (const test::Ended& rank : refused) {
    CAPTURE(rank.words);
    CHECK(rank.ok());
    CHECK(has(rank.words, "does not see the directory"));
    CHECK(has(rank.words, "--writers first"));
  }
  CHECK(world.names().empty());
  expect_well(run(Writers::first));
  test::check_equal(world.work / "model", world.work / "place/out");
}

TEST_CASE("a rank is killed while it writes: named by all, nothing at the output, and a resumed export finishes") {
  // Who is alone on its host is missed at the deadline only: that is for tests of the group.
  const std::vector<int> victims = {0, 1};
  for (const int victim : victims) {
    for (const int nth : {1, 3, 6}) {
      CAPTURE(victim);
      CAPTURE(nth);
      World world;
      const ExportOptions options{.max_shard_size = 60'000, .memory_budget = 1 << 20, .resume = true};
      const auto run = [&](bool kills) {
        return test::try_ranks(4, [&](SyncGroup& group) {
          kill_at = kills && group.rank() == victim ? nth : 0;
          if (kill_at != 0) os::set_fault_hook(die_while_writing);
          try {
            export_model(world.work / "shards", world.work / "place/out", "llama", group, options);
          } catch (const Error& error) {
            test::say(error.what());
          }
        });
      };
      const auto ended = run(true);
      for (int rank = 0; rank < 4; ++rank) {
        const test::Ended& end = ended[static_cast<std::size_t>(rank)];
        CAPTURE(end.words);
        if (rank == victim)
          CHECK(end.signal == SIGKILL);
        else
          CHECK(has(end.words, "rank " + std::to_string(victim)));
      }
      CHECK_FALSE(fs::exists(world.work / "place/out"));
      CHECK(world.names().size() == 1);  // what can be gone on with
      expect_well(run(false));
      test::check_equal(world.work / "model", world.work / "place/out");
    }
  }
}
