// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ranks as processes of their launcher: how they are started (fork, setup, exec), how signals are forwarded to
// them, and how all processes of a job are found and ended.

#include <signal.h>
#include <sys/types.h>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include "src/os/fd.hpp"

namespace muster::launch {

/// Calls read(2), and repeats it after signals.
ssize_t read_some(int source, void* target, std::size_t most) noexcept;

/// A pipe whose two ends are closed by exec. make_pipe: `flags` are additional flags for pipe2(2). Throws Error(io).
struct Pipe {
  os::Fd reader;
  os::Fd writer;
};
Pipe make_pipe(int flags = 0);

/// The NULL-terminated arrays that exec needs. They are made before the fork, because no memory may be allocated after
/// it.
class ExecArguments {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;
  /// Uses the caller's environment with `variables` set in it. Removes the variables that describe how the caller was
  /// started (group::is_own_variable).
  ExecArguments(const std::vector<std::string>& command, const Variables& variables);
  /// Returns the arguments to run this program again, without arguments. It also works if its file has been renamed.
  static ExecArguments own_program(const Variables& variables);

  /// Returns the program to execute: a path, or a name that is searched for in PATH.
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

/// The resources that a child inherits from its launcher.
struct Inheritance {
  // Standard streams; -1 for the stream of the launcher.
  int input = -1;
  int output = -1;
  int error = -1;
  /// Descriptors that stay open under their numbers, even if they are marked close-on-exec.
  std::vector<int> descriptors = {};
  sigset_t mask{};
};

struct Child {
  pid_t pid = -1;
  os::Fd process;      ///< the pidfd of the process
  os::Fd exec_report;  ///< see exec_error()
};

/// Forks, and executes the command in the child. The child dies when the calling thread ends. Throws Error(io) if no
/// process can be created. exec_error() returns later whether the exec succeeded.
Child spawn(const ExecArguments& arguments, const Inheritance& inheritance);

/// Like spawn(), but without exec, from a process without other threads. The child has the given environment and the
/// descriptors that exec would have left open. It ends with the result of `body`, as if main() had returned it.
Child fork_into(const ExecArguments& arguments, const Inheritance& inheritance, const std::function<int()>& body);

/// Waits for the child's exec. Returns 0 if it succeeded, otherwise errno.
int exec_error(Child& child);

/// Receives the signals that a launcher forwards. The signals are blocked and read from a descriptor. Blocks them in
/// the calling thread, and restores its mask at the end. Ignored signals remain ignored: a job under nohup receives no
/// SIGHUP.
class SignalRelay {
 public:
  /// Throws Error(io) if no descriptor can be created.
  SignalRelay();
  ~SignalRelay();
  SignalRelay& operator=(SignalRelay&&) = delete;

  struct Received {
    int signal = 0;
    bool from_terminal = false;  ///< sent by a key: the kernel sent it to the whole foreground group
  };
  /// Returns the next signal that has arrived, or nullopt.
  std::optional<Received> next();
  /// Returns a descriptor that is readable if next() has a signal.
  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
  /// Returns the previous mask of the thread, with which the ranks start.
  [[nodiscard]] const sigset_t& original_mask() const noexcept { return original_mask_; }
  /// Lets SIGTSTP stop this process. Returns after SIGCONT.
  void stop_here() const;

 private:
  sigset_t original_mask_{};
  struct sigaction original_child_action_ {};
  os::Fd descriptor_;
};

// Finds the processes that a launcher has started. They have its mark in the environment that they were started with,
// which they cannot lose by accident. This also finds processes that ranks left behind, which neither a process group
// nor a parent identifies any more.

/// The environment variable of the mark. (MUSTER_JOB is the same for all launchers of one job.)
inline constexpr const char* mark_variable = "MUSTER_LAUNCHER";

/// Returns a pidfd of each live process of this user that was started with the mark, except the caller. Processes of
/// other users are not found, and neither are those that rewrote their environment.
std::vector<os::Fd> marked_processes(const std::string& mark);

/// Sends SIGTERM, and SIGKILL to the processes that still exist after `patience`. Returns the number of processes that
/// it found.
std::size_t end_marked_processes(const std::string& mark, std::chrono::milliseconds patience);

/// A small process that waits for the death of its launcher. Death signals reach only the ranks, and not the processes
/// that they started (children of a shell). The guard kills those too. It has its own session, where it receives no
/// signals of the terminal and none that are sent to the launcher's process group.
class JobGuard {
 public:
  /// Throws Error(io) if no process can be created.
  explicit JobGuard(const std::string& mark);
  /// Called at an orderly end of the launcher: the guard exits without killing any process.
  ~JobGuard();
  JobGuard& operator=(JobGuard&&) = delete;

 private:
  os::Fd lifeline_;  // a socket, because a write to a killed guard must not raise a signal
  pid_t pid_ = -1;
};

// Implements the rules of the CUDA driver for the variable CUDA_VISIBLE_DEVICES.

/// Returns the number of visible devices on a host that has `devices` devices, if CUDA_VISIBLE_DEVICES is `list`. As in
/// the driver, the list ends at the first entry that is not a device, so "-1" hides all devices. A device that is
/// listed twice also hides all devices. Entries such as "GPU-<uuid>" count as devices because only the driver can
/// resolve them.
inline int devices_in(std::string_view list, int devices) {
  std::vector<std::string_view> seen;
  while (!list.empty()) {
    std::string_view entry = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), entry.size() + 1));
    entry.remove_prefix(std::min(entry.size(), entry.find_first_not_of(' ')));
    entry = entry.substr(0, entry.find(' '));
    int index = -1;
    const auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), index);
    const bool is_index = error == std::errc{} && end == entry.data() + entry.size();
    const bool is_name = entry.starts_with("GPU-") || entry.starts_with("MIG-");
    if (!is_name && (!is_index || index < 0 || index >= devices)) break;
    if (std::ranges::find(seen, entry) != seen.end()) return 0;
    seen.push_back(entry);
  }
  return std::min(devices, static_cast<int>(seen.size()));
}

}  // namespace muster::launch
