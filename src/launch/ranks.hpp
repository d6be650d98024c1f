// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ranks as processes of their launcher: fork, what must be set in between, exec; the signals that it passes on to
// them; and how all processes of a job are found and ended.

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::launch {

/// read(2), whatever signals come meanwhile.
ssize_t read_some(int source, void* target, std::size_t most) noexcept;

/// A pipe that exec closes: its reader's end and its writer's. `flags`: more of pipe2(2)'s. Throws Error(io).
struct Pipe {
  os::Fd reader;
  os::Fd writer;
};
Pipe make_pipe(int flags = 0);

/// The NULL-terminated arrays that exec wants, made before the fork: nothing may be allocated after it.
class ExecArguments {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;
  /// The caller's environment with `variables` set in it, and without those that say how the caller was started
  /// (sync::is_own_variable).
  ExecArguments(const std::vector<std::string>& command, const Variables& variables);
  /// This very program, whatever its file is called now, without arguments.
  static ExecArguments own_program(const Variables& variables);

  /// What is executed: a path, or a name that is looked for.
  [[nodiscard]] const char* program() const noexcept { return program_; }
  [[nodiscard]] char* const* command() const noexcept { return command_pointers_.data(); }
  [[nodiscard]] char* const* environment() const noexcept { return environment_pointers_.data(); }

 private:
  const char* program_ = nullptr;
  std::vector<std::string> command_;
  std::vector<std::string> environment_;
  std::vector<char*> command_pointers_;
  std::vector<char*> environment_pointers_;
};

/// What the child gets of its launcher.
struct Inheritance {
  // Standard streams; -1: what the launcher has.
  int input = -1;
  int output = -1;
  int error = -1;
  /// Descriptors that stay open, by their numbers, whatever is set for exec.
  std::vector<int> descriptors = {};
  sigset_t mask{};
};

struct Child {
  pid_t pid = -1;
  os::Fd process;      ///< its pidfd
  os::Fd exec_report;  ///< see exec_error()
};

/// Forks, and executes the command in the child; it dies when the calling thread does. Throws Error(io) if no process
/// can be had. Whether the exec worked is told later, by exec_error().
Child spawn(const ExecArguments& arguments, const Inheritance& inheritance);

/// The same without exec, from a process that has no other threads: the child has that environment, the descriptors
/// that exec would have left it, and ends with what `body` returns, as if by a return from main().
Child fork_into(const ExecArguments& arguments, const Inheritance& inheritance, const std::function<int()>& body);

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
  SignalRelay& operator=(SignalRelay&&) = delete;

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

// The processes that a launcher has started, found by what they cannot lose by accident: its mark in the environment
// they were started with. That also finds what ranks left behind, which no process group and no parent leads to any
// more.

/// The environment variable that marks them. (MUSTER_JOB is the same for launchers of one job.)
inline constexpr const char* mark_variable = "MUSTER_LAUNCHER";

/// A pidfd of each live process of this user that was started with that mark, the caller excepted. Processes of other
/// users and those that rewrote their environment are not found.
std::vector<os::Fd> marked_processes(const std::string& mark);

/// SIGTERM, SIGKILL to those that are still there after `patience`. Returns how many there were.
std::size_t end_marked_processes(const std::string& mark, std::chrono::milliseconds patience);

/// A small process that waits for its launcher to die. Death signals reach the ranks alone, not the processes that they
/// started (a shell's children): the guard kills those too. It stands in a session of its own, where neither the
/// terminal nor a signal to the launcher's group reaches it.
class JobGuard {
 public:
  /// Throws Error(io) if no process can be had.
  explicit JobGuard(const std::string& mark);
  /// The launcher ends in good order: the guard leaves, and nothing is killed.
  ~JobGuard();
  JobGuard& operator=(JobGuard&&) = delete;

 private:
  os::Fd lifeline_;  // a socket: writing to a guard that was killed is no signal
  pid_t pid_ = -1;
};

}  // namespace muster::launch
