// SPDX-License-Identifier: Apache-2.0
// Groups of ranks that share only a directory: their rendezvous, calls, failures, and remaining files.

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "muster/workspace.hpp"
#include "src/os/process.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/names.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/shared_words.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

FileGroupOptions options_of(const TemporaryDirectory& directory, int rank, int size) {
  return {.directory = directory.path().string(),
          .key = "test",
          .rank = rank,
          .size = size,
          .timeout = 20s,
          .heartbeat = 50ms,
          .lost_after = 1s};
}

/// Checks that only the marker file remains of all jobs.
bool is_clean(const TemporaryDirectory& directory) {
  std::size_t others = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.path())) {
    if (entry.path().filename() == "muster-workspace.json") continue;
    MESSAGE("left: " << entry.path().string());
    ++others;
  }
  return others == 0;
}

/// Identifies a process on another host, whose files a test creates.
os::ProcessIdentity writer_elsewhere(std::int64_t pid = 4711) {
  return {"elsewhere", "0123456789abcdef", pid, 99, 7};
}

void touch(const std::string& path) {
  write_text(path, "");
}

/// Returns the rendezvous directory that rank 0 leaves after it has waited for rank 1 in vain.
std::string wait_in_vain(const TemporaryDirectory& directory) {
  run_processes(1, [&](int) {
    FileGroupOptions options = options_of(directory, 0, 2);
    options.timeout = 100ms;
    error_of(ErrorKind::timeout, {"rank 1"}, [&] { (void)file_group(options); });
  });
  for (const auto& entry : std::filesystem::directory_iterator(directory.path()))
    if (entry.path().filename().string().starts_with("meeting-")) return entry.path();
  FAIL("nobody has waited");
  return {};
}

template <class T>
std::vector<T> gather(Group& group, T mine) {
  std::vector<T> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

}  // namespace

TEST_CASE("rounds, messages and duplicates; no file remains") {
  for (const int size : {1, 2, 5}) {
    CAPTURE(size);
    const TemporaryDirectory directory;
    run_processes(size, [&](int rank) {
      const auto group = file_group(options_of(directory, rank, size));
      RANK_CHECK(group->kind() == "file" && group->size() == size && group->rank() == rank);
      for (int other = 0; other < size; ++other) RANK_CHECK(group->shares_memory(other) == (other == rank));
      RANK_CHECK(group->info(rank).pid == ::getpid());
      for (int turn = 0; turn < 5; ++turn) {
        const std::vector<int> all = gather(*group, 100 * turn + rank);
        for (int other = 0; other < size; ++other)
          RANK_CHECK(all[static_cast<std::size_t>(other)] == 100 * turn + other);
        group->barrier();
      }
      const std::string key(reinterpret_cast<const char*>(group->nonce().data()), group->nonce().size());
      std::array<std::byte, 16> nonce = group->nonce();
      for (const auto& theirs : gather(*group, nonce)) RANK_CHECK(theirs == nonce);
      const auto copy = group->duplicate();
      RANK_CHECK(copy->nonce() != group->nonce());
      // Messages: empty, small, large, several in flight, in both groups.
      const int next = (rank + 1) % size;
      const int before = (rank + size - 1) % size;
      for (const auto& some : {group, copy}) {
        if (size == 1) break;
        for (const std::size_t bytes : {std::size_t{0}, std::size_t{10}, std::size_t{3} << 20})
          some->send(next, std::vector<std::byte>(bytes, static_cast<std::byte>(rank)));
        for (const std::size_t bytes : {std::size_t{0}, std::size_t{10}, std::size_t{3} << 20})
          RANK_CHECK(some->receive(before, 4 << 20) == std::vector<std::byte>(bytes, static_cast<std::byte>(before)));
      }
      copy->barrier();
    });
    CHECK(is_clean(directory));
  }
}

TEST_CASE("while a group lives, its ended duplicates and its past heartbeats leave no files") {
  const TemporaryDirectory directory;
  run_processes(3, [&](int rank) {
    const auto group = file_group(options_of(directory, rank, 3));
    const auto files = [&] {
      const std::filesystem::recursive_directory_iterator all(directory.path());
      return std::distance(begin(all), end(all));
    };
    group->barrier();
    const auto before = files();
    for (int turn = 0; turn < 10; ++turn) group->duplicate()->barrier();
    std::this_thread::sleep_for(500ms);  // ten heartbeats
    group->barrier();
    RANK_CHECK(files() < before + 15);
    group->barrier();
  });
  CHECK(is_clean(directory));
}

