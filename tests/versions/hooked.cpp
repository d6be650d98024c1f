// SPDX-License-Identifier: Apache-2.0
// Linked into the program `muster`, for the tests of versions. Through the fault-injection seam it sees each system
// call that the seam knows, in order.
//   MUSTER_TEST_CALLS=FILE  appends a line "CALL PATH" per call
//   MUSTER_TEST_KILL=N      kills the process at the Nth call, before the kernel carries it out

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "src/os/fault.hpp"

namespace {

std::atomic<long> calls_left{0};
int log_file = -1;

int note(std::string_view call, std::string_view path) {
  if (log_file >= 0) {
    const std::string line = std::string(call) + ' ' + std::string(path) + '\n';
    if (::write(log_file, line.data(), line.size()) < 0) return 0;
  }
  if (--calls_left == 0) ::kill(::getpid(), SIGKILL);
  return 0;
}

const bool is_installed = [] {
  const char* calls = std::getenv("MUSTER_TEST_CALLS");
  const char* kill = std::getenv("MUSTER_TEST_KILL");
  if (calls == nullptr && kill == nullptr) return false;
  if (calls != nullptr) log_file = ::open(calls, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (kill != nullptr) calls_left = std::atol(kill);
  muster::os::set_fault_hook(note);
  return true;
}();

}  // namespace
