// SPDX-License-Identifier: Apache-2.0
// Programs that get one open file and return bytes.

#include <doctest/doctest.h>
#include <signal.h>
#include <stdlib.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <span>
#include <string>
#include <string_view>

#include "muster/error.hpp"
#include "src/os/fault.hpp"
#include "src/os/file.hpp"
#include "src/os/library.hpp"
#include "src/os/subprocess.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

os::SubprocessResult shell(const std::string& script, os::SubprocessLimits limits = {.deadline = 5s}) {
  static const TemporaryDirectory folder;
  write_text(folder / "input", "the input");
  const auto file = os::ReadableFile::open(folder / "input");
  return os::run_subprocess({"/bin/sh", "-c", script}, file.descriptor(), limits);
}

std::string text_of(const os::SubprocessResult& result) {
  return {reinterpret_cast<const char*>(result.output.data()), result.output.size()};
}

TEST_CASE("a program has the file and the socket, and no other descriptor") {
  ::setenv("MUSTER_SECRET", "told", 1);
  const os::SubprocessResult result =
      shell("cat <&3 >&4; echo \"[$MUSTER_SECRET]\" >&4; ls /proc/self/fd | wc -l >&4; exit 7");
  CHECK(result.end == os::SubprocessEnd::exited);
  CHECK(result.status == 7);
  // The standard descriptors, 3, 4, and that of ls itself.
  CHECK(text_of(result).starts_with("the input[]\n"));
  CHECK(result.peak_bytes != 0);
  CHECK(result.wall < 5s);
}

TEST_CASE("blocked and ignored signals are not inherited") {
  ::signal(SIGTERM, SIG_IGN);
  const os::SubprocessResult result = shell("kill -TERM $$; echo alive >&4");
  ::signal(SIGTERM, SIG_DFL);
  CHECK(result.end == os::SubprocessEnd::signalled);
  CHECK(result.status == SIGTERM);
  CHECK(result.output.empty());
}

TEST_CASE("a program that does not end is killed, and its earlier output is kept") {
  const auto began = std::chrono::steady_clock::now();
  const os::SubprocessResult silent = shell("echo some >&4; exec sleep 100", {.deadline = 200ms});
  CHECK(silent.end == os::SubprocessEnd::timed_out);
  CHECK(text_of(silent) == "some\n");
  // It has closed the socket and keeps running.
  CHECK(shell("exec 4>&-; exec sleep 100", {.deadline = 200ms}).end == os::SubprocessEnd::timed_out);
  // It writes without end.
  const os::SubprocessResult talking = shell("while :; do echo word; sleep 0.01; done >&4", {.deadline = 200ms});
  CHECK(talking.end == os::SubprocessEnd::timed_out);
  CHECK(std::chrono::steady_clock::now() - began < 5s);
}

TEST_CASE("a program that waits has more time than one that computes") {
  // The limits are 100 ms of CPU time or one second of wall-clock time.
  const os::SubprocessLimits limits{.deadline = 100ms, .longest = 1s};
  const os::SubprocessResult waiting = shell("sleep 0.3; echo done >&4", limits);
  CHECK(waiting.end == os::SubprocessEnd::exited);
  CHECK(text_of(waiting) == "done\n");
  CHECK(shell("exec sleep 100", limits).end == os::SubprocessEnd::timed_out);
  // The CPU time limit ended it, not the wall-clock limit. So it ran for at least that time, however busy the machine
  // is.
  const os::SubprocessResult working = shell("while :; do :; done", {.deadline = 100ms, .longest = 60s});
  CHECK(working.end == os::SubprocessEnd::timed_out);
  CHECK(working.wall >= 100ms);
  CHECK(working.wall < 30s);
}

TEST_CASE("a program with too much output is killed") {
  const os::SubprocessResult result = shell("exec cat /dev/zero >&4", {.deadline = 20s, .output_bytes = 1 << 20});
  CHECK(result.end == os::SubprocessEnd::too_much);
  CHECK(result.output.size() < (1 << 20) + (1 << 17));
}

