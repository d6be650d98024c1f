// SPDX-License-Identifier: Apache-2.0
#pragma once
// The processes of a job, found by what they cannot lose by accident: MUSTER_JOB in the environment they were started
// with. That also finds what ranks left behind, which no process group and no parent leads to any more.

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::launch {

/// The environment variable that marks them, and names the job to world().
inline constexpr const char* job_variable = "MUSTER_JOB";

/// A pidfd of each live process of this user that was started with MUSTER_JOB=job, the caller excepted. Processes of
/// other users and those that rewrote their environment are not found.
std::vector<os::Fd> processes_of_job(const std::string& job);

/// SIGTERM, SIGKILL to those that are still there after `patience`. Returns how many there were.
std::size_t end_job_processes(const std::string& job, std::chrono::milliseconds patience);

/// A small process that waits for its launcher to die. Death signals reach the ranks alone, not the processes that they
/// started (a shell's children): the guard kills those too. It stands in a session of its own, where neither the
/// terminal nor a signal to the launcher's group reaches it.
class JobGuard {
 public:
  /// Throws Error(io) where no process can be had.
  explicit JobGuard(const std::string& job);
  /// The launcher ends in good order: the guard leaves, and nothing is killed.
  ~JobGuard();
  JobGuard(const JobGuard&) = delete;
  JobGuard& operator=(const JobGuard&) = delete;

 private:
  os::Fd lifeline_;  // a socket: writing to a guard that was killed is no signal
  pid_t pid_ = -1;
};

}  // namespace muster::launch
