// SPDX-License-Identifier: Apache-2.0
// Each system call of writing and reading a state file fails once, with each error that file systems return.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/state_files.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

/// The call number `which` of any kind, counted from 1.
CallToFail nth(std::size_t which, int error) {
  return {.error = error, .after = static_cast<int>(which) - 1, .times = 1};
}

const std::vector<NamedTensor>& before() {
  static const std::vector<NamedTensor> tensors = {{"weight", normal_weights({50, 50}, 1)}};
  return tensors;
}
const std::vector<NamedTensor>& after() {
  static const std::vector<NamedTensor> tensors = {{"weight", normal_weights({200, 100}, 2)},
                                                   {"bias", pattern(DType::bf16, {77}, 3)}};
  return tensors;
}

// Writes in pieces and out of order, so that bytes are also read back.
void write(const std::string& path, std::optional<int> level) {
  StateFileWriter writer(path, some_config(), entries_of(after()), {.zstd_level = level, .chunk_bytes = 20'000});
  const auto bytes = after()[0].second.bytes();
  for (std::size_t at = bytes.size(); at > 0; at -= 20'000)
    writer.write(0, at - 20'000, bytes.subspan(at - 20'000, 20'000));
  writer.write(1, after()[1].second);
  writer.commit();
}

std::optional<Error> attempt(const std::string& path, std::optional<int> level) {
  try {
    write(path, level);
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

}  // namespace

TEST_CASE("writing: after any failure the file is the earlier one or the new one, and no other file remains") {
  for (const std::optional<int> level : {std::optional<int>(), std::optional<int>(1)}) {
    const TemporaryDirectory work;
    const std::string path = work / "state";
    std::vector<std::string> all;
    // Replacing a file takes a few more calls than creating one.
    write_state_file(path, {}, before(), {.durable = false});
    {
      const FailingCall none({});
      write(path, level);
      all = FailingCall::calls();
    }
    for (const char* call : {"create", "fallocate", "pwrite", "open", "fstat", "pread", "fdatasync", "fsync", "close",
                             "rename", "open-directory", "fsync-directory"}) {
      CAPTURE(call);
      CHECK(std::ranges::find(all, call) != all.end());
    }
    for (std::size_t which = 1; which <= all.size(); ++which) {
      const std::string& call = all[which - 1];
      // Two errors for each call, alternating, because every write to the disk takes time.
      for (const int number : which % 2 == 0 ? std::array{ENOSPC, EIO} : std::array{ESTALE, EDQUOT}) {
        const std::string words = fmt::format("{} ({}): {}", call, which, number);
        CAPTURE(words);
        write_state_file(path, {}, before(), {.durable = false});
        std::optional<Error> error;
        {
          const FailingCall fault(nth(which, number));
          error = attempt(path, level);
        }
        REQUIRE(error.has_value());
        CHECK(error->os_error() == number);
        CHECK(error->kind() == (number == ENOSPC || number == EDQUOT ? ErrorKind::out_of_space : ErrorKind::io));
        CHECK_FALSE(error->path().empty());
        // The directory is synced after the rename.
        const bool is_new = call == "open-directory" || call == "fsync-directory";
        const StateFile file = StateFile::open(path);
        CHECK(holds(file, is_new ? after() : before()));
        CHECK(file.check().empty());
        CHECK(work.count() == 1);
      }
    }
    // Interrupted and partial transfers are not failures.
    for (std::size_t which = 1; which <= all.size(); ++which) {
      if (all[which - 1] != "pwrite" && all[which - 1] != "pread") continue;
      for (const int number : {EINTR, os::short_transfer}) {
        const FailingCall fault(nth(which, number));
        CHECK_FALSE(attempt(path, level).has_value());
      }
      CHECK(holds(StateFile::open(path), after()));
      CHECK(StateFile::open(path).check().empty());
    }
    CHECK(work.count() == 1);
  }
}

TEST_CASE("writing a new file: a failure leaves no file") {
  const TemporaryDirectory work;
  for (std::size_t which = 1;; ++which) {
    std::optional<Error> error;
    bool is_reached = false;
    {
      const FailingCall fault(nth(which, EIO));
      error = attempt(work / "state", {});
      is_reached = FailingCall::calls().size() >= which;
    }
    if (!is_reached) break;
    REQUIRE(error.has_value());
    if (FailingCall::calls().back().ends_with("-directory")) {
      CHECK(StateFile::open(work / "state").check().empty());
      break;
    }
    CHECK(work.count() == 0);
  }
}

TEST_CASE("a file system that cannot reserve space is not a failure; a wrong reply to the rename is detected") {
  const TemporaryDirectory work;
  std::size_t reserving = 1;
  {
    const FailingCall none({});
    write(work / "measured", {});
    while (FailingCall::calls()[reserving - 1] != "fallocate") ++reserving;
  }
  std::filesystem::remove(work / "measured");
  {
    const FailingCall fault(nth(reserving, EOPNOTSUPP));
    CHECK_FALSE(attempt(work / "state", {}).has_value());
    CHECK(FailingCall::calls()[reserving - 1] == "fallocate");
  }
  CHECK(holds(StateFile::open(work / "state"), after()));
  std::size_t which = 1;
  {
    const FailingCall none({});
    write(work / "state", {});
    while (FailingCall::calls()[which - 1] != "rename") ++which;
  }
  write_state_file(work / "state", {}, before());
  {
    // The reply is that the temporary name does not exist, and the new name belongs to the earlier file.
    const FailingCall fault(nth(which, ENOENT));
    const std::optional<Error> error = attempt(work / "state", {});
    REQUIRE(error.has_value());
    CHECK(error->os_error() == ENOENT);
  }
  CHECK(holds(StateFile::open(work / "state"), before()));
  CHECK(work.count() == 1);
}

TEST_CASE("reading: each failure keeps its errno") {
  const TemporaryDirectory work;
  for (const std::optional<int> level : {std::optional<int>(), std::optional<int>(1)}) {
    write_state_file(work / "state", some_config(), after(), {.zstd_level = level, .chunk_bytes = 20'000});
    for (const FileAccess access : {FileAccess::map, FileAccess::read}) {
      const auto read = [&] {
        const StateFile file = StateFile::open(work / "state", access);
        static_cast<void>(file.load());
      };
      std::vector<std::string> all;
      {
        const FailingCall none({});
        read();
        all = FailingCall::calls();
      }
      CHECK(std::ranges::count(all, "mmap") == (access == FileAccess::map ? 1 : 0));
      for (std::size_t which = 1; which <= all.size(); ++which) {
        for (const int number : {EIO, ESTALE}) {
          const FailingCall fault(nth(which, number));
          const Error error = thrown_by(ErrorKind::io, read);
          CHECK(error.os_error() == number);
          CHECK(error.path() == work / "state");
        }
        if (all[which - 1] != "pread") continue;
        for (const int number : {EINTR, os::short_transfer}) {
          const FailingCall fault(nth(which, number));
          CHECK_NOTHROW(read());
        }
      }
    }
  }
}

TEST_CASE("checking: an unreadable part is a problem with its cause, and the rest is checked") {
  const TemporaryDirectory work;
  write_state_file(work / "state", some_config(), after());
  const StateFile file = StateFile::open(work / "state", FileAccess::read);
  std::size_t all = 0;
  {
    const FailingCall none({});
    CHECK(file.check().empty());
    all = FailingCall::calls().size();
  }
  for (std::size_t which = 1; which <= all; ++which) {
    const FailingCall fault(nth(which, EIO));
    const std::vector<StateProblem> problems = file.check();
    REQUIRE(problems.size() == 1);
    CHECK(problems[0].words.find("EIO") != std::string::npos);
  }
  // A shortage of memory shows nothing about the file.
  for (std::size_t which = 1; which <= all; ++which) {
    const FailingCall fault(nth(which, ENOMEM));
    thrown_by(ErrorKind::out_of_space, [&] { static_cast<void>(file.check()); });
  }
}