TEST_CASE("a program that answers requests until there are no more") {
  const TemporaryDirectory folder;
  write_text(folder / "input", "");
  const auto file = os::ReadableFile::open(folder / "input");
  os::Subprocess program({"/bin/sh", "-c", "while read word <&4; do echo \"<$word>\" >&4; done"}, file.descriptor());
  const auto answer = [&program](std::string_view question, std::size_t length) {
    program.begin({.deadline = 200ms, .longest = 20s});
    program.send(std::as_bytes(std::span(question)));
    std::string text(length, ' ');
    text.resize(program.receive(std::as_writable_bytes(std::span(text))));
    return text;
  };
  CHECK(answer("one\n", 6) == "<one>\n");
  CHECK(answer("two\n", 6) == "<two>\n");
  // It does not answer this request, and is killed at the end.
  program.begin({.deadline = 100ms});
  std::array<std::byte, 1> nothing{};
  CHECK(program.receive(nothing) == 0);
  CHECK(program.finish().end == os::SubprocessEnd::timed_out);
}

TEST_CASE("a program that ends before it answers") {
  const TemporaryDirectory folder;
  write_text(folder / "input", "");
  const auto file = os::ReadableFile::open(folder / "input");
  os::Subprocess program({"/bin/sh", "-c", "echo so >&4; exit 3"}, file.descriptor());
  program.begin({.deadline = 5s});
  program.send(std::as_bytes(std::span("question")));
  std::string text(100, ' ');
  text.resize(program.receive(std::as_writable_bytes(std::span(text))));
  CHECK(text == "so\n");
  const os::SubprocessResult result = program.finish();
  CHECK(result.end == os::SubprocessEnd::exited);
  CHECK(result.status == 3);
}

TEST_CASE("a host program that reaps its own children does no harm") {
  ::signal(SIGCHLD, SIG_IGN);
  const os::SubprocessResult result = shell("echo said >&4");
  ::signal(SIGCHLD, SIG_DFL);
  CHECK(result.end == os::SubprocessEnd::unknown);
  CHECK(text_of(result) == "said\n");
}

TEST_CASE("a program that cannot be started is reported with the cause") {
  const TemporaryDirectory folder;
  write_text(folder / "input", "");
  const auto file = os::ReadableFile::open(folder / "input");
  const auto run = [&](const std::string& program) { (void)os::run_subprocess({program}, file.descriptor(), {}); };
  CHECK(has(words_of(ErrorKind::unsupported, [&] { run(folder / "nothing"); }), "starting the program"));
  CHECK(has(words_of(ErrorKind::unsupported, [&] { run(folder / "input"); }), "EACCES"));
  os::set_fault_hook([](std::string_view call, std::string_view) { return call == "spawn" ? EAGAIN : 0; });
  CHECK(has(words_of(ErrorKind::io, [&] { run("/bin/true"); }), "EAGAIN"));
  os::set_fault_hook([](std::string_view call, std::string_view) { return call == "socketpair" ? EMFILE : 0; });
  CHECK(has(words_of(ErrorKind::io, [&] { run("/bin/true"); }), "EMFILE"));
  os::set_fault_hook(nullptr);
}

TEST_CASE("libraries of the system are found by their names") {
  CHECK(os::find_loaded("libc.so.6").handle != nullptr);
  CHECK(os::load_for_others("libc.so.6").handle != nullptr);
  CHECK(os::find_loaded("libmuster-missing.so.1").handle == nullptr);
  const os::LoadedLibrary missing = os::load_for_others("libmuster-missing.so.1");
  CHECK(missing.handle == nullptr);
  CHECK(!missing.exists);
  CHECK(has(missing.failure, "libmuster-missing.so.1: cannot open"));
}

TEST_CASE("the library finds its own path") {
  CHECK(os::own_folder().starts_with('/'));
}

}  // namespace