TEST_CASE("one job after another in one directory, with one key") {
  const TemporaryDirectory directory;
  run_processes(3, [&](int rank) {
    for (int turn = 0; turn < 5; ++turn) file_group(options_of(directory, rank, 3))->barrier();
  });
  CHECK(is_clean(directory));
}

TEST_CASE("two jobs with different keys do not mix") {
  const TemporaryDirectory directory;
  run_processes(6, [&](int process) {
    FileGroupOptions options = options_of(directory, process % 3, 3);
    options.key = process < 3 ? "a" : "b";
    const auto group = file_group(options);
    for (const int theirs : gather(*group, process / 3)) RANK_CHECK(theirs == process / 3);
  });
  CHECK(is_clean(directory));
}

TEST_CASE("old hello, call and answer files of other hosts are not taken for live ranks") {
  const TemporaryDirectory directory;
  run_processes(2, [&](int rank) { file_group(options_of(directory, rank, 2))->barrier(); });
  using Kind = workspace::MeetingName::Kind;
  const std::string meeting = wait_in_vain(directory);
  const std::string old_first(16, 'a');
  const std::string old_second(16, 'b');
  for (const auto& [rank, token] : {std::pair(0, old_first), std::pair(1, old_second)})
    touch(meeting + "/" +
          workspace::meeting_file_name({.kind = Kind::hello,
                                        .version = 1,
                                        .rank = rank,
                                        .size = 2,
                                        .token = token,
                                        .writer = writer_elsewhere()}));
  write_text(
      meeting + "/" +
          workspace::meeting_file_name({.kind = Kind::call, .first_token = old_first, .writer = writer_elsewhere()}),
      old_second + "\n");
  touch(meeting + "/" +
        workspace::meeting_file_name({.kind = Kind::here,
                                      .rank = 1,
                                      .token = old_second,
                                      .first_token = old_first,
                                      .writer = writer_elsewhere()}));
  run_processes(2, [&](int rank) {
    const auto group = file_group(options_of(directory, rank, 2));
    for (int other = 0; other < 2; ++other) RANK_CHECK(group->info(other).host != "elsewhere");
  });
}

TEST_CASE("a link at the rendezvous directory is refused, and nothing is written to its target") {
  const TemporaryDirectory directory;
  const std::string meeting = wait_in_vain(directory);
  std::filesystem::remove_all(meeting);
  const TemporaryDirectory outside;
  std::filesystem::create_directory_symlink(outside.path(), meeting);
  const std::string words = words_of(ErrorKind::invalid_argument, [&] { file_group(options_of(directory, 0, 2)); });
  CHECK(has(words, meeting));
  CHECK(has(words, "a link"));
  CHECK(outside.count() == 0);
}

TEST_CASE("a rank 0 that never arrives is named; duplicate ranks and different sizes are errors on all") {
  SUBCASE("rank 0 missing") {
    const TemporaryDirectory directory;
    FileGroupOptions options = options_of(directory, 1, 2);
    options.timeout = 200ms;
    CHECK(has(words_of(ErrorKind::timeout, [&] { file_group(options); }), "could not reach rank 0"));
    CHECK(is_clean(directory));
  }
  SUBCASE("double") {
    const TemporaryDirectory directory;
    run_processes(4, [&](int process) {
      FileGroupOptions options = options_of(directory, std::min(process, 2), 4);
      options.timeout = 2s;
      error_of(ErrorKind::rank_mismatch, {"two processes are rank 2"}, [&] { (void)file_group(options); });
    });
  }
  SUBCASE("sizes") {
    const TemporaryDirectory directory;
    run_processes(3, [&](int rank) {
      FileGroupOptions options = options_of(directory, rank, rank == 2 ? 5 : 3);
      options.timeout = 2s;
      error_of(ErrorKind::rank_mismatch, {"one of 5 ranks"}, [&] { (void)file_group(options); });
    });
  }
}

TEST_CASE("the last survivor removes the files of a killed rank") {
  const TemporaryDirectory directory;
  run_processes(3, {1}, [&](int rank) {
    const auto group = file_group(options_of(directory, rank, 3));
    group->barrier();
    if (rank == 1) ::raise(SIGKILL);
    const Error error = error_of([&] { group->barrier(); });
    RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == 1);
  });
  CHECK(is_clean(directory));
}

