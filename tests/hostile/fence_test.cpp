// SPDX-License-Identifier: Apache-2.0
// The sandbox of the reader for third-party HDF5 files holds. Each attempt is one that an attacker who controls the
// reader would make.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <string>

#include "src/checkpoint/thirdparty/hdf5/reader.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster::hdf5;
using namespace muster::test;

namespace {

constexpr int input = 3;
constexpr int peer = 4;
constexpr int no_seccomp = 77;
constexpr int inherited = 78;

/// Returns the exit status of an attempt inside the sandbox: 0 if it succeeded, errno, or minus the signal that ended
/// it.
template <class Attempt>
int inside(Attempt attempt) {
  const TemporaryDirectory folder;
  write_text(folder / "file", "0123456789");
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int file = ::open((folder / "file").c_str(), O_RDWR);
    const int up = ::fcntl(ends[1], F_DUPFD, 20);
    ::send(ends[0], "question", 8, 0);
    ::dup2(::fcntl(file, F_DUPFD, 20), input);
    ::dup2(up, peer);
    const FenceOptions options{.input = input, .socket = peer};
    drop_inheritance(options);
    for (const int other : {file, up})
      if (other != input && other != peer && ::fcntl(other, F_GETFD) >= 0) ::_exit(inherited);
    const std::uint8_t flags = raise_fence(options);
    if ((flags & fence_seccomp) == 0) ::_exit(no_seccomp);
    errno = 0;
    ::_exit(attempt() ? 0 : errno);
  }
  ::close(ends[1]);
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(ends[0]);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

bool has_seccomp() {
  static const int end = inside([] { return true; });
  static const bool has = end != no_seccomp;
  CHECK((!has || end == 0));
  if (!has) MESSAGE("SKIPPED: this kernel or sandbox has no seccomp filters");
  return has;
}

TEST_CASE("the calls that the reader needs work") {
  if (!has_seccomp()) return;
  std::array<char, 4> four{};
  CHECK(inside([&] { return ::pread(input, four.data(), four.size(), 2) == 4; }) == 0);
  CHECK(inside([] { return ::write(peer, "x", 1) == 1; }) == 0);
  CHECK(inside([&] { return ::read(peer, four.data(), four.size()) == 4; }) == 0);
  CHECK(inside([] { return std::string(100'000, 'x').size() == 100'000; }) == 0);
  CHECK(inside([] {
          return ::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
        }) == 0);
}

TEST_CASE("nothing else of the machine can be reached") {
  if (!has_seccomp()) return;
  std::array<char, 4> four{};
  CHECK(inside([] { return ::open("/etc/passwd", O_RDONLY) >= 0; }) == EPERM);
  CHECK(inside([] { return ::open("/tmp/muster-test-made", O_CREAT | O_WRONLY, 0600) >= 0; }) == EPERM);
  CHECK(inside([] { return ::unlink("/tmp/muster-test-made") == 0; }) == EPERM);
  CHECK(inside([] { return ::rename("/tmp/a", "/tmp/b") == 0; }) == EPERM);
  CHECK(inside([] { return ::kill(::getppid(), SIGTERM) == 0; }) == EPERM);
  CHECK(inside([] { return ::kill(1, 0) == 0; }) == EPERM);
  CHECK(inside([] { return ::dup(input) >= 0; }) == EPERM);
  CHECK(inside([] { return ::lseek(input, 0, SEEK_SET) == 0; }) == EPERM);
  CHECK(inside([&] { return ::read(input, four.data(), 1) == 1; }) == EPERM);
  CHECK(inside([&] { return ::pread(0, four.data(), 1, 0) == 1; }) == EPERM);
  CHECK(inside([&] { return ::recv(peer, four.data(), 1, 0) == 1; }) == EPERM);
  // The file that the reader may read cannot be written, whatever the descriptor would allow.
  CHECK(inside([] { return ::pwrite(input, "x", 1, 0) == 1; }) == EPERM);
  CHECK(inside([] { return ::ftruncate(input, 0) == 0; }) == EPERM);
  CHECK(inside([] { return ::write(input, "x", 1) == 1; }) == EPERM);
  CHECK(inside([] { return ::write(1, "x", 1) == 1; }) == EPERM);
  CHECK(inside([] { return ::mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE, input, 0) != MAP_FAILED; }) == EPERM);
}

TEST_CASE("no code can be added") {
  if (!has_seccomp()) return;
  CHECK(inside([] {
          return ::mmap(nullptr, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
        }) == EPERM);
  CHECK(inside([] {
          void* memory = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
          return ::mprotect(memory, 4096, PROT_READ | PROT_EXEC) == 0;
        }) == EPERM);
}

TEST_CASE("calls that only an attacker makes terminate the process") {
  if (!has_seccomp()) return;
  CHECK(inside([] { return ::execl("/bin/true", "true", static_cast<char*>(nullptr)) == 0; }) == -SIGSYS);
  CHECK(inside([] { return ::fork() >= 0; }) == -SIGSYS);
  CHECK(inside([] { return ::socket(AF_UNIX, SOCK_STREAM, 0) >= 0; }) == -SIGSYS);
  CHECK(inside([] { return ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0; }) == -SIGSYS);
  CHECK(inside([] { return ::syscall(SYS_bpf, 0, nullptr, 0) == 0; }) == -SIGSYS);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("memory and time are limited") {
  if (!has_seccomp()) return;
  CHECK(inside([] {
          return ::mmap(nullptr, std::size_t{128} << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) !=
                 MAP_FAILED;
        }) == ENOMEM);
  const pid_t child = ::fork();
  if (child == 0) {
    raise_fence({.cpu_seconds = 1});
    // A call that the compiler cannot remove.
    for (;;) (void)::getpid();
  }
  int status = 0;
  rusage used{};
  ::wait4(child, &status, 0, &used);
  CHECK(WIFSIGNALED(status));
  CHECK(used.ru_utime.tv_sec <= 2);
}
#endif

}  // namespace
