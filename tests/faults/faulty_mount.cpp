// SPDX-License-Identifier: Apache-2.0
#include "tests/faults/faulty_mount.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <thread>

namespace muster::test {
namespace {

constexpr long fuse_magic = 0x65735546;

bool is_mounted(const std::string& path) {
  struct statfs status {};
  return ::statfs(path.c_str(), &status) == 0 && status.f_type == fuse_magic;
}

void run(const std::vector<std::string>& command) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
}

}  // namespace

FaultyMount::FaultyMount(const std::string& backing, const std::vector<std::string>& rules) {
  const pid_t parent = ::getpid();
  server_ = ::fork();
  if (server_ < 0) throw std::runtime_error("fork");
  if (server_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(3);
    std::vector<std::string> words = {MUSTER_FAULTY_FS, backing, point_.path().string()};
    words.insert(words.end(), rules.begin(), rules.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  for (int turn = 0; turn < 2000 && !is_mounted(point_.path()); ++turn) {
    if (::waitpid(server_, nullptr, WNOHANG) == server_) {
      server_ = -1;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  if (!is_mounted(point_.path())) throw std::runtime_error("faulty_fs could not be mounted");
}

FaultyMount::~FaultyMount() {
  if (server_ < 0) return;
  ::kill(server_, SIGTERM);
  ::waitpid(server_, nullptr, 0);
  // SIGTERM unmounts, but not what is in use.
  struct stat status {};
  if (is_mounted(point_.path()) || ::stat(point_.path().c_str(), &status) != 0)
    run({"fusermount3", "-u", "-z", point_.path().string()});
}

void FaultyMount::cut_power() const {
  ::kill(server_, SIGUSR1);
  // The next look carries it out, once the signal has come.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  struct stat status {};
  ::stat((point_ / "nothing").c_str(), &status);
}

std::string FaultyMount::obstacle() {
  if (std::string(MUSTER_FAULTY_FS).empty()) return "libfuse3 was not there when this was built";
  if (::access("/dev/fuse", R_OK | W_OK) != 0) return "/dev/fuse cannot be opened";
  const TemporaryDirectory backing;
  try {
    const FaultyMount mount(backing.path().string(), {});
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace muster::test