TEST_CASE("the end of a group does not wait for the next heartbeat") {
  const TemporaryDirectory directory;
  FileGroupOptions options = options_of(directory, 0, 1);
  options.heartbeat = 1s;
  options.lost_after = 20s;
  std::vector<std::chrono::steady_clock::duration> ends;
  for (int turn = 0; turn < 5; ++turn) {
    auto group = file_group(options);
    std::this_thread::sleep_for(options.heartbeat / 10);  // now the thread of the heartbeat sleeps
    const auto since = std::chrono::steady_clock::now();
    group.reset();
    ends.push_back(std::chrono::steady_clock::now() - since);
  }
  std::ranges::nth_element(ends, ends.begin() + 2);
  CHECK(ends[2] < options.heartbeat / 2);
}

TEST_CASE("different calls are an error on all ranks, and so is a group that one rank fails") {
  const TemporaryDirectory directory;
  run_processes(3, [&](int rank) {
    const auto group = file_group(options_of(directory, rank, 3));
    const auto copy = group->duplicate();
    error_of(ErrorKind::rank_mismatch, {}, [&] {
      if (rank == 1)
        group->barrier();
      else
        (void)gather(*group, rank);
    });
    copy->barrier();
    if (rank == 2)
      copy->abort(Error(ErrorKind::io, "the disk \"x\" is broken", {.rank = 2, .path = "/x", .os_error = EIO}));
    const Error heard = error_of([&] { copy->barrier(); });
    RANK_CHECK(heard.kind() == ErrorKind::io && heard.rank() == 2 && heard.path() == "/x" && heard.os_error() == EIO);
    RANK_CHECK(std::strcmp(heard.what(), "the disk \"x\" is broken") == 0);
  });
  CHECK(is_clean(directory));
}

TEST_CASE("world() is a file group if ranks of other hosts belong to the job") {
  const TemporaryDirectory directory;
  run_processes(2, [&](int rank) {
    for (const char* name : {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}) ::unsetenv(name);
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("LOCAL_WORLD_SIZE", "1", 1);
    ::setenv("MUSTER_JOB", "some word", 1);
    set_world(nullptr);
    error_of(ErrorKind::unsupported, {"MUSTER_WORKSPACE"}, [] { (void)world(); });
    ::setenv("MUSTER_WORKSPACE", (directory / "ws").c_str(), 1);
    RANK_CHECK(world()->kind() == "file" && world()->size() == 2);
    world()->barrier();
    set_world(nullptr);
  });
}

TEST_CASE("a forked child does not take part, and removes no file") {
  const TemporaryDirectory directory;
  run_processes(2, [&](int rank) {
    auto group = file_group(options_of(directory, rank, 2));
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        group->barrier();
      } catch (const Error& error) {
        status = error.kind() == ErrorKind::unsupported ? 0 : 2;
      }
      group.reset();
      ::_exit(status);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    RANK_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    group->barrier();
  });
  CHECK(is_clean(directory));
}

TEST_CASE("a rank whose process is not visible from here is lost when it is silent, and not before") {
  // A separate PID namespace acts like another host: other ranks cannot check whether its processes live.
  const TemporaryDirectory directory;
  SharedWords words;
  Ranks ranks(2, [&](int rank) {
    if (rank == 1) {
      if (::unshare(CLONE_NEWPID) != 0) {
        words[2] = 1;  // this environment does not allow unshare
        return;
      }
      const pid_t child = ::fork();
      if (child != 0) {
        int status = 0;
        ::waitpid(child, &status, 0);
        return;
      }
    }
    while (rank == 0 && words[2] == 0 && words[3] == 0) std::this_thread::sleep_for(1ms);
    if (words[2] != 0) return;
    words[3] = 1;
    const auto group = file_group(options_of(directory, rank, 2));
    group->barrier();
    RANK_CHECK(os::life_of(os::own_identity()) == os::Life::alive);
    if (rank == 1) {
      // This is longer than the silence limit, but the heartbeat continues.
      std::this_thread::sleep_for(1300ms);
      group->barrier();
      ::kill(::getpid(), SIGKILL);
      ::_exit(9);
    }
    group->barrier();
    const auto since = std::chrono::steady_clock::now();
    const Error error = error_of([&] { group->barrier(); });
    RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == 1);
    RANK_CHECK(says(error, "has been silent for"));
    const auto waited = std::chrono::steady_clock::now() - since;
    RANK_CHECK(waited > 900ms && waited < 4s);
  });
  const auto all = ranks.wait();
  if (words[2] != 0)
    MESSAGE("skipped: no process namespace can be made here");
  else
    CHECK_MESSAGE(all[0].ok(), all[0].words);
}
