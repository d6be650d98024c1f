// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ranks as processes of their launcher: fork, what must be set in between, exec; and the signals that it passes on
// to them; and their output on its way through the launcher.

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::launch {
/// The NULL-terminated arrays that exec wants, made before the fork: nothing may be allocated after it.
class ExecArguments {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;
  /// The caller's environment with `variables` set in it, and without those that say how the caller was started
  /// (sync::is_own_variable).
  ExecArguments(const std::vector<std::string>& command, const Variables& variables);

  [[nodiscard]] char* const* command() const noexcept { return command_pointers_.data(); }
  [[nodiscard]] char* const* environment() const noexcept { return environment_pointers_.data(); }

 private:
  std::vector<std::string> command_;
  std::vector<std::string> environment_;
  std::vector<char*> command_pointers_;
  std::vector<char*> environment_pointers_;
};

/// What the child gets as its standard streams; -1: what the caller has.
struct StandardStreams {
  int input = -1;
  int output = -1;
  int error = -1;
};

struct Child {
  pid_t pid = -1;
  os::Fd process;      ///< its pidfd
  os::Fd exec_report;  ///< see exec_error()
};

/// Forks, and executes the command in the child with `mask` as its signal mask; it dies when the calling thread does.
/// Throws Error(io) if no process can be had. Whether the exec worked is told later, by exec_error().
Child spawn(const ExecArguments& arguments, const StandardStreams& streams, const sigset_t& mask);

/// Waits for the child's exec. 0 if it worked, else errno.
int exec_error(Child& child);

/// The signals that a launcher passes on, read from a descriptor while they are blocked. Blocks the signals of the
/// calling thread, and gives it its mask back at the end. What was ignored stays ignored: a job under nohup hears no
/// SIGHUP.
class SignalRelay {
 public:
  /// Throws Error(io) if there is no descriptor to be had.
  SignalRelay();
  ~SignalRelay();
  SignalRelay(const SignalRelay&) = delete;
  SignalRelay& operator=(const SignalRelay&) = delete;

  struct Received {
    int signal = 0;
    bool from_terminal = false;  ///< by a key: the kernel sent it to the whole foreground group
  };
  /// The next one that has come, none if none has.
  std::optional<Received> next();
  /// Readable when next() has one.
  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
  /// The thread's mask before: what the ranks start with.
  [[nodiscard]] const sigset_t& original_mask() const noexcept { return original_mask_; }
  /// Lets SIGTSTP have its effect on this process; returns after SIGCONT.
  void stop_here() const;

 private:
  sigset_t original_mask_{};
  struct sigaction original_child_action_ {};
  os::Fd descriptor_;
};

// The processes of a job, found by what they cannot lose by accident: MUSTER_JOB in the environment they were started
// with. That also finds what ranks left behind, which no process group and no parent leads to any more.

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
  /// Throws Error(io) if no process can be had.
  explicit JobGuard(const std::string& job);
  /// The launcher ends in good order: the guard leaves, and nothing is killed.
  ~JobGuard();
  JobGuard(const JobGuard&) = delete;
  JobGuard& operator=(const JobGuard&) = delete;

 private:
  os::Fd lifeline_;  // a socket: writing to a guard that was killed is no signal
  pid_t pid_ = -1;
};

/// The ranks' output in whole lines, with the rank before them.
///
/// Reads pipes in a thread of its own, so that a reader of the launcher's output who is slow does not keep it from
/// seeing ranks fail. A line is written by one call, at most 1 MiB of it; a last line without an end gets one.
class LinePump {
 public:
  LinePump() = default;
  /// Ends as finish(0).
  ~LinePump();
  LinePump(const LinePump&) = delete;
  LinePump& operator=(const LinePump&) = delete;

  /// Before start(): what comes from `source` goes to the descriptor `target`, with `prefix` before each line.
  void add(os::Fd source, int target, std::string prefix);
  /// Throws Error(io) if no thread or descriptor can be had.
  void start();
  /// Waits until all sources have ended, at most `longest` without any coming, and stops. Returns the errno of the
  /// first write that failed, 0 if none did. A pipe that nobody reads any more is no failure: its sources are closed.
  int finish(std::chrono::milliseconds longest);

 private:
  struct Stream {
    os::Fd source;
    int target = 1;
    std::string line;  ///< the prefix and what has come of the line
    std::size_t prefix_size = 0;
  };
  void run();
  void pass_on(Stream& stream);
  void write(Stream& stream);

  std::vector<Stream> streams_;
  os::Fd stop_;
  int failure_ = 0;  // of the thread, as long as it runs
  std::thread thread_;
};

}  // namespace muster::launch
